"""What things cost: a prefill, and a play as a whole.

Cost of a prefill: t(L, x) = c + b x + a (2 L x + x^2) seconds for x tokens after L tokens of cache.

The form follows from the work: a constant per call, a linear part (projections, MLP), and attention, where token i
attends to the L + i tokens before it. The three constants are fitted to a few timed prefills.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Annotated

from msgspec import Meta

from kvabr.types.arguments import check_type, checked
from kvabr.types.errors import FormatError, UsageError
from kvabr.types.records import check

MISS_PENALTY = 0.5
"""Cost of a missed deadline in addition to its lateness, nats per generated token."""
_Constant = Annotated[float, Meta(ge=0, le=1e100)]
"""A constant of a prefill's cost."""


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
    """Return J, what a play cost: loss + time price x TTFT + engine price x engine seconds + lateness penalty.

    A missed deadline costs `MISS_PENALTY`, plus the lateness in deadlines.

    Args:
        loss: expected loss of the cache, nats per generated token.
        ttft_s: when the cache was complete, seconds; for a play that was given up, how long it may last at most.
        deadline_s: the deadline, seconds.
        met: whether the deadline was met.
        engine_s: seconds of engine time.
        time_price: price of a second before the first token, nats per generated token.
        gpu_price: price of a second of engine time, nats per generated token. An infinite price is a rule for the
            player, not a cost: engine time then counts nothing.
    """
    missed = 0.0 if met else MISS_PENALTY
    spent = gpu_price * engine_s if math.isfinite(gpu_price) else 0.0
    return loss + time_price * ttft_s + missed + max(0.0, ttft_s - deadline_s) / deadline_s + spent


@dataclass(frozen=True, slots=True)
class PrefillCost:
    """Seconds that an engine takes to compute the KV of new tokens."""

    constant_s: _Constant
    """Seconds per call, regardless of its size."""
    per_token_s: _Constant
    """Seconds per new token."""
    attention_s: _Constant = 0.0
    """Seconds per pair of a new token and a token it attends to, times 2; see the formula of this module."""

    def __post_init__(self) -> None:
        check(self, "prefill cost")
        if not self.constant_s + self.per_token_s + self.attention_s > 0:
            raise FormatError("prefill cost: the three constants are all zero")

    def seconds(self, before: int, tokens: int) -> float:
        """Return the seconds to compute ``tokens`` tokens after ``before`` cached ones; 0.0 for no tokens."""
        if tokens <= 0:
            return 0.0
        pairs = 2.0 * before * tokens + float(tokens) * tokens
        return self.constant_s + self.per_token_s * tokens + self.attention_s * pairs

    def behind(self, tokens: int) -> PrefillCost:
        """Return the cost of a prompt whose first ``tokens`` tokens are in place and not counted."""
        return replace(self, per_token_s=self.per_token_s + 2.0 * self.attention_s * tokens)

    @classmethod
    @checked
    def from_rate(cls, tokens_per_second: float) -> PrefillCost:
        """Return a purely linear cost, for when only a prefill rate is known."""
        if not (math.isfinite(tokens_per_second) and tokens_per_second > 0):
            raise UsageError(f"prefill rate must be a positive number of tokens a second, not {tokens_per_second}")
        return cls(0.0, 1.0 / tokens_per_second)

    @classmethod
    def fit(cls, timings: Iterable[tuple[int, int, float]]) -> PrefillCost:
        """Fit the constants to at least three timings, given as (tokens before, new tokens, seconds).

        Non-negative least squares on relative errors.
        """
        import numpy as np  # noqa: PLC0415  # only fitting needs them, and they load slowly
        from scipy.optimize import nnls  # noqa: PLC0415

        check_type("PrefillCost.fit: timings", timings, Iterable)
        rows = list(timings)
        check_type("PrefillCost.fit: timings", rows, Sequence[tuple[int, int, float]])
        if len(rows) < 3 or any(x <= 0 or s <= 0 or before < 0 for before, x, s in rows):
            raise UsageError("fitting a prefill cost takes at least three timings of at least one token each")
        seconds = np.array([s for _, _, s in rows])
        design = np.array([[1.0, x, 2.0 * before * x + float(x) * x] for before, x, _ in rows])
        # Weighting by 1/seconds makes each timing count by its relative error, not its absolute one.
        weighted = design / seconds[:, None]
        norms = np.linalg.norm(weighted, axis=0)
        solution, _ = nnls(weighted / norms, np.ones(len(rows)))
        constant, linear, attention = (solution / norms).tolist()
        return cls(constant, linear, attention)

    def to_json(self) -> dict[str, float]:
        """Return plain JSON values."""
        return asdict(self)
