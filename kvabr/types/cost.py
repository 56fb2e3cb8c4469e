"""The cost of a prefill, and of a whole play.

Prefill: t(L, x) = max(f, c + b x + d L + a (2 L x + x^2)) seconds for x tokens after L tokens of cache.

The terms are a constant per call, a part linear in the new tokens (projections, MLP), a part linear in the cached
tokens (uploading or reading them), and attention, as token i attends to the L + i tokens before it. An accelerator
takes at least f until there are enough tokens to keep it busy. All constants are fitted to timed prefills.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import astuple, dataclass, replace
from typing import TYPE_CHECKING, Annotated

from msgspec import Meta

from kvabr.types.errors import FormatError, UsageError
from kvabr.types.records import check, to_json

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import ArrayLike, NDArray

    Array = NDArray[np.float64]

MISS_PENALTY = 0.5
"""Cost of a missed deadline, in addition to the cost of lateness, nats per generated token."""
MIN_CALL = 5.0
_MAX_CONSTANT = 1e100
_Constant = Annotated[float, Meta(ge=0, le=_MAX_CONSTANT)]
MIN_RATE = 1 / _MAX_CONSTANT
"""Minimum prefill rate, tokens per second."""
_MAX_TIMING_ERROR = 0.1
"""Relative error above which a timing gets less weight."""
_FLOOR_PRICE = 3.0
"""Minimum gain in `_Fit._misfit` for accepting a floor."""
_MAX_FLOOR_FACTOR, _SURPRISE_PRICE = 2.2, 8.0
"""Maximum usual floor, as a multiple of the expected time of the smallest call; and the minimum gain for a higher
floor, which a single wrong timing cannot reach.
"""
_ROUNDS, _MAX_SPLITS, _SAME = 12, 8, 1e-4
_MIN_S, _MAX_S, _RIDGE = 1e-12, 1e9, 1e-12
_ANCHORS = ((0, 128), (0, 1024), (0, 8192), (0, 65536), (8192, 128), (8192, 1024), (32768, 128), (32768, 2048))
"""Sizes, as (tokens before, new tokens), at which a fit also uses the prior cost."""
_ANCHOR_WEIGHT, _NEAREST = 0.3, 5
"""Weight of all anchors together, relative to one timing; and number of nearest timings that determine an anchor's
scale.
"""


def objective(
    loss: float,
    ttft_s: float,
    deadline_s: float,
    *,
    met: bool,
    engine_s: float,
    time_price: float,
    gpu_price: float,
) -> float:
    """Return J, the cost of a play: loss + time price x TTFT + engine price x engine seconds + lateness penalty.

    A missed deadline costs `MISS_PENALTY` plus the lateness, in multiples of the deadline. ``loss`` is in nats per
    generated token. So are ``time_price``, the price of a second before the first token, and ``gpu_price``, that of a
    second of engine time. An infinite ``gpu_price`` is a rule for the player; engine time then costs 0. For an
    abandoned play, ``ttft_s`` is its maximum length.
    """
    missed = 0.0 if met else MISS_PENALTY
    spent = gpu_price * engine_s if math.isfinite(gpu_price) else 0.0
    return loss + time_price * ttft_s + missed + max(0.0, ttft_s - deadline_s) / deadline_s + spent


_CACHED_TOKENS = (0, 2048, 8192, 32768)


@dataclass(frozen=True, slots=True)
class PrefillCost:
    """Seconds to compute the KV of new tokens; see the formula in this module's docstring."""

    constant_s: _Constant
    """Seconds per call."""
    per_token_s: _Constant
    """Seconds per new token."""
    attention_s: _Constant = 0.0
    """Half the seconds per pair of a new token and a token that it attends to."""
    before_s: _Constant = 0.0
    """Seconds per cached token."""
    floor_s: _Constant = 0.0
    """Minimum seconds per call."""

    def __post_init__(self) -> None:
        check(self, "prefill cost")
        if not any(astuple(self)):
            raise FormatError("prefill cost: at least one constant must be more than 0")

    def seconds(self, before: int, tokens: int) -> float:
        """Return the seconds to compute ``tokens`` tokens after ``before`` cached ones; 0.0 for no tokens."""
        if tokens <= 0:
            return 0.0
        return max(self.floor_s, self.constant_s + self.before_s * before + self.added_s(before, tokens))

    def added_s(self, before: int, tokens: int) -> float:
        """Return the seconds that ``tokens`` more tokens after ``before`` others add to a long call."""
        pairs = 2.0 * before * tokens + float(tokens) * tokens
        return self.per_token_s * tokens + self.attention_s * pairs

    def seconds_many(self, before: ArrayLike, tokens: ArrayLike) -> Array:
        """Return `seconds` for arrays of calls; the arguments broadcast."""
        import numpy as np  # noqa: PLC0415  # it loads slowly

        first, new = np.asarray(before, np.float64), np.asarray(tokens, np.float64)
        added = self.per_token_s * new + self.attention_s * (2.0 * first * new + new * new)
        return np.where(new > 0, np.maximum(self.floor_s, self.constant_s + self.before_s * first + added), 0.0)

    def after(self, tokens: int) -> PrefillCost:
        """Return the cost of a prompt's tokens after its first ``tokens``, which are in place and not counted."""
        return replace(
            self,
            constant_s=self.constant_s + self.before_s * tokens,
            per_token_s=self.per_token_s + 2.0 * self.attention_s * tokens,
        )

    def scaled(self, factor: float) -> PrefillCost:
        """Return the cost of an engine that is slower by ``factor``."""
        return PrefillCost(*(factor * each for each in astuple(self)))

    def in_steps(self, limit: int) -> PrefillCost:
        """Return the approximate total cost for an engine that computes at most ``limit`` tokens per call.

        Fitting takes about 10 ms.
        """
        sizes = [1 << power for power in range(7, 17)]
        return PrefillCost.fit(
            (before, new, self._calls_s(before, new, limit)) for before in _CACHED_TOKENS for new in sizes
        )

    def _calls_s(self, before: int, tokens: int, limit: int) -> float:
        steps = range(before, before + tokens, limit)
        return sum(self.seconds(step, min(limit, before + tokens - step)) for step in steps)

    @classmethod
    def from_rate(cls, tokens_per_second: float) -> PrefillCost:
        """Return a linear cost, for an engine with a known prefill rate only."""
        if not MIN_RATE <= tokens_per_second < math.inf:
            raise UsageError(
                f"prefill rate must be at least {MIN_RATE:g} tokens per second and finite, got {tokens_per_second}"
            )
        return cls(0.0, 1.0 / tokens_per_second)

    @classmethod
    def fit(cls, timings: Iterable[tuple[int, int, float]], prior: PrefillCost | None = None) -> PrefillCost:
        """Fit the constants to timings, given as (tokens before, new tokens, seconds).

        The fit uses non-negative least squares on relative errors; outliers get little weight. An earlier cost, the
        ``prior``, is scaled to match, and used for sizes without timings. Raise `UsageError` for fewer than three
        timings (with a prior: one), or if a timing has no tokens or no positive time.
        """
        import numpy as np  # noqa: PLC0415  # loads slowly, and only fitting needs it

        rows = list(timings)
        least = "three timings" if prior is None else "one timing"
        if len(rows) < (3 if prior is None else 1) or any(
            before < 0 or new <= 0 or not 0 < seconds <= _MAX_S for before, new, seconds in rows
        ):
            raise UsageError(f"fitting a prefill cost needs at least {least} of at least one token each")
        before, new, seconds = np.array(rows, np.float64).T
        weights, start = np.ones(len(rows)), seconds
        if prior is not None:
            known = np.maximum(prior.seconds_many(before, new), _MIN_S)
            first, more = np.array(_ANCHORS, np.float64).T
            anchors = np.maximum(prior.seconds_many(first, more), _MIN_S)
            apart = np.abs(np.log(np.concatenate([known, anchors])[:, None] / known))
            nearest = np.argsort(apart, axis=1, kind="stable")[:, :_NEAREST]
            # Use the lower median, as outliers are usually late.
            ratios = np.quantile((seconds / known)[nearest], 0.5, axis=1, method="lower")
            if not (known <= prior.floor_s).any():
                ratios[len(rows) :][anchors <= prior.floor_s] = 1.0
            start = np.concatenate([known, anchors]) * ratios
            seconds = np.concatenate([seconds, start[len(rows) :]])
            weights = np.concatenate([weights, np.full(len(_ANCHORS), _ANCHOR_WEIGHT / len(rows))])
            before, new = np.concatenate([before, first]), np.concatenate([new, more])
        return _Fit(before, new, seconds, weights, start).best(
            0.0 if prior is not None and prior.floor_s else _FLOOR_PRICE
        )

    def to_json(self) -> dict[str, float]:
        """Return plain JSON values."""
        return to_json(self, "attention_s")


