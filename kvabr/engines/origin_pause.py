"""Leaves an origin alone that has failed, so that it does not cost every request of an engine its time.

After a failure the origin is not asked again for a moment, longer after each consecutive one, and in any case not
before it answers a probe. Probes go on in the background, so an origin that comes back is asked within a second.

A request that had no time for an answer says little: one client's short deadlines must not turn the origin off for all.
Neither does one that failed while another was answered: many at once may take this machine longer than they have. After
these a probe is sent, and the origin is asked on meanwhile.
"""

from __future__ import annotations

import asyncio
import math
import time

from kvabr.engines.clients import Begin, EngineClient
from kvabr.types.backoff import Backoff
from kvabr.types.errors import KvabrError

FIRST_PAUSE_S, MAX_PAUSE_S = 0.5, 30.0
"""Seconds without requests after one that failed, doubled with each consecutive failure of an origin that answers
probes."""
FAIR_S, FAIR_ROUND_TRIPS = 0.25, 4.0
"""Seconds and round trips that a request must have had for its failure to tell of the origin."""
_PROBE_S = 1.0
_NAPS_S = (0.1, 0.2, 0.4)
"""Seconds between probes: the last again and again."""


class OriginPause:
    """Whether an origin is asked."""

    def __init__(self, begin: Begin) -> None:
        """Start with an origin that is asked.

        Args:
            begin: runs a coroutine of the client in the background.
        """
        self._begin = begin
        self._pauses, self._again_s = Backoff(FIRST_PAUSE_S, MAX_PAUSE_S), 0.0
        self._answered_s = -math.inf
        self._silent = self._probing = False

    @property
    def active(self) -> bool:
        """Whether it is left alone now."""
        return self._silent or time.monotonic() < self._again_s

    def answered(self) -> None:
        """Note a request that was answered."""
        self._again_s, self._answered_s = 0.0, time.monotonic()
        self._pauses.reset()

    def failed(self, began_s: float, *, within_s: float = FAIR_S, rtt_s: float = 0.0) -> float | None:
        """Note a request that failed, and begin a pause; requests under way at the same time count as one.

        Args:
            began_s: when it began, by `time.monotonic`.
            within_s: seconds that it had. With few, no pause begins unless the origin does not answer a probe either.
            rtt_s: round trip time to the origin; 0.0: it is not known.

        Returns:
            The seconds of the pause, if one began with it.
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
            while not await answers(client, _PROBE_S):  # noqa: ASYNC110  # nobody says when a peer is back
                await asyncio.sleep(next(naps, _NAPS_S[-1]))
        finally:
            self._silent = False


async def answers(client: EngineClient, within_s: float) -> bool:
    """Return whether the client's origin answers a probe in time."""
    try:
        await client.round_trip(probe_s=within_s)
    except KvabrError:
        return False
    return True
