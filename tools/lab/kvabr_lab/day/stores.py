"""A day of requests against one store that is too small for all of them: what must be computed again.

Each request looks for the longest beginning of its prompt that is stored, computes the rest, and stores its own prompt
as an asset. When the store is full, a twentieth of it is freed. There are two kinds of store:

- `FOLDER`: each asset has a copy of all of its prompt, as in a folder that engines publish into.
- `SHARED`: equal beginnings are stored once, as in an object store's spans.

The day is the same for every order of eviction: an answer comes a second after its request and takes `TOKEN_S` a token.
"""

from __future__ import annotations

import json
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Literal, NamedTuple

from kvabr.store.eviction import Candidate, History, Part, ReuseTable, victims
from kvabr.types.cost import PrefillCost
from kvabr.types.errors import FormatError, UsageError
from kvabr_lab.day.requests import TOKEN_S, DayRequest

StoreKind = Literal["folder", "shared"]
FOLDER: StoreKind = "folder"
SHARED: StoreKind = "shared"
CLAIRVOYANT = "clairvoyant"
"""Order by value, of who knows when each part is used next. Not a bound: a sequence of best choices."""

_FIRST_TOKEN_S = 1.0
_SLACK = 0.05
_TRACE_BLOCK = 512
"""Tokens of a block in the traces of `read_trace`."""


class Visit(NamedTuple):
    """A request as a store sees it."""

    at_s: float
    parts: tuple[tuple[int, int], ...]
    """As `DayRequest.parts`."""


def visits(requests: Sequence[DayRequest]) -> list[Visit]:
    """Return when the requests of a day come, in order."""
    times: dict[int, float] = {}
    found = []
    for request in requests:
        at_s = times[request.number] if request.at_s is None else request.at_s
        if request.following is not None:
            answer_s = _FIRST_TOKEN_S + TOKEN_S * request.answer[1]
            times[request.following] = at_s + answer_s + requests[request.following].pause_s
        found.append(Visit(at_s, request.parts))
    return sorted(found)


def read_trace(path: Path) -> list[Visit]:
    """Return the requests of a trace in the form of Mooncake's (FAST 2025): a JSON object a line.

    An object has ``timestamp`` (ms) and ``hash_ids``, numbers of blocks of 512 tokens; equal numbers are equal
    beginnings. Blocks that no request of the trace tells apart become one part.

    Raises `FormatError` if the file is not such a trace.
    """
    rows: list[tuple[float, list[int]]] = []
    try:
        with path.open(encoding="utf-8") as file:
            for line in file:
                value = json.loads(line)
                rows.append((float(value["timestamp"]) / 1000, [int(block) for block in value["hash_ids"]]))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise FormatError(f"{path}: not a trace of requests with timestamp and hash_ids ({error!r})") from error
    counts = Counter(block for _, blocks in rows for block in blocks)
    following: defaultdict[int, set[int]] = defaultdict(set)
    for _, blocks in rows:
        for block, after in pairwise(blocks):
            following[block].add(after)
    found = []
    for at_s, blocks in rows:
        parts: list[tuple[int, int]] = []
        tokens = 0
        for block, behind in zip(blocks, [*blocks[1:], None], strict=True):
            tokens += _TRACE_BLOCK
            if behind is None or counts[behind] != counts[block] or len(following[block]) > 1:
                parts.append((block, tokens))
                tokens = 0
        if parts:
            found.append(Visit(at_s, tuple(parts)))
    return sorted(found)


@dataclass(frozen=True, slots=True)
class StoreOutcome:
    """What a store did in a day."""

    order: str
    tokens: int
    """Of all prompts."""
    new_tokens: int
    """That were never computed before."""
    hit_tokens: int
    computed_s: float
    """Seconds of prefill."""
    new_s: float
    """Of these, for tokens that were never computed before."""
    evicted: int

    @property
    def hit_ratio(self) -> float:
        """Share of the tokens that came from the store."""
        return self.hit_tokens / max(1, self.tokens)

    @property
    def recomputed_tokens(self) -> int:
        """Tokens that had been computed before, and were evicted since."""
        return self.tokens - self.hit_tokens - self.new_tokens

    @property
    def recomputed_s(self) -> float:
        """Seconds of prefill for tokens that had been computed before."""
        return self.computed_s - self.new_s


def distinct_tokens(day: Iterable[Visit]) -> int:
    """Return how many tokens a store would have that keeps everything once."""
    return sum({number: tokens for visit in day for number, tokens in visit.parts}.values())


