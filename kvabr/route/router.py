"""A router's memory: how fast the link is, and how much is going on at both sites.

`Router` keeps what one request cannot know: an estimate of the link, fed by what arrives over it, and the *pressure* of
both sites and of the link, fed by its own decisions.

Work that is put into a queue makes later requests wait. In a queue that r requests a second enter (Poisson) and that is
busy a share s of the time, x seconds of work behind a backlog of u seconds make others wait r / (1 - s) x (u + x/2)
seconds in all: the difference of the value function of M/G/1 (Hyytiä, Penttinen and Aalto, 2012). The pressure is
r / (1 - s).

Transfers may be minutes apart and last minutes. `LinkMemory` therefore mixes what an estimator has seen lately with
what the link usually carries: the older the last sample and the longer the transfer, the more counts the usual rate.
Otherwise a single bad minute would close the link for good, since nothing more is sent over it.
"""

from __future__ import annotations

import math

from kvabr.abr.estimator import Estimator
from kvabr.abr.estimators.tracking import Tracking
from kvabr.route.forecast import FETCH, LOCAL, REMOTE, CacheSize, Forecast, PrefillSite, RouteLink
from kvabr.route.rule import Route, decide
from kvabr.types.cost import PrefillCost
from kvabr.types.errors import UsageError

RECENT_S = 4.0
"""Half-life of the trust in what a link has carried lately, seconds."""
USUAL_S = 300.0
"""Half-life of the memory of what it usually carries, seconds of a busy link."""
_LEAST_IDLE = 0.1
"""Least idle share of a queue that counts: with a queue that only grows, no formula holds."""


_HORIZON_S = 60.0
"""Horizon of the estimate of the link: as long as a long transfer."""


class WorkMeter:
    """Requests and seconds of work that a queue is given, as means that decay."""

    def __init__(self, half_life_s: float) -> None:
        self._half_life_s = half_life_s
        self._requests = self._work_s = self._weight_s = 0.0
        self._at_s = -math.inf

    def add(self, work_s: float, now: float) -> None:
        """Note that a request brought seconds of work."""
        self._decay(now)
        self._requests += 1
        self._work_s += work_s

    def pressure(self, now: float) -> float:
        """Return the pressure, 1/s; see this module."""
        self._decay(now)
        if not self._weight_s:
            return 0.0
        # A young meter has seen little time; at least a tenth of a half-life keeps one request from being a crowd.
        seen_s = max(self._weight_s, 0.1 * self._half_life_s)
        return self._requests / seen_s / max(_LEAST_IDLE, 1.0 - self._work_s / seen_s)

    def _decay(self, now: float) -> None:
        passed_s = now - self._at_s
        if passed_s <= 0:
            return
        self._at_s = now
        if math.isinf(passed_s):
            return
        keep = 0.5 ** (passed_s / self._half_life_s)
        self._requests *= keep
        self._work_s *= keep
        self._weight_s = self._weight_s * keep + (1 - keep) * self._half_life_s / math.log(2)


class LinkMemory:
    """What a link carries: lately, by an estimator, and usually."""

    def __init__(self, estimator: Estimator, *, recent_s: float = RECENT_S, usual_s: float = USUAL_S) -> None:
        """Know nothing.

        Args:
            estimator: Estimate of what the link carries now.
            recent_s: Half-life of the trust in it, seconds.
            usual_s: Half-life of the usual rate, seconds of a busy link.
        """
        self.estimator = estimator
        self._recent_s, self._usual_s = recent_s, usual_s
        self._bytes = self._seconds = 0.0
        self._heard_s = -math.inf

    def sample(self, nbytes: float, seconds: float, now: float) -> None:
        """Note that ``nbytes`` came over the busy link within ``seconds``, ending at ``now``."""
        if not (0 <= nbytes < math.inf and 0 < seconds < math.inf):
            return
        self.estimator.sample(nbytes, seconds, now)
        keep = 0.5 ** (seconds / self._usual_s)
        self._bytes, self._seconds = keep * self._bytes + nbytes, keep * self._seconds + seconds
        self._heard_s = max(self._heard_s, now)

    def rates(self, nbytes: float, now: float) -> tuple[float, float]:
        """Return the rate that is expected while the link carries ``nbytes`` from now on, and a lower bound.

        Both are 0.0 if nothing is known.
        """
        if not self._bytes:
            return 0.0, 0.0
        usual, rate = self._bytes / self._seconds, self.estimator.rate()
        if rate <= 0:
            return usual, usual
        ahead_s = max(0.0, now - self._heard_s) + nbytes / usual / 2
        trust = 0.5 ** (ahead_s / self._recent_s)
        expected = trust * rate + (1 - trust) * usual
        return expected, expected * min(1.0, self.estimator.lower_bound() / rate)


