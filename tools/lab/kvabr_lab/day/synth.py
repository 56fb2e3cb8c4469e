"""Synthetic traces with the requested mean rate, reproducible from a seed on every machine.

- ``constant``: one rate, the control of every experiment.
- ``markov``: a Markov chain over three states (poor, fair, good) with exponential dwell times and log-normal scatter
  within a state: the usual model of a cellular link.
- ``outages``: the same chain with outages of rate zero, like blocked mmWave or a satellite handover.
- ``slow-start``: the rate doubles up to a plateau, like a new connection.
- ``diurnal``: a slow sinusoid with scatter, like a shared wide-area path.
- ``port``: a fair share of a switch port in a data centre. Other flows arrive at random (Poisson) with heavy-tailed
  sizes (Pareto); an incast reduces the share for milliseconds, and a pause frame (PFC) stops it.
- ``bucket``: a tenant's rate limit with a token bucket: the limit, and bursts of several times the limit.

In the last two kinds, the rate changes at events; their times are rounded to steps, and equal steps are merged.

Uniform numbers come from NumPy's PCG64: NumPy guarantees that stream across versions, but not its distributions. Rates
are rounded to whole kbit/s, which hides platform differences in the last bit of `math.log`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields
from heapq import heappop, heappush

import numpy as np

from kvabr.replay.trace import MAX_SEGMENTS, Trace
from kvabr.types.errors import UsageError

_STATES = (0.35, 1.0, 1.8)
_RAMP_START = 1 / 64
"""Initial rate of a slow start, relative to the plateau."""
_TAIL = 1.5
"""Tail exponent of flow sizes: the mean exists, the variance does not."""
_MAX_FLOW = 1000.0
"""Largest flow relative to the smallest; without this limit, a flow could outlast the trace."""
_KBIT = 125.0
_MAX_MBPS = 1e7
_MAX_SECONDS = 1e7


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """Parameters of a trace, with the kinds that use them; ``*_every_s`` are mean intervals, ``*_s`` mean lengths."""

    scatter: float = 0.15
    """Standard deviation of the rate's logarithm (all kinds but constant)."""
    dwell_s: float = 8.0
    """Mean dwell time in a state (markov, outages)."""
    outage_every_s: float = 30.0
    outage_s: float = 2.0
    ramp_s: float = 10.0
    """Seconds until the plateau is reached (slow-start)."""
    period_s: float = 120.0
    """Length of a cycle (diurnal)."""
    depth: float = 0.6
    """Relative amplitude, from 0 to below 1 (diurnal)."""
    cross: float = 0.4
    """Load by other flows, relative to the port's rate, 0 to 0.95 (port)."""
    flow_s: float = 0.05
    """Seconds that a mean flow takes if it has the port to itself (port)."""
    fan_in: float = 32.0
    """Number of senders in an incast; 0: no incasts (port)."""
    incast_every_s: float = 0.2
    incast_s: float = 0.004
    pause_every_s: float = 1.0
    pause_s: float = 0.0005
    burst: float = 10.0
    """Burst rate relative to the limit, 1 or more (bucket)."""
    burst_every_s: float = 5.0
    burst_s: float = 0.5

    def __post_init__(self) -> None:
        for field in fields(self):
            if field.name.endswith("_s"):
                _check(field.name, getattr(self, field.name), limit=_MAX_SECONDS)
        if not 0 <= self.cross <= 0.95:
            raise UsageError(f"cross must be from 0 (no other flows) to 0.95, got {self.cross}")
        if not 0 <= self.fan_in <= 1e6:
            raise UsageError(f"fan_in must be 0 to 1000000 senders, got {self.fan_in}")
        if not 1 <= self.burst <= 1e6:
            raise UsageError(f"burst must be from 1 to 1000000, got {self.burst}")
        if not 0 <= self.scatter <= 3:
            raise UsageError(f"scatter must be from 0 (none) to 3, got {self.scatter}")
        if not 0 <= self.depth < 1:
            raise UsageError(f"depth must be at least 0 (flat) and less than 1, got {self.depth}")


