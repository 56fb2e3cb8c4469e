"""Estimates of a link that several plays share.

A play that sees only its own bytes mistakes other plays' transfers for a slow link. So the plays of a process to one
peer estimate the link from the bytes of all, counted on arrival, and expect its rate divided by the active plays.

A small file keeps the measurements as a warm start. It belongs to one host; copies are ignored. A corrupt, foreign or
absurd file causes one warning, never a failed play, and the next write replaces it.
"""

from __future__ import annotations

import asyncio
import math
import threading
import time
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from kvabr.abr.estimator import Estimator, Prior
from kvabr.client.machine_file import MachineFile, this_host
from kvabr.transfer.interface import Connection
from kvabr.types.errors import FormatError, PolicyError
from kvabr.types.once import once

MAX_PEERS = 512
_MAX_NAME = 300
_SLOWEST, _FASTEST = 1.0, 1e12
"""Plausible rates, bytes per second."""
_MAX_TTFB_S = 30.0
_HALF_LIFE_S = 3600.0
_MAX_S = 7 * 86400.0
_LAST_PLAY_WEIGHT = 0.5
"""Weight of the last play against earlier ones."""
_RATE_SHARE, _MIN_WEIGHT = 0.8, 0.5
"""Share of the recorded rate to count on, and least `Prior.weight` (freshness) of a usable record."""


@dataclass(frozen=True, slots=True)
class PeerRecord:
    """One peer."""

    rate: float
    """Geometric mean over plays, the last one counting half, bytes per second."""
    ttfb_s: float
    """Mean of the least time to first byte, equally weighted, seconds."""
    at: float
    """End of the last play, seconds since 1970."""

    def sound(self) -> bool:
        """Return whether the values are plausible."""
        numbers = (self.rate, self.ttfb_s, self.at)
        return (
            all(type(number) in (int, float) and math.isfinite(number) for number in numbers)
            and _SLOWEST <= self.rate <= _FASTEST
            and 0 <= self.ttfb_s <= _MAX_TTFB_S
            and self.at >= 0
        )

    def with_play(self, last: PeerRecord) -> PeerRecord:
        """Return the record with one play added."""
        rate = math.exp((1 - _LAST_PLAY_WEIGHT) * math.log(self.rate) + _LAST_PLAY_WEIGHT * math.log(last.rate))
        ttfb_s = (1 - _LAST_PLAY_WEIGHT) * self.ttfb_s + _LAST_PLAY_WEIGHT * last.ttfb_s
        return PeerRecord(rate, ttfb_s, last.at)

    def prior(self, now: float) -> Prior | None:
        """Return the prior for a play that begins now, or None if too old."""
        age_s = now - self.at
        if not -60 <= age_s <= _MAX_S:  # clocks may differ a little
            return None
        return Prior(self.rate, self.ttfb_s, 0.5 ** (max(0.0, age_s) / _HALF_LIFE_S))


def combined(links: Iterable[Prior]) -> Prior:
    """Return the estimate of several links together."""
    known = [link for link in links if link.rate > 0]
    return Prior(sum(link.rate for link in known), min((link.ttfb_s for link in known), default=0.0))


UNKNOWN = Prior(0.0, 0.0)
"""A link without measurements."""