class _Fit:
    def __init__(self, before: Array, new: Array, seconds: Array, weights: Array, start: Array) -> None:
        import numpy as np  # noqa: PLC0415

        self._design = np.column_stack([np.ones(len(new)), new, 2.0 * before * new + new * new, before])
        self._before, self._new, self._seconds, self._weights, self._start = before, new, seconds, weights, start

    def best(self, price: float) -> PrefillCost:
        """Return the best cost. A floor is used only if it improves the fit by ``price``."""
        import numpy as np  # noqa: PLC0415

        nothing = np.zeros(len(self._seconds), bool)
        plain = self._robust(nothing)
        found, least = plain, self._misfit(plain)
        work = np.argsort(plain.seconds_many(self._before, self._new), kind="stable")
        for last in sorted({round(each) for each in np.linspace(1, len(work) - 1, _MAX_SPLITS)} - {len(work), 0}):
            floored = nothing.copy()
            floored[work[:last]] = True
            one = self._robust(floored)
            own = price if one.floor_s <= _MAX_FLOOR_FACTOR * self._start.min() else _SURPRISE_PRICE
            if (misfit := self._misfit(one) + own) < least:
                found, least = one, misfit
        return found

    def _robust(self, floored: NDArray[np.bool_]) -> PrefillCost:
        import numpy as np  # noqa: PLC0415

        expected = self._start
        for _ in range(_ROUNDS):
            off = np.log(self._seconds / expected) / _MAX_TIMING_ERROR
            # Relative to the larger of both times, so that a single timing cannot dominate.
            rows = np.sqrt(self._weights / (1.0 + off * off)) / np.maximum(self._seconds, expected)
            floor = 0.0
            if floored.any():
                squares = rows[floored] ** 2
                floor = float((squares * self._seconds[floored]).sum() / squares.sum())
            weighted = self._design[~floored] * rows[~floored, None]
            constant, linear, attention, behind = _least_squares(weighted, (rows * self._seconds)[~floored]).tolist()
            found = PrefillCost(constant, linear, attention, behind, floor if floor > constant else 0.0)
            before, expected = expected, np.maximum(found.seconds_many(self._before, self._new), _MIN_S)
            if np.abs(expected / before - 1).max() < _SAME:
                break
            if floored.any() and (again := expected <= floor).any() and not again.all():
                floored = again
        return found

    def _misfit(self, cost: PrefillCost) -> float:
        """Return the misfit: approximately minus twice the log-likelihood of the timings."""
        import numpy as np  # noqa: PLC0415

        off = np.log(self._seconds / np.maximum(cost.seconds_many(self._before, self._new), _MIN_S)) / _MAX_TIMING_ERROR
        return float((self._weights * np.log1p(off * off)).sum())


def _least_squares(design: Array, target: Array) -> Array:
    import numpy as np  # noqa: PLC0415

    norms = np.linalg.norm(design, axis=0)
    norms[norms == 0] = 1.0
    scaled = design / norms
    count = scaled.shape[1]
    gram, right = scaled.T @ scaled + _RIDGE * np.eye(count), scaled.T @ target
    used = (np.arange(1, 1 << count)[:, None] >> np.arange(count) & 1).astype(float)
    each = gram * used[:, :, None] * used[:, None, :] + np.eye(count) * (1 - used)[:, :, None]
    found = np.linalg.solve(each, (right * used)[:, :, None])[:, :, 0]
    gained = np.where((found >= 0).all(axis=1), found @ right, -np.inf)
    best: Array = found[int(gained.argmax())] / norms
    return best