class Dice:
    """Random distributions computed from uniform numbers."""

    def __init__(self, seed: int) -> None:
        self._uniform = np.random.Generator(np.random.PCG64(seed)).random

    def positive(self) -> float:
        """Return a uniform random number in (0, 1]."""
        return 1.0 - float(self._uniform())

    def exponential(self, mean: float) -> float:
        """Return a random number with an exponential distribution."""
        return -mean * math.log(self.positive())

    def lognormal(self, sigma: float) -> float:
        """Return a random factor with a log-normal distribution of median 1 (Box and Muller)."""
        normal = math.sqrt(-2 * math.log(self.positive())) * math.cos(2 * math.pi * self.positive())
        return math.exp(sigma * normal)

    def pareto(self, mean: float) -> float:
        """Return a random number with a Pareto tail, at most `_MAX_FLOW` times the smallest."""
        least = mean * (_TAIL - 1) / _TAIL
        return least * min(_MAX_FLOW, math.pow(self.positive(), -1 / _TAIL))

    def other(self, state: int) -> int:
        """Return one of the other states at random."""
        return (state + 1 + int(float(self._uniform()) * (len(_STATES) - 1))) % len(_STATES)


class _Episodes:
    def __init__(self, every_s: float, lasts_s: float, dice: Dice) -> None:
        self._every_s, self._lasts_s, self._dice = every_s, lasts_s, dice
        self._ends = 0.0
        self._draw()

    def _draw(self) -> None:
        self._begins = self._ends + self._dice.exponential(self._every_s)
        self._ends = self._begins + self._dice.exponential(self._lasts_s)

    def at(self, time: float) -> bool:
        """Return True if ``time`` is in an interval; times must not decrease between calls."""
        while self._ends <= time:
            self._draw()
        return self._begins <= time


def _constant(shape: Shape, times: Sequence[float], dice: Dice) -> Iterator[float]:  # noqa: ARG001
    return (1.0 for _ in times)


def _markov(shape: Shape, times: Sequence[float], dice: Dice) -> Iterator[float]:
    state, until = 1, dice.exponential(shape.dwell_s)
    for time in times:
        while until <= time:
            state, until = dice.other(state), until + dice.exponential(shape.dwell_s)
        yield _STATES[state] * dice.lognormal(shape.scatter)


def _outages(shape: Shape, times: Sequence[float], dice: Dice) -> Iterator[float]:
    outages = _Episodes(shape.outage_every_s, shape.outage_s, dice)
    for time, rate in zip(times, list(_markov(shape, times, dice)), strict=True):
        yield 0.0 if outages.at(time) else rate


def _slow_start(shape: Shape, times: Sequence[float], dice: Dice) -> Iterator[float]:
    for time in times:
        yield _RAMP_START ** max(0.0, 1 - time / shape.ramp_s) * dice.lognormal(shape.scatter)


def _diurnal(shape: Shape, times: Sequence[float], dice: Dice) -> Iterator[float]:
    for time in times:
        yield (1 - shape.depth * math.cos(2 * math.pi * time / shape.period_s)) * dice.lognormal(shape.scatter)


def _port(shape: Shape, times: Sequence[float], dice: Dice) -> Iterator[float]:
    """Yield one divided by the number of flows, including that of the play."""
    incasts = _Episodes(shape.incast_every_s, shape.incast_s, dice)
    pauses = _Episodes(shape.pause_every_s, shape.pause_s, dice)
    gap_s = shape.flow_s / shape.cross if shape.cross else math.inf
    flows: list[float] = []
    """For each other flow, the cumulative share at which it ends, in seconds of the port's full rate."""
    now, carried = 0.0, 0.0
    comes = dice.exponential(gap_s) if shape.cross else math.inf
    for time in times:
        while True:
            ends = now + (flows[0] - carried) * (1 + len(flows)) if flows else math.inf
            until = min(time, comes, ends)
            carried += (until - now) / (1 + len(flows))
            now = until
            if ends <= until:
                carried = heappop(flows)
            elif comes <= until:
                heappush(flows, carried + dice.pareto(shape.flow_s))
                comes += dice.exponential(gap_s)
            else:
                break
        share = 1.0 / (1.0 + len(flows) + (shape.fan_in if incasts.at(time) else 0.0))
        yield 0.0 if pauses.at(time) else share


