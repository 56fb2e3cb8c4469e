"""The actions of `kvabr store`."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from kvabr.cli.display import StageBar, human, output, plain, printable, table, write_result
from kvabr.cli.store import CopyCommand, ListCommand, RemoveCommand, VerifyCommand
from kvabr.store import admin
from kvabr.store.locations import open_store
from kvabr.store.removing import Progress
from kvabr.store.store_tree import StoreTree
from kvabr.types.errors import AssetError, KvabrError, NotFoundError, UsageError
from kvabr.types.words import counted

_STAGES = {
    "catalogs": "reading catalogs",
    "listing": "listing objects",
    "removing": "removing assets",
    "checking": "checking assets",
    "comparing": "comparing tracks",
    "copying": "copying assets",
}


def ls(args: ListCommand) -> int:
    """List the assets of a store."""
    tree, now_s = StoreTree(args.store), time.time()
    with StageBar(_STAGES) as bar:
        found = admin.inventory(tree, bar)
    held = [each for each in found.holdings if args.model in (None, each.model)]
    shared = Counter(part for each in found.holdings for part in each.objects)
    result = [_row(each, shared) for each in held]
    rows = [
        (
            printable(each.name[: each.name.rfind("/") + 17]),
            each.model,
            f"{each.tokens:,}",
            human(each.bytes),
            human(row["own_bytes"]),
            _age(now_s - each.created_s),
            "yes" if each.measured else "",
        )
        for each, row in zip(held, result, strict=True)
    ]
    columns = ("name", "model", "tokens", "bytes", "own", "age", "measured")
    spare = ("measured", "own", "age", "tokens")
    if rows:
        output().print(table(None, columns, rows, left=("name",), fold=("model",), spare=spare))
    for name, what in found.damaged.items():
        plain(f"{name}: cannot be read: {what}; see kvabr store verify")
    others = (
        f"; {human(found.unreferenced_bytes)} in objects that belong to no asset" if found.unreferenced_bytes else ""
    )
    total = (
        f"{counted(len(held), 'asset')}, {human(admin.total_bytes(held))}" if held else f"{tree.location}: no assets"
    )
    plain(total + others)
    result_of_all = {"unreferenced_bytes": found.unreferenced_bytes, "damaged": dict(found.damaged)}
    write_result(args.json, "store ls", {"store": tree.location, "assets": result, **result_of_all})
    return 0


def rm(args: RemoveCommand) -> int:
    """Remove assets from a store."""
    if not (args.names or args.model or args.unreferenced):
        raise UsageError("name the assets to remove, or give --model M or --unreferenced")
    tree = StoreTree(args.store)
    known = list(admin.names_in(tree)) if args.names else []
    names = dict.fromkeys(admin.full_name(known, name) for name in args.names)
    with StageBar(_STAGES) as bar:
        if args.model is not None:
            held = admin.inventory(tree, bar).holdings
            names |= dict.fromkeys(each.name for each in held if each.model == args.model)
        freed = admin.remove(tree, list(names), unreferenced=args.unreferenced, progress=bar)
    plain(f"{counted(len(names), 'asset')} removed, {human(freed)} freed")
    write_result(args.json, "store rm", {"store": tree.location, "removed": list(names), "bytes": freed})
    return 0


def verify(args: VerifyCommand) -> int:
    """Check the objects of a store, and repair it if requested."""
    tree, done = StoreTree(args.store), {admin.REPAIR: "removed", admin.REWRITE: "written again"}
    with StageBar(_STAGES) as bar:
        bad = admin.find_damage(tree, deep=args.deep, progress=bar)
        if args.deep:
            bad += _differing(tree, {each.name for each in bad if each.advice != admin.REWRITE}, bar)
        if args.repair:
            going = {each.name for each in bad if each.advice == admin.REPAIR}
            admin.remove(tree, going, progress=bar)
            admin.rewrite(tree, [each.name for each in bad if each.advice == admin.REWRITE])
            bad = [replace(each, repaired=each.advice in done) for each in bad]
    for each in bad:
        plain(f"{each.name}: {each.what}; {done[each.advice] if each.repaired else each.advice}")
    left = [each for each in bad if not each.repaired]
    damages = [{"name": each.name, "what": each.what, "repaired": each.repaired} for each in bad]
    write_result(args.json, "store verify", {"store": tree.location, "deep": args.deep, "damages": damages})
    if left:
        raise AssetError(f"{tree.location}: {len(left)} damaged objects or assets")
    whole = "no object is damaged" if args.deep else "no object is missing; --deep also reads the bytes of frames"
    rest = "the rest is undamaged" if args.deep else "no other object is missing"
    count = Counter(done[each.advice] for each in bad)
    plain(", ".join((*(f"{each} {how}" for how, each in count.items()), rest)) if bad else whole)
    return 0


def _differing(tree: StoreTree, bad: set[str], progress: Progress) -> list[admin.Damage]:
    """Return the assets whose tracks contradict each other, except for those that are ``bad`` already."""
    from kvabr.publish.comparing import compare_tracks

    stores, found = admin.names_in(tree), []
    names = sorted(stores.keys() - bad)
    for number, name in enumerate(names):
        progress("comparing", number, len(names))
        try:
            compare_tracks(stores[name].open(name.rpartition("/")[2]))
        except NotFoundError:
            continue  # removed meanwhile
        except KvabrError as error:
            found.append(admin.Damage(name, str(error), "remove it, or publish it again"))
    return found


def copy(args: CopyCommand) -> int:
    """Copy assets to another store."""
    source, target = StoreTree(args.store), open_store(args.target, create=True)
    names = [admin.full_name(admin.names_in(source), name) for name in args.name]
    with StageBar(_STAGES) as bar:
        done = admin.copy_assets(source, target, names=names, model=args.model, progress=bar)
    for name, why in done.failed.items():
        plain(f"{name}: not copied: {why}")
    were = "was" if len(done.kept) == 1 else "were"
    plain(f"{counted(len(done.assets), 'asset')} copied, {human(done.bytes)}; {len(done.kept):,} {were} already there")
    result = {"copied": done.assets, "kept": done.kept, "failed": done.failed, "bytes": done.bytes}
    write_result(args.json, "store copy", result)
    if done.failed:
        were = "was" if len(done.failed) == 1 else "were"
        raise AssetError(f"{counted(len(done.failed), 'asset')} {were} not copied")
    return 0


def _row(each: admin.Holding, shared: Mapping[str, int]) -> dict[str, Any]:
    return {
        "name": each.name,
        "model": each.model,
        "tokens": each.tokens,
        "bytes": each.bytes,
        "own_bytes": sum(size for part, size in each.objects.items() if shared[part] == 1),
        "created_s": each.created_s,
        "measured": each.measured,
        "tracks": dict(each.tracks),
    }


def _age(seconds: float) -> str:
    for unit, size in (("d", 86400), ("h", 3600), ("m", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f}{unit}"
    return f"{max(seconds, 0.0):.0f}s"
