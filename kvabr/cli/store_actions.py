"""What `kvabr store` does: administers a store, and shows the result."""

from __future__ import annotations

import argparse
import math
import time
from collections import defaultdict
from collections.abc import Iterable
from typing import Any

from kvabr.cli.display import StageBar, human, output, plain, printable, table, write_result
from kvabr.cli.interrupt import run_async
from kvabr.cli.options import check_writable
from kvabr.store.admin import rules
from kvabr.store.admin.collect import Collected
from kvabr.store.admin.copying import copy_assets
from kvabr.store.admin.opening import open_admin, open_admins
from kvabr.store.admin.protocol import Damage, Inventory, StoreAdmin, full_name
from kvabr.store.admin.rules import Holding, Rules, evictions, total_bytes
from kvabr.store.admin.survey import Progress
from kvabr.store.locations import open_store
from kvabr.types.errors import AssetError, KvabrError, NotFoundError, UsageError
from kvabr.types.words import counted

_STAGES = {
    "catalogs": "reading catalogs",
    "listing": "listing objects",
    "evicting": "removing assets",
    "sweeping": "removing spans",
    "tidying": "removing notes",
    "spans": "checking spans",
    "checking": "checking assets",
    "comparing": "comparing tracks",
    "copying": "copying assets",
}
_SHOWN = 20
"""Removed assets that are listed one by one."""


def ls(args: argparse.Namespace) -> int:
    """List the assets."""
    check_writable(args.json)
    admin, found = _inventory(args)
    held = [each for each in found.holdings if args.model in (None, each.model)]
    shared = _shared(found.holdings)
    rows = [
        (
            printable(each.name if len(each.name) != 64 else each.name[:16]),
            each.model,
            f"{each.tokens:,}",
            human(each.bytes),
            human(_own(each, shared)),
            _time(found.now_s - each.created_s),
            _time(found.now_s - max(each.used_s, each.created_s)),
            _pin(each, found.now_s),
            "yes" if each.measured else "",
        )
        for each in held
    ]
    columns = ("name", "model", "tokens", "bytes", "own", "age", "used", "pinned", "measured")
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
            "now_s": found.now_s,
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
        pinned = [each for each in held if each.is_pinned(found.now_s)]
        rows.append((model, str(len(held)), human(total_bytes(held)), human(total_bytes(pinned))))
        sizes: dict[str, int] = defaultdict(int)
        for each in held:
            for track, size in each.tracks.items():
                sizes[track] += size
        tracks += [(model, track, size) for track, size in sizes.items()]
    out = output()
    title = f"tenant {tenant}" if tenant else None
    out.print(table(title, ("model", "assets", "bytes", "pinned"), rows, fold=("model",)))
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


def pin(args: argparse.Namespace) -> int:
    """Keep an asset for a time."""
    seconds = rules.duration(args.time) if args.until is None else None
    until_s = None if args.until is None else rules.date(args.until)
    admin = open_admin(args.store)
    name = full_name(run_async(admin.names()), args.name)
    if seconds is None:
        seconds = (until_s or 0.0) - run_async(admin.time_s())
    if seconds <= 0:
        raise UsageError("a pin must end in the future")
    until_s = run_async(admin.pin(name, seconds))
    plain(f"{name}: pinned until {_date(until_s)} UTC")
    return 0


def unpin(args: argparse.Namespace) -> int:
    """End the pin of an asset."""
    admin = open_admin(args.store)
    name = full_name(run_async(admin.names()), args.name)
    if not run_async(admin.unpin(name)):
        raise NotFoundError(f"{name}: is not pinned")
    plain(f"{name}: no longer pinned")
    return 0


def expire(args: argparse.Namespace) -> int:
    """Write the tombstone, and collect."""
    check_writable(args.json)
    before_s = None if args.before is None else rules.date(args.before)
    if args.dry_run:
        admin, found = _inventory(args)
        at_s = found.now_s if before_s is None else before_s
        gone = evictions(found.holdings, Rules(), found.now_s, {args.model: at_s})
        gone = [each for each in gone if each.holding.model == args.model]
        names = {each.holding.name for each in gone}
        left = [each for each in found.holdings if each.name not in names]
        freed = total_bytes(found.holdings) - total_bytes(left)
        done = Collected(evicted=gone, kept=len(left), bytes=freed)
        _report(admin, done, args)
        return 0
    admin = open_admin(args.store)
    at_s = run_async(admin.expire(args.model, before_s))
    plain(f"{args.model}: everything from before {_date(at_s)} UTC has expired")
    done = _collect(admin, Rules(), args)
    if done.busy:
        plain("somebody is publishing some of it at the moment: run `kvabr store gc` again in a while")
    return 0


def gc(args: argparse.Namespace) -> int:
    """Collect."""
    check_writable(args.json)
    kept = Rules(
        grace_s=rules.duration(args.grace),
        ttl_s=math.inf if args.ttl is None else rules.duration(args.ttl),
        model_ttl_s=rules.model_durations(args.model_ttl),
        max_age_s=math.inf if args.max_age is None else rules.duration(args.max_age),
        max_bytes=None if args.max_bytes is None else rules.size(args.max_bytes),
        order=args.evict,
        keep_measured=not args.measured,
    )
    cache_ttl_s = None if args.cache_ttl is None else rules.duration(args.cache_ttl)
    admin = open_admin(args.store)
    if args.deep:
        with StageBar(_STAGES) as bar:
            bad = run_async(admin.verify(deep=True, repair=not args.dry_run, progress=bar))
        for each in bad:
            plain(f"{each.name}: {each.what}; {'removed' if each.repaired else each.advice}")
    _collect(admin, kept, args, cache_ttl_s)
    return 0


