"""Which cached prompts go first when a store is full: least recently used, least often used, or least valuable.

The value of an asset is what it is expected to save per byte that it occupies: the seconds to compute what would be
lost with it, times the rate at which that is used again. Three facts about KV caches decide it:

- Prompts share beginnings. What a second asset holds too is not lost: an asset that another one continues is worth
  nothing, and a beginning that many share is worth what all of them save. See `Part`.
- Attention makes the end of a long prompt dearer to compute than its beginning, where the engine's cost is known.
- Most caches are never used again, and those that were used are likely to be used again, for a while. How likely is
  measured, by the number of uses so far and the time since the last one. See `ReuseTable`.

Nothing here reads a clock or does I/O. Times are seconds since any moment, the same for all.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args

from kvabr.types.cost import PrefillCost
from kvabr.types.errors import UsageError

Order = Literal["value", "lru", "lfu"]
ORDERS: tuple[Order, ...] = get_args(Order)
"""Names of orders: by value, least recently used first, least often used first."""
DEFAULT_ORDER: Order = "value"


class Part(NamedTuple):
    """A piece of a prompt's cache that several assets may share, such as a span or a group."""

    key: str | bytes
    """Equal keys are the same part: its bytes are freed, and its tokens lost, with the last asset that has it."""
    bytes: int
    """Bytes that are shared; 0 where each asset has a copy of its own."""
    tokens: int
    seconds: float = 0.0
    """Seconds to compute the part, after everything before it; 0.0: not known. Tokens count instead, for all parts,
    unless the seconds of all are known."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """An asset that may be evicted."""

    key: str
    bytes: int
    """Bytes of its own, which are freed whenever it goes."""
    first_s: float
    """When it was stored."""
    last_s: float
    """When it was used last: played, looked up, or computed again."""
    uses: int = 0
    """How often it was used since it was stored."""
    parts: Sequence[Part] = ()
    """What it has, in the order of the prompt."""
    pinned_until_s: float = -math.inf
    """It is not evicted before."""

    @property
    def history(self) -> History:
        """When and how often it was used."""
        return History(self.uses, self.first_s, self.last_s, sum(part.tokens for part in self.parts) or 1.0)


class History(NamedTuple):
    """When and how often something was used."""

    uses: int
    """Not counting that it was stored."""
    first_s: float
    last_s: float
    weight: float = 1.0
    """Of what was used, in any unit: large things say more about what a byte is worth."""

    def merged(self, other: History) -> History:
        """Return the history of both: what was stored twice, was used by who stored it again."""
        first_s, last_s = min(self.first_s, other.first_s), max(self.last_s, other.last_s)
        return History(self.uses + other.uses + 1, first_s, last_s, max(self.weight, other.weight))


def parts_of(
    keys: Sequence[bytes], ends: Container[bytes], tokens: int, group_tokens: int, *, seconds: PrefillCost | None = None
) -> tuple[Part, ...]:
    """Return the parts of an asset whose bytes are its own, up to 16 groups each.

    Args:
        keys: of its groups, for instance `kvabr.types.naming.prefix_key` of the chained digests.
        ends: keys of the last groups of all assets: those that it continues end with a part of it.
        tokens: of the asset.
        group_tokens: tokens of a group.
        seconds: what its engine takes; None: not known.
    """
    found, first = [], 0
    for group, key in enumerate(keys):
        if (group + 1) % _PART_GROUPS and key not in ends and group < len(keys) - 1:
            continue
        end = min(tokens, (group + 1) * group_tokens)
        takes = 0.0 if seconds is None else seconds.added_s(first, end - first)
        found.append(Part(key, 0, end - first, takes))
        first = end
    return tuple(found)


_PART_GROUPS = 16
_BINS = 52
_EDGES_S = (0.0, *(2.0 ** (0.5 * step) for step in range(1, _BINS + 1)))
"""Bounds of the ages that the table tells apart, seconds: each the root of 2 times the one before, up to two years."""
_GAPS = 5
"""Mean times between uses that the table tells apart: up to 16 s, 64 s, 256 s, 1,024 s, more."""
_CLASSES = 1 + 2 * _GAPS
"""Classes of assets: never used, used once, and used more often, the latter two by their mean time between uses."""
_PRIOR_S, _PRIOR_SHAPE, _PRIOR_WEIGHT = 300.0, 0.3, 4.0
"""Where nothing is measured, idle times have a Pareto distribution of this scale and shape. The last
number is its weight: observed parts in each age. What is measured of all parts weighs as much for each class."""
_MEMORY = 4.0
"""Past idle periods weigh at most this many times as much as the present ones; then they are halved."""
_REMEMBERED = 2
"""Histories are kept of this many parts for each one that is there."""


class ReuseTable:
    """How soon assets are used again, by the number of uses so far and the time since the last one: a life table.

    Each use ends an idle period; the current ones have not ended (they are censored). Of both the hazard of being used
    is estimated (Kaplan and Meier, 1958). A rate is the best ratio of expected uses to expected time kept, over all
    times after which one might give up: what is hardly ever used within seconds, but mostly within a minute, is worth
    keeping for a minute (an index as in Gittins, 1979, or the hit density of Beckmann et al., NSDI 2018).
    """

    def __init__(self) -> None:
        """Begin with nothing measured."""
        self._ended, self._open = _table(), _table()
        """Idle periods of what was evicted that ended with a use, and that did not; by class, then by age."""
        self._rates = self._estimate(self._ended, self._open, 1.0)
        self.histories: dict[str | bytes, History] = {}
        """By key, of parts that were noted; those used longest ago first."""

    def note(self, parts: Iterable[Part], now: float) -> None:
        """Note that parts are used or stored."""
        for part in parts:
            known = self.histories.pop(part.key, None)
            if known is None:
                self.histories[part.key] = History(0, now, now, part.tokens)
            else:
                self._ended[_class(known)][_bin(now - known.last_s)] += known.weight
                self.histories[part.key] = History(known.uses + 1, known.first_s, now, known.weight)

    def forget(self, most: int, now: float) -> None:
        """Keep the histories of at most ``most`` parts."""
        for key in list(itertools.islice(self.histories, max(0, len(self.histories) - most))):
            _count_open(self.histories.pop(key), now, self._open)

    def measure(self, stored: Iterable[History], now: float) -> None:
        """Measure again, given the histories of all that is stored and was not noted."""
        ended, unended = _table(), _table()
        others = 0
        for others, history in enumerate(stored, 1):  # noqa: B007  # used after the loop
            _count(history, now, ended, unended)
        for history in self.histories.values():
            _count_open(history, now, unended)
        present = sum(map(sum, unended))
        if sum(map(sum, self._ended)) + sum(map(sum, self._open)) > _MEMORY * present:
            for table in (self._ended, self._open):
                table[:] = [[0.5 * value for value in row] for row in table]
        weight = present / max(1, len(self.histories) + others)
        self._rates = self._estimate(_sum(ended, self._ended), _sum(unended, self._open), weight)

    def rate(self, key: str | bytes, history: History, now: float) -> float:  # noqa: ARG002  # for those who know more
        """Return the expected uses per second of keeping a part, or an asset without parts."""
        rates = self._rates[_class(history)]
        # Between the middles of two ages.
        place = 2.0 * math.log2(max(1.0, now - history.last_s)) - 0.5
        low = min(_BINS - 2, max(0, int(place)))
        share = min(1.0, max(0.0, place - low))
        return rates[low] + share * (rates[low + 1] - rates[low])

    @staticmethod
    def _estimate(ended: list[list[float]], unended: list[list[float]], weight: float) -> list[list[float]]:
        weight *= _PRIOR_WEIGHT
        # The idle times of all: at first assumed to have a Pareto distribution.
        pairs = itertools.pairwise(_EDGES_S)
        prior = [1.0 - ((low + _PRIOR_S) / (high + _PRIOR_S)) ** _PRIOR_SHAPE for low, high in pairs]
        pooled = _hazards(
            [sum(ages) for ages in zip(*ended, strict=True)],
            [sum(ages) for ages in zip(*unended, strict=True)],
            prior,
            weight,
        )
        return [_rates(_hazards(mine, its, pooled, weight), mine) for mine, its in zip(ended, unended, strict=True)]


def _table() -> list[list[float]]:
    return [[0.0] * _BINS for _ in range(_CLASSES)]


def _sum(one: list[list[float]], other: list[list[float]]) -> list[list[float]]:
    return [[a + b for a, b in zip(row, its, strict=True)] for row, its in zip(one, other, strict=True)]


def _class(history: History) -> int:
    if not history.uses:
        return 0
    return _class_of(history.uses, (history.last_s - history.first_s) / history.uses)


def _class_of(uses: int, gap_s: float) -> int:
    if not uses:
        return 0
    return 1 + (_GAPS if uses > 1 else 0) + min(_GAPS - 1, max(0, _bin(gap_s) - 4) // 4)


def _bin(age_s: float) -> int:
    return min(_BINS - 1, int(2.0 * math.log2(age_s))) if age_s > 1.0 else 0


def _count(history: History, now: float, ended: list[list[float]], unended: list[list[float]]) -> None:
    """Count idle periods; of the ended ones only the mean is known."""
    if history.uses:
        gap_s = (history.last_s - history.first_s) / history.uses
        for uses in range(min(3, history.uses)):
            ended[_class_of(uses, gap_s)][_bin(gap_s)] += history.weight
    _count_open(history, now, unended)


def _count_open(history: History, now: float, unended: list[list[float]]) -> None:
    """Count the idle period that has not ended."""
    unended[_class(history)][_bin(now - history.last_s)] += history.weight


def _hazards(ended: list[float], unended: list[float], prior: list[float], weight: float) -> list[float]:
    """Return the probability of a use within each age, if there was none before; the prior has a weight."""
    found, at_risk = [0.0] * _BINS, 0.0
    for age in reversed(range(_BINS)):
        at_risk += ended[age] + 0.5 * unended[age]
        found[age] = (ended[age] + weight * prior[age]) / (at_risk + weight)
        at_risk += 0.5 * unended[age]
    return found


def _rates(hazards: list[float], ended: list[float]) -> list[float]:
    """Return the rate at each age."""
    found: list[float] = []
    last = max((age for age in range(_BINS) if ended[age]), default=0)
    for age in range(_BINS):
        alive, used, kept_s, best = 1.0, 0.0, 0.0, 0.0
        for later in range(age, _BINS):
            width = _EDGES_S[later + 1] - _EDGES_S[later]
            # In its own age it stands in the middle.
            share = 0.5 if later == age else 1.0
            hazard = min(0.999, hazards[later]) * share
            used += alive * hazard
            kept_s += alive * width * share * (1.0 - 0.5 * hazard)
            alive *= 1.0 - hazard
            best = max(best, used / kept_s)
        if age > last:
            # Nothing so old was ever used: the estimate is a guess. So the rate falls at least as the age grows.
            best = min(best, found[-1] * _EDGES_S[age] / _EDGES_S[age + 1])
        found.append(best)
    return found


def victims(
    candidates: Iterable[Candidate],
    excess_bytes: int,
    now: float,
    *,
    order: str = DEFAULT_ORDER,
    reuse: ReuseTable | None = None,
) -> list[Candidate]:
    """Return what to evict, in this order, to free at least ``excess_bytes``; all that may go if it is not enough.

    Args:
        candidates: everything that is stored, the pinned ones too: what they share is not lost.
        excess_bytes: how much must go; 0 or less: nothing.
        now: the time.
        order: one of `ORDERS`.
        reuse: measured reuse, for ``value``; learns from what is there and what goes. None: only from what is there.

    Raises:
        UsageError: There is no such order.
    """
    if order not in ORDERS:
        raise UsageError(f"{order!r} is no order of eviction; there are {', '.join(ORDERS)}")
    if excess_bytes <= 0:
        return []
    queue = _Queue(list(candidates), now, order, ReuseTable() if reuse is None else reuse)
    found: list[Candidate] = []
    while excess_bytes > 0 and (victim := queue.pop()) is not None:
        candidate, freed = victim
        found.append(candidate)
        excess_bytes -= freed
    return found


class _Queue:
    """Candidates, the first to go at the top of a heap."""

    def __init__(self, candidates: list[Candidate], now: float, order: str, reuse: ReuseTable) -> None:
        self._candidates, self._now, self._reuse, self._by_value = candidates, now, reuse, order == "value"
        self._owners: defaultdict[str | bytes, set[int]] = defaultdict(set)
        """Candidates that have a part."""
        self._histories: dict[str | bytes, History] = {}
        self._timed = True
        for number, candidate in enumerate(candidates):
            for part in candidate.parts:
                self._owners[part.key].add(number)
                self._timed = self._timed and part.seconds > 0
        if self._by_value:
            self._measure()
        scores: dict[str, Callable[[int], float]] = {
            "value": self._value,
            "lru": lambda number: self._candidates[number].last_s,
            "lfu": lambda number: self._candidates[number].uses,
        }
        self._score = scores[order]
        self._current = {
            number: self._entry(number)
            for number, candidate in enumerate(candidates)
            if candidate.pinned_until_s <= now
        }
        self._heap = list(self._current.values())
        heapq.heapify(self._heap)

    def pop(self) -> tuple[Candidate, int] | None:
        """Remove the first to go; return it with the bytes that this frees, or None if nothing may go."""
        while self._heap:
            entry = heapq.heappop(self._heap)
            number = entry[2]
            if self._current.get(number) is not entry:
                continue  # its value has changed since
            del self._current[number]
            candidate = self._candidates[number]
            return candidate, candidate.bytes + self._release(number)
        return None

    def _release(self, number: int) -> int:
        """Take the parts from a candidate that goes; return the bytes that this frees."""
        candidate, freed, alone = self._candidates[number], 0, set[int]()
        for part in candidate.parts:
            owners = self._owners[part.key]
            owners.discard(number)
            if len(owners) == 1:
                alone |= owners
            elif not owners:
                freed += part.bytes
        if self._by_value:
            # They no longer share the cost of losing what they have.
            for other in alone & self._current.keys():
                entry = self._current[other] = self._entry(other)
                heapq.heappush(self._heap, entry)
        return freed

    def _measure(self) -> None:
        histories, noted = self._histories, self._reuse.histories
        for candidate in self._candidates:
            its = candidate.history
            for part in candidate.parts:
                known = histories.get(part.key)
                histories[part.key] = noted.get(part.key) or (its if known is None else known.merged(its))
        self._reuse.forget(_REMEMBERED * (len(histories) or len(self._candidates)), self._now)
        self._reuse.measure(self._distinct(), self._now)

    def _distinct(self) -> Iterable[History]:
        """Yield the histories of what has no parts, and of parts; of neighbours with the same history once."""
        yield from (one.history for one in self._candidates if not one.parts)
        before: History | None = None
        for key, history in self._histories.items():
            if history != before and key not in self._reuse.histories:
                yield history
            before = history

    def _entry(self, number: int) -> tuple[float, float, int]:
        return self._score(number), self._candidates[number].last_s, number

    def _value(self, number: int) -> float:
        """Return the expected seconds saved per second and byte."""
        candidate = self._candidates[number]
        if not candidate.parts:
            return self._reuse.rate(candidate.key, candidate.history, self._now)
        freed, saved = candidate.bytes, 0.0
        for part in candidate.parts:
            if len(self._owners[part.key]) == 1:
                freed += part.bytes
                rate = self._reuse.rate(part.key, self._histories[part.key], self._now)
                saved += rate * (part.seconds if self._timed else part.tokens)
        return saved / max(1, freed)
