"""The interface between a MoQT session and a connection: streams, as in QUIC and in QMux on TCP."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable

MIN_AHEAD_BYTES, MAX_AHEAD_BYTES = 16 << 10, 256 << 10
"""Least and most unsent bytes of a transport. More would put less urgent data first on a slow link."""


class StreamTransport(ABC):
    """The streams of one connection. Events go to its `Endpoint`."""

    broken: tuple[type[Exception], ...] = (ValueError,)
    """Errors of the methods below on a stream that is over, which a peer can cause at any time."""

    @abstractmethod
    def write(self, stream: int, data: bytes | memoryview, *, fin: bool = False) -> None:
        """Send bytes on a stream, which its first bytes open. They must not change afterwards."""

    @abstractmethod
    def reset(self, stream: int, code: int) -> None:
        """Stop sending on a stream (RESET_STREAM)."""

    @abstractmethod
    def stop(self, stream: int, code: int) -> None:
        """Ask the peer to stop sending on a stream (STOP_SENDING)."""

    @abstractmethod
    def close(self, code: int, reason: str) -> None:
        """Close the connection with an application code."""

    @abstractmethod
    def ping(self) -> None:
        """Ping the peer; its answer calls `Endpoint.alive`."""

    @abstractmethod
    def flush(self) -> None:
        """Send pending data now."""

    def flush_soon(self) -> None:
        """Send pending data now or soon, whichever is cheaper."""
        self.flush()

    @abstractmethod
    async def wait_closed(self) -> None:
        """Wait until both ends have closed the connection."""

    @abstractmethod
    def drop(self) -> None:
        """Close the socket, if only this connection uses it."""

    @abstractmethod
    def may_open(self, stream: int) -> bool:
        """Return whether the peer's limit allows a stream of ours."""

    @abstractmethod
    def backlog(self, stream: int) -> int:
        """Return the bytes of our stream that the peer may lack."""

    @abstractmethod
    def unsent(self, streams: Iterable[int]) -> int:
        """Return the unsent bytes of our streams; only ``streams`` may have some."""

    @abstractmethod
    def ahead(self) -> int:
        """Return how many unsent bytes the transport should have."""

    @property
    def piece(self) -> int:
        """Most bytes to write at once."""
        return 64 << 10

    @abstractmethod
    def in_flight(self) -> int:
        """Return the bytes sent, but neither acknowledged nor lost."""

    @abstractmethod
    def delivered(self, stream: int) -> bool:
        """Return whether our finished stream was sent completely, if known."""

    @abstractmethod
    def round_trip(self) -> float | None:
        """Return the smoothed round trip, seconds."""

    @property
    @abstractmethod
    def address(self) -> str:
        """The peer's address, without port."""

    @abstractmethod
    def peer_certificate(self) -> bytes | None:
        """Return the peer's certificate, DER."""
