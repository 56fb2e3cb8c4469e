"""Limits the CPU time of policies and estimators that are not kvabr's own: of each call into them, and of nothing else.

What the player itself does is never counted, however long a prompt is.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import ParamSpec, TypeVar

from kvabr.abr.estimator import Estimator, Prior
from kvabr.abr.plugins import shipped
from kvabr.client import cpu_limit

P = ParamSpec("P")
T = TypeVar("T")


class PluginLimit:
    """Makes the calls into plug-ins of one play, see `kvabr.player.policy_guard.CallLimit`."""

    def __init__(self, left_s: Callable[[], float] | None = None) -> None:
        """``left_s`` returns the seconds until a real play should end; None for a simulated one."""
        self._left_s = left_s

    def __call__(self, call: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
        """Return what the call returns; raise what it raises, or `PolicyError` if it takes too long."""
        if self._left_s is None:
            return cpu_limit.limited(cpu_limit.MOST_PLAY_CPU_S, call, *args, **kwargs)
        return cpu_limit.limited_step(self._left_s(), call, *args, **kwargs)


def limited_estimator(estimator: Estimator, limit: PluginLimit) -> Estimator:
    """Return an estimator whose calls are limited, unless it is kvabr's own."""
    if shipped(estimator):
        return estimator
    cls = type(estimator)
    made = type(cls.__name__, (_LimitedEstimator,), {"name": getattr(cls, "name", cls.__name__)})
    limited: Estimator = made(estimator, limit)
    return limited


class _LimitedEstimator(Estimator):
    """Passes every call on to an estimator."""

    name = "limited"

    def __init__(self, inner: Estimator, limit: PluginLimit) -> None:
        super().__init__()
        self._inner, self._limit = inner, limit

    def start(self, horizon_s: float) -> None:
        self._limit(self._inner.start, horizon_s)

    def prime(self, prior: Prior) -> None:
        self._limit(self._inner.prime, prior)

    def sample(self, nbytes: float, seconds: float, now: float) -> None:
        self._limit(self._inner.sample, nbytes, seconds, now)

    def waited(self, now: float) -> None:
        self._limit(self._inner.waited, now)

    def rate(self) -> float:
        return self._limit(self._inner.rate)

    def lower_bound(self) -> float:
        return self._limit(self._inner.lower_bound)

    def first_byte(self, seconds: float) -> None:
        self._limit(self._inner.first_byte, seconds)

    def ttfb(self) -> float:
        return self._limit(self._inner.ttfb)
