"""What `kvabr store` does: administers a store, and shows the result."""

from __future__ import annotations

import argparse
import time
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from kvabr.cli.display import StageBar, human, output, plain, printable, table, write_result
from kvabr.cli.interrupt import run_async
from kvabr.cli.options import check_writable
from kvabr.store.admin.checking import find_damage
from kvabr.store.admin.copying import copy_assets
from kvabr.store.admin.opening import open_admin, open_admins
from kvabr.store.admin.protocol import (
    REPAIR,
    Damage,
    Holding,
    Inventory,
    Progress,
    StoreAdmin,
    full_name,
    total_bytes,
)
from kvabr.store.locations import open_store
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


def ls(args: argparse.Namespace) -> int:
    """List the assets."""
    check_writable(args.json)
    admin, found = _inventory(args)
    held = [each for each in found.holdings if args.model in (None, each.model)]
    shared, now_s = _shared(found.holdings), time.time()
    rows = [
        (
            printable(each.name if len(each.name) != 64 else each.name[:16]),
            each.model,
            f"{each.tokens:,}",
            human(each.bytes),
            human(_own(each, shared)),
            _time(now_s - each.created_s),
            "yes" if each.measured else "",
        )
        for each in held
    ]
    columns = ("name", "model", "tokens", "bytes", "own", "age", "measured")
    spare = ("measured", "own", "age", "tokens")
    if rows:
        output().print(table(None, columns, rows, left=("name",), fold=("model",), spare=spare))
    _say_damaged(found)
    plain(f"{counted(len(held), 'asset')}, {human(total_bytes(held))}" if held else f"{admin.location}: no assets")
    write_result(
        args.json,
        "store ls",
        {
            "store": admin.location,
            "tenant": admin.tenant,
            "assets": [_row(each, shared) for each in held],
            "damaged": dict(found.damaged),
        },
    )
    return 0


def du(args: argparse.Namespace) -> int:
    """Show how many bytes models and tracks take."""
    check_writable(args.json)
    admins = open_admins(args.store) if args.all_tenants else [open_admin(args.store)]
    tenants = []
    for admin in admins:
        with StageBar(_STAGES) as bar:
            found: Inventory = run_async(admin.inventory(bar))
        tenants.append(_du(admin.tenant, found))
    write_result(args.json, "store du", {"store": args.store, "tenants": tenants})
    return 0


def _du(tenant: str, found: Inventory) -> dict[str, Any]:
    """Show the bytes of one tenant, and return them as JSON values."""
    models: dict[str, list[Holding]] = defaultdict(list)
    for each in found.holdings:
        models[each.model].append(each)
    rows, tracks = [], []
    for model, held in sorted(models.items()):
        rows.append((model, str(len(held)), human(total_bytes(held))))
        sizes: dict[str, int] = defaultdict(int)
        for each in held:
            for track, size in each.tracks.items():
                sizes[track] += size
        tracks += [(model, track, size) for track, size in sizes.items()]
    out = output()
    title = f"tenant {tenant}" if tenant else None
    out.print(table(title, ("model", "assets", "bytes"), rows, fold=("model",)))
    shown = [(model, track, human(size)) for model, track, size in tracks]
    out.print(table("each asset's own count", ("model", "track", "bytes"), shown, fold=("model",), left=("track",)))
    _say_damaged(found)
    total = total_bytes(found.holdings)
    others = f"; {human(found.unnamed_bytes)} that no asset names, {human(found.cached_bytes)} of cached groups"
    plain(f"{counted(len(found.holdings), 'asset')}, {human(total)}" + (others if tenant else ""))
    return {
        "tenant": tenant,
        "assets": len(found.holdings),
        "bytes": total,
        "unnamed_bytes": found.unnamed_bytes,
        "cached_bytes": found.cached_bytes,
        "models": {model: {"assets": len(held), "bytes": total_bytes(held)} for model, held in models.items()},
        "tracks": [{"model": model, "track": track, "bytes": size} for model, track, size in tracks],
        "damaged": dict(found.damaged),
    }


def rm(args: argparse.Namespace) -> int:
    """Remove assets."""
    check_writable(args.json)
    if not (args.names or args.model or args.unnamed):
        raise UsageError("say what to remove: names of assets, --model M or --unnamed")
    admin = open_admin(args.store)
    known = run_async(admin.names()) if args.names else []
    names = dict.fromkeys(full_name(known, name) for name in args.names)
    with StageBar(_STAGES) as bar:
        if args.model is not None:
            found: Inventory = run_async(admin.inventory(bar))
            names |= dict.fromkeys(each.name for each in found.holdings if each.model == args.model)
        freed = run_async(admin.remove(list(names), unnamed=args.unnamed, progress=bar))
    plain(f"{counted(len(names), 'asset')} removed, {human(freed)} freed")
    value = {"store": admin.location, "tenant": admin.tenant, "removed": list(names), "bytes": freed}
    write_result(args.json, "store rm", value)
    return 0


