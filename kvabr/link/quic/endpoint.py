"""One end of a MoQT session on one QUIC connection: moves bytes between the two, and events upwards."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

from kvabr.link.quic.backend import STILL_S, QuicLibrary
from kvabr.moqt.codes import SessionCode, name_of
from kvabr.moqt.events import Close, Event, Reset, Stop, Write
from kvabr.moqt.session import MoqtSession
from kvabr.moqt.wire import Draft, by_alpn

_CRYPTO_ERROR = 0x100
"""First of the QUIC error codes that are TLS alerts (RFC 9001, section 4.8)."""
_INVALID_TOKEN = 0xB
"""QUIC error code (RFC 9000, section 20.1). Our Retry tokens are valid, so it means that the server admits nobody."""
_NO_APPLICATION_PROTOCOL = _CRYPTO_ERROR + 120
_MOST_HELD = 1024
"""Maximum streams that wait for the peer's stream limit. A peer that makes us open more and allows none is hostile."""
_STUCK = "the QUIC library cannot send any more on this connection"
_GONE = (ValueError, AssertionError, RuntimeError, KeyError)
"""Errors of the libraries on a stream that is over, which a peer can cause at any time."""


class Endpoint(ABC):
    """The owner of one QUIC connection and one session."""

    most_unread = 1 << 20
    """Maximum bytes of answers on one stream that a peer may leave unread."""
    starts_at_once = True
    """Whether SETUP is sent when the handshake is done; otherwise the subclass starts the session."""

    def __init__(self, library: QuicLibrary) -> None:
        self.lib = library
        self.driver: Any = None
        """The library's protocol object, once it exists."""
        self.quic: Any = None
        """The library's connection, once it exists."""
        self._given_up = False
        self._looking_again: asyncio.TimerHandle | None = None
        self.underway: set[int] = set()
        """Streams that QUIC has been given completely, and that the peer has not acknowledged completely."""
        self.session: MoqtSession | None = None
        """Once the handshake is done."""
        self._kinds = library.events
        self._held: dict[int, list[Write | Reset | Stop]] = {}
        """Commands for streams beyond the peer's stream limit, in the order of the streams."""
        self.broken: tuple[type[Exception], ...] = _GONE
        """Errors of the library on a stream that is over."""
        if library.name == "qh3":
            from qh3.quic.connection import QuicConnectionError  # noqa: PLC0415  # only where it is installed

            self.broken = (*_GONE, QuicConnectionError)

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
        """Give the connection more to send; called before packets are made."""

    def sent(self) -> None:
        """End the connection, once this turn of the event loop is over, if the library can never send on it again."""
        if self._given_up:
            return
        loop = asyncio.get_running_loop()
        if self.lib.stuck(self.quic, self.underway):
            self._given_up = True
            loop.call_soon(self.safely, self._give_up)
        elif self._looking_again is None and self.lib.suspect(self.quic):
            self._looking_again = loop.call_later(STILL_S, self._look_again)

    def _look_again(self) -> None:
        self._looking_again = None
        if self.lib.closing(self.quic) is None:
            self.sent()

    def _give_up(self) -> None:
        with contextlib.suppress(*self.broken):
            self.quic.close(error_code=SessionCode.INTERNAL_ERROR, reason_phrase=_STUCK)
        self.ended(_STUCK, SessionCode.INTERNAL_ERROR)

    # ------------------------------------------------------------------ from the library

    def quic_event(self, event: Any) -> None:
        """Handle an event of the QUIC connection."""
        kinds, session = self._kinds, self.session
        kind = type(event)
        if kind is kinds.StreamDataReceived:
            if session is not None:
                session.receive(event.stream_id, event.data, fin=event.end_stream)
        elif kind is kinds.HandshakeCompleted:
            self._handshake_done(event.alpn_protocol)
        elif kind is kinds.ConnectionTerminated:
            # Only application codes are MoQT's; QUIC uses the same small numbers for other errors.
            ours = event.frame_type is None or event.error_code >= _CRYPTO_ERROR
            code = event.error_code if ours else SessionCode.INTERNAL_ERROR
            self.ended(explain(event.error_code, event.frame_type, event.reason_phrase), code)
        elif kind is kinds.PingAcknowledged:
            self.alive()
        elif session is not None:
            if kind is kinds.StreamReset:
                session.receive_reset(event.stream_id, event.error_code)
            elif kind is kinds.StopSendingReceived:
                session.receive_stop(event.stream_id, event.error_code)

    def _handshake_done(self, alpn: str | None) -> None:
        draft = by_alpn(alpn or "")
        if draft is None:
            self.shut(SessionCode.VERSION_NEGOTIATION_FAILED, f"no common protocol, the peer chose {alpn!r}")
            return
        self.session = self.make_session(draft)
        if self.session is not None and self.starts_at_once:
            self.session.start()

    # ------------------------------------------------------------------ to the library

    def settle(self) -> None:
        """Deliver the session's events and carry out its commands."""
        session = self.session
        if session is None:
            return
        while events := session.take_events():
            for event in events:
                self.happened(event)
        for stream in [each for each in self._held if self.lib.may_open(self.quic, each)]:
            for held in self._held.pop(stream):
                self._carry_out(held)
        while commands := session.take_commands():
            for command in commands:
                self._carry_out(command)

    def settle_and_send(self) -> None:
        """Do the same outside of the library's callbacks, and send."""
        self.settle()
        self.driver._transmit_soon() if self.lib.name == "aioquic" else self.driver.transmit()  # noqa: SLF001

    def may_send(self, stream: int) -> bool:
        """Return whether the peer allows a stream that the session has opened."""
        return stream not in self._held

    def _carry_out(self, command: Write | Reset | Stop | Close) -> None:
        quic, session = self.quic, self.session
        if not isinstance(command, Close) and session is not None:
            stream = command.stream
            ours = stream % 2 == (not session.client)
            if stream in self._held or (ours and not self.lib.may_open(quic, stream)):
                self._hold(command, session)
                return
        with contextlib.suppress(*self.broken):  # the peer reset the stream, or the connection is closing
            if isinstance(command, Write):
                quic.send_stream_data(command.stream, command.data, command.fin)
                if len(command.data) > 0 and self.lib.backlog(quic, command.stream) > self.most_unread:
                    quic.close(error_code=SessionCode.INTERNAL_ERROR, reason_phrase="answers are not read")
            elif isinstance(command, Reset):
                quic.reset_stream(command.stream, command.code)
                self.lib.hurry(quic, command.stream)
            elif isinstance(command, Stop):
                quic.stop_stream(command.stream, command.code)
                self.lib.hurry(quic, command.stream)
            else:
                quic.close(error_code=command.code, reason_phrase=command.reason[:500])

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
            with contextlib.suppress(*self.broken):
                self.quic.close(error_code=SessionCode.INTERNAL_ERROR, reason_phrase="internal error")
            self.ended(f"internal error: {type(error).__name__}: {error}", SessionCode.INTERNAL_ERROR)

    def shut(self, code: int, reason: str) -> None:
        """Close the connection."""
        if self.session is not None:
            self.session.close(code, reason)
            self.settle()
        else:
            self.quic.close(error_code=code, reason_phrase=reason[:500])
        self.driver.transmit()


