"""One end of a MoQT session on one connection: moves bytes between the two, and events upwards."""

from __future__ import annotations

import contextlib
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

from kvabr.link.transport import StreamTransport
from kvabr.moqt.codes import SessionCode
from kvabr.moqt.events import Close, Event, Reset, Stop, Write
from kvabr.moqt.session import MoqtSession
from kvabr.moqt.wire import Draft, by_alpn

_MOST_HELD = 1024
"""Maximum streams that wait for the peer's stream limit. A peer that makes us open more and allows none is hostile."""


class Endpoint(ABC):
    """The owner of one connection and one session."""

    transport: StreamTransport
    """The connection, set before anything happens on it."""

    most_unread = 1 << 20
    """Maximum bytes of answers on one stream that a peer may leave unread."""
    starts_at_once = True
    """Whether SETUP is sent when the handshake is done; otherwise the subclass starts the session."""

    def __init__(self) -> None:
        self.underway: set[int] = set()
        """Streams that the transport has been given completely, and that the peer may not have completely."""
        self.session: MoqtSession | None = None
        """Once the handshake is done."""
        self._held: dict[int, list[Write | Reset | Stop]] = {}
        """Commands for streams beyond the peer's stream limit, in the order of the streams."""

    # ------------------------------------------------------------------ for subclasses

    @abstractmethod
    def make_session(self, draft: Draft) -> MoqtSession | None:
        """Return a session for a finished handshake, not started; None if the connection was closed instead."""

    @abstractmethod
    def happened(self, event: Event) -> None:
        """Handle an event of the session."""

    @abstractmethod
    def ended(self, reason: str, code: int) -> None:
        """Handle the end of the connection."""

    def alive(self) -> None:  # noqa: B027  # most do not care
        """Handle the acknowledgement of a PING."""

    def feed(self) -> None:  # noqa: B027  # a client has nothing to send
        """Give the transport more to send; called before it sends."""

    # ------------------------------------------------------------------ from the transport

    def received(self, stream: int, data: bytes | memoryview, *, fin: bool) -> None:
        """Handle bytes of a stream."""
        if self.session is not None:
            self.session.receive(stream, data, fin=fin)

    def room(self, stream: int, most: int) -> list[memoryview]:
        """Return memory for at most ``most`` bytes that come next on a stream; none: pass them to `received`."""
        del stream, most
        return []

    def took(self, stream: int, into: list[memoryview], count: int) -> None:  # noqa: B027  # most have no room
        """Note that ``count`` bytes of a stream have been written to what `room` returned."""

    def worked(self, cpu_s: float) -> None:  # noqa: B027  # most do not care
        """Note processor time that a thread of the transport has taken, seconds."""

    def was_reset(self, stream: int, code: int) -> None:
        """Handle the reset of a stream by the peer."""
        if self.session is not None:
            self.session.receive_reset(stream, code)

    def was_stopped(self, stream: int, code: int) -> None:
        """Handle a STOP_SENDING of the peer."""
        if self.session is not None:
            self.session.receive_stop(stream, code)

    def handshake_done(self, alpn: str | None) -> None:
        """Begin the session, with the protocol that both ends have agreed on."""
        draft = by_alpn(alpn or "")
        if draft is None:
            self.shut(SessionCode.VERSION_NEGOTIATION_FAILED, f"no common protocol, the peer chose {alpn!r}")
            return
        self.session = self.make_session(draft)
        if self.session is not None and self.starts_at_once:
            self.session.start()

    # ------------------------------------------------------------------ to the transport

    def settle(self) -> None:
        """Deliver the session's events and carry out its commands."""
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
        """Do the same outside of the transport's callbacks, and send."""
        self.settle()
        self.transport.flush_soon()

    def may_send(self, stream: int) -> bool:
        """Return whether the peer allows a stream that the session has opened."""
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
                    transport.close(SessionCode.INTERNAL_ERROR, "answers are not read")
            elif isinstance(command, Reset):
                transport.reset(command.stream, command.code)
            elif isinstance(command, Stop):
                transport.stop(command.stream, command.code)
            else:
                transport.close(command.code, command.reason)

    def _hold(self, command: Write | Reset | Stop, session: MoqtSession) -> None:
        """Hold a command back until the peer allows its stream."""
        stream = command.stream
        waiting = self._held.setdefault(stream, [])
        if not isinstance(command, Write):
            # The data is no longer wanted, but the stream must be opened: stream numbers leave no gaps.
            waiting[:] = [Write(stream, b""), *(one for one in waiting if not isinstance(one, Write))]
        waiting.append(command)
        if len(self._held) > _MOST_HELD:
            session.close(SessionCode.INTERNAL_ERROR, f"more than {_MOST_HELD} streams wait for the stream limit")

    def safely(self, work: Callable[..., None], *arguments: Any) -> None:
        """Run ``work``; an unexpected error ends the connection and is logged, so that it is never left half alive."""
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
