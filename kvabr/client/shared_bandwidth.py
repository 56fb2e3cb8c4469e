"""One link, several plays: what each of them sees of it, and what they know of it together.

A play that shares its link sees its own bytes alone. Were it to reckon with those, it would take another's transfers
for a slow link, and would not know, when another begins or ends, that its share is another one from then on. So the
plays of a process to one peer share what they see: each estimates the link by the bytes of all, and reckons with its
share, the link over the plays that are active.
"""

from __future__ import annotations

import asyncio
import math
import threading
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager

from kvabr.abr.estimator import Estimator, Prior
from kvabr.client.peer_history import PeerHistory
from kvabr.quic.interface import Connection
from kvabr.types.errors import PolicyError

_ACTIVE_S = 0.5
"""A play that has not been heard of for so many seconds takes nothing from the others."""


class SharedLink:
    """What the plays of this process share of the way to one peer."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._members: list[LinkShare] = []
        self.total = 0.0
        """Bytes of all plays' samples so far."""

    @contextmanager
    def joined(self, estimator: Estimator, known: Prior | None = None) -> Iterator[LinkShare]:
        """Take part, with an estimator that is fresh, and with what is known of the peer from before."""
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
        """One has received so many bytes; those of all."""
        with self._lock:
            self.total += nbytes
            return self.total

    def active_beside(self, share: LinkShare) -> int:
        """How many others are active."""
        with self._lock:
            return sum(one is not share and one.active() for one in self._members)


class LinkShare(Estimator):
    """The estimator of one play that shares its link: it estimates the link, and says the play's share of it."""

    name = "share"

    def __init__(self, link: SharedLink, inner: Estimator) -> None:
        """Take the estimator that the play would have on its own."""
        super().__init__()
        self._link, self._inner = link, inner
        self._seen, self._joined_at = link.total, _now()
        self._since_s: float | None = None
        self._heard_at: float | None = None

    def start(self, horizon_s: float) -> None:
        """See `Estimator.start`."""
        self._inner.start(horizon_s)

    def prime(self, prior: Prior) -> None:
        """See `Estimator.prime`; the prior is of the link.

        Raises:
            PolicyError: the estimator raises.
        """
        try:
            self._inner.prime(prior)
        except Exception as error:
            raise PolicyError(f"estimator {type(self._inner).__name__} raised {error!r} on what was known") from error

    def sample(self, nbytes: float, seconds: float, now: float) -> None:
        """Hear of the play's own bytes, and count those of the others in the same time."""
        total = self._link.heard(nbytes)
        # Before its first sample a play has waited: what the others received meanwhile they did not in `seconds`.
        since_s = now - max(seconds, _now() - self._joined_at) if self._since_s is None else self._since_s
        elapsed_s = max(seconds, now - since_s)
        others = max(0.0, total - self._seen - nbytes)
        self._seen, self._since_s, self._heard_at = total, now, _now()
        self._inner.sample(nbytes + (others * seconds / elapsed_s if elapsed_s > 0 else 0.0), seconds, now)

    @property
    def heard(self) -> bool:
        """Whether there was any sample."""
        return self._heard_at is not None

    def active(self) -> bool:
        """Whether it was heard of lately."""
        return self._heard_at is not None and _now() - self._heard_at <= _ACTIVE_S

    def link_rate(self) -> float:
        """What the whole link carries, bytes per second; 0 where the estimator cannot say.

        Others ask, or a play that is over: what is wrong with the estimator is for its own play to tell.
        """
        try:
            rate = float(self._inner.rate())
        except Exception:  # noqa: BLE001  # a plug-in's, whatever it is
            return 0.0
        return rate if math.isfinite(rate) and rate > 0 else 0.0

    def rate(self) -> float:
        """The play's share of the link."""
        return self._inner.rate() / (1 + self._link.active_beside(self))

    def lower_bound(self) -> float:
        """The play's share of what the link carries at least."""
        return self._inner.lower_bound() / (1 + self._link.active_beside(self))

    def first_byte(self, seconds: float) -> None:
        """See `Estimator.first_byte`."""
        self._inner.first_byte(seconds)

    def ttfb(self) -> float:
        """See `Estimator.ttfb`."""
        return self._inner.ttfb()


def _named(estimator: Estimator) -> type[LinkShare]:
    """A `LinkShare` that goes by the name of what it stands for, so that a fault is laid at the right door."""
    cls = type(estimator)
    return type(cls.__name__, (LinkShare,), {"name": getattr(cls, "name", cls.__name__)})


def _now() -> float:
    """The time of the loop that the play runs on."""
    try:
        return asyncio.get_running_loop().time()
    except RuntimeError:
        return time.monotonic()


_BY_PEER: weakref.WeakValueDictionary[str, SharedLink] = weakref.WeakValueDictionary()
_BY_CONNECTION: weakref.WeakKeyDictionary[Connection, SharedLink] = weakref.WeakKeyDictionary()
_LOCK = threading.Lock()


def link_of(connection: Connection) -> SharedLink:
    """The link that a connection runs over: plays to one peer share it, also on several connections."""
    with _LOCK:
        link = _BY_CONNECTION.get(connection)
        if link is None:
            peer = connection.peer
            link = (None if peer is None else _BY_PEER.get(peer)) or SharedLink()
            if peer is not None:
                _BY_PEER[peer] = link
            _BY_CONNECTION[connection] = link
        return link


@contextmanager
def estimating(connection: Connection, estimator: Estimator, history: PeerHistory | None) -> Iterator[Estimator]:
    """The estimator of a play over a connection, which knows what is known of the peer, and tells what it finds out.

    Args:
        connection: where the play fetches.
        estimator: fresh.
        history: what is known from plays before; None: nothing is kept.
    """
    peer = connection.peer
    known = None if history is None or peer is None else history.of(peer)
    with link_of(connection).joined(estimator, known) as share:
        yield share
    # A play that received nothing knows no more than was known: it must not make old news fresh.
    if history is not None and peer is not None and share.heard:
        history.heard(peer, share.link_rate(), share.ttfb())
