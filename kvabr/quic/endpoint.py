"""One end of a MoQT session on one QUIC connection: carries bytes from the one to the other, and events upwards."""

from __future__ import annotations

import contextlib
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

from kvabr.moqt.codes import SessionCode, name_of
from kvabr.moqt.events import Close, Event, Reset, Stop, Write
from kvabr.moqt.session import Session
from kvabr.moqt.wire import Draft, by_alpn
from kvabr.quic.library import QuicLibrary

_CRYPTO_ERROR = 0x100
"""QUIC error codes from here on are TLS alerts (RFC 9001, section 4.8)."""
_INVALID_TOKEN = 0xB
"""Of QUIC (RFC 9000, section 20.1): our own Retry tokens are good, so it means that the server wants nobody."""
_NO_APPLICATION_PROTOCOL = _CRYPTO_ERROR + 120
_MOST_HELD = 1024
"""Streams that may wait until the peer allows them; one that needs so many and allows none is up to no good."""
_GONE = (ValueError, AssertionError, RuntimeError, KeyError)
"""What the libraries raise on a stream that is over, which a peer can bring about at any time."""


class Endpoint(ABC):
    """The owner of one QUIC connection and one session."""

    most_unread = 1 << 20
    """Bytes of answers on one stream that a peer may leave unread."""
    starts_at_once = True
    """Whether our SETUP goes when the handshake is done, or the subclass starts the session itself."""

    def __init__(self, library: QuicLibrary) -> None:
        self.lib = library
        self.driver: Any = None
        """The library's protocol object, once there is one."""
        self.session: Session | None = None
        """Once the handshake is done."""
        self._kinds = library.events
        self._held: dict[int, list[Write | Reset | Stop]] = {}
        """Commands for streams that the peer does not allow yet, in the order of the streams."""
        self.broken: tuple[type[Exception], ...] = _GONE
        """What the library raises on a stream that is over."""
        if library.name == "qh3":
            from qh3.quic.connection import QuicConnectionError  # noqa: PLC0415  # only where it is installed

            self.broken = (*_GONE, QuicConnectionError)

    @property
    def quic(self) -> Any:
        """The library's connection."""
        return self.driver._quic  # noqa: SLF001  # this is how its own subclasses reach it

    # ------------------------------------------------------------------ for subclasses

    @abstractmethod
    def make_session(self, draft: Draft) -> Session | None:
        """The handshake is done: a session, not started yet; None after having closed the connection."""

    @abstractmethod
    def happened(self, event: Event) -> None:
        """The session has something to tell."""

    @abstractmethod
    def ended(self, reason: str, code: int) -> None:
        """The connection is over."""

    def alive(self) -> None:  # noqa: B027  # most do not care
        """The peer has acknowledged a PING."""

    def feed(self) -> None:  # noqa: B027  # a client has nothing to send
        """Packets are about to be made: now is the time to give the connection more to send."""

    # ------------------------------------------------------------------ from the library

    def quic_event(self, event: Any) -> None:
        """An event of the QUIC connection."""
        kinds, session = self._kinds, self.session
        kind = type(event)
        if kind is kinds.StreamDataReceived:
            if session is not None:
                session.receive(event.stream_id, event.data, fin=event.end_stream)
        elif kind is kinds.HandshakeCompleted:
            self._handshake_done(event.alpn_protocol)
        elif kind is kinds.ConnectionTerminated:
            # Only an application's code is one of MoQT's: QUIC has other meanings for the same small numbers.
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
            elif kind is kinds.DatagramFrameReceived:
                session.receive_datagram(event.data)

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
        """Hand on what the session has to tell, and carry out what it wants."""
        session = self.session
        if session is None:
            return
        while events := session.take_events():
            for event in events:
                self.happened(event)
        if self._held:
            self._release()
        while commands := session.take_commands():
            for command in commands:
                self._carry_out(command)

    def settle_and_send(self) -> None:
        """The same, when nothing that the library called will send it."""
        self.settle()
        self.driver._transmit_soon() if self.lib.name == "aioquic" else self.driver.transmit()  # noqa: SLF001

    def may_send(self, stream: int) -> bool:
        """Whether a stream of ours that the session has opened is allowed by the peer, too."""
        return stream not in self._held

    def _carry_out(self, command: Write | Reset | Stop | Close) -> None:
        quic, session = self.quic, self.session
        if not isinstance(command, Close) and session is not None:
            stream = command.stream
            ours = stream % 2 == (not session.client)
            if stream in self._held or (ours and not self.lib.may_open(quic, stream)):
                self._hold(command, session)
                return
        try:
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
        except self.broken:
            # The stream was over before the command reached it: the peer reset it, or the connection is closing.
            return

    def _hold(self, command: Write | Reset | Stop, session: Session) -> None:
        """Keep a command until the peer allows its stream."""
        stream = command.stream
        waiting = self._held.setdefault(stream, [])
        if not isinstance(command, Write):
            # Nothing of it is wanted any more; but the stream must be opened, since their numbers leave no gaps.
            waiting[:] = [Write(stream, b""), *(one for one in waiting if not isinstance(one, Write))]
        waiting.append(command)
        if len(self._held) > _MOST_HELD:
            session.close(SessionCode.INTERNAL_ERROR, f"more than {_MOST_HELD} streams wait for leave to be opened")

    def _release(self) -> None:
        """Carry out what the peer allows by now."""
        for stream in list(self._held):
            if self.lib.may_open(self.quic, stream):
                for command in self._held.pop(stream):
                    self._carry_out(command)

    def safely(self, work: Callable[..., None], *arguments: Any) -> None:
        """Do something; what nobody thought of ends the connection, and says so, rather than leave it half alive."""
        try:
            work(*arguments)
        except Exception as error:
            logging.getLogger(__name__).exception("connection ended by an internal error")
            with contextlib.suppress(*self.broken):
                self.quic.close(error_code=SessionCode.INTERNAL_ERROR, reason_phrase="internal error")
            self.ended(f"internal error: {type(error).__name__}: {error}", SessionCode.INTERNAL_ERROR)

    def shut(self, code: int, reason: str) -> None:
        """End the connection."""
        if self.session is not None:
            self.session.close(code, reason)
            self.settle()
        else:
            self.quic.close(error_code=code, reason_phrase=reason[:500])
        self.driver.transmit()