def verify(args: argparse.Namespace) -> int:
    """Check everything."""
    check_writable(args.json)
    admin = open_admin(args.store)
    with StageBar(_STAGES) as bar:
        bad = find_damage(open_store(args.store), deep=args.deep, progress=bar)
        if args.deep:
            bad += _differing(args.store, {each.name for each in bad}, bar)
        if args.repair:
            going = {each.name for each in bad if each.advice == REPAIR and each.name != "."}
            run_async(admin.remove(going, progress=bar))
            bad = [replace(each, repaired=each.name in going) for each in bad]
    for each in bad:
        plain(f"{each.name}: {each.what}; {'removed' if each.repaired else each.advice}")
    left = [each for each in bad if not each.repaired]
    write_result(
        args.json,
        "store verify",
        {
            "store": admin.location,
            "deep": args.deep,
            "damages": [{"name": each.name, "what": each.what, "repaired": each.repaired} for each in bad],
        },
    )
    if left:
        raise AssetError(f"{admin.location}: {len(left)} damaged")
    whole = "nothing is damaged" if args.deep else "nothing is missing; the bytes of frames were not read, --deep does"
    rest = "the rest is undamaged" if args.deep else "of the rest nothing is missing"
    plain(whole if not bad else f"{len(bad)} removed, {rest}")
    return 0


def _differing(location: str, bad: set[str], progress: Progress) -> list[Damage]:
    """Return the assets, of those that are not bad already, whose tracks do not agree with each other."""
    from kvabr.publish.comparing import compare_tracks

    store, found = open_store(location), []
    names = sorted(set(store.list().versions) - bad)
    for number, name in enumerate(names):
        progress("comparing", number, len(names))
        try:
            compare_tracks(store.open(name))
        except NotFoundError:
            continue  # it was removed meanwhile
        except KvabrError as error:
            found.append(Damage(name, str(error), "remove it, or publish it again"))
    return found


def copy(args: argparse.Namespace) -> int:
    """Copy assets."""
    check_writable(args.json)
    source, target = open_store(args.store, must_exist=True), open_store(args.target, create=True)
    names = [full_name(list(source.list().versions), name) for name in args.name]
    with StageBar(_STAGES) as bar:
        done = copy_assets(source, target, names=names, model=args.model, progress=bar)
    for name, why in done.failed.items():
        plain(f"{name}: not copied: {why}")
    were = "was" if len(done.kept) == 1 else "were"
    plain(f"{counted(len(done.assets), 'asset')} copied, {human(done.bytes)}; {len(done.kept):,} {were} there already")
    write_result(
        args.json,
        "store copy",
        {
            "copied": done.assets,
            "kept": done.kept,
            "failed": done.failed,
            "bytes": done.bytes,
        },
    )
    if done.failed:
        were = "was" if len(done.failed) == 1 else "were"
        raise AssetError(f"{counted(len(done.failed), 'asset')} {were} not copied")
    return 0


def _inventory(args: argparse.Namespace) -> tuple[StoreAdmin, Inventory]:
    admin = open_admin(args.store)
    with StageBar(_STAGES) as bar:
        found: Inventory = run_async(admin.inventory(bar))
    return admin, found


def _say_damaged(found: Inventory) -> None:
    for name, what in found.damaged.items():
        plain(f"{name}: cannot be read: {what}; see kvabr store verify")


def _shared(holdings: Iterable[Holding]) -> dict[str, int]:
    """Return how many assets have each part."""
    counts: dict[str, int] = defaultdict(int)
    for each in holdings:
        for part in each.parts:
            counts[part] += 1
    return counts


def _own(holding: Holding, shared: dict[str, int]) -> int:
    return holding.own_bytes + sum(size for part, size in holding.parts.items() if shared[part] == 1)


def _row(each: Holding, shared: dict[str, int]) -> dict[str, Any]:
    return {
        "name": each.name,
        "model": each.model,
        "tokens": each.tokens,
        "bytes": each.bytes,
        "own_bytes": _own(each, shared),
        "created_s": each.created_s,
        "measured": each.measured,
        "tracks": dict(each.tracks),
    }


def _time(seconds: float) -> str:
    """Return a time in its largest unit."""
    for unit, size in (("d", 86400), ("h", 3600), ("m", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f}{unit}"
    return f"{max(seconds, 0.0):.0f}s"
