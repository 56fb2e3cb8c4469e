"""Which policy is better, and can that be told at all: paired comparison over the same plays.

Two policies are compared by the difference of their regrets play by play, so that what the link did cancels out. Plays
over one trace are not independent of each other, whatever their start: the bootstrap draws whole traces, with all of
their plays. Where many pairs are compared at once, the largest of many chance differences is larger than each: whether
two policies can be told apart is decided by the bootstrap distribution of the largest studentised difference over all
pairs (max-t), so that in 95 % of matrices no two equal policies are told apart.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvabr.errors import UsageError

Array = npt.NDArray[np.float64]
Counts = npt.NDArray[np.int64]

DRAWS = 4000
"""Bootstrap samples."""
_SAME = 1e-9
"""Regrets that differ by no more count as equal."""


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
    apart: bool
    """Whether the two can be told apart, among all pairs that were compared."""


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
                return Versus(first, second, turned, pair.losses, pair.wins, pair.apart)
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
        sums = np.bincount(self._of, weights=values, minlength=self.traces)
        found: Array = (self._weights @ sums) / (self._weights @ self._plays)
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
    apart = _apart([values[a] - values[b] for a, b in pairs], bootstrap)
    versus = tuple(_versus(a, b, values, bootstrap, apart=told) for (a, b), told in zip(pairs, apart, strict=True))
    ranking = _rank(order, values, versus, bootstrap)
    return Comparison(len(traces), bootstrap.traces, ranking, versus)


def _versus(a: str, b: str, values: Mapping[str, Array], bootstrap: Bootstrap, *, apart: bool) -> Versus:
    difference = values[a] - values[b]
    wins, losses = float((difference < -_SAME).mean()), float((difference > _SAME).mean())
    return Versus(a, b, bootstrap.interval(difference), wins, losses, apart)


def _apart(differences: Sequence[Array], bootstrap: Bootstrap) -> list[bool]:
    """Which mean differences are too large for chance, all of them taken together."""
    if not differences or bootstrap.traces < 2:
        return [False] * len(differences)
    found = [float(values.mean()) for values in differences]
    drawn = [bootstrap.means(values) for values in differences]
    spread = [float(line.std()) for line in drawn]
    largest = np.zeros(len(drawn[0]))
    for mean, line, width in zip(found, drawn, spread, strict=True):
        if width > 0:
            largest = np.maximum(largest, np.abs(line - mean) / width)
    critical = float(np.quantile(largest, 0.95))
    # Where nothing varies from trace to trace (one is better by the same everywhere), the difference is what it is.
    return [
        abs(mean) > max(_SAME, critical * width)
        for mean, width in zip(found, spread, strict=True)
    ]


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
