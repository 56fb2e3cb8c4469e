"""Paired comparison over the same plays: which policy is better, and if the difference is significant.

Taking the difference of regrets in each play cancels the effect of the link. Plays over one trace are dependent, so the
bootstrap draws whole traces.

Significance is not decided by intervals, because a rare miss outweighs a hundred other plays. If two policies were
equal, the sign of each trace's difference would be random. So signs are drawn many times, for all pairs together, and a
difference must exceed the largest random difference among all pairs (the step-down procedure of Westfall and Young).
With equal policies, 95 % of matrices then show no difference. Five traces are too few: five equal signs occur by chance
once in sixteen times.
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
MIN_TRACES = 6
"""Minimum number of traces for a significant difference."""
_SIGNIFICANCE = 0.05
_TOLERANCE = 1e-9
_ROUNDING = 1e-5
"""Relative rounding error of a sum over random signs."""


@dataclass(frozen=True, slots=True)
class Interval:
    """A mean and its 95 % interval."""

    mean: float
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class Versus:
    """One policy compared with another, over the plays that both have."""

    first: str
    second: str
    difference: Interval
    """Mean regret of the first minus that of the second; the interval is for this pair alone."""
    wins: float
    """Fraction of plays in which the first policy has less regret."""
    losses: float
    """Fraction of plays in which the first policy has more regret."""
    chance: float
    """Probability that chance causes a difference this large among all compared pairs."""

    @property
    def apart(self) -> bool:
        """True if the difference is significant."""
        return self.chance <= _SIGNIFICANCE


@dataclass(frozen=True, slots=True)
class Ranked:
    """A policy in the ranking."""

    policy: str
    regret: Interval
    place: int
    """Place, 1 for the best; policies share it if they do not differ significantly from the first policy of the place.
    """
    like: tuple[str, ...]
    """Policies that do not differ significantly."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """All pairs of policies, for a matrix or a part of it."""

    plays: int
    traces: int
    ranking: tuple[Ranked, ...]
    pairs: tuple[Versus, ...]
    """Each pair once, the better policy first."""

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
    """Resamples traces with replacement, with the same seeded draws for all comparisons."""

    def __init__(self, traces: Sequence[str], *, seed: int = 0, draws: int = DRAWS) -> None:
        """Draw the samples; ``traces`` has the trace of every play."""
        names, self._of = np.unique(np.asarray(traces, dtype=object).astype(str), return_inverse=True)
        self.traces = len(names)
        dice = np.random.default_rng(seed)
        self._weights: Counts = dice.multinomial(self.traces, [1 / self.traces] * self.traces, size=draws)
        self._plays = np.bincount(self._of, minlength=self.traces).astype(float)

    def means(self, values: Array) -> Array:
        """Return the mean of ``values``, which has one value per play, in every draw."""
        found: Array = (self._weights @ self.sums(values)) / (self._weights @ self._plays)
        return found

    def sums(self, values: Array) -> Array:
        """Return the sum of ``values``, which has one value per play, for each trace."""
        found: Array = np.bincount(self._of, weights=values, minlength=self.traces).astype(float)
        return found

    def interval(self, values: Array) -> Interval:
        """Return the mean of ``values`` with its 95 % interval."""
        drawn = self.means(values)
        low, high = np.quantile(drawn, (0.025, 0.975))
        mean = float(values.mean())
        return Interval(mean, min(mean, float(low)), max(mean, float(high)))


def compare(regrets: Mapping[str, Sequence[float]], traces: Sequence[str], *, seed: int = 0) -> Comparison:
    """Compare policies over the same plays; ``traces`` has the trace of every play.

    Raises:
        UsageError: A policy does not have one regret per play.
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
    wins, losses = float((difference < -_TOLERANCE).mean()), float((difference > _TOLERANCE).mean())
    return Versus(a, b, bootstrap.interval(difference), wins, losses, chance)


def _chances(differences: Sequence[Array], plays: int, seed: int) -> list[float]:
    """Return, for each pair, the probability that chance causes a difference this large among all pairs.

    ``differences`` has, for each pair, the sum of differences over each trace.
    """
    found = [1.0] * len(differences)
    # Rounding errors between equal policies do not count as differences.
    decided = [index for index, sums in enumerate(differences) if abs(sums.sum()) > _TOLERANCE * plays]
    if not decided:
        return found
    table = np.array([differences[index] / np.linalg.norm(differences[index]) for index in decided])
    seen = np.abs(table.sum(axis=1))
    drawn = np.abs(_signs(table.shape[1], seed) @ table.T.astype(np.float32))
    # Step down from the largest difference: each must exceed only random differences among the remaining pairs.
    order = np.argsort(-seen, kind="stable")
    largest = np.maximum.accumulate(drawn[:, order[::-1]], axis=1)[:, ::-1]
    passed = (largest >= seen[order] * (1 - _ROUNDING)).sum(axis=0)
    chance = np.maximum.accumulate((1 + passed) / (1 + len(drawn)))
    for place, index in enumerate(order):
        found[decided[int(index)]] = float(chance[place])
    return found


@lru_cache(maxsize=2)
def _signs(traces: int, seed: int) -> npt.NDArray[np.float32]:
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
