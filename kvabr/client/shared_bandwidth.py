"""Estimates of a link that several plays share.

A play sees only its own bytes. From those alone it would take another play's transfers for a slow link, and would not
notice that its share changes when another play begins or ends. So the plays of a process to one peer share what they
see: each estimates the link from the bytes of all, and expects its share, the link's rate over the active plays.
"""

from __future__ import annotations

import asyncio
import math
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from kvabr.abr.estimator import Estimator, Prior
from kvabr.client.peer_history import PeerHistory
from kvabr.quic.interface import Connection
from kvabr.types.errors import PolicyError

_ACTIVE_S = 0.5
"""Seconds without a sample after which a play takes nothing from the others."""


class SharedLink:
    """What the plays of this process know of the path to one peer."""

    def __init__(self, clock: Callable[[], float] | None = None) -> None:
        """Begin without plays; ``clock`` returns the time, seconds (None: that of the running event loop)."""
        self.clock = clock or _now
        self._lock = threading.Lock()
        self._members: list[LinkShare] = []
        self.total = 0.0
        """Bytes of all plays' samples so far."""

    @contextmanager
    def joined(self, estimator: Estimator, known: Prior | None = None) -> Iterator[LinkShare]:
        """Yield a play's estimator of its share of the link, given a fresh one of the whole link and what is known."""
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

    def heard(self, nbytes: float) -> float:
        """Count bytes that a play received, and return those of all plays."""
        with self._lock:
            self.total += nbytes
            return self.total

    def active_beside(self, share: LinkShare) -> int:
        """Return how many other plays are active."""
        with self._lock:
            return sum(one is not share and one.active() for one in self._members)


class LinkShare(Estimator):
    """Estimates a play's share of a link by an estimator of the whole link."""

    name = "share"

    def __init__(self, link: SharedLink, inner: Estimator) -> None:
        """Wrap the estimator that the play would use alone."""
        super().__init__()
        self._link, self._inner = link, inner
        self._seen, self._joined_at = link.total, link.clock()
        self._since_s: float | None = None
        self._heard_at: float | None = None

    def start(self, horizon_s: float) -> None:
        """See `Estimator.start`."""
        self._inner.start(horizon_s)

    def prime(self, prior: Prior) -> None:
        """See `Estimator.prime`; the prior is of the link. Raise `PolicyError` if the estimator raises."""
        try:
            self._inner.prime(prior)
        except Exception as error:
            raise PolicyError(f"estimator {type(self._inner).__name__} raised {error!r} on what was known") from error

    def sample(self, nbytes: float, seconds: float, now: float) -> None:
        """See `Estimator.sample`; adds what the other plays received in the same time."""
        total = self._link.heard(nbytes)
        # Before its first sample a play has waited: the others received their bytes in more than `seconds`.
        since_s = now - max(seconds, self._link.clock() - self._joined_at) if self._since_s is None else self._since_s
        elapsed_s = max(seconds, now - since_s)
        others = max(0.0, total - self._seen - nbytes)
        self._seen, self._since_s, self._heard_at = total, now, self._link.clock()
        self._inner.sample(nbytes + (others * seconds / elapsed_s if elapsed_s > 0 else 0.0), seconds, now)

    @property
    def heard(self) -> bool:
        """Whether there was any sample."""
        return self._heard_at is not None

    def active(self) -> bool:
        """Return whether there was a sample lately."""
        return self._heard_at is not None and self._link.clock() - self._heard_at <= _ACTIVE_S

    def link_rate(self) -> float:
        """Return the rate of the whole link, bytes per second; 0 where the estimator cannot say.

        Called for other plays and at the end of a play: errors of the estimator are reported by its own play.
        """
        try:
            rate = float(self._inner.rate())
        except Exception:  # noqa: BLE001  # a plug-in's, whatever it is
            return 0.0
        return rate if math.isfinite(rate) and rate > 0 else 0.0

    def rate(self) -> float:
        """Return the play's share of the link, bytes per second."""
        return self._inner.rate() / (1 + self._link.active_beside(self))

    def lower_bound(self) -> float:
        """Return the play's share of the link's lower bound, bytes per second."""
        return self._inner.lower_bound() / (1 + self._link.active_beside(self))

    def first_byte(self, seconds: float) -> None:
        """See `Estimator.first_byte`."""
        self._inner.first_byte(seconds)

    def ttfb(self) -> float:
        """See `Estimator.ttfb`."""
        return self._inner.ttfb()


def _named(estimator: Estimator) -> type[LinkShare]:
    """Return a `LinkShare` class with the estimator's name, so that errors name the user's estimator."""
    cls = type(estimator)
    return type(cls.__name__, (LinkShare,), {"name": getattr(cls, "name", cls.__name__)})


def _now() -> float:
    """Return the time of the event loop that the play runs on."""
    try:
        return asyncio.get_running_loop().time()
    except RuntimeError:
        return time.monotonic()


_LINKS: weakref.WeakValueDictionary[str | Connection, SharedLink] = weakref.WeakValueDictionary()
_LOCK = threading.Lock()


def link_of(connection: Connection) -> SharedLink:
    """Return the link of a connection, as long as any play uses it. Connections to one peer share it."""
    with _LOCK:
        return _LINKS.setdefault(connection.peer or connection, SharedLink())


@contextmanager
def estimating(connection: Connection, estimator: Estimator, history: PeerHistory) -> Iterator[Estimator]:
    """Yield a play's estimator, primed by what is known of the peer; what it finds out is recorded at the end."""
    peer = connection.peer
    known = None if peer is None else history.of(peer)
    with link_of(connection).joined(estimator, known) as share:
        yield share
    # A play that received nothing has learned nothing: it must not make old knowledge look fresh.
    if peer is not None and share.heard:
        history.heard(peer, share.link_rate(), share.ttfb())