class Router:
    """Decides request by request where to prefill. It reads no clock and does no I/O."""

    def __init__(
        self,
        local: PrefillCost,
        remote: PrefillCost,
        cache: CacheSize,
        *,
        rtt_s: float,
        workers: tuple[int, int] = (1, 1),
        live: bool = True,
        estimator: Estimator | None = None,
        margin_s: float = 0.0,
        half_life_s: float = 600.0,
        considerate: bool = True,
    ) -> None:
        """Create a router for a local and a remote site.

        Args:
            local: Cost of a prefill at the decode node's own site.
            remote: Cost of a prefill at the other site.
            cache: What a cache takes on the link; see `CacheSize.of_catalog`.
            rtt_s: Round trip between the sites, seconds.
            workers: Prefills that run at a time, locally and remotely.
            live: Whether the remote site sends groups while it prefills.
            estimator: Estimate of what the link carries lately (default: a new `tracking`).
            margin_s: Another place than the local one must be better by this much.
            half_life_s: Memory of how much is going on, seconds.
            considerate: Whether the wait of other requests counts.

        Raises:
            UsageError: A time is out of range.
        """
        if not (0 < half_life_s < math.inf and 0 <= rtt_s < math.inf):
            raise UsageError(f"router: a round trip of {rtt_s} s, a memory of {half_life_s} s; give finite times")
        self.cache = cache
        self.memory = LinkMemory(_tracking() if estimator is None else estimator)
        self._costs, self._workers, self._rtt_s, self._live = (local, remote), workers, rtt_s, live
        self._margin_s, self._considerate = margin_s, considerate
        self._here, self._there, self._link = (WorkMeter(half_life_s) for _ in range(3))

    def arrived(self, nbytes: float, seconds: float, now: float) -> None:
        """Note that ``nbytes`` came over the busy link within ``seconds``, ending at ``now``."""
        self.memory.sample(nbytes, seconds, now)

    def route(
        self,
        tokens: int,
        now: float,
        *,
        cached: tuple[int, int] = (0, 0),
        queue_s: tuple[float, float] = (0.0, 0.0),
        backlog_bytes: float = 0.0,
        deadline_s: float | None = None,
    ) -> Route:
        """Decide where a prompt is prefilled, and count on its being done.

        Args:
            tokens: Length of the prompt.
            now: The time, seconds, on any clock that does not go back.
            cached: Tokens at its beginning whose cache is in place, locally and remotely.
            queue_s: Seconds until a worker is free, locally and remotely.
            backlog_bytes: Bytes of earlier requests that have not arrived.
            deadline_s: Seconds from now until the first token is due; None: no deadline.

        Raises:
            UsageError: An argument is out of range.
        """
        meters = (self._here, self._there, self._link) if self._considerate else ()
        pressures = [meter.pressure(now) for meter in meters] or [0.0] * 3
        local, remote = (
            PrefillSite(self._costs[each], queue_s[each], cached[each], self._workers[each], pressures[each])
            for each in (0, 1)
        )
        lacking = max(0, tokens - cached[0]) * self.cache.per_token + self.cache.constant
        rate, bound = self.memory.rates(backlog_bytes + lacking, now)
        link = RouteLink(rate, self._rtt_s, backlog_bytes, self._live, pressures[2], bound)
        found = decide(tokens, local, remote, link, self.cache, deadline_s=deadline_s, margin_s=self._margin_s)
        chosen = next(one for one in found.options if one.place == found.place)
        self._count(chosen, link, now)
        return found

    def _count(self, chosen: Forecast, link: RouteLink, now: float) -> None:
        if chosen.place in (LOCAL, FETCH):
            self._here.add(chosen.prefill_s / self._workers[0], now)
        if chosen.place == REMOTE:
            self._there.add(chosen.prefill_s / self._workers[1], now)
        if chosen.bytes:
            self._link.add(link.seconds(chosen.bytes), now)


def _tracking() -> Estimator:
    made = Tracking()
    made.start(_HORIZON_S)
    return made