def explain(code: int, frame_type: int | None, reason: str) -> str:
    """Return why a connection ended, as text."""
    said = f": {reason}" if reason else ""
    if code == _NO_APPLICATION_PROTOCOL or "ALPN" in reason:  # qh3 sends another alert
        return "no common protocol: the peer speaks none of the MoQT drafts that were offered"
    if code == _INVALID_TOKEN and frame_type is not None:
        return "the server takes no more connections now; try another server, or later"
    if _CRYPTO_ERROR <= code < _CRYPTO_ERROR + 0x100 and frame_type is not None:
        return f"TLS failed (alert {code - _CRYPTO_ERROR}){said}"
    if frame_type is None and code:
        return f"closed with {name_of(code, SessionCode)}{said}"
    return f"the connection ended{said}" if code == 0 else f"QUIC error 0x{code:x}{said}"


def protocol_class(library: QuicLibrary, attach: Callable[[Any], Endpoint]) -> Any:
    """Return a subclass of the library's protocol that passes events to an `Endpoint`, made by ``attach``."""
    base: Any = library.protocol

    class EndpointProtocol(base):  # type: ignore[misc]  # the library decides what it is
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            library.prepare(self._quic)
            self.endpoint = attach(self)
            self.endpoint.driver, self.endpoint.quic = self, self._quic

        def quic_event_received(self, event: Any) -> None:
            self.endpoint.safely(self.endpoint.quic_event, event)

        def _process_events(self) -> None:
            # Deliver the events of many packets at once: delivering costs more than receiving.
            super()._process_events()
            self.endpoint.safely(self.endpoint.settle)
            if (closing := library.closing(self._quic)) is not None:
                self.endpoint.quic_event(closing)

        def datagrams_received(self, datagrams: list[bytes], address: Any) -> None:
            if library.name == "qh3":
                super().datagrams_received(datagrams, address)
                return
            quic, now = self._quic, self._loop.time()
            for datagram in datagrams:
                quic.receive_datagram(datagram, address, now)
            self._process_events()
            self.transmit()

        def transmit(self) -> None:
            self.endpoint.feed()
            super().transmit()
            self.endpoint.sent()

    return EndpointProtocol