def _bucket(shape: Shape, times: Sequence[float], dice: Dice) -> Iterator[float]:
    bursts = _Episodes(shape.burst_every_s, shape.burst_s, dice)
    for time in times:
        yield shape.burst if bursts.at(time) else 1.0


_KINDS: dict[str, Callable[[Shape, Sequence[float], Dice], Iterator[float]]] = {
    "constant": _constant,
    "markov": _markov,
    "outages": _outages,
    "slow-start": _slow_start,
    "diurnal": _diurnal,
    "port": _port,
    "bucket": _bucket,
}
_WAITS = {
    "markov": ("dwell_s",),
    "outages": ("dwell_s", "outage_every_s"),
    "port": ("flow_s", "incast_every_s", "pause_every_s"),
    "bucket": ("burst_every_s",),
}
"""Parameters with mean times between events, to limit the number of events per step."""
_IN_RUNS = ("constant", "port", "bucket")
KINDS = tuple(_KINDS)


def synthesise(
    kind: str,
    *,
    mean_mbps: float,
    duration_s: float,
    step_s: float = 1.0,
    seed: int = 0,
    rtt_s: float | None = None,
    shape: Shape | None = None,
    name: str | None = None,
) -> Trace:
    """Make a trace; the same arguments give the same trace.

    Args:
        kind: One of `KINDS`.
        mean_mbps: Mean rate over the whole trace, except for rounding to kbit/s.
        duration_s: Length of the trace; the last segment may be shorter.
        step_s: Length of a segment; for kinds with events, the rounding of their times.
        seed: 0 or more.
        rtt_s: Round trip time to record.
        shape: Parameters of the kind.
        name: Family and name, such as ``lte/walk`` (default: ``synth/KIND-SEED``).

    Raises:
        UsageError: An argument is invalid, or this seed's outages cover the whole trace.
    """
    if kind not in _KINDS:
        raise UsageError(f"unknown kind of trace {kind!r}; choose from {', '.join(KINDS)}")
    for what, value, limit in (
        ("mean_mbps", mean_mbps, _MAX_MBPS),
        ("duration_s", duration_s, _MAX_SECONDS),
        ("step_s", step_s, _MAX_SECONDS),
    ):
        _check(what, value, limit=limit)
    if not 0 <= seed < 1 << 64:
        raise UsageError(f"the seed must be a whole number from 0 to 2**64 - 1, got {seed}")
    segments = math.ceil(duration_s / step_s * (1 - 1e-12))
    if segments > MAX_SEGMENTS:
        raise UsageError(
            f"{segments} steps, more than the {MAX_SEGMENTS} allowed; give a shorter duration or a longer step"
        )
    shape = shape or Shape()
    for what in _WAITS.get(kind, ()):
        if getattr(shape, what) < step_s / 100:
            raise UsageError(f"{what} must be at least a hundredth of the step ({step_s:g} s)")
    # Round, so that the third step of 0.1 s begins at 0.3, not at 0.30000000000000004.
    times = [round(index * step_s, 9) for index in range(segments)]
    raw = list(_KINDS[kind](shape, times, Dice(seed)))
    ends = [*times[1:], duration_s]
    carried = math.fsum((end - start) * rate for start, end, rate in zip(times, ends, raw, strict=True))
    factor = mean_mbps * 1000 * duration_s / carried if carried > 0 else 0.0
    rates = [round(rate * factor) * _KBIT for rate in raw]
    if not any(rates):
        raise UsageError(
            f"{kind}, seed {seed}: the rate would be zero throughout {duration_s:g} s; give a longer duration or a "
            "higher rate"
        )
    if kind in _IN_RUNS:
        changes = [index for index, rate in enumerate(rates) if not index or rate != rates[index - 1]]
        times, rates = [times[index] for index in changes], [rates[index] for index in changes]
    name = name or f"synth/{kind}-{seed}"
    return Trace(name, name.partition("/")[0], tuple(times), tuple(rates), float(duration_s), rtt_s)


def _check(what: str, value: float, *, limit: float) -> None:
    if not 1e-6 <= value <= limit:
        raise UsageError(f"{what} must be from 0.000001 to {limit:g}, got {value}")