def verify(args: argparse.Namespace) -> int:
    """Check everything."""
    check_writable(args.json)
    admin = open_admin(args.store)
    with StageBar(_STAGES) as bar:
        bad = run_async(admin.verify(deep=args.deep, repair=args.repair, progress=bar))
        if args.deep:
            bad += _differing(args.store, {each.name for each in bad}, bar)
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
    expired = run_async(open_admin(args.target).expired())
    names = [full_name(list(source.list().versions), name) for name in args.name]
    with StageBar(_STAGES) as bar:
        done = copy_assets(source, target, names=names, model=args.model, expired=expired, progress=bar)
    for name in done.expired:
        plain(f"{name}: not copied, its model has expired at {target.location} since it was published")
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
            "expired": done.expired,
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


def _collect(admin: StoreAdmin, kept: Rules, args: argparse.Namespace, cache_ttl_s: float | None = None) -> Collected:
    with StageBar(_STAGES) as bar:
        done = run_async(
            admin.collect(
                kept,
                dry_run=args.dry_run,
                cache_ttl_s=cache_ttl_s,
                take_over=getattr(args, "take_over", False),
                progress=bar,
            )
        )
    _report(admin, done, args)
    return done


def _report(admin: StoreAdmin, done: Collected, args: argparse.Namespace) -> None:
    """Say what was collected, and write it as JSON."""
    _say_gone(done, dry_run=args.dry_run)
    value: dict[str, Any] = {
        "store": admin.location,
        "tenant": admin.tenant,
        "dry_run": args.dry_run,
        "evicted": [{"name": each.holding.name, "reason": each.reason} for each in done.evicted],
        "damaged": done.damaged,
    }
    removed = ("spans", "pointers", "offers", "profiles", "groups", "bytes")
    counts = ("kept", *removed, "waiting", "busy", "excess", "swept")
    write_result(args.json, "store gc", value | {name: getattr(done, name) for name in counts})


def _say_gone(done: Collected, *, dry_run: bool) -> None:
    removed = "would be removed" if dry_run else "removed"
    for each in done.evicted[:_SHOWN]:
        plain(f"{each.holding.name}: {removed}, {each.reason}")
    if len(done.evicted) > _SHOWN:
        plain(f"... and {len(done.evicted) - _SHOWN} more")
    for name, why in done.damaged.items():
        plain(f"{name}: cannot be read: {why}; see kvabr store verify")
    stay = "stays" if done.kept == 1 else "stay"
    plain(f"{counted(len(done.evicted), 'asset')} {removed}, {done.kept:,} {stay}; {human(done.bytes)} freed")
    parts = {
        "span": done.spans,
        "pointer": done.pointers,
        "offer": done.offers,
        "profile": done.profiles,
    }
    parts["cached group"] = done.groups
    if any(parts.values()):
        plain(", ".join(counted(count, what) for what, count in parts.items() if count) + f" {removed}")
    if done.waiting:
        stay = "stays for its grace" if done.waiting == 1 else "stay for their grace"
        plain(f"{counted(done.waiting, 'span')} that nothing names {stay}")
    if done.busy:
        plain(f"{done.busy:,} {'stays' if done.busy == 1 else 'stay'} because they are in use again")
    if done.excess:
        plain(f"still {human(done.excess)} over --max-bytes: the rest is pinned, new, or was measured (see --measured)")
    if not done.swept:
        plain("no spans are removed while there are catalogs that cannot be read: they may name any of them")


def _say_damaged(found: Inventory) -> None:
    for name, what in found.damaged.items():
        plain(f"{name}: cannot be read: {what}; see kvabr store verify")


def _shared(holdings: Iterable[Holding]) -> dict[str | bytes, int]:
    """Return how many assets have each part."""
    counts: dict[str | bytes, int] = defaultdict(int)
    for each in holdings:
        for part in each.parts:
            counts[part.key] += 1
    return counts


def _own(holding: Holding, shared: dict[str | bytes, int]) -> int:
    return holding.own_bytes + sum(part.bytes for part in holding.parts if shared[part.key] == 1)


def _row(each: Holding, shared: dict[str | bytes, int]) -> dict[str, Any]:
    return {
        "name": each.name,
        "model": each.model,
        "tokens": each.tokens,
        "bytes": each.bytes,
        "own_bytes": _own(each, shared),
        "created_s": each.created_s,
        "used_s": max(each.used_s, each.created_s),
        "uses": each.uses,
        "pinned_until_s": None if each.pinned_until_s == math.inf else each.pinned_until_s,
        "measured": each.measured,
        "tracks": dict(each.tracks),
    }


def _pin(each: Holding, now_s: float) -> str:
    if each.pinned_until_s is None or not each.is_pinned(now_s):
        return ""
    return "damaged pin" if each.pinned_until_s == math.inf else f"for {_time(each.pinned_until_s - now_s)}"


def _time(seconds: float) -> str:
    """Return a time in its largest unit."""
    for unit, size in (("d", 86400), ("h", 3600), ("m", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f}{unit}"
    return f"{max(seconds, 0.0):.0f}s"


def _date(at_s: float) -> str:
    return "for ever" if at_s > 1e11 else time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(max(0.0, at_s)))
