"""Finds the longest prefix of a prompt among the spans of a store, in two rounds of requests. No I/O.

A span is named by the chained digest of its last group, and spans begin at multiples of 16 groups; so a prompt of n
groups knows the names of all full spans that could be its own. A pointer stands for a group inside a span, and has a
copy of the span's head. The first round asks for the heads of all full spans, and for a pointer of the prompt's last
group; the second for the pointers inside the first span that is not there. More than `_AT_ONCE` spans are searched for
17-ary first, so that a long prompt of which little is cached costs few requests.

Nothing that comes is believed: a head counts only as far as its digests are those of the prompt.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from itertools import takewhile
from typing import Any, Literal, NamedTuple

from kvabr.store.objects import spans
from kvabr.store.objects.layout import StoreOffer
from kvabr.store.objects.spans import SpanHead
from kvabr.transfer.interface import FoundPrefix
from kvabr.types.catalog import Catalog, CommonFacts, Level, Track
from kvabr.types.errors import FormatError
from kvabr.types.naming import TrackNamespace
from kvabr.types.records import fields_of
from kvabr.types.units import hit, units_of

_AT_ONCE = 31
"""Full spans whose heads are all asked for in the first round: of 16 groups, prompts of up to 511 groups."""
_PROBES = 16


class Ask(NamedTuple):
    """One object that may be there."""

    kind: Literal["span", "end", "pointer"]
    """A span inside an asset; the last span of one that ends with a snapshot of a state; a pointer to either."""
    group: int
    """The group of the prompt whose digest names it."""


class SpanSearch:
    """The search for one prompt in one offer. Ask for what `wanted` returns until that is nothing, then see `found`."""

    def __init__(self, digests: Sequence[str], span_groups: int, *, states: bool = False) -> None:
        """Begin with the chained digests of the prompt, or the beginnings of them that are in the names of objects.

        ``states``: the spec has a class of them.
        """
        self._digests, self._size, self._states = digests, span_groups, states
        self._full = len(digests) // span_groups
        self._heads: dict[int, SpanHead] = {}
        """Full spans that are there, by number."""
        self._missing: set[int] = set()
        self._tails: list[SpanHead] = []
        """Heads of spans of which the prompt shares a part only, or that end their asset."""
        self._asked: set[Ask] = set()
        self._round: list[Ask] = []
        self.rounds = 0

    def wanted(self) -> list[Ask]:
        """Return what to ask for in the next round; empty: the search is over."""
        self._round = [ask for ask in self._next() if ask not in self._asked]
        self._asked.update(self._round)
        self.rounds += bool(self._round)
        return list(self._round)

    def take(self, answers: Mapping[Ask, SpanHead | None]) -> None:
        """Take the heads that were there of what was wanted; None, or nothing, for those that were not."""
        for ask in self._round:
            head = answers.get(ask)
            number = ask.group // self._size
            fits = head is not None and head.first == number * self._size
            shared = self._shared(head) if head is not None and fits else 0
            if ask.kind == "span" and shared < self._size:
                self._missing.add(number)
            elif ask.kind == "span" and head is not None:
                self._heads[number] = head
            elif shared and head is not None and head not in self._tails:
                self._tails.append(head)

    @property
    def found(self) -> list[SpanHead]:
        """The spans of the longest prefix, in order; of the last one the prompt may share only the first groups."""
        run = self._run()
        tails = [head for head in self._tails if head.first <= run * self._size]
        best = max(tails, key=lambda head: head.first + self._shared(head), default=None)
        whole = [self._heads[number] for number in range(run)]
        # The span that ends an asset has a snapshot that the one inside an asset lacks.
        if best is None or best.first + self._shared(best) < run * self._size:
            return whole
        return [*whole[: best.first // self._size], best]

    # -------------------------------------------------------------- internals

    def _shared(self, head: SpanHead) -> int:
        own = self._digests[head.first :]
        return sum(1 for _ in takewhile(lambda pair: pair[0].startswith(pair[1]), zip(head.digests, own, strict=False)))

    def _run(self) -> int:
        """Return how many full spans are there from the first one on."""
        return next((number for number in range(self._full) if number not in self._heads), self._full)

    def _next(self) -> list[Ask]:
        if not self._asked:
            return [*map(self._span, self._probes(0, self._full)), *self._last()]
        absent = min(self._missing, default=self._full)
        known = max((number for number in self._heads if number < absent), default=-1)
        unknown = [number for number in range(absent) if number not in self._heads]
        if unknown:  # the heads below what was found, and what lies between that and the first that is missing
            below = [number for number in unknown if number < known]
            return list(map(self._span, [*below, *self._probes(known + 1, absent)]))
        return self._inside(self._run())

    @staticmethod
    def _probes(first: int, end: int) -> list[int]:
        """Return the numbers of some spans of ``range(first, end)``: all, or evenly spaced ones with the last."""
        count = end - first
        if count <= _AT_ONCE:
            return list(range(first, end))
        return [first + (count * (probe + 1) + _PROBES - 1) // _PROBES - 1 for probe in range(_PROBES)]

    def _span(self, number: int) -> Ask:
        return Ask("span", (number + 1) * self._size - 1)

    def _last(self) -> list[Ask]:
        """Return what a prompt that was played before is found by at once."""
        last = len(self._digests) - 1
        asks = [Ask("pointer", last)] if len(self._digests) % self._size else []
        return [*asks, Ask("end", last)] if self._states else asks

    def _inside(self, run: int) -> list[Ask]:
        """Return what may be there of a span that is not there as a whole."""
        first, groups = run * self._size, len(self._digests)
        if any(head.first <= first and self._shared(head) + head.first == groups for head in self._tails):
            return []
        asks = [Ask("pointer", group) for group in range(first, min(first + self._size - 1, groups))]
        whole = self._states and first + self._size <= groups
        return [*asks, Ask("end", first + self._size - 1)] if whole else asks


def found_prefix(offer: StoreOffer, heads: Sequence[SpanHead]) -> FoundPrefix:
    """Return what consecutive spans from the first group on make: a catalog, cut to what there are snapshots for.

    Raises `FormatError` if they do not fit together.
    """
    spec, chunks = offer.spec, tuple(digest for head in heads for digest in head.digests)
    size = spec.group_tokens
    for head in heads[:-1]:
        if head.tokens != offer.span_groups * size:
            raise FormatError(f"span {head.digests[-1][:16]}: lacks tokens, although another follows it")
    tokens = heads[-1].first * size + heads[-1].tokens
    limited_by: str | None = None
    units = units_of(spec, tokens)
    listed = {
        (track.name, track.first + at) for head in heads for track in head.tracks for at in range(len(track.bytes))
    }
    if any((spec.parts[unit.part].track_name(offer.tracks[0].name), unit.group) not in listed for unit in units):
        # The last span is not the last of its asset: there is no snapshot of a state at its end.
        groups, limited_by = hit(spec, len(chunks), tokens + 1)
        if not groups:
            return FoundPrefix(None, limited_by)
        chunks, tokens = chunks[:groups], groups * size
        units = units_of(spec, tokens)
    # What is left behind tails is a share of what a whole asset loses, and the last span of one is as a rule not full.
    rest: dict[str, Any] = {} if heads[-1].tokens < offer.span_groups * size else {"tails": ()}
    tracks = []
    for level in offer.tracks:
        entries = _entries(heads, [part.track_name(level.name) for part in spec.parts])
        try:
            found = [entries[unit.part][unit.group] for unit in units]
        except KeyError as error:
            raise FormatError(f"spans: {level.name} lacks a group of {spec.names[0]} or another class") from error
        sizes, digests, losses = zip(*found, strict=True)
        tracks.append(Track(**fields_of(level, Level) | rest, bytes=sizes, loss=losses, digests=digests))
    catalog = Catalog(
        namespace=TrackNamespace(spec.model, chunks[-1]),
        spec=spec,
        tokens=tokens,
        chunks=chunks,
        tracks=tuple(tracks),
        **fields_of(offer, CommonFacts),
        position=heads[0].position,
    )
    tag = hashlib.sha256("".join(digest for track in tracks for digest in track.digests).encode()).hexdigest()
    return FoundPrefix(catalog, limited_by, tag)


def _entries(heads: Sequence[SpanHead], names: Sequence[str]) -> list[dict[int, tuple[int, str, float]]]:
    """Return per class the size, SHA-256 and loss of each unit, by its number."""
    found: list[dict[int, tuple[int, str, float]]] = []
    for name in names:
        own: dict[int, tuple[int, str, float]] = {}
        for head in heads:
            if (track := head.by_name.get(name)) is not None:
                own |= zip(
                    range(track.first, track.first + len(track.bytes)),
                    zip(track.bytes, track.digests, track.loss, strict=True),
                    strict=True,
                )
        found.append(own)
    return found


def parsed_heads(
    offer: StoreOffer, came: Sequence[tuple[str | None, memoryview] | None]
) -> list[tuple[str, SpanHead] | None]:
    """Parse what came of some spans: a name and first bytes, or no name and a pointer.

    None stands for what did not come, or is no span of this offer.
    """
    found: list[tuple[str, SpanHead] | None] = []
    for answer in came:
        try:
            if answer is None:
                found.append(None)
                continue
            name, data = answer
            pair = spans.parse_pointer(data) if name is None else (name, spans.parse_head(data))
            spans.check_span(pair[1], offer)
            found.append(pair)
        except FormatError:
            found.append(None)
    return found
