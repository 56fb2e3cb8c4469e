"""Units: the groups of each layer class, and which units a prompt needs.

A cache of one class has one unit per group of tokens, with the same number. With several classes, units are ordered by
group of tokens, then by class. A class of kind ``state`` has one unit per snapshot, which belongs to the group that
ends at the snapshot. Players treat units as groups.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

from kvabr.types.kv import KVSpec

COMPUTED = -1
"""`Unit.source` of text between passages, which only an engine can compute."""


class Unit(NamedTuple):
    """One group of one layer class."""

    part: int
    """Index of the class in `KVSpec.parts`."""
    group: int
    """Number in the tracks of the class: the group ID of its objects."""
    chunk: int
    """Index of the group of tokens at the unit's end, whose digest names the unit."""
    first: int
    """Position of the first token in the prompt; for a snapshot, the number of tokens before it."""
    tokens: int
    """Number of tokens; for a snapshot, of rows."""
    free: int | None = None
    """Position of the first token within a passage; None if the position in the prompt is fixed."""
    source: int = 0
    """Index in `Catalog.sources` for a joined cache, or `COMPUTED`."""


class Span(NamedTuple):
    """A run of tokens of one layer class that a play needs."""

    first: int
    """Position of the first token, see `Unit.first`."""
    tokens: int
    """Number of tokens, may be 0; for a snapshot, of rows."""


def units_of(spec: KVSpec, tokens: int) -> tuple[Unit, ...]:
    """Return the units of a published cache of ``tokens`` tokens, in order."""
    found = [unit for part in range(len(spec.parts)) for unit in _of_part(spec, part, tokens)]
    return tuple(sorted(found, key=lambda unit: (unit.chunk, unit.part)))


