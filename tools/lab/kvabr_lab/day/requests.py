"""The requests of a day: arrivals, prompt lengths, and common beginnings.

Conversations of three `KINDS` begin as a Poisson process. Its rate varies over the day as a sine, by 60 % of the mean,
with optional bursts. A turn follows a pause after the previous answer, which takes 20 ms per token from its first
token, so a slow rule delays its own requests. Beginnings follow Zipf's law (exponent 1). A conversation ends when its
next prompt, which contains everything before it, would exceed the maximum length.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, count
from typing import Generic, TypeAlias, TypeVar

from kvabr.types.errors import UsageError
from kvabr_lab.day.synth import Dice

DAY_S = 86_400.0
TOKEN_S = 0.02
"""Seconds per token of an answer."""
_SWING = 0.6
"""Variation of the arrival rate around its mean, relative to the mean."""
_BURST_S, _BURST_SHARE = 60.0, 0.1
"""Mean length of a burst in seconds, and fraction of time in bursts."""
_MAX_REQUESTS = 1_000_000

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of conversation. Lengths, in tokens, are log-normal: (median, standard deviation of the logarithm)."""

    share: float
    texts: int
    """Number of common beginnings."""
    shared: tuple[float, float]
    """Length of a common beginning."""
    first: tuple[float, float]
    """Length of the first message."""
    turns: float
    """Mean number of further turns (geometric)."""
    more: tuple[float, float]
    """Length that a turn adds."""
    answer: tuple[float, float]
    pause_s: float
    """Mean pause after an answer (exponential), seconds."""


KINDS = (
    Kind(0.5, 12, (1000, 0.6), (250, 1.0), 4, (150, 1.0), (300, 0.8), 45.0),
    Kind(0.3, 300, (16_000, 0.8), (120, 0.7), 2, (80, 0.7), (250, 0.8), 60.0),
    Kind(0.2, 40, (12_000, 0.8), (1500, 1.0), 10, (1200, 1.0), (200, 0.8), 15.0),
)
"""Chats (system prompts), documents, and agents (repositories)."""


@dataclass(frozen=True, slots=True)
class DayShape:
    """Number and lengths of a day's requests."""

    requests: int = 4000
    """Expected number of requests."""
    duration_s: float = DAY_S
    longest: int = 131_072
    """Maximum length of a prompt, tokens."""
    length: float = 1.0
    burst: float = 1.0
    """Factor of the arrival rate in bursts, which last a minute and occur every ten minutes, on average."""

    def __post_init__(self) -> None:
        if not 1 <= self.requests <= _MAX_REQUESTS:
            raise UsageError(f"requests must be 1 to {_MAX_REQUESTS}, got {self.requests}")
        if not 0 < self.duration_s <= 1e7:
            raise UsageError(f"a day must be more than 0 and at most 10,000,000 s, got {self.duration_s}")
        if not (self.longest >= 1 and 0 < self.length <= 1000):
            raise UsageError(
                f"the factor on lengths must be more than 0 and at most 1000, got {self.length}, and the longest "
                f"prompt at least 1 token, got {self.longest}"
            )
        if not 1 <= self.burst <= 100:
            raise UsageError(f"bursts must be 1 to 100 times the usual rate, got {self.burst}")


@dataclass(frozen=True, slots=True)
class DayRequest:
    """One request of a day."""

    number: int
    at_s: float | None
    """Arrival time in seconds; None for a later turn."""
    pause_s: float
    """Seconds from the end of the previous answer."""
    following: int | None
    """Number of the next turn, or None."""
    parts: tuple[tuple[int, int], ...]
    """Number and tokens of each part of the prompt. If two requests have the same number at a position, their prompts
    are equal up to the end of that part.
    """
    answer: tuple[int, int]
    """Number and tokens of the answer, which is a part of later prompts of the conversation."""
    luck: tuple[float, float]
    """Logarithm of local, and of remote, prefill time relative to the forecast, in standard deviations."""
    tokens: int


_Texts: TypeAlias = "_Zipf[tuple[int, int]]"


