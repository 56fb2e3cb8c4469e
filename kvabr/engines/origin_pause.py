"""Pauses requests to a failed origin, so that they do not delay an engine.

After a failure, requests pause for a growing time, and at least until the origin answers a probe. If the failed request
had little time, or another request was answered since it began, requests continue, and a probe decides whether to
pause.
"""

from __future__ import annotations

import asyncio
import math
import time

from kvabr.engines.clients import Begin, EngineClient
from kvabr.types.backoff import Backoff
from kvabr.types.errors import KvabrError

FIRST_PAUSE_S, MAX_PAUSE_S = 0.5, 30.0
"""First pause and maximum pause, in seconds; the pause doubles with each consecutive failure."""
FAIR_S, FAIR_ROUND_TRIPS = 0.25, 4.0
"""Minimum time limit, in seconds and in round trips, for a failed request to cause a pause by itself."""
_PROBE_S = 1.0
_NAPS_S = (0.1, 0.2, 0.4)
"""Seconds between probes; the last value repeats."""


class OriginPause:
    """Decides whether to send requests to an origin."""

    def __init__(self, begin: Begin) -> None:
        """Start without a pause; ``begin`` runs a coroutine of the client in the background."""
        self._begin = begin
        self._pauses, self._again_s = Backoff(FIRST_PAUSE_S, MAX_PAUSE_S), 0.0
        self._answered_s = -math.inf
        self._silent = self._probing = False

    @property
    def active(self) -> bool:
        """True during a pause."""
        return self._silent or time.monotonic() < self._again_s

    def answered(self) -> None:
        """Record that the origin answered a request."""
        self._again_s, self._answered_s = 0.0, time.monotonic()
        self._pauses.reset()

    def failed(self, began_s: float, *, within_s: float = FAIR_S, rtt_s: float = 0.0) -> float | None:
        """Record a failed request; concurrent failures count as one. Return the seconds of a new pause, or None.

        ``began_s`` is a time of `time.monotonic`. If the request's time limit ``within_s`` was short, a pause begins
        only if a probe fails, too. ``rtt_s`` is the round trip time to the origin; 0.0: unknown.
        """
        if within_s < max(FAIR_S, FAIR_ROUND_TRIPS * rtt_s) or self._answered_s > began_s:
            if not (self._silent or self._probing):
                self._probing = True
                self._begin(self._unless_it_answers)
            return None
        if began_s < self._again_s - self._pauses.pause_s or self._silent:
            return None
        pause_s = self._pauses.longer()
        self._again_s = time.monotonic() + pause_s
        self._silent = True
        self._begin(self._until_it_answers)
        return pause_s

    async def _unless_it_answers(self, client: EngineClient) -> None:
        try:
            self._silent = not await answers(client, _PROBE_S)
        finally:
            self._probing = False
        if self._silent:
            await self._until_it_answers(client)

    async def _until_it_answers(self, client: EngineClient) -> None:
        naps = iter(_NAPS_S)
        try:
            while not await answers(client, _PROBE_S):  # noqa: ASYNC110  # there is no event to wait for
                await asyncio.sleep(next(naps, _NAPS_S[-1]))
        finally:
            self._silent = False


async def answers(client: EngineClient, within_s: float) -> bool:
    """Return True if the client's origin answers a probe in time."""
    try:
        await client.round_trip(probe_s=within_s)
    except KvabrError:
        return False
    return True
