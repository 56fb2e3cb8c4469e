"""What a router remembers: link rate, queues at both sites, and past requests.

Transfers may last minutes and be minutes apart, so `LinkMemory` mixes the rate of the last seconds with the usual rate.
The older the last sample and the longer the transfer, the more weight the usual rate has. The half-life of the recent
rate's weight is chosen by past prediction errors. Without the usual rate, the link would no longer be used after one
bad minute, because no further transfer would measure it.

`Router.probe` requests a small transfer on a rarely used link. Its sample represents up to two seconds without
transfers, so that probes have the same weight as transfers.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from kvabr.abr.estimators import DecayingMean, Estimator, Tracking
from kvabr.types.cost import PrefillCost
from kvabr.types.errors import UsageError
from kvabr_lab.route.forecast import FETCH, LOCAL, CacheSize, Forecast, PrefillSite, RouteLink, forecasts
from kvabr_lab.route.lookahead import Lookahead
from kvabr_lab.route.rule import Route, choose

LATELY_S = 1.0
"""Half-life of the recent mean, in seconds of a busy link."""
RECENT_S = (16.0, 4.0, 64.0)
"""Candidates for the half-life of the recent mean's weight, seconds; the best predictor is used."""
_PREDICTION_S = 8.0
"""Seconds over which predictions are compared to choose a half-life."""
_ERROR_DECAY = 0.98
USUAL_S = 300.0
"""Half-life of the usual rate, in seconds of a busy link."""
PROBE_S = 2.0
"""Seconds without transfers before a probe, and maximum time that a sample represents."""
PROBE_BYTES = 65_536
PROBE_WAIT_S = 1.0
_HORIZON_S = 60.0
"""Seconds over which the link is estimated: those of a long transfer."""


class LinkMemory:
    """Recent and usual rate of a link. An estimator provides the uncertainty."""

    def __init__(
        self,
        estimator: Estimator,
        *,
        lately_s: float = LATELY_S,
        recent_s: tuple[float, ...] = RECENT_S,
        usual_s: float = USUAL_S,
    ) -> None:
        """Create without samples; for the half-lives see `LATELY_S`, `RECENT_S` and `USUAL_S`.

        The ratio of the estimator's lower bound to its rate is applied to the expected rate. If several ``recent_s``
        are equally good, the first is used.
        """
        self.estimator = estimator
        self._errors = dict.fromkeys(recent_s, 0.0)
        """Decaying sum of errors by half-life, relative to the usual rate."""
        self._past: deque[tuple[float, float, float]] = deque(maxlen=64)
        """End of each sample, and the two means at that time."""
        self._lately, self._usual = DecayingMean(lately_s), DecayingMean(usual_s)
        self._sampled_s = -math.inf

    def sample(self, nbytes: float, seconds: float, now: float) -> None:
        """Record ``nbytes`` received over the busy link within ``seconds``, ending at ``now``."""
        if not (0 <= nbytes < math.inf and 0 < seconds < math.inf):
            return
        self.estimator.sample(nbytes, seconds, now)
        self._judge(nbytes / seconds, now - seconds / 2)
        stands_s = max(seconds, min(now - self._sampled_s, PROBE_S))
        self._lately.add(nbytes / seconds, stands_s)
        self._usual.add(nbytes / seconds, stands_s)
        self._sampled_s = max(self._sampled_s, now)
        self._past.append((now, self._lately.value(), self._usual.value()))

    @property
    def sampled_s(self) -> float:
        """End of the last sample; minus infinity if there is none."""
        return self._sampled_s

    @property
    def recent_s(self) -> float:
        """Half-life of the recent mean's weight, seconds."""
        return min(self._errors, key=self._errors.__getitem__)

    def _judge(self, rate: float, middle_s: float) -> None:
        before = [one for one in self._past if one[0] <= middle_s - _PREDICTION_S]
        if not before or not self._usual.value():
            return
        at_s, lately, usual = before[-1]
        for half_life_s, error in self._errors.items():
            trust = 0.5 ** ((middle_s - at_s) / half_life_s)
            wrong = abs(trust * lately + (1 - trust) * usual - rate) / usual if usual else 0.0
            self._errors[half_life_s] = _ERROR_DECAY * error + (1 - _ERROR_DECAY) * wrong

    def rates(self, nbytes: float, now: float) -> tuple[float, float]:
        """Return the expected rate of a transfer of ``nbytes`` from now on, and its lower bound; 0.0 if unknown."""
        usual = self._usual.value()
        if not usual:
            return 0.0, 0.0
        ahead_s = max(0.0, now - self._sampled_s) + nbytes / usual / 2
        trust = 0.5 ** (ahead_s / self.recent_s)
        expected = trust * self._lately.value() + (1 - trust) * usual
        rate = self.estimator.rate()
        return expected, expected * min(1.0, self.estimator.lower_bound() / rate if rate > 0 else 1.0)


@dataclass(frozen=True, slots=True)
class RouteRequest:
    """A request and the state of both sites."""

    tokens: int
    cached: tuple[int, int] = (0, 0)
    """Number of cached tokens at the prompt's start, locally and remotely."""
    queue_s: tuple[float, float] = (0.0, 0.0)
    backlog_bytes: float = 0.0
    """Bytes of earlier requests that are computed but have not arrived."""
    deadline_s: float | None = None
    """Seconds until the first token is due; None: no deadline."""