def count_of(spec: KVSpec, tokens: int) -> int:
    """Return the number of units of a published cache, without creating the units."""
    return sum(-(-tokens // _apart(spec, part, tokens)) for part in range(len(spec.classes)))


def unit_of(spec: KVSpec, part: int, group: int, tokens: int) -> Unit:
    """Return a unit by class and number; raise `IndexError` if there is none."""
    only, size = spec.parts[part].only, spec.group_tokens
    if only.kind != "state":
        first, last = spec.group_range(group, tokens)
        return Unit(part, group, group, first, last - first)
    apart = only.interval or tokens
    if not 0 <= group < -(-tokens // apart):
        raise IndexError(f"snapshot {group} is outside a cache of {tokens} tokens")
    end = min((group + 1) * apart, tokens)
    return Unit(part, group, (end - 1) // size, end, only.k_dim)


def _of_part(spec: KVSpec, part: int, tokens: int) -> Iterator[Unit]:
    return (unit_of(spec, part, group, tokens) for group in range(-(-tokens // _apart(spec, part, tokens))))


def _apart(spec: KVSpec, part: int, tokens: int) -> int:
    only = spec.classes[part]
    return spec.group_tokens if only.kind != "state" else only.interval or tokens


def units_by_chunk(units: Iterable[Unit], chunks: int) -> list[list[Unit]]:
    """Return the units that end with each of ``chunks`` groups of tokens."""
    found: list[list[Unit]] = [[] for _ in range(chunks)]
    for unit in units:
        found[unit.chunk].append(unit)
    return found


def computed_shape(part: KVSpec, tokens: int) -> tuple[int, int, int, int, int]:
    """Return the shape of a class's KV computed for ``tokens`` tokens; for a state, the shape of one snapshot."""
    return part.shape(part.rows if part.only.kind == "state" else tokens)


def needed(spec: KVSpec, units: Sequence[Unit], tokens: int, end: int | None = None) -> list[int]:
    """Return the indices of the units that a prompt needs if it continues after its first ``tokens`` tokens.

    These are all groups of full attention and latents, the groups still visible in a window or the last chunk, and the
    snapshot at the end. ``end``, a token in the last group, adds the units needed to continue there.
    """
    first = [part.only.first_needed(end or tokens) for part in spec.parts]
    state = [part.only.kind == "state" for part in spec.parts]
    return [
        index
        for index, unit in enumerate(units)
        if (unit.first == tokens if state[unit.part] else first[unit.part] < unit.first + unit.tokens <= tokens)
    ]


def prefix_units(spec: KVSpec, units: Sequence[Unit], tokens: int, prefix: int, end: int) -> list[tuple[int, int]]:
    """Return the units for a prompt that continues after the first ``prefix`` of a cache's ``tokens`` tokens.

    Each is a pair of indices in ``units``, which has all units of the cache: the unit, and the unit with the same loss,
    as losses of windows were measured at the end of the whole cache. For ``end`` see `needed`.
    """
    places = {(unit.part, unit.group): index for index, unit in enumerate(units)}
    shorter = units_of(spec, prefix)
    picked = [places[shorter[index].part, shorter[index].group] for index in needed(spec, shorter, prefix, end)]
    alike = dict(zip(picked, picked, strict=True))
    ends = needed(spec, units, tokens)
    for part, one in enumerate(spec.parts):
        last = [index for index in ends if units[index].part == part]
        if last and one.only.kind not in ("full", "latent"):
            own = [index for index in picked if units[index].part == part]
            alike |= {index: last[max(0, len(last) - 1 - behind)] for behind, index in enumerate(reversed(own))}
    return [(index, alike[index]) for index in picked]


def groups_needed(spec: KVSpec, part: int, end: int, first: int, total: int) -> range | None:
    """Return the groups of a class that a prompt needs if it continues after its first ``end`` tokens.

    Skip groups within the first ``first`` tokens, which are whole groups; the cache has ``total`` tokens. Return None
    if a state has no snapshot at ``end``.
    """
    only, size = spec.classes[part], spec.group_tokens
    if only.kind != "state":
        return range(max(first, only.first_needed(end)) // size, -(-end // size))
    apart = only.interval or total
    snapshot = -(-end // apart)
    return None if min(snapshot * apart, total) != end else range(snapshot - 1, snapshot)


def cuts(spec: KVSpec, units: Sequence[Unit], offset: int, total: int) -> Iterator[int]:
    """Yield the indices from which an engine can compute the rest if all earlier units are in place.

    These are 0 and the starts of groups of tokens after all needed units. ``units`` has all groups of full attention
    and latents. The engine already has ``offset`` groups of tokens; `Unit.chunk` counts from after these.
    """
    size, there = spec.group_tokens, {(unit.part, unit.group) for unit in units}
    partial = [part for part, only in enumerate(spec.classes) if only.kind not in ("full", "latent")]
    yield 0
    for index in range(1, len(units)):
        end = (offset + units[index].chunk) * size
        if units[index].chunk > units[index - 1].chunk:
            wanted = ((part, groups_needed(spec, part, end, offset * size, total)) for part in partial)
            if all(groups is not None and all((part, group) in there for group in groups) for part, groups in wanted):
                yield index


def hit(spec: KVSpec, groups: int, tokens: int) -> tuple[int, str | None]:
    """Return how many of the first ``groups`` groups every class can play, in an asset of ``tokens`` tokens.

    States need a snapshot at the end. The second value is the class that limits the number, or None.
    """
    limit: str | None = None
    while groups and (bound := _shortest(spec, groups, tokens)) is not None:
        groups, limit = bound
    return groups, limit


def _shortest(spec: KVSpec, groups: int, tokens: int) -> tuple[int, str] | None:
    end = min(groups * spec.group_tokens, tokens)
    for part, name in zip(spec.parts, spec.names, strict=True):
        only = part.only
        if only.kind == "state" and end < tokens and (only.interval is None or end % only.interval):
            return (0 if only.interval is None else end // only.interval * only.interval // spec.group_tokens), name
    return None


def snapshot_ends(part: KVSpec, tokens: int) -> list[int]:
    """Return the number of tokens before each snapshot of a state; empty for other classes."""
    if part.only.kind != "state":
        return []
    return [unit.first for unit in _of_part(part, 0, tokens)]


def cache_length(part: KVSpec, tokens: int) -> int:
    """Return the length of the token axis of one class's tensor in a published cache of ``tokens`` tokens.

    Snapshots of a state are concatenated on this axis, with rows in place of tokens.
    """
    return tokens if part.only.kind != "state" else len(snapshot_ends(part, tokens)) * part.rows


def with_snapshots_of(spec: KVSpec, other: KVSpec) -> KVSpec:
    """Return ``spec`` with the snapshot intervals of another spec, chosen by a publisher, if the classes match."""
    if len(spec.classes) != len(other.classes) or spec.group_tokens != other.group_tokens:
        return spec
    pairs = zip(spec.classes, other.classes, strict=True)
    intervals = [theirs.interval if mine.kind == theirs.kind else mine.interval for mine, theirs in pairs]
    if intervals == [own.interval for own in spec.classes]:
        return spec
    return replace(
        spec, classes=tuple(replace(one, interval=every) for one, every in zip(spec.classes, intervals, strict=True))
    )
