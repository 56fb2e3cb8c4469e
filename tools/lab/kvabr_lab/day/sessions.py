"""Agent sessions: prompts that grow turn by turn, with tools between turns, and forks.

Sessions begin as a Poisson process. Each belongs to a tenant and begins with one of the common beginnings (tools and
repositories) by Zipf's law. Some turns also begin a fork, a session with the prompt so far. Lengths are log-normal
(median, standard deviation of the logarithm); the number of turns is geometric. The time between an answer and the next
turn has a heavy tail: a quick tool, a build or test, or a person. All constants are assumptions; `read_sessions` reads
measured sessions.
"""

from __future__ import annotations

import json
import math
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, count, pairwise
from pathlib import Path

from kvabr.types.errors import FormatError, UsageError
from kvabr_lab.day.synth import Dice

_BEGINNINGS, _BEGINNING = 24, (12_000, 0.7)
_TASK, _TURNS, _MORE, _ANSWER, _FORKS = (1500, 1.0), 12.0, (900, 1.2), (180, 0.9), 0.04
"""``_MORE``: length of tool output; ``_FORKS``: fraction of turns with a fork."""
_GAPS = ((0.85, 2.0, 1.0), (0.12, 45.0, 0.9), (0.03, 400.0, 1.2))
"""Pauses for tools, builds and tests, and people: fraction, median in seconds, standard deviation of the logarithm."""
_GAP_SUMS = list(accumulate(share for share, *_ in _GAPS))
_TRACE_BLOCK = 512
"""Tokens per block in the traces of `read_sessions`."""
_COMMON = 20
"""If a block of a trace has more distinct successors than this, it begins prompts of many sessions."""
_MAX_SESSIONS = 100_000


@dataclass(frozen=True, slots=True)
class SessionTurn:
    """A request of a session."""

    session: int
    tenant: int
    parts: tuple[tuple[int, int], ...]
    """Parts of the prompt, see `kvabr_lab.day.requests.DayRequest.parts`."""
    answer: tuple[int, int]
    """Number and tokens of the answer, which is a part of the next prompt."""
    at_s: float | None = None
    """Arrival time in seconds; None: after another turn's answer."""
    after: int | None = None
    """Number of that turn, or None."""
    gap_s: float = 0.0

    @property
    def tokens(self) -> int:
        """Length of the prompt."""
        return sum(length for _, length in self.parts)


@dataclass(frozen=True, slots=True)
class SessionShape:
    """Number and length of sessions."""

    sessions: int = 400
    duration_s: float = 14_400.0
    """Seconds in which sessions begin, except forks."""
    tenants: int = 8
    longest: int = 131_072

    def __post_init__(self) -> None:
        if not (1 <= self.sessions <= _MAX_SESSIONS and 1 <= self.tenants <= _MAX_SESSIONS):
            raise UsageError(
                f"sessions and tenants must be 1 to {_MAX_SESSIONS}, got {self.sessions} and {self.tenants}"
            )
        if not (0 < self.duration_s <= 1e7 and self.longest >= 1):
            raise UsageError(
                f"the duration and the longest prompt must be positive, got {self.duration_s} s and {self.longest} "
                "tokens"
            )


def day_of_sessions(shape: SessionShape, seed: int) -> tuple[SessionTurn, ...]:
    """Return the turns of a day by number, reproducibly."""
    dice, numbers = Dice(seed), count()
    beginnings = [(next(numbers), _length(_BEGINNING, dice)) for _ in range(_BEGINNINGS)]
    sums = list(accumulate(1 / (rank + 1) for rank in range(_BEGINNINGS)))
    found: list[SessionTurn] = []
    sessions, at_s = count(), 0.0
    for _ in range(shape.sessions):
        at_s += dice.exponential(shape.duration_s / shape.sessions)
        begins = beginnings[min(bisect_left(sums, dice.positive() * sums[-1]), _BEGINNINGS - 1)]
        first = SessionTurn(0, min(int(dice.positive() * shape.tenants), shape.tenants - 1), (begins,), (0, 0), at_s)
        waiting = [first]
        while waiting:
            waiting += _session(found, next(sessions), waiting.pop(), shape, dice, numbers)
    return tuple(found)


def _session(
    found: list[SessionTurn], session: int, first: SessionTurn, shape: SessionShape, dice: Dice, numbers: count[int]
) -> list[SessionTurn]:
    """Add the turns of a session; return the first turns of its forks."""
    forks = []
    turn = replace(first, session=session, parts=(*first.parts, (next(numbers), _length(_TASK, dice))))
    while turn.tokens <= shape.longest:
        turn, number = replace(turn, answer=(next(numbers), _length(_ANSWER, dice))), len(found)
        found.append(turn)
        parts = (*turn.parts, turn.answer)
        if dice.positive() <= _FORKS:
            forks.append(replace(turn, parts=parts, at_s=None, after=number, gap_s=_gap(dice)))
        if dice.positive() * _TURNS <= 1:
            break
        more = (next(numbers), _length(_MORE, dice))
        turn = replace(turn, parts=(*parts, more), at_s=None, after=number, gap_s=_gap(dice))
    return forks


def _length(median: tuple[float, float], dice: Dice) -> int:
    return max(1, round(median[0] * dice.lognormal(median[1])))


def _gap(dice: Dice) -> float:
    place = dice.positive()
    kind = min(bisect_left(_GAP_SUMS, place), len(_GAPS) - 1)
    _, median_s, sigma = _GAPS[kind]
    return median_s * dice.lognormal(sigma)


def read_sessions(path: Path) -> tuple[SessionTurn, ...]:
    """Return the turns of a trace in the format of Mooncake (FAST 2025): one JSON object per line.

    An object has ``timestamp`` (ms), ``output_length`` and ``hash_ids``, numbers of blocks of 512 tokens; equal numbers
    mean equal prompts up to there. A request continues the latest request with all its blocks but the last, unless
    these blocks begin prompts of many sessions. All turns have the same tenant, and prompts are whole blocks.

    Raises:
        FormatError: The file is not such a trace.
    """
    rows: list[tuple[float, list[int], int]] = []
    try:
        with path.open(encoding="utf-8") as file:
            for line in file:
                value = json.loads(line)
                blocks = [int(block) for block in value["hash_ids"]]
                if blocks:
                    rows.append((float(value["timestamp"]) / 1000, blocks, int(value["output_length"])))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise FormatError(
            f"{path}: not a trace of requests with timestamp, output_length and hash_ids ({error!r})"
        ) from error
    if not rows:
        raise FormatError(f"{path}: contains no request")
    behind: defaultdict[int, set[int]] = defaultdict(set)
    for _, blocks, _ in rows:
        for block, after in pairwise(blocks):
            behind[block].add(after)
    found: list[SessionTurn] = []
    ends: dict[int, int] = {}
    sessions, answers = count(), count(-1, -1)
    for at_s, blocks, output in sorted(rows, key=lambda row: row[0]):
        before = next((ends[block] for block in reversed(blocks) if block in ends), None)
        session = next(sessions) if before is None else before
        end = blocks[-2] if len(blocks) > 1 else blocks[-1]
        if len(behind[end]) <= _COMMON:
            ends[end] = session
        parts = tuple((block, _TRACE_BLOCK) for block in blocks)
        found.append(SessionTurn(session, 0, parts, (next(answers), output), at_s))
    return tuple(found)


def quantile(values: Sequence[float], share: float) -> float:
    """Return the smallest value that is not exceeded by ``share`` of the values; NaN without values."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)] if ordered else math.nan
