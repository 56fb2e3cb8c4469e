"""Paired comparison over the same plays: which policy is better, and whether the plays can tell.

Two policies are compared by the difference of their regrets, play by play, so that the effect of the link cancels out.
Plays over one trace are not independent, whatever their starts, so the bootstrap draws whole traces with all their
plays.

The width of an interval does not answer whether two policies can be told apart, because a rare miss outweighs a hundred
other plays. If two policies were equal, each would be the better one on a trace by chance: the sign of each trace's
difference could be either. So signs are drawn at random many times, for all pairs at once, and a difference has to
exceed the largest one that chance produces among all pairs (the step-down procedure of Westfall and Young). Among equal
policies, 95 % of matrices then tell none apart, however many policies are compared and however regrets are distributed.
Five traces are too few to tell anything: all five signs agree by chance once in sixteen times.
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
LEAST_TRACES = 6
"""Fewest traces over which policies can be told apart."""
_LEVEL = 0.05
"""Probability up to which a difference counts as real."""
_SAME = 1e-9
"""Regrets that differ by at most this are equal."""
_ROUNDING = 1e-5
"""Relative rounding error of a sum over drawn signs."""


@dataclass(frozen=True, slots=True)
class Interval:
    """A mean and its 95 % interval."""

    mean: float
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class Versus:
    """One policy against another, over plays of both."""

    first: str
    second: str
    difference: Interval
    """Mean regret of the first minus that of the second; negative if the first is better. For this pair alone."""
    wins: float
    """Share of plays in which the first has less regret."""
    losses: float
    """Share of plays in which the first has more regret; in the rest they are equal."""
    chance: float
    """Probability that random signs make a difference this large among all compared pairs, 0 to 1."""

    @property
    def apart(self) -> bool:
        """Return whether the two can be told apart."""
        return self.chance <= _LEVEL


@dataclass(frozen=True, slots=True)
class Ranked:
    """One policy's place in the ranking."""

    policy: str
    regret: Interval
    place: int
    """1 for the best; policies that cannot be told from the first of a place share it."""
    like: tuple[str, ...]
    """Policies that it cannot be told from."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """All policies of a matrix, or of part of it, against each other."""

    plays: int
    """Feasible plays that every policy played."""
    traces: int
    ranking: tuple[Ranked, ...]
    pairs: tuple[Versus, ...]
    """Each pair once, the better one first."""

    def versus(self, first: str, second: str) -> Versus:
        """Return the pair in this order.

        Raises:
            KeyError: The pair was not compared.
        """
        for pair in self.pairs:
            if (pair.first, pair.second) == (first, second):
                return pair
            if (pair.second, pair.first) == (first, second):
                turned = Interval(-pair.difference.mean, -pair.difference.high, -pair.difference.low)
                return Versus(first, second, turned, pair.losses, pair.wins, pair.chance)
        raise KeyError((first, second))


class Bootstrap:
    """Resample traces with replacement; everything compared shares the draws, and a seed fixes them."""

    def __init__(self, traces: Sequence[str], *, seed: int = 0, draws: int = DRAWS) -> None:
        """Draw the samples.

        Args:
            traces: The trace of every play.
            seed: Seed of the draws.
            draws: Number of draws.
        """
        names, self._of = np.unique(np.asarray(traces, dtype=object).astype(str), return_inverse=True)
        self.traces = len(names)
        dice = np.random.default_rng(seed)
        self._weights: Counts = dice.multinomial(self.traces, [1 / self.traces] * self.traces, size=draws)
        self._plays = np.bincount(self._of, minlength=self.traces).astype(float)

    def means(self, values: Array) -> Array:
        """Return the mean of ``values``, one per play, in every draw."""
        found: Array = (self._weights @ self.sums(values)) / (self._weights @ self._plays)
        return found

    def sums(self, values: Array) -> Array:
        """Return the sum of ``values``, one per play, over each trace."""
        found: Array = np.bincount(self._of, weights=values, minlength=self.traces).astype(float)
        return found

    def interval(self, values: Array) -> Interval:
        """Return the mean of ``values`` with its 95 % percentile interval."""
        drawn = self.means(values)
        low, high = np.quantile(drawn, (0.025, 0.975))
        mean = float(values.mean())
        return Interval(mean, min(mean, float(low)), max(mean, float(high)))


def compare(regrets: Mapping[str, Sequence[float]], traces: Sequence[str], *, seed: int = 0) -> Comparison:
    """Compare policies over the same plays.

    Args:
        regrets: The regret of every play by policy; all policies in the same order of plays.
        traces: The trace of every play, in that order.
        seed: Seed of the bootstrap.

    Raises:
        UsageError: Some policy does not have one regret per play.
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
    """Return for every pair the probability that random signs make a difference this large among all pairs.

    Args:
        differences: Per pair, the sum of its differences over each trace.
        plays: Number of plays of all traces.
        seed: Seed of the signs.
    """
    found = [1.0] * len(differences)
    # Rounding errors between equal policies are not a difference.
    telling = [index for index, sums in enumerate(differences) if abs(sums.sum()) > _SAME * plays]
    if not telling:
        return found
    table = np.array([differences[index] / np.linalg.norm(differences[index]) for index in telling])
    seen = np.abs(table.sum(axis=1))
    drawn = np.abs(_signs(table.shape[1], seed) @ table.T.astype(np.float32))
    # Step down from the largest: each has to exceed only what chance produces among the remaining pairs.
    order = np.argsort(-seen, kind="stable")
    largest = np.maximum.accumulate(drawn[:, order[::-1]], axis=1)[:, ::-1]
    passed = (largest >= seen[order] * (1 - _ROUNDING)).sum(axis=0)
    chance = np.maximum.accumulate((1 + passed) / (1 + len(drawn)))
    for place, index in enumerate(order):
        found[telling[int(index)]] = float(chance[place])
    return found


@lru_cache(maxsize=2)
def _signs(traces: int, seed: int) -> npt.NDArray[np.float32]:
    """Return random signs, [draw, trace]; the comparisons of a matrix share them."""
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