class Router:
    """Chooses the prefill place of each request. Reads no clock and does no I/O."""

    def __init__(
        self,
        local: PrefillCost,
        remote: PrefillCost,
        cache: CacheSize,
        *,
        rtt_s: float,
        workers: tuple[int, int] = (1, 1),
        live: bool = True,
        both: bool = True,
        estimator: Estimator | None = None,
        margin_s: float = 0.0,
        lookahead: Lookahead | None = None,
        considerate: bool = True,
    ) -> None:
        """Create a router for a local (decode) and a remote site.

        Args:
            local: Cost at the local site.
            remote: Cost at the remote site.
            cache: See `CacheSize.of_catalog`.
            rtt_s: Round trip time between the sites.
            workers: Number of concurrent prefills, locally and remotely.
            live: True if the remote site sends groups during the prefill.
            both: True if the local engine can compute the start of a prompt that arrives from its end.
            estimator: Estimates the uncertainty of the link's rate; see `LinkMemory`.
            margin_s: Minimum advantage of a place over the local site, seconds.
            lookahead: Remembers requests.
            considerate: True if the delay of other requests counts.

        Raises:
            UsageError: An argument is out of range.
        """
        if not 0 <= rtt_s < math.inf:
            raise UsageError(f"router: the round trip must be 0 or more seconds and finite, got {rtt_s}")
        if not all(1 <= each <= _MAX_WORKERS for each in workers):
            raise UsageError(
                f"router: each site must have 1 to {_MAX_WORKERS} workers, got {workers[0]} and {workers[1]}"
            )
        self.cache = cache
        self.memory = LinkMemory(_tracking() if estimator is None else estimator)
        self._costs, self._rtt_s, self._live, self._both = (local, remote), rtt_s, live, both
        self._margin_s, self._considerate = margin_s, considerate
        self._lookahead = Lookahead() if lookahead is None else lookahead
        self._free = ([-math.inf] * workers[0], [-math.inf] * workers[1])
        self._coming: list[tuple[float, float, float]] = []
        self._probed_s = -math.inf

    def probe(self, now: float) -> int:
        """Return the number of bytes to fetch as a probe; 0 if no probe is due.

        Call this about twice a second, with the clock of `route`. Measure the time from the first to the last byte, for
        at most `PROBE_WAIT_S`, and pass it to `arrived`, even if no byte arrived. The next probe is due after two more
        seconds without transfers.
        """
        if now - max(self.memory.sampled_s, self._probed_s) < PROBE_S:
            return 0
        self._probed_s = now
        return PROBE_BYTES

    def arrived(self, nbytes: float, seconds: float, now: float) -> None:
        """See `LinkMemory.sample`."""
        self.memory.sample(nbytes, seconds, now)

    def route(self, request: RouteRequest, now: float) -> Route:
        """Choose the prefill place of a prompt and reserve resources; ``now`` is a time of any monotonic clock.

        Raises:
            UsageError: A number is out of range.
        """
        options = self.options(request, now)
        found = choose(options, deadline_s=request.deadline_s, margin_s=self._margin_s)
        self.take(options, found.chosen, now)
        return found

    def options(self, request: RouteRequest, now: float) -> tuple[Forecast, ...]:
        """Return the forecast of every place, with the delay of other requests; pass the choice to `take`.

        Raises:
            UsageError: A number is out of range.
        """
        cached, queue_s, backlog_bytes = request.cached, request.queue_s, request.backlog_bytes
        local, remote = (PrefillSite(self._costs[each], queue_s[each], cached[each]) for each in (0, 1))
        here, there = self._free
        _correct(here, now, queue_s[0])
        _correct(there, now, queue_s[1])
        lacking = max(0, request.tokens - cached[0]) * self.cache.per_token + self.cache.constant
        rate, bound = self.memory.rates(backlog_bytes + lacking, now)
        coming = self._still_coming(now)
        link = RouteLink(rate, self._rtt_s, backlog_bytes, self._live, coming, bound)
        found = forecasts(request.tokens, local, remote, link, self.cache, both=self._both)
        if not self._considerate:
            return found
        free_s = now + link.seconds(backlog_bytes + math.fsum(nbytes for _, _, nbytes in coming))
        return self._lookahead.priced(found, here, there, free_s, rate, now)

    def take(self, options: Sequence[Forecast], chosen: Forecast, now: float) -> None:
        """Reserve the resources for the chosen option, and remember the request."""
        self._lookahead.note(options, now, both=self._both)
        here, there = self._free
        if chosen.place in (LOCAL, FETCH):
            _give(here, now, max(chosen.ttft_s - chosen.prefill_s, 0.0), chosen.prefill_s)
        else:
            _give(there, now, 0.0, chosen.prefill_s)
            _give(here, now, 0.0, chosen.front_s)
            self._coming.append((now + chosen.ready_s, now + chosen.computed_s, chosen.bytes))

    def _still_coming(self, now: float) -> tuple[tuple[float, float, float], ...]:
        self._coming = [one for one in self._coming if one[1] > now]
        found = []
        for begin, end, nbytes in self._coming:
            left = min(1.0, (end - now) / (end - begin)) if end > begin else 1.0
            found.append((max(0.0, begin - now), end - now, left * nbytes))
        return tuple(found)


_MAX_WORKERS = 4096


def _correct(free: list[float], now: float, queue_s: float) -> None:
    """Shift the times at which workers are free, so that the first is free ``queue_s`` from now."""
    least = max(now, min(free))
    for index, at in enumerate(free):
        # The router did not know of some work, or work ended early.
        free[index] = max(at, now + queue_s) if now + queue_s >= least else at - (least - now - queue_s)


def _give(free: list[float], now: float, after_s: float, work_s: float) -> None:
    if work_s > 0:
        index = min(range(len(free)), key=free.__getitem__)
        free[index] = max(free[index], now + after_s) + work_s


def _tracking() -> Estimator:
    made = Tracking()
    made.start(_HORIZON_S)
    return made