class PeerHistory(MachineFile[PeerRecord]):
    """The file, and later measurements. Thread-safe."""

    owner, most = "host", MAX_PEERS

    def __init__(self, path: Path | None = None) -> None:
        """Read the file if there is one; never raises."""
        self._warned = False
        super().__init__(path, "peers", _record)

    def of(self, peer: str, now: float | None = None) -> Prior | None:
        """Return a peer's recent prior, or None."""
        known = self.get(peer)
        return None if known is None else known.prior(time.time() if now is None else now)

    def link(self, names: Iterable[str], announced: Prior) -> Prior:
        """Return a cautious estimate of the fastest link to a peer by any name, or of the announced rate; 0.0: none."""
        known = self.before(names, announced) or UNKNOWN
        return UNKNOWN if known.weight < _MIN_WEIGHT else Prior(_RATE_SHARE * known.rate, known.ttfb_s)

    def before(self, names: Iterable[str], announced: Prior) -> Prior | None:
        """Return a play's prior: of earlier plays, or if none is recent, the announced rate."""
        known = [prior for name in names if (prior := self.of(name)) is not None]
        best = max(known, key=lambda prior: (prior.weight >= _MIN_WEIGHT, prior.rate), default=None)
        if (best is None or best.weight < _MIN_WEIGHT) and announced.rate:
            return replace(announced, weight=_MIN_WEIGHT)
        return best

    def record(self, peer: str, rate: float, ttfb_s: float, now: float | None = None) -> None:
        """Record the end of a play in memory, unless implausible."""
        at = time.time() if now is None else now
        record = PeerRecord(rate, ttfb_s, at)
        if not record.sound() or not 0 < len(peer) <= _MAX_NAME:
            return
        with self._lock:
            before = self._known.get(peer)
            if before is not None and before.prior(at) is not None:
                record = before.with_play(record)
            self._set(peer, record)

    def identity(self) -> str:
        return this_host()

    def warn(self, what: str) -> None:
        """Warn once."""
        if not self._warned:
            self._warned = True
            warnings.warn(f"the speed of peers: {what}", RuntimeWarning, stacklevel=2)


history_at = once(PeerHistory)
"""Returns this process's `PeerHistory` for a file."""


def _record(plain: Any) -> PeerRecord:
    record = PeerRecord(**plain)
    if not record.sound():
        raise FormatError("a record is implausible")
    return record


V = TypeVar("V")

_MAX_QUIET_S = 0.5
"""Seconds without bytes or waiting until a play is inactive."""
_STEP_S = 1e-3
"""Bytes within this time are counted together."""
_MAX_STEPS = 1 << 15
_MAX_FRESH_PLAYS, _REUSE_S = 32, 0.05
"""With more plays, values of all plays are reused for this many seconds: reading every play at each tick would take all
the time."""


class SharedLink:
    """Measurements of the path to one peer by the plays of this process."""

    def __init__(self, clock: Callable[[], float] | None = None) -> None:
        """``clock`` returns seconds; None: the event loop's."""
        self.clock = clock or _now
        self._lock = threading.Lock()
        self._members: list[LinkShare] = []
        self._steps = deque([(-math.inf, 0)], _MAX_STEPS)
        self._kept: dict[object, tuple[float, Any]] = {}
        """Cached results over all plays by function, with their times."""

    @contextmanager
    def joined(self, estimator: Estimator, known: Prior | None = None) -> Iterator[LinkShare]:
        """Yield a play's estimator of its share, from a fresh one of the whole link and a prior."""
        share = _named(estimator)(self, estimator)
        if known is not None:
            share.prime(known)
        with self._lock:
            others = [one.link_rate() for one in self._members if one.active()]
            self._members.append(share)
        if rate := max(others, default=0.0):
            share.prime(Prior(rate, 0.0))
        try:
            yield share
        finally:
            with self._lock:
                self._members.remove(share)

    def received(self, nbytes: int) -> None:
        """Count bytes that just arrived for any play."""
        now, steps = self.clock(), self._steps
        with self._lock:
            at, total = steps[-1]
            if now - at < _STEP_S:
                steps[-1] = at, total + nbytes
            else:
                steps.append((now, total + nbytes))

    def bytes_within(self, seconds: float) -> int:
        """Return the bytes that arrived within the last ``seconds``."""
        since_s = self.clock() - seconds
        with self._lock:
            before = next((total for at, total in reversed(self._steps) if at <= since_s), self._steps[0][1])
            return self._steps[-1][1] - before

    def known(self) -> float:
        """Return the highest rate estimated by an active play; 0.0 if none."""
        return _known(self._all())[0]

    def of_others(self, share: LinkShare, find: Callable[[list[LinkShare]], V]) -> V:
        """Return ``find`` of the other plays; if there are many plays, of all, and reuse it for a moment."""
        if len(self._members) <= _MAX_FRESH_PLAYS:
            return find([one for one in self._all() if one is not share])
        now = self.clock()
        kept = self._kept.get(find)
        if kept is None or not 0 <= now - kept[0] < _REUSE_S:
            kept = self._kept[find] = now, find(self._all())
        found: V = kept[1]
        return found

    def _all(self) -> list[LinkShare]:
        with self._lock:
            return list(self._members)


