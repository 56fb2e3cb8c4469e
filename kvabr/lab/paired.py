"""Which policy is better, and can that be told at all: paired comparison over the same plays.

Two policies are compared by the difference of their regrets play by play, so that what the link did cancels out. Plays
over one trace are not independent of each other, whatever their start: the bootstrap draws whole traces, with all of
their plays.

Whether two policies can be told apart at all is another question than how wide an interval is, for a rare miss weighs a
hundred times what other plays do. If two policies were equal, it would be by chance which of them did better on a
trace: the sign of each trace's difference could as well be the other. Signs are drawn anew many times, for all pairs at
once, and the largest difference of all pairs is what a difference has to pass (the step-down of Westfall and Young): of
equal policies, none are told apart in 95 % of matrices, however many are compared and whatever their regrets look like.
Five traces are too few to tell anything: with all signs alike, chance does as much once in sixteen times.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from kvabr.types.errors import UsageError

Array = npt.NDArray[np.float64]
Counts = npt.NDArray[np.int64]

DRAWS = 4000
"""Bootstrap samples."""
_LEVEL = 0.05
"""Chance below which a difference is taken for one."""
_SAME = 1e-9
"""Regrets that differ by no more count as equal."""
_ROUNDING = 1e-5
"""By how much a sum of drawn signs may be off, relative."""


@dataclass(frozen=True, slots=True)
class Interval:
    """A mean, and where it would lie in 95 % of such samples."""

    mean: float
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class Versus:
    """One policy against another, over the plays of both."""

    first: str
    second: str
    difference: Interval
    """Mean regret of the first less that of the second: below zero the first is better. Of this pair alone."""
    wins: float
    """Share of the plays in which the first has less regret."""
    losses: float
    """Share in which it has more; in the others they are equal."""
    chance: float
    """How often signs alone make a difference so large among all pairs that were compared, 0 to 1."""

    @property
    def apart(self) -> bool:
        """Whether the two can be told apart."""
        return self.chance <= _LEVEL


@dataclass(frozen=True, slots=True)
class Ranked:
    """One policy's place."""

    policy: str
    regret: Interval
    place: int
    """1 for the best; policies that cannot be told from the best of a place share it."""
    like: tuple[str, ...]
    """Policies that it cannot be told apart from."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """All policies of a matrix, or of a part of it, against each other."""

    plays: int
    """Plays that every policy played and that are feasible."""
    traces: int
    ranking: tuple[Ranked, ...]
    pairs: tuple[Versus, ...]
    """Each pair once, the better one first."""

    def versus(self, first: str, second: str) -> Versus:
        """The pair, whichever way round.

        Raises:
            KeyError: there is none.
        """
        for pair in self.pairs:
            if (pair.first, pair.second) == (first, second):
                return pair
            if (pair.second, pair.first) == (first, second):
                turned = Interval(-pair.difference.mean, -pair.difference.high, -pair.difference.low)
                return Versus(first, second, turned, pair.losses, pair.wins, pair.chance)
        raise KeyError((first, second))


class Bootstrap:
    """Draws traces with replacement; the same draws for all that is compared, and the same for the same seed."""

    def __init__(self, traces: Sequence[str], *, seed: int = 0, draws: int = DRAWS) -> None:
        """Prepare.

        Args:
            traces: the trace of every play.
            seed: of the draws.
            draws: how many.
        """
        names, self._of = np.unique(np.asarray(traces, dtype=object).astype(str), return_inverse=True)
        self.traces = len(names)
        dice = np.random.default_rng(seed)
        self._weights: Counts = dice.multinomial(self.traces, [1 / self.traces] * self.traces, size=draws)
        self._plays = np.bincount(self._of, minlength=self.traces).astype(float)

    def means(self, values: Array) -> Array:
        """The mean of ``values``, one per play, in every draw."""
        found: Array = (self._weights @ self.sums(values)) / (self._weights @ self._plays)
        return found

    def sums(self, values: Array) -> Array:
        """The sum of ``values``, one per play, over each trace."""
        found: Array = np.bincount(self._of, weights=values, minlength=self.traces).astype(float)
        return found

    def interval(self, values: Array) -> Interval:
        """Mean and its 95 % percentile interval."""
        drawn = self.means(values)
        low, high = np.quantile(drawn, (0.025, 0.975))
        mean = float(values.mean())
        return Interval(mean, min(mean, float(low)), max(mean, float(high)))


def compare(regrets: Mapping[str, Sequence[float]], traces: Sequence[str], *, seed: int = 0) -> Comparison:
    """Compare policies over the same plays.

    Args:
        regrets: per policy, the regret of every play, the plays in one order for all.
        traces: the trace of every play, in that order.
        seed: of the bootstrap.

    Raises:
        UsageError: not one regret per play and policy.
    """
    if any(len(values) != len(traces) for values in regrets.values()):
        raise UsageError("a paired comparison needs the regret of every play for every policy")
    if not traces or not regrets:
        return Comparison(len(traces), 0, (), ())
    values = {policy: np.asarray(line, dtype=float) for policy, line in regrets.items()}
    order = sorted(values, key=lambda policy: float(values[policy].mean()))
    bootstrap = Bootstrap(traces, seed=seed)
    pairs = [(a, b) for place, a in enumerate(order) for b in order[place + 1 :]]
    chances = _chances([bootstrap.sums(values[a] - values[b]) for a, b in pairs], len(traces), seed)
    versus = tuple(_versus(a, b, values, bootstrap, chance) for (a, b), chance in zip(pairs, chances, strict=True))
    ranking = _rank(order, values, versus, bootstrap)
    return Comparison(len(traces), bootstrap.traces, ranking, versus)


def _versus(a: str, b: str, values: Mapping[str, Array], bootstrap: Bootstrap, chance: float) -> Versus:
    difference = values[a] - values[b]
    wins, losses = float((difference < -_SAME).mean()), float((difference > _SAME).mean())
    return Versus(a, b, bootstrap.interval(difference), wins, losses, chance)


def _chances(differences: Sequence[Array], plays: int, seed: int) -> list[float]:
    """For every pair, how often drawn signs make so large a difference, all pairs taken together.

    Args:
        differences: per pair, the sum of its differences over each trace.
        plays: of all traces.
        seed: of the signs.
    """
    found = [1.0] * len(differences)
    # What rounding alone makes of two that are the same is no difference.
    telling = [index for index, sums in enumerate(differences) if abs(sums.sum()) > _SAME * plays]
    if not telling:
        return found
    table = np.array([differences[index] / np.linalg.norm(differences[index]) for index in telling])
    seen = np.abs(table.sum(axis=1))
    drawn = np.abs(_signs(table.shape[1], seed) @ table.T.astype(np.float32))
    # From the largest down: each has to pass only what is left to be told.
    order = np.argsort(-seen, kind="stable")
    largest = np.maximum.accumulate(drawn[:, order[::-1]], axis=1)[:, ::-1]
    passed = (largest >= seen[order] * (1 - _ROUNDING)).sum(axis=0)
    chance = np.maximum.accumulate((1 + passed) / (1 + len(drawn)))
    for place, index in enumerate(order):
        found[telling[int(index)]] = float(chance[place])
    return found


@lru_cache(maxsize=2)
def _signs(traces: int, seed: int) -> npt.NDArray[np.float32]:
    """Drawn signs, [draw, trace]; the comparisons of a matrix share them."""
    dice = np.random.default_rng(seed)
    return (2 * dice.integers(0, 2, size=(DRAWS, traces), dtype=np.int8) - 1).astype(np.float32)


def _rank(
    order: Sequence[str], values: Mapping[str, Array], pairs: Sequence[Versus], bootstrap: Bootstrap
) -> tuple[Ranked, ...]:
    told = {frozenset((pair.first, pair.second)): pair.apart for pair in pairs}
    out: list[Ranked] = []
    head, place = order[0], 1
    for number, policy in enumerate(order, 1):
        if policy != head and told[frozenset((head, policy))]:
            head, place = policy, number
        like = tuple(other for other in order if other != policy and not told[frozenset((policy, other))])
        out.append(Ranked(policy, bootstrap.interval(values[policy]), place, like))
    return tuple(out)
