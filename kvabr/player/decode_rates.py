"""How long decoding takes here: a latency per batch, and seconds per group of each track. Reads no clock.

A processor decodes groups one by one, and has no latency. A GPU decodes all that has arrived together: n groups take
T(n) = a + b n. The seconds per group are corrected by what decoding really takes.

They are what was measured on this device, or what the catalog says. Every decoded group tells how far they are off. The
tracks of a family share that correction, since they share code: if AC-L0 takes eight times as long as the table
says, so does AC-L3.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from statistics import median

from kvabr.types.catalog import Catalog
from kvabr.types.errors import UsageError

_WINDOW = 9
"""Decoded groups that a correction is made of. Their median bears four that were held up."""
_MAX_LOG = math.log(1024)
"""Limit of a correction: more is no difference between machines, but a clock that jumped or a process that slept."""


def family(track: str) -> str:
    """Return the family of tracks that share a decoder: what stands before the first hyphen, as in AC-L0."""
    return track.partition("-")[0]


class DecodeRates:
    """Seconds to decode a full group of each track. Not for several threads at once."""

    def __init__(
        self,
        catalog: Catalog,
        measured: Mapping[str, float] | None = None,
        latencies: Mapping[str, float] | None = None,
    ) -> None:
        """Begin with a table.

        Args:
            catalog: its tracks; it says what was not measured.
            measured: seconds that each further full group of a batch takes to check and decode, by track.
            latencies: seconds that a batch takes besides, by family; 0 where nothing is said.

        Raises:
            UsageError: a measured time is not a positive, finite number.
        """
        self._latencies = dict(latencies or {})
        for name, seconds in self._latencies.items():
            if not 0 <= seconds < math.inf:
                raise UsageError(f"a batch of {name} was measured to begin after {seconds} s; measure again")
        self._table = {track.name: track.decode_s for track in catalog.tracks}
        for track, seconds in (measured or {}).items():
            if not 0 < seconds < math.inf:
                raise UsageError(f"decoding {track} was measured at {seconds} s; measure again")
            if track in self._table:
                self._table[track] = float(seconds)
        self._observed: dict[str, deque[float]] = {}
        """Logarithms of observed over expected seconds, by family. The first is that of the table itself."""
        self._known: dict[str, float] = {}
        """Seconds per track, until the next observation: they are read far more often than they change."""

    def seconds(self, track: str) -> float:
        """Return the seconds to decode a full group of a track; 0.0 if nothing is known of it."""
        if (known := self._known.get(track)) is None:
            known = self._known[track] = self._table[track] * self.correction(track)
        return known

    def latency(self, track: str) -> float:
        """Return the seconds that a batch with groups of a track takes, besides those of its groups."""
        return self._latencies.get(family(track), 0.0)

    def correction(self, track: str) -> float:
        """Return the factor between what decoding takes and what the table says."""
        observed = self._observed.get(family(track))
        if observed is None:
            # A machine that is slow at one family is likely to be slow at all.
            others = [median(other) for other in self._observed.values()]
            return math.exp(median(others)) if others else 1.0
        return math.exp(median(observed))

    def observe(self, track: str, share: float, seconds: float) -> None:
        """Take the time that decoding took; ignore what is no duration, as after a clock was set back.

        Args:
            track: what was decoded, with the layers below it.
            share: tokens of the group as a share of a full group's.
            seconds: how long one thread was at it, without the latency of a batch.
        """
        if not (0 < seconds < math.inf and share > 0):
            return
        self._known.clear()
        expected = self._table[track] * share
        if expected <= 0:
            self._table[track] = seconds / share / self.correction(track)
            return
        log = min(_MAX_LOG, max(-_MAX_LOG, math.log(seconds / expected)))
        self._observed.setdefault(family(track), deque([0.0], maxlen=_WINDOW)).append(log)