class _Foreknowledge(ReuseTable):
    """Knows when each part is used next."""

    def __init__(self, day: Sequence[Visit]) -> None:
        super().__init__()
        self._times: defaultdict[str | bytes, list[float]] = defaultdict(list)
        for visit in day:
            for number, _ in visit.parts:
                self._times[str(number)].append(visit.at_s)

    def rate(self, key: str | bytes, history: History, now: float) -> float:  # noqa: ARG002  # it knows better
        times = self._times[key]
        place = bisect_right(times, now)
        return 1.0 / (times[place] - now + 1.0) if place < len(times) else 0.0


@dataclass(slots=True)
class _Asset:
    visit: Visit
    parts: tuple[Part, ...]
    bytes: int
    """Of its own."""
    used_s: float
    uses: int = 0


class _Store:
    """What a store has, and when it was used."""

    def __init__(self, kind: StoreKind, capacity: int, cost: PrefillCost) -> None:
        self._copies, self._capacity, self._cost = kind == FOLDER, capacity, cost
        self._assets: dict[str, _Asset] = {}
        self._owners: defaultdict[str | bytes, set[str]] = defaultdict(set)
        self._held = 0
        self.evicted = 0

    def parts(self, visit: Visit) -> tuple[Part, ...]:
        """Return the parts of a prompt; a token takes a byte."""
        found, first = [], 0
        for number, tokens in visit.parts:
            seconds = self._cost.seconds(first, tokens) - self._cost.constant_s
            found.append(Part(str(number), 0 if self._copies else tokens, tokens, seconds))
            first += tokens
        return tuple(found)

    def has(self, part: Part) -> bool:
        return bool(self._owners.get(part.key))

    def answered(self, part: Part) -> None:
        """Count a use of the newest asset that has what was found."""
        newest = max(self._owners[part.key], key=lambda name: self._assets[name].visit.at_s)
        self._assets[newest].uses += 1

    def store(self, visit: Visit, parts: tuple[Part, ...], evict: Callable[[list[Candidate], int], list[str]]) -> None:
        name = str(parts[-1].key)
        known = self._assets.get(name)
        if known is not None:
            known.used_s = visit.at_s
            return
        own = sum(part.tokens for part in parts) if self._copies else 0
        self._assets[name] = _Asset(visit, parts, own, visit.at_s)
        self._held += own
        for part in parts:
            owners = self._owners[part.key]
            self._held += 0 if owners else part.bytes
            owners.add(name)
        if self._held > self._capacity:
            excess = self._held - int((1 - _SLACK) * self._capacity)
            for victim in evict(list(self._candidates(name)), excess):
                self._remove(victim)

    def _candidates(self, new: str) -> Iterable[Candidate]:
        for name, one in self._assets.items():
            pinned = float("inf") if name == new else float("-inf")
            yield Candidate(name, one.bytes, one.visit.at_s, one.used_s, one.uses, one.parts, pinned)

    def _remove(self, name: str) -> None:
        asset = self._assets.pop(name)
        self.evicted += 1
        self._held -= asset.bytes
        for part in asset.parts:
            owners = self._owners[part.key]
            owners.discard(name)
            if not owners:
                self._held -= part.bytes
                del self._owners[part.key]


def replay_store(
    day: Sequence[Visit], kind: StoreKind, capacity: int, order: str, cost: PrefillCost, *, warm_s: float = 0.0
) -> StoreOutcome:
    """Play a day against a store.

    Args:
        day: the requests.
        kind: `FOLDER` or `SHARED`.
        capacity: tokens whose cache the store holds.
        order: one of `kvabr.store.eviction.ORDERS`, or `CLAIRVOYANT`.
        cost: of a prefill.
        warm_s: requests before that are not counted, although the store has them.

    Raises:
        UsageError: There is no such order, or the store holds nothing.
    """
    if capacity < 1:
        raise UsageError(f"a store for {capacity} tokens holds nothing; give it more")
    store = _Store(kind, capacity, cost)
    reuse = _Foreknowledge(day) if order == CLAIRVOYANT else ReuseTable()
    seen: set[str | bytes] = set()
    tokens = new = hit = 0
    computed_s = new_s = 0.0
    now = 0.0
    name = "value" if order == CLAIRVOYANT else order

    def evict(candidates: list[Candidate], excess: int) -> list[str]:
        return [victim.key for victim in victims(candidates, excess, now, order=name, reuse=reuse)]

    for visit in day:
        now = visit.at_s
        parts = store.parts(visit)
        there, last = True, None
        for part in parts:
            there = there and store.has(part)
            last = part if there else last
            if now >= warm_s:
                tokens += part.tokens
                hit += part.tokens if there else 0
                computed_s += 0.0 if there else part.seconds
                if part.key not in seen:
                    new += part.tokens
                    new_s += part.seconds
            seen.add(part.key)
        reuse.note(parts, now)
        if last is not None:
            store.answered(last)
        store.store(visit, parts, evict)
    return StoreOutcome(order, tokens, new, hit, computed_s, new_s, store.evicted)
