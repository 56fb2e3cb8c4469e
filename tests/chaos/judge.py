"""Judges the outcome of a play: holes, wrong bytes, lateness, crashes and hangs."""

from dataclasses import dataclass
from typing import Literal

from kvabr.types.catalog import RECOMPUTED
from tests.chaos.facts import GRACE_S, CacheFacts, GroupFacts, Order, Report
from tests.chaos.published import SPEC, G, Library

Kind = Literal["hole", "wrong", "late", "hang", "crash"]


@dataclass(frozen=True, slots=True)
class Failure:
    """Something that must not happen, or a late play, which a busy processor may explain."""

    kind: Kind
    text: str


def judge(report: Report, order: Order, library: Library) -> list[Failure]:
    """Return the failures of a play, usually none."""
    found = [*_ended(report), *_missing(report)]
    if report.cache is not None:
        found += _cache(report.cache, order, library)
    if report.later is not None and report.upgraded:
        found += _cache(report.later, order, library, "after upgrades: ")
    elif report.later is not None and report.cache is not None and report.later.groups != report.cache.groups:
        changed = [
            g for g, pair in enumerate(zip(report.cache.groups, report.later.groups, strict=True)) if len({*pair}) > 1
        ]
        found.append(Failure("wrong", f"groups {changed} changed after the cache was handed over"))
    for base in report.bases:
        found += _base(base, order, library)
    return found


def _ended(report: Report) -> list[Failure]:
    if report.outcome == "hang":
        return [Failure("hang", f"no end after {report.elapsed_s:.1f} s")]
    if report.outcome == "crash":
        return [Failure("crash", report.error)]
    if report.elapsed_s <= report.bound_s + GRACE_S:
        return []
    text = f"{report.outcome} after {report.elapsed_s:.3f} s, due after {report.bound_s:.3f} s {report.error}"
    return [Failure("late", text)]


def _missing(report: Report) -> list[Failure]:
    if report.outcome != "incomplete":
        return []
    before = 0 if report.cache is None else len(report.cache.groups)
    missing = report.missing
    if not missing or list(missing) != sorted(set(missing)) or missing[0] != before:
        return [Failure("hole", f"incomplete: missing {missing}, with {before} groups before them")]
    return []


def _cache(cache: CacheFacts, order: Order, library: Library, where: str = "") -> list[Failure]:
    """Check a cache against the truth: all groups that were fetched are those of one version."""
    if cache.tokens > order.tokens or cache.covered != len(cache.groups):
        text = f"{where}{cache.tokens} tokens in {cache.covered} groups, of {order.tokens} tokens asked for"
        return [Failure("hole", text)]
    found, versions = [], {key[1] for key in library.truth if key[0] == order.prompt}
    known = library.catalogs.get(cache.catalog_sha256 or "")
    if known is not None:
        versions &= {known[1]} if known[0] == order.prompt else set()
    for number, group in enumerate(cache.groups):
        same = _versions(number, group, cache.tokens, order, library)
        if not same:
            kind: Kind = "hole" if group.nan or not group.track else "wrong"
            found.append(Failure(kind, f"{where}group {number} of {group.track!r} is none of any version"))
        elif group.track != RECOMPUTED:
            versions &= same
    if not found and not versions:
        tracks = ", ".join(group.track for group in cache.groups)
        found.append(Failure("wrong", f"{where}groups of several versions in one cache ({tracks})"))
    return found


def _versions(number: int, group: GroupFacts, tokens: int, order: Order, library: Library) -> set[int]:
    """Return the versions that a group agrees with; all if it was computed."""
    if group.track == RECOMPUTED:
        right = library.recomputed(order.prompt, number * G, min(number * G + G, tokens))
        return {0} if group.sha256 == right else set()
    wanted = order.prompt, group.track, number
    return {
        version
        for (prompt, version, track, at), sha256 in library.truth.items()
        if (prompt, track, at) == wanted and sha256 == group.sha256
    }


def _base(base: tuple[CacheFacts, CacheFacts], order: Order, library: Library) -> list[Failure]:
    """Check the cache that an engine continued: any mixture of published versions.

    A copy that is made while a better track is written into a group has numbers of both tracks, which is right too.
    """
    found = []
    first, last = base
    for number, (group, later) in enumerate(zip(first.groups, last.groups, strict=True)):
        right = {
            sha256 for (prompt, _, _, at), sha256 in library.truth.items() if (prompt, at) == (order.prompt, number)
        }
        right.add(library.recomputed(order.prompt, *SPEC.group_range(number, first.tokens)))
        if group.nan or right.isdisjoint({group.sha256, later.sha256}):
            kind: Kind = "hole" if group.nan else "wrong"
            found.append(Failure(kind, f"group {number} of {first.tokens} tokens that the engine computed on"))
    return found
