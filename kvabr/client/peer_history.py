"""Rates and round trips of peers from earlier plays, in a small file: a warm start for the next play to a peer.

The file belongs to one host, since another host has other links; a copied file is ignored. A corrupt, foreign or absurd
file causes one warning and is replaced by the next write: a warm start is never worth a failed play.
"""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from kvabr.abr.estimator import Prior
from kvabr.client.machine_file import MachineFile, this_host
from kvabr.types.errors import FormatError

SCHEMA = "kvabr.priors/1"
MAX_PEERS = 512
"""Peers that are kept; the ones heard of longest ago make room."""
_MOST_NAME = 300
_SLOWEST, _FASTEST = 1.0, 1e12
"""Plausible rates, bytes per second."""
_LONGEST_TTFB_S = 30.0
_HALF_LIFE_S = 3600.0
"""Seconds after which a record counts half."""
_LONGEST_S = 7 * 86400.0
"""Seconds after which a record is ignored."""
_NEWEST = 0.5
"""Weight of the last play against all before it."""
_CAUTION, _LEAST_WEIGHT = 0.8, 0.5
"""Share of the rate of earlier plays that is counted on; and how fresh they must be, see `Prior.weight`."""


@dataclass(frozen=True, slots=True)
class PeerRecord:
    """One peer."""

    rate: float
    """Geometric mean of the link's rate over plays, the last one counting half, bytes per second."""
    ttfb_s: float
    """Mean of the least time to first byte, weighted alike, seconds."""
    at: float
    """End of the last play, seconds since 1970."""
    plays: int = 1

    def sound(self) -> bool:
        """Return whether such a link is plausible."""
        numbers = (self.rate, self.ttfb_s, self.at)
        return (
            all(type(number) in (int, float) and math.isfinite(number) for number in numbers)
            and type(self.plays) is int
            and _SLOWEST <= self.rate <= _FASTEST
            and 0 <= self.ttfb_s <= _LONGEST_TTFB_S
            and self.at >= 0
            and self.plays >= 1
        )

    def heard(self, last: PeerRecord) -> PeerRecord:
        """Return the record with one more play."""
        rate = math.exp((1 - _NEWEST) * math.log(self.rate) + _NEWEST * math.log(last.rate))
        return PeerRecord(rate, (1 - _NEWEST) * self.ttfb_s + _NEWEST * last.ttfb_s, last.at, self.plays + 1)

    def prior(self, now: float) -> Prior | None:
        """Return what a play that begins now may assume; None if the record is too old."""
        age_s = now - self.at
        if not -60 <= age_s <= _LONGEST_S:  # a little ahead may be another's clock; more is none
            return None
        return Prior(self.rate, self.ttfb_s, 0.5 ** (max(0.0, age_s) / _HALF_LIFE_S))


class KnownLink(NamedTuple):
    """What is known of the link before a play."""

    rate: float
    """Rate that it should exceed most of the time, bytes per second; 0.0 if it is unknown."""
    ttfb_s: float
    """Seconds from a request to its first byte."""

    @classmethod
    def of_all(cls, links: Iterable[KnownLink]) -> KnownLink:
        """Return what is known of several links together."""
        known = [link for link in links if link.rate > 0]
        return cls(sum(link.rate for link in known), min((link.ttfb_s for link in known), default=0.0))


class PeerHistory(MachineFile[PeerRecord]):
    """The file, and what this process has learned since. May be used from several threads."""

    table, owner, most = "peers", "host", MAX_PEERS

    def __init__(self, path: Path | None = None) -> None:
        """Read the file if it exists; never raises. Without a path, records are kept in memory only."""
        self._told = False
        super().__init__(path, SCHEMA, _record)

    def of(self, peer: str, now: float | None = None) -> Prior | None:
        """Return what a play to a peer may assume; None if nothing recent is known."""
        known = self.get(peer)
        return None if known is None else known.prior(time.time() if now is None else now)

    def link(self, peer: str | None) -> KnownLink:
        """Return what earlier plays told of the link to a peer, if they were not long ago."""
        prior = None if peer is None else self.of(peer)
        if prior is None or prior.weight < _LEAST_WEIGHT:
            return KnownLink(0.0, 0.0)
        return KnownLink(_CAUTION * prior.rate, prior.ttfb_s)

    def heard(self, peer: str, rate: float, ttfb_s: float, now: float | None = None) -> None:
        """Record the end of a play; implausible values are ignored. Nothing is written before `save`."""
        at = time.time() if now is None else now
        record = PeerRecord(rate, ttfb_s, at)
        if not record.sound() or not 0 < len(peer) <= _MOST_NAME:
            return
        with self._lock:
            before = self._known.get(peer)
            if before is not None and before.prior(at) is not None:
                record = before.heard(record)
            self._put(peer, record)

    def newer(self, known: PeerRecord, written: PeerRecord) -> bool:
        """See `MachineFile.newer`."""
        return written.at <= known.at

    def whose(self) -> str:
        """See `MachineFile.whose`."""
        return this_host()

    def plain(self, value: PeerRecord) -> Any:
        """See `MachineFile.plain`."""
        return asdict(value)

    def tell(self, what: str) -> None:
        """Warn once."""
        if not self._told:
            self._told = True
            warnings.warn(f"the speed of peers: {what}", RuntimeWarning, stacklevel=2)


@cache
def history_at(path: Path | None) -> PeerHistory:
    """Return the one `PeerHistory` of this process for a file."""
    return PeerHistory(path)


def _record(plain: Any) -> PeerRecord:
    record = PeerRecord(**plain)
    if not record.sound():
        raise FormatError("one of its records is implausible")
    return record
