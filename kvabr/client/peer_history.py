"""Rates and round trips of peers from earlier plays, in a small file: a warm start for the next play to a peer.

The file belongs to one host, since another host has other links; a copied file is ignored. It is JSON with a checksum,
written whole or not at all, and a writer merges what other processes have written. A corrupt, foreign or absurd file
causes one warning and is replaced by the next write: a warm start is never worth a failed play.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import math
import platform
import threading
import time
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from kvabr.abr.estimator import Prior
from kvabr.store.files import PRIVATE, PRIVATE_FOLDER, read_text, write_text
from kvabr.types.errors import FormatError, KvabrError

SCHEMA = "kvabr.priors/1"
MAX_BYTES = 1 << 18
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
_LONGEST_WAIT_S = 2.0
"""Seconds that a write waits for the lock; a process that was stopped may hold it for ever."""
_WAIT_S = 0.01
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


class PeerHistory:
    """The file, and what this process has learned since. May be used from several threads."""

    def __init__(self, path: Path | None = None) -> None:
        """Read the file if it exists; never raises. Without a path, records are kept in memory only."""
        self.path = path
        self._lock = threading.Lock()
        self._told = False
        self._known: dict[str, PeerRecord] = self._read()

    def of(self, peer: str, now: float | None = None) -> Prior | None:
        """Return what a play to a peer may assume; None if nothing recent is known."""
        with self._lock:
            known = self._known.get(peer)
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
            self._known = _newest(self._known | {peer: record})

    def refresh(self) -> None:
        """Read what other processes have written meanwhile; never raises."""
        merged = self._read()
        with self._lock:
            merged |= {
                peer: known for peer, known in self._known.items() if peer not in merged or merged[peer].at <= known.at
            }
            self._known = _newest(merged)

    def save(self) -> None:
        """Write the file, merged with what other processes have written. Failure causes one warning."""
        if self.path is None:
            return
        try:
            self.path.parent.mkdir(mode=PRIVATE_FOLDER, parents=True, exist_ok=True)
            with _alone(self.path):
                self.refresh()
                with self._lock:
                    text = _dumps(self._known)
                # Not under the lock: a play that begins meanwhile must not wait for a disk.
                write_text(self.path, text, mode=PRIVATE)
        except (OSError, KvabrError) as error:
            self._tell(f"the speed of peers cannot be saved: {error}")

    def _read(self) -> dict[str, PeerRecord]:
        if self.path is None:
            return {}
        try:
            if not self.path.exists():
                return {}
            return _loads(read_text(self.path, MAX_BYTES, unreadable=FormatError, unfit=FormatError))
        except (FormatError, OSError) as error:
            self._tell(f"{self.path}: {error}; it is ignored, and will be written anew")
            return {}

    def _tell(self, what: str) -> None:
        if not self._told:
            self._told = True
            warnings.warn(what, RuntimeWarning, stacklevel=2)


@cache
def this_host() -> str:
    """Return a digest that identifies this host and reveals nothing else."""
    parts = [platform.node(), platform.machine()]
    with contextlib.suppress(OSError):
        parts.append(Path("/etc/machine-id").read_text(encoding="ascii", errors="replace")[:64])
    return hashlib.sha256("\0".join(("kvabr.host", *parts)).encode()).hexdigest()[:16]


@cache
def history_at(path: Path | None) -> PeerHistory:
    """Return the one `PeerHistory` of this process for a file."""
    return PeerHistory(path)


def _newest(known: dict[str, PeerRecord]) -> dict[str, PeerRecord]:
    newest = sorted(known, key=lambda peer: known[peer].at)[-MAX_PEERS:]
    return {peer: known[peer] for peer in newest}


def _digest(peers: Any) -> str:
    return hashlib.sha256(json.dumps(peers, sort_keys=True).encode()).hexdigest()


def _dumps(known: dict[str, PeerRecord]) -> str:
    peers = {peer: asdict(known[peer]) for peer in sorted(known)}
    return (
        json.dumps({"schema": SCHEMA, "host": this_host(), "sha256": _digest(peers), "peers": peers}, indent=1) + "\n"
    )


def _loads(text: str) -> dict[str, PeerRecord]:
    try:
        whole = json.loads(text)
        if whole["schema"] != SCHEMA:
            raise FormatError(f"not a file of {SCHEMA}")
        if whole["host"] != this_host():
            raise FormatError("of another host")
        peers = whole["peers"]
        if whole["sha256"] != _digest(peers) or len(peers) > MAX_PEERS:
            raise FormatError("damaged")
        known = {peer: PeerRecord(**each) for peer, each in peers.items()}
    except (AttributeError, KeyError, TypeError, ValueError, RecursionError) as error:
        raise FormatError(f"not a file of {SCHEMA} ({error!r})") from error
    for peer, each in known.items():
        if not each.sound() or len(peer) > _MOST_NAME:
            raise FormatError(f"its record of {peer[:40]!r} is implausible")
    return known


@contextmanager
def _alone(path: Path) -> Iterator[None]:
    """Exclude other writers; raise `OSError` if one does not release the lock."""
    with path.with_name(f".{path.name}.lock").open("a") as file:
        until = time.monotonic() + _LONGEST_WAIT_S
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                if time.monotonic() >= until:
                    raise TimeoutError(f"another process does not let go of {file.name}") from error
                time.sleep(_WAIT_S)
                continue
            except OSError:  # a file system without locks: the last one to write wins
                pass
            break
        yield
