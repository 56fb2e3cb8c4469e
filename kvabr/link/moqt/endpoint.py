"""One end of a MoQT session on one connection: an `Endpoint` moves bytes between them, and passes events on.

The connection has streams, as in QUIC or in QMux on TCP (`StreamTransport`).
"""

from __future__ import annotations

import contextlib
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from typing import Any

from kvabr.moqt.codes import SessionCode
from kvabr.moqt.events import Close, Event, Reset, Stop, Write
from kvabr.moqt.session import MoqtSession
from kvabr.moqt.wire import Draft, by_alpn

MIN_AHEAD_BYTES, MAX_AHEAD_BYTES = 16 << 10, 256 << 10
"""Minimum and maximum unsent bytes to give to a transport. With more, urgent data would wait for them on a slow
link."""
_MAX_HELD = 1024
"""Maximum number of streams that wait for the peer's stream limit; a peer that causes more is hostile."""


class StreamTransport(ABC):
    """The streams of one connection. It reports events to its `Endpoint`."""

    broken: tuple[type[Exception], ...] = (ValueError,)
    """Errors that methods raise for a stream that is over; a peer can cause them at any time."""

    @abstractmethod
    def write(self, stream: int, data: bytes | memoryview, *, fin: bool = False) -> None:
        """Send bytes on a stream; the first bytes open it. ``data`` must not change afterwards."""

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
        """Send pending data now or in the next iteration of the loop, whichever is cheaper."""
        self.flush()

    @abstractmethod
    async def wait_closed(self) -> None:
        """Wait until both ends have closed the connection."""

    @abstractmethod
    def drop(self) -> None:
        """Close the socket, if only this connection uses it."""

    @abstractmethod
    def may_open(self, stream: int) -> bool:
        """Return True if the peer's limit allows this stream of ours."""

    @abstractmethod
    def backlog(self, stream: int) -> int:
        """Return the bytes of our stream that are not known to be delivered."""

    @abstractmethod
    def unsent(self, streams: Iterable[int]) -> int:
        """Return the unsent bytes of our streams. The caller lists in ``streams`` all that may have some."""

    @abstractmethod
    def ahead(self) -> int:
        """Return how many unsent bytes to give to the transport."""

    @property
    def piece(self) -> int:
        """Maximum bytes to write at once."""
        return 64 << 10

    @abstractmethod
    def in_flight(self) -> int:
        """Return the bytes sent, but neither acknowledged nor lost."""

    @abstractmethod
    def delivered(self, stream: int) -> bool:
        """Return True if our finished stream was delivered completely, as far as known."""

    @abstractmethod
    def round_trip(self) -> float | None:
        """Return the smoothed round trip in seconds."""

    @property
    @abstractmethod
    def address(self) -> str:
        """The peer's address without port."""

    @abstractmethod
    def peer_certificate(self) -> bytes | None:
        """Return the peer's certificate in DER."""