def day_of_requests(shape: DayShape, seed: int) -> tuple[DayRequest, ...]:
    """Return the requests of a day by number, reproducibly.

    First requests of conversations are in order of arrival, each followed by its later turns.
    """
    dice = Dice(seed)
    numbers = count()
    shared = [_shared_texts(kind, shape, dice, numbers) for kind in KINDS]
    each = sum(kind.share * (1 + kind.turns) for kind in KINDS)
    every_s = shape.duration_s / (shape.requests / each)
    found: list[DayRequest] = []
    begin_s, bursts = 0.0, _bursts(shape, dice)
    most = (1 + _SWING) * shape.burst
    usual = 1 / (1 - _BURST_SHARE + _BURST_SHARE * shape.burst)
    """Rate between bursts, relative to the mean."""
    while True:
        # Thinning: propose at the day's highest rate, and accept in proportion to the current rate.
        begin_s += dice.exponential(every_s / (most * usual))
        if begin_s >= shape.duration_s:
            break
        swing = 1 + _SWING * math.sin(2 * math.pi * (begin_s / shape.duration_s - 0.25))
        rate = swing * (shape.burst if any(low <= begin_s < high for low, high in bursts) else 1.0)
        if dice.positive() * most <= rate:
            found += _conversation(len(found), begin_s, shared, shape, dice, numbers)
    return tuple(found)


def shared_parts(requests: Sequence[DayRequest]) -> tuple[tuple[int, int], ...]:
    """Return the common beginnings, most popular first."""
    used = Counter(request.parts[0] for request in requests if request.at_s is not None)
    return tuple(part for part, _ in used.most_common())


def _bursts(shape: DayShape, dice: Dice) -> list[tuple[float, float]]:
    found: list[tuple[float, float]] = []
    if shape.burst == 1:
        return found
    at_s = 0.0
    while at_s < shape.duration_s:
        begin_s = at_s + dice.exponential(_BURST_S * (1 / _BURST_SHARE - 1))
        at_s = begin_s + dice.exponential(_BURST_S)
        found.append((begin_s, at_s))
    return found


class _Zipf(Generic[T]):
    def __init__(self, things: list[T]) -> None:
        self._things = things
        self._sums = list(accumulate(1 / (rank + 1) for rank in range(len(things))))

    def pick(self, dice: Dice) -> T:
        return self._things[min(bisect_left(self._sums, dice.positive() * self._sums[-1]), len(self._things) - 1)]


def _shared_texts(kind: Kind, shape: DayShape, dice: Dice, numbers: count[int]) -> _Texts:
    return _Zipf([(next(numbers), _length(kind.shared, shape, dice)) for _ in range(kind.texts)])


def _length(median: tuple[float, float], shape: DayShape, dice: Dice) -> int:
    return max(1, min(shape.longest // 2, round(shape.length * median[0] * dice.lognormal(median[1]))))


def _conversation(
    first: int, at_s: float, shared: list[_Texts], shape: DayShape, dice: Dice, numbers: count[int]
) -> list[DayRequest]:
    place = dice.positive()
    index = 0
    while index < len(KINDS) - 1 and place > KINDS[index].share:
        place -= KINDS[index].share
        index += 1
    kind, texts = KINDS[index], shared[index]
    first_part = (next(numbers), _length(kind.first, shape, dice))
    parts: tuple[tuple[int, int], ...] = (texts.pick(dice), first_part)
    found: list[DayRequest] = []
    while True:
        answer = (next(numbers), _length(kind.answer, shape, dice))
        luck = (math.log(dice.lognormal(1.0)), math.log(dice.lognormal(1.0)))
        tokens = sum(length for _, length in parts)
        pause_s = dice.exponential(kind.pause_s) if found else 0.0
        begin_s = None if found else at_s
        found.append(DayRequest(first + len(found), begin_s, pause_s, None, parts, answer, luck, tokens))
        parts = (*parts, answer, (next(numbers), _length(kind.more, shape, dice)))
        over = sum(length for _, length in parts) > shape.longest
        if over or dice.positive() * (1 + kind.turns) <= 1:
            break
    return [*(replace(one, following=one.number + 1) for one in found[:-1]), found[-1]]
