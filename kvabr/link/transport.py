"""What a MoQT session needs of a connection: streams, as QUIC has them and QMux has them on TCP."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable

LEAST_AHEAD_BYTES, MOST_AHEAD_BYTES = 16 << 10, 256 << 10
"""Bytes that a transport is given ahead of what it has sent: what it can send before it asks again, within these
bounds. More would let less urgent data in first on a slow link."""


class StreamTransport(ABC):
    """The streams of one connection. An `Endpoint` owns it, and hears of what happens."""

    name: str
    """``aioquic``, ``qh3`` or ``tcp``."""
    broken: tuple[type[Exception], ...] = (ValueError,)
    """Errors of the methods below on a stream that is over, which a peer can cause at any time."""

    @abstractmethod
    def write(self, stream: int, data: bytes | memoryview, *, fin: bool = False) -> None:
        """Send bytes on a stream, which is opened by its first ones. They must not change any more."""

    @abstractmethod
    def reset(self, stream: int, code: int) -> None:
        """Send no more on a stream (RESET_STREAM)."""

    @abstractmethod
    def stop(self, stream: int, code: int) -> None:
        """Ask the peer to send no more on a stream (STOP_SENDING)."""

    @abstractmethod
    def close(self, code: int, reason: str) -> None:
        """Close the connection with a code of the application."""

    @abstractmethod
    def ping(self) -> None:
        """Have the peer answer; `Endpoint.alive` tells that it has."""

    @abstractmethod
    def flush(self) -> None:
        """Send what there is to send."""

    def flush_soon(self) -> None:
        """Send it now or soon; whatever costs less."""
        self.flush()

    @abstractmethod
    async def wait_closed(self) -> None:
        """Wait until the connection is over on both ends."""

    @abstractmethod
    def drop(self) -> None:
        """Let go of the socket, if it is this connection's alone."""

    @abstractmethod
    def may_open(self, stream: int) -> bool:
        """Return whether a stream of ours is within the peer's limit."""

    @abstractmethod
    def backlog(self, stream: int) -> int:
        """Return the bytes of a stream of ours that the peer does not have, as far as is known."""

    @abstractmethod
    def unsent(self, streams: Iterable[int]) -> int:
        """Return the bytes of our streams that have not been sent yet; ``streams`` are those that may have some."""

    @abstractmethod
    def ahead(self) -> int:
        """Return how many bytes it should have ahead of what it has sent."""

    @property
    def piece(self) -> int:
        """How many bytes to write at a time, at most."""
        return 64 << 10

    @abstractmethod
    def in_flight(self) -> int:
        """Return the bytes that were sent, and neither acknowledged nor lost."""

    @abstractmethod
    def delivered(self, stream: int) -> bool:
        """Return whether all of a finished stream of ours has left, as far as the transport can tell."""

    @abstractmethod
    def round_trip(self) -> float | None:
        """Return the smoothed round trip, seconds, if it is known."""

    @abstractmethod
    def lost(self) -> int | None:
        """Return how many packets of ours were lost, where that is counted."""

    @property
    @abstractmethod
    def address(self) -> str:
        """The address of the peer, without port."""

    @abstractmethod
    def peer_certificate(self) -> bytes | None:
        """Return the peer's certificate, DER."""
