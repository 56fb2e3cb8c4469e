"""QUIC as a `StreamTransport`: calls of a library's connection, and its events for an `Endpoint`."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterable
from typing import Any

from kvabr.link.moqt.endpoint import Endpoint
from kvabr.link.quic.backend import STILL_S, QuicLibrary
from kvabr.link.transport import LEAST_AHEAD_BYTES, MOST_AHEAD_BYTES, StreamTransport
from kvabr.moqt.codes import SessionCode, name_of

_CRYPTO_ERROR = 0x100
"""First of the QUIC error codes that are TLS alerts (RFC 9001, section 4.8)."""
_INVALID_TOKEN = 0xB
"""QUIC error code (RFC 9000, section 20.1). Our Retry tokens are valid, so it means that the server admits nobody."""
_NO_APPLICATION_PROTOCOL = _CRYPTO_ERROR + 120
_STUCK = "the QUIC library cannot send any more on this connection"
_GONE = (ValueError, AssertionError, RuntimeError, KeyError)
"""Errors of the libraries on a stream that is over, which a peer can cause at any time."""


class QuicTransport(StreamTransport):
    """One connection of a QUIC library."""

    def __init__(self, library: QuicLibrary, driver: Any, quic: Any, endpoint: Endpoint) -> None:
        """Take the library's protocol object and its connection."""
        self.lib, self.driver, self.quic, self._endpoint = library, driver, quic, endpoint
        self.name = library.name
        self.socket: asyncio.DatagramTransport | None = None
        """Of a client, which has one for each connection."""
        self._kinds = library.events
        self._given_up = False
        self._looking_again: asyncio.TimerHandle | None = None
        self.broken = _GONE
        if library.name == "qh3":
            from qh3.quic.connection import QuicConnectionError  # noqa: PLC0415  # only where it is installed

            self.broken = (*_GONE, QuicConnectionError)

    def write(self, stream: int, data: bytes | memoryview, *, fin: bool = False) -> None:
        """See `StreamTransport.write`."""
        self.quic.send_stream_data(stream, data, fin)

    def reset(self, stream: int, code: int) -> None:
        """See `StreamTransport.reset`."""
        self.quic.reset_stream(stream, code)
        self.lib.hurry(self.quic, stream)

    def stop(self, stream: int, code: int) -> None:
        """See `StreamTransport.stop`."""
        self.quic.stop_stream(stream, code)
        self.lib.hurry(self.quic, stream)

    def close(self, code: int, reason: str) -> None:
        """See `StreamTransport.close`."""
        self.quic.close(error_code=code, reason_phrase=reason[:500])

    def ping(self) -> None:
        """See `StreamTransport.ping`."""
        self.quic.send_ping(id(self) & 0xFFFF)

    def flush(self) -> None:
        """See `StreamTransport.flush`."""
        self.driver.transmit()

    def flush_soon(self) -> None:
        """See `StreamTransport.flush_soon`."""
        self.driver._transmit_soon() if self.lib.name == "aioquic" else self.driver.transmit()  # noqa: SLF001

    async def wait_closed(self) -> None:
        """See `StreamTransport.wait_closed`."""
        await self.driver.wait_closed()

    def drop(self) -> None:
        """See `StreamTransport.drop`."""
        if self.socket is not None:
            self.socket.close()

    def may_open(self, stream: int) -> bool:
        """See `StreamTransport.may_open`."""
        return self.lib.may_open(self.quic, stream)

    def backlog(self, stream: int) -> int:
        """See `StreamTransport.backlog`."""
        return self.lib.backlog(self.quic, stream)

    def unsent(self, streams: Iterable[int]) -> int:
        """See `StreamTransport.unsent`."""
        return self.lib.unsent(self.quic, streams)

    def ahead(self) -> int:
        """Return one congestion window, within bounds: all that the library can send before it asks again."""
        return min(MOST_AHEAD_BYTES, max(LEAST_AHEAD_BYTES, self.lib.window(self.quic)))

    def in_flight(self) -> int:
        """See `StreamTransport.in_flight`."""
        return self.lib.in_flight(self.quic)

    def delivered(self, stream: int) -> bool:
        """See `StreamTransport.delivered`."""
        return self.lib.delivered(self.quic, stream)

    def round_trip(self) -> float | None:
        """See `StreamTransport.round_trip`."""
        return self.lib.round_trip(self.quic)

    def lost(self) -> int | None:
        """See `StreamTransport.lost`."""
        return self.lib.lost(self.quic)

    @property
    def address(self) -> str:
        """See `StreamTransport.address`."""
        return self.lib.address(self.quic)

    def peer_certificate(self) -> bytes | None:
        """See `StreamTransport.peer_certificate`."""
        return self.lib.peer_certificate(self.quic)

    # ------------------------------------------------------------------ from the library

    def event(self, event: Any) -> None:
        """Tell the endpoint of an event of the QUIC connection."""
        kinds, endpoint = self._kinds, self._endpoint
        kind = type(event)
        if kind is kinds.StreamDataReceived:
            endpoint.received(event.stream_id, event.data, fin=event.end_stream)
        elif kind is kinds.HandshakeCompleted:
            endpoint.handshake_done(event.alpn_protocol)
        elif kind is kinds.ConnectionTerminated:
            # Only application codes are MoQT's; QUIC uses the same small numbers for other errors.
            ours = event.frame_type is None or event.error_code >= _CRYPTO_ERROR
            code = event.error_code if ours else SessionCode.INTERNAL_ERROR
            endpoint.ended(explain(event.error_code, event.frame_type, event.reason_phrase), code)
        elif kind is kinds.PingAcknowledged:
            endpoint.alive()
        elif kind is kinds.StreamReset:
            endpoint.was_reset(event.stream_id, event.error_code)
        elif kind is kinds.StopSendingReceived:
            endpoint.was_stopped(event.stream_id, event.error_code)

    def sent(self) -> None:
        """End the connection, once this turn of the event loop is over, if the library can never send on it again."""
        if self._given_up:
            return
        loop = asyncio.get_running_loop()
        if self.lib.stuck(self.quic, self._endpoint.underway):
            self._given_up = True
            loop.call_soon(self._endpoint.safely, self._give_up)
        elif self._looking_again is None and self.lib.suspect(self.quic):
            self._looking_again = loop.call_later(STILL_S, self._look_again)

    def _look_again(self) -> None:
        self._looking_again = None
        if self.lib.closing(self.quic) is None:
            self.sent()

    def _give_up(self) -> None:
        with contextlib.suppress(*self.broken):
            self.close(SessionCode.INTERNAL_ERROR, _STUCK)
        self._endpoint.ended(_STUCK, SessionCode.INTERNAL_ERROR)


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
            self.streams = self.endpoint.transport = QuicTransport(library, self, self._quic, self.endpoint)

        def quic_event_received(self, event: Any) -> None:
            self.endpoint.safely(self.streams.event, event)

        def _process_events(self) -> None:
            # Deliver the events of many packets at once: delivering costs more than receiving.
            super()._process_events()
            self.endpoint.safely(self.endpoint.settle)
            if (closing := library.closing(self._quic)) is not None:
                self.streams.event(closing)

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
            self.streams.sent()

    return EndpointProtocol