def explain(code: int, frame_type: int | None, reason: str) -> str:
    """Why a connection ended, for people."""
    said = f": {reason}" if reason else ""
    if code == _NO_APPLICATION_PROTOCOL or "ALPN" in reason:  # qh3 has another alert for it
        return "no common protocol: the peer speaks none of the MoQT drafts that were offered"
    if code == _INVALID_TOKEN and frame_type is not None:
        return "it takes no more connections now; try another server, or later"
    if _CRYPTO_ERROR <= code < _CRYPTO_ERROR + 0x100 and frame_type is not None:
        return f"TLS failed (alert {code - _CRYPTO_ERROR}){said}"
    if frame_type is None and code:
        return f"closed with {name_of(code, SessionCode)}{said}"
    return f"the connection ended{said}" if code == 0 else f"QUIC error 0x{code:x}{said}"


def protocol_class(library: QuicLibrary, attach: Callable[[Any], Endpoint]) -> Any:
    """A subclass of the library's protocol whose events go to an `Endpoint`, made by ``attach`` for each connection."""
    base: Any = library.protocol

    class EndpointProtocol(base):  # type: ignore[misc]  # the library decides what it is
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            library.prepare(self._quic)
            self.endpoint = attach(self)
            self.endpoint.driver = self

        def quic_event_received(self, event: Any) -> None:
            self.endpoint.safely(self.endpoint.quic_event, event)

        def _process_events(self) -> None:
            # What many packets brought is handed on at once: handing on costs more than taking in.
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

    return EndpointProtocol