class Endpoint(ABC):
    """Base class of the owner of one connection and its session."""

    transport: StreamTransport
    """Set before its first event."""

    most_unread = 1 << 20
    """Maximum bytes of answers on one stream that a peer may leave unread."""
    starts_at_once = True
    """True: SETUP is sent after the handshake. False: the subclass starts the session."""

    def __init__(self) -> None:
        self.session: MoqtSession | None = None
        self._held: dict[int, list[Write | Reset | Stop]] = {}
        """Commands for streams beyond the peer's limit, by stream number."""

    # ------------------------------------------------------------------ for subclasses

    @abstractmethod
    def make_session(self, draft: Draft) -> MoqtSession | None:
        """Return a session, not started, after the handshake; None if the connection was closed."""

    @abstractmethod
    def happened(self, event: Event) -> None:
        """Handle an event of the session."""

    @abstractmethod
    def ended(self, reason: str, code: int) -> None:
        """Handle the end of the connection. Idempotent."""

    def alive(self) -> None:  # noqa: B027  # optional
        """Handle the acknowledgement of a PING."""

    def feed(self) -> None:  # noqa: B027  # a client has no output of its own
        """Give the transport more data; called before the transport sends."""

    # ------------------------------------------------------------------ from the transport

    def received(self, stream: int, data: bytes | memoryview, *, fin: bool) -> None:
        """Handle bytes of a stream."""
        if self.session is not None:
            self.session.receive(stream, data, fin=fin)

    def receive_buffers(self, stream: int, most: int) -> list[memoryview]:
        """Return memory for the next bytes of a stream, at most ``most``; empty: they are passed to `received`."""
        del stream, most
        return []

    def took(self, stream: int, into: list[memoryview], count: int) -> None:  # noqa: B027  # optional
        """Handle ``count`` bytes that were written to the memory of `receive_buffers`."""

    def worked(self, cpu_s: float) -> None:  # noqa: B027  # optional
        """Add processor time of the transport's threads, in seconds."""

    def was_reset(self, stream: int, code: int) -> None:
        """Handle the reset of a stream by the peer."""
        if self.session is not None:
            self.session.receive_reset(stream, code)

    def was_stopped(self, stream: int, code: int) -> None:
        """Handle a STOP_SENDING of the peer."""
        if self.session is not None:
            self.session.receive_stop(stream, code)

    def handshake_done(self, alpn: str | None) -> None:
        """Start the session with the negotiated protocol."""
        draft = by_alpn(alpn or "")
        if draft is None:
            self.shut(SessionCode.VERSION_NEGOTIATION_FAILED, f"no common protocol, the peer chose {alpn!r}")
            return
        self.session = self.make_session(draft)
        if self.session is not None and self.starts_at_once:
            self.session.start()

    # ------------------------------------------------------------------ to the transport

    def settle(self) -> None:
        """Handle the session's events, and carry out its commands."""
        session = self.session
        if session is None:
            return
        while events := session.take_events():
            for event in events:
                self.happened(event)
        for stream in [each for each in self._held if self.transport.may_open(each)]:
            for held in self._held.pop(stream):
                self._carry_out(held)
        self.carry_out()

    def carry_out(self) -> None:
        """Carry out the session's commands."""
        while self.session is not None and (commands := self.session.take_commands()):
            for command in commands:
                self._carry_out(command)

    def settle_and_send(self) -> None:
        """Call `settle`, and send; for use outside of the transport's callbacks."""
        self.settle()
        self.transport.flush_soon()

    def may_send(self, stream: int) -> bool:
        """Return True if the peer's limit allows the stream."""
        return stream not in self._held

    def _carry_out(self, command: Write | Reset | Stop | Close) -> None:
        transport, session = self.transport, self.session
        if not isinstance(command, Close) and session is not None:
            stream = command.stream
            ours = stream % 2 == (not session.client)
            if stream in self._held or (ours and not transport.may_open(stream)):
                self._hold(command, session)
                return
        with contextlib.suppress(*transport.broken):  # the peer reset the stream, or the connection is closing
            if isinstance(command, Write):
                transport.write(command.stream, command.data, fin=command.fin)
                if len(command.data) > 0 and transport.backlog(command.stream) > self.most_unread:
                    transport.close(SessionCode.INTERNAL_ERROR, "the peer does not read answers")
            elif isinstance(command, Reset):
                transport.reset(command.stream, command.code)
            elif isinstance(command, Stop):
                transport.stop(command.stream, command.code)
            else:
                transport.close(command.code, command.reason)

    def _hold(self, command: Write | Reset | Stop, session: MoqtSession) -> None:
        """Hold a command until the peer's limit allows its stream."""
        stream = command.stream
        waiting = self._held.setdefault(stream, [])
        if not isinstance(command, Write):
            # The data is obsolete, but the stream must be opened, since stream numbers have no gaps.
            waiting[:] = [Write(stream, b""), *(one for one in waiting if not isinstance(one, Write))]
        waiting.append(command)
        if len(self._held) > _MAX_HELD:
            session.close(SessionCode.INTERNAL_ERROR, f"more than {_MAX_HELD} streams wait for the stream limit")

    def safely(self, work: Callable[..., None], *arguments: Any) -> None:
        """Run ``work``; on an unexpected error, log it and end the connection, whose state may be inconsistent."""
        try:
            work(*arguments)
        except Exception as error:
            logging.getLogger(__name__).exception("connection ended by an internal error")
            with contextlib.suppress(*self.transport.broken):
                self.transport.close(SessionCode.INTERNAL_ERROR, "internal error")
            self.ended(f"internal error: {type(error).__name__}: {error}", SessionCode.INTERNAL_ERROR)

    def shut(self, code: int, reason: str) -> None:
        """Close the connection."""
        if self.session is not None:
            self.session.close(code, reason)
            self.settle()
        else:
            self.transport.close(code, reason)
        self.transport.flush()