class LinkShare(Estimator):
    """Estimates a play's share of a link."""

    name = "share"

    def __init__(self, link: SharedLink, inner: Estimator) -> None:
        super().__init__()
        self._link, self._inner = link, inner
        self._active_at = -math.inf
        self.sampled = False

    def start(self, horizon_s: float) -> None:
        self._inner.start(horizon_s)

    def prime(self, prior: Prior) -> None:
        """Prime with the link's prior; raise `PolicyError` if the estimator raises."""
        super().prime(prior)
        try:
            self._inner.prime(prior)
        except Exception as error:
            raise PolicyError(
                f"estimator {type(self._inner).__name__} raised {error!r} when given the link's history"
            ) from error

    def sample(self, nbytes: float, seconds: float, now: float) -> None:
        self.sampled, self._active_at = True, self._link.clock()
        self._inner.sample(max(nbytes, float(self._link.bytes_within(seconds))), seconds, now)

    def waited(self, now: float) -> None:
        seconds = self._link.clock() - self._active_at
        self._active_at = self._link.clock()
        if 0 < seconds < math.inf:
            self._inner.sample(float(self._link.bytes_within(seconds)), seconds, now)

    def active(self) -> bool:
        """Return whether the play recently received bytes, or waited for others."""
        return self._link.clock() - self._active_at <= _MAX_QUIET_S

    def link_rate(self, *, lower: bool = False) -> float:
        """Return the link's rate or lower bound, bytes per second; 0 if the estimator fails."""
        return _positive(self._inner.lower_bound if lower else self._inner.rate)

    def link_ttfb(self) -> float:
        """Return the least time to first byte, seconds; as `link_rate`."""
        return _positive(self._inner.ttfb)

    def rate(self) -> float:
        return self._share(self._inner.rate(), lower=False)

    def lower_bound(self) -> float:
        return self._share(self._inner.lower_bound(), lower=True)

    def _share(self, own: float, *, lower: bool) -> float:
        if own <= 0 and not self.sampled:  # no bytes yet: use the others' estimate
            own = self._link.of_others(self, _known)[lower]
        return own / (1 + self._link.of_others(self, _active))

    def first_byte(self, seconds: float) -> None:
        self._inner.first_byte(seconds)

    def ttfb(self) -> float:
        """Return the least time to first byte of this play and the others, seconds."""
        own, other = self._inner.ttfb(), self._link.of_others(self, _least_ttfb)
        return min(own, other) if own > 0 and other > 0 else own or other


def _known(shares: list[LinkShare]) -> tuple[float, float]:
    return max(((one.link_rate(), one.link_rate(lower=True)) for one in shares if one.active()), default=(0.0, 0.0))


def _least_ttfb(shares: list[LinkShare]) -> float:
    return min((seconds for one in shares if (seconds := one.link_ttfb()) > 0), default=0.0)


def _active(shares: list[LinkShare]) -> int:
    return sum(one.active() for one in shares)


def _positive(what: Callable[[], float]) -> float:
    try:
        value = float(what())
    except Exception:  # noqa: BLE001  # any error of a plug-in
        return 0.0
    return value if math.isfinite(value) and value > 0 else 0.0


def _named(estimator: Estimator) -> type[LinkShare]:
    cls = type(estimator)
    return type(cls.__name__, (LinkShare,), {"name": getattr(cls, "name", cls.__name__)})


def _now() -> float:
    try:
        return asyncio.get_running_loop().time()
    except RuntimeError:
        return time.monotonic()


_LINKS: weakref.WeakValueDictionary[str | Connection, SharedLink] = weakref.WeakValueDictionary()
_LOCK = threading.Lock()


def link_of(peer: str | Connection) -> SharedLink:
    """Return the link to a peer; it exists while in use."""
    with _LOCK:
        return _LINKS.setdefault(peer, SharedLink())
