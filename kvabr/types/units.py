"""Units: what a cache is cut into, one group of one layer class each, and which of them a prompt needs.

A cache of one class has a unit per group of tokens, with the same number. With several classes, the units of the first
group of tokens come first, in the order of their classes, then those of the second. A class of kind ``state`` has one
per snapshot, which comes with the group at whose end it was taken. A player plays units as it plays groups, and calls
them so: each has its own bytes, loss and track.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

from kvabr.types.kv import KVSpec

COMPUTED = -1
"""`Unit.source` of what no asset has, so that only an engine can bring it: a text between passages."""


class Unit(NamedTuple):
    """One group of one layer class."""

    part: int
    """Index of its class in `KVSpec.parts`."""
    group: int
    """Its number in the tracks of its class: the group ID of its objects."""
    chunk: int
    """The group of tokens that it ends with, whose digest names what it was computed from."""
    first: int
    """Position of its first token in the prompt; of a snapshot, the number of tokens before it."""
    tokens: int
    """Tokens, or rows of a snapshot."""
    free: int | None = None
    """Of a passage, which may be played anywhere, its first token there; None: it was encoded for its place in the
    prompt."""
    source: int = 0
    """Index of its asset in `Catalog.sources`, if the cache is joined from several; `COMPUTED` if none has it."""


class Span(NamedTuple):
    """The tokens of one layer class that a play needs: a run of them."""

    first: int
    """Position of the first one; of a snapshot, the number of tokens before it."""
    tokens: int
    """Number of tokens, possibly 0; rows of a snapshot."""


def units_of(spec: KVSpec, tokens: int) -> tuple[Unit, ...]:
    """Return the units of a published cache of ``tokens`` tokens, in order."""
    found = [unit for part in range(len(spec.parts)) for unit in _of_part(spec, part, tokens)]
    return tuple(sorted(found, key=lambda unit: (unit.chunk, unit.part)))


def count_of(spec: KVSpec, tokens: int) -> int:
    """Return the number of units of a published cache, without making them."""
    return sum(-(-tokens // _apart(spec, part, tokens)) for part in range(len(spec.classes)))


def unit_of(spec: KVSpec, part: int, group: int, tokens: int) -> Unit:
    """Return a unit, given its class and its number there; `IndexError` if there is none."""
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
    """Return the tokens from one unit of a class to the next."""
    only = spec.classes[part]
    return spec.group_tokens if only.kind != "state" else only.interval or tokens


def units_by_chunk(units: Iterable[Unit], chunks: int) -> list[list[Unit]]:
    """Return the units that end with each of ``chunks`` groups of tokens."""
    found: list[list[Unit]] = [[] for _ in range(chunks)]
    for unit in units:
        found[unit.chunk].append(unit)
    return found


def computed_shape(part: KVSpec, tokens: int) -> tuple[int, int, int, int, int]:
    """Return the shape of what an engine computes of one class for ``tokens`` tokens: of a state, one snapshot."""
    return part.shape(part.rows if part.only.kind == "state" else tokens)


def needed(spec: KVSpec, units: Sequence[Unit], tokens: int, end: int | None = None) -> list[int]:
    """Return the indices of the units that a prompt needs that goes on behind its first ``tokens`` tokens.

    With ``end``, a token of the last group, also those that a prompt needs which goes on behind that.

    It needs every group of full attention and of latents; of a window and of the last chunk the groups that can still
    be seen; and of a state the snapshot at its end.
    """
    first = [part.only.first_needed(end or tokens) for part in spec.parts]
    state = [part.only.kind == "state" for part in spec.parts]
    return [
        index
        for index, unit in enumerate(units)
        if (unit.first == tokens if state[unit.part] else first[unit.part] < unit.first + unit.tokens <= tokens)
    ]


def prefix_units(spec: KVSpec, units: Sequence[Unit], tokens: int, prefix: int, end: int) -> list[tuple[int, int]]:
    """Return the units that a prompt needs which goes on behind the first ``prefix`` of a cache's ``tokens`` tokens.

    Each is given as its index in ``units``, all of the cache's, and the index of the one that loses as much. What a
    group of a window loses depends on its distance from the end, and was measured at the cache's own end. For ``end``
    see `needed`.
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
    """Return the groups of a class that a prompt needs which goes on behind its first ``end`` tokens.

    Those of the first ``first`` tokens, whole groups, are left out. The cache has ``total`` tokens. None: there is no
    snapshot at ``end``.
    """
    only, size = spec.classes[part], spec.group_tokens
    if only.kind != "state":
        return range(max(first, only.first_needed(end)) // size, -(-end // size))
    apart = only.interval or total
    snapshot = -(-end // apart)
    return None if min(snapshot * apart, total) != end else range(snapshot - 1, snapshot)


def cuts(spec: KVSpec, units: Sequence[Unit], offset: int, total: int) -> Iterator[int]:
    """Yield the indices at which an engine can begin to compute all that follows if every unit before is in place.

    They are the first one, and each with which a group of tokens begins and before which nothing is missing that a
    prompt needs which goes on there. ``units`` has every group of full attention and of latents. ``offset``: groups of
    tokens that the engine has; `Unit.chunk` counts from there.
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
    """Return how many of the first ``groups`` groups of an asset of ``tokens`` tokens every class can be played for.

    A state can only be played where there is a snapshot of it. The second value names the class that limits the hit;
    None if none does.
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
    """Return how many tokens come before each snapshot of a state in a cache of ``tokens`` tokens.

    ``part`` is the spec of one class; there are none unless it is a state.
    """
    if part.only.kind != "state":
        return []
    return [unit.first for unit in _of_part(part, 0, tokens)]


def cache_length(part: KVSpec, tokens: int) -> int:
    """Return the length of the fourth axis in the tensor of one class of a published cache of ``tokens`` tokens.

    The snapshots of a state lie there one behind the other, with their rows in the place of tokens.
    """
    return tokens if part.only.kind != "state" else len(snapshot_ends(part, tokens)) * part.rows


def with_snapshots_of(spec: KVSpec, other: KVSpec) -> KVSpec:
    """Return ``spec`` with the snapshots of another spec of as many classes: their number is up to a publisher."""
    if len(spec.classes) != len(other.classes) or spec.group_tokens != other.group_tokens:
        return spec
    pairs = zip(spec.classes, other.classes, strict=True)
    intervals = [theirs.interval if mine.kind == theirs.kind else mine.interval for mine, theirs in pairs]
    if intervals == [own.interval for own in spec.classes]:
        return spec
    return replace(
        spec, classes=tuple(replace(one, interval=every) for one, every in zip(spec.classes, intervals, strict=True))
    )
