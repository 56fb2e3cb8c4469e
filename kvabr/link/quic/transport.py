"""QUIC as a `StreamTransport`: wraps a library's connection, and passes its events to an `Endpoint`."""

# ruff: noqa: SLF001  # neither library has a public way to most of this

from __future__ import annotations

import asyncio
import contextlib
from abc import abstractmethod
from collections.abc import Callable, Iterable
from typing import Any

from kvabr.link.moqt.endpoint import MAX_AHEAD_BYTES, MIN_AHEAD_BYTES, Endpoint, StreamTransport
from kvabr.link.quic.backend import QuicLibrary
from kvabr.moqt.codes import SessionCode, name_of

_CRYPTO_ERROR = 0x100
"""First QUIC error code of TLS alerts (RFC 9001, section 4.8)."""
_INVALID_TOKEN = 0xB
"""QUIC error code INVALID_TOKEN (RFC 9000, section 20.1). Our Retry tokens are valid, so it means that the server is
full."""
_NO_APPLICATION_PROTOCOL = _CRYPTO_ERROR + 120
_CANNOT_SEND = "the QUIC library can no longer send on this connection"
_TOO_LONG = "capacity exhausted"
"""Part of qh3's message when a packet does not fit."""
_NO_STREAM = "reserved stream is missing"
"""Part of qh3's message when it retransmits data of a stream that was acknowledged meanwhile. qh3 2.1 then drops the
packet, and never sends the data of other streams in it. A client whose requests get no answer dials again
(`kvabr.transfer.peer`)."""
_LOST_PACKETS = 64
"""Maximum number of consecutive packets that may be lost in this way."""
_LOST_TRACK_MESSAGE = "stream reservation is already active"
"""Part of qh3's message after it has lost track of a packet: the connection is unusable."""
_STREAM_OVER_ERRORS = (ValueError, AssertionError, RuntimeError, KeyError)
"""Errors that the libraries raise for a stream that is over; a peer can cause them at any time."""


class QuicTransport(StreamTransport):
    """One connection of a QUIC library."""

    broken: tuple[type[Exception], ...] = _STREAM_OVER_ERRORS

    def __init__(self, library: QuicLibrary, driver: Any, quic: Any, endpoint: Endpoint) -> None:
        self.driver, self.quic, self._endpoint = driver, quic, endpoint
        self.socket: asyncio.DatagramTransport | None = None
        self._kinds = library.events

    def write(self, stream: int, data: bytes | memoryview, *, fin: bool = False) -> None:
        self.quic.send_stream_data(stream, data, fin)

    def reset(self, stream: int, code: int) -> None:
        self.quic.reset_stream(stream, code)

    def stop(self, stream: int, code: int) -> None:
        self.quic.stop_stream(stream, code)

    def close(self, code: int, reason: str) -> None:
        self.quic.close(error_code=code, reason_phrase=reason[:500])

    def ping(self) -> None:
        self.quic.send_ping(id(self) & 0xFFFF)

    def flush(self) -> None:
        self.driver.transmit()

    async def wait_closed(self) -> None:
        await self.driver.wait_closed()

    def drop(self) -> None:
        if self.socket is not None:
            self.socket.close()

    @property
    @abstractmethod
    def _path(self) -> Any:
        """The library's object that counts bytes in flight, or None."""

    def ahead(self) -> int:
        """Return the size of a congestion window, within bounds."""
        return min(MAX_AHEAD_BYTES, max(MIN_AHEAD_BYTES, int(self._path.congestion_window)))

    def in_flight(self) -> int:
        return 0 if self._path is None else int(self._path.bytes_in_flight)

    # ------------------------------------------------------------------ from the library

    def event(self, event: Any) -> None:
        """Pass an event of the QUIC connection to the endpoint."""
        kinds, endpoint = self._kinds, self._endpoint
        kind = type(event)
        if kind is kinds.StreamDataReceived:
            endpoint.received(event.stream_id, event.data, fin=event.end_stream)
        elif kind is kinds.HandshakeCompleted:
            endpoint.handshake_done(event.alpn_protocol)
        elif kind is kinds.ConnectionTerminated:
            # Only application codes are MoQT's; QUIC uses the same small numbers for its own errors.
            ours = event.frame_type is None or event.error_code >= _CRYPTO_ERROR
            code = event.error_code if ours else SessionCode.INTERNAL_ERROR
            endpoint.ended(explain(event.error_code, event.frame_type, event.reason_phrase), code)
        elif kind is kinds.PingAcknowledged:
            endpoint.alive()
        elif kind is kinds.StreamReset:
            endpoint.was_reset(event.stream_id, event.error_code)
        elif kind is kinds.StopSendingReceived:
            endpoint.was_stopped(event.stream_id, event.error_code)

    @property
    def closing(self) -> Any:
        """The ``ConnectionTerminated`` event of a closed connection, else None.

        The libraries emit it only after three probe timeouts, which may take seconds.
        """
        return self.quic._close_event


class AioquicTransport(QuicTransport):
    """One connection of aioquic, used mostly through private attributes."""

    def reset(self, stream: int, code: int) -> None:
        super().reset(stream, code)
        self._hurry(stream)

    def stop(self, stream: int, code: int) -> None:
        super().stop(stream, code)
        self._hurry(stream)

    def _hurry(self, stream: int) -> None:
        """Send a stream's RESET_STREAM or STOP_SENDING before other streams' data.

        aioquic first fills a packet with data. If there is then no space for the frame, it stops sending until there
        is.
        """
        queue = self.quic._streams_queue
        if (found := self.quic._streams.get(stream)) in queue:
            queue.remove(found)
            queue.insert(0, found)

    def flush_soon(self) -> None:
        self.driver._transmit_soon()

    def may_open(self, stream: int) -> bool:
        quic = self.quic
        return bool(stream // 4 < (quic._remote_max_streams_uni if stream & 2 else quic._remote_max_streams_bidi))

    def backlog(self, stream: int) -> int:
        found = self.quic._streams.get(stream)
        return 0 if found is None else int(found.sender._buffer_stop - found.sender._buffer_start)

    def unsent(self, streams: Iterable[int]) -> int:
        known = self.quic._streams
        senders = [known[stream].sender for stream in streams if stream in known]
        return sum(sender._buffer_stop - sender.highest_offset for sender in senders)

    def delivered(self, stream: int) -> bool:
        found = self.quic._streams.get(stream)
        return found is None or bool(found.sender.is_finished)

    @property
    def _path(self) -> Any:
        return self.quic._loss

    def round_trip(self) -> float | None:
        return float(self._path._rtt_smoothed) if self._path._rtt_initialized else None

    @property
    def address(self) -> str:
        return str(self.quic._network_paths[0].addr[0])

    def peer_certificate(self) -> bytes | None:
        from cryptography.hazmat.primitives.serialization import Encoding  # noqa: PLC0415  # slow to load

        certificate = self.quic.tls._peer_certificate
        return None if certificate is None else bytes(certificate.public_bytes(Encoding.DER))


class Qh3Transport(QuicTransport):
    """One connection of qh3, with workarounds for faults of qh3 2.1."""

    def __init__(self, library: QuicLibrary, driver: Any, quic: Any, endpoint: Endpoint) -> None:
        super().__init__(library, driver, quic, endpoint)
        from qh3.quic.connection import QuicConnectionError  # noqa: PLC0415  # only where it is installed

        self.broken = (*_STREAM_OVER_ERRORS, QuicConnectionError)
        quic.datagrams_to_send = self._sendable_packets
        self._given_up = False

    def may_open(self, stream: int) -> bool:
        return bool(stream // 4 < self._path.stream_limits[bool(stream & 2)])

    def backlog(self, stream: int) -> int:
        return int(self.quic.get_send_buffer_size(stream))

    def unsent(self, streams: Iterable[int]) -> int:
        del streams
        return int(self.quic.get_send_buffer_size())

    def delivered(self, stream: int) -> bool:
        return stream not in self.quic._created_local_stream_ids

    @property
    def _path(self) -> Any:
        return self.quic._core

    def round_trip(self) -> float | None:
        return None if self._path is None else self._path.smoothed_rtt

    @property
    def address(self) -> str:
        return str(self.quic._remote_addr[0])

    def peer_certificate(self) -> bytes | None:
        certificate = self.quic.get_peercert()
        return None if certificate is None else bytes(certificate.public_bytes())

    def _give_up(self) -> None:
        with contextlib.suppress(*self.broken):
            self.close(SessionCode.INTERNAL_ERROR, _CANNOT_SEND)
        self._endpoint.ended(_CANNOT_SEND, SessionCode.INTERNAL_ERROR)

    def _sendable_packets(self, now: float) -> list[tuple[bytes, Any]]:
        """Return the packets to send, up to the point where qh3 2.1 would raise and lose them.

        qh3 raises when a packet exceeds the limit before a peer's address is validated (RFC 9000, section 8.1), which
        delays connecting by a second; and when it sends on a stream that is gone, as after losses. If it can never send
        again, end the connection.
        """
        core, lost = self._path, 0
        made: list[tuple[bytes, Any]] = []
        while core is not None and lost < _LOST_PACKETS:
            try:
                packet = core.poll_transmit(now)
            except (RuntimeError, ValueError) as error:
                message = str(error)
                if _NO_STREAM in message:
                    lost += 1
                    continue
                if _LOST_TRACK_MESSAGE in message and not self._given_up:
                    self._given_up = True
                    asyncio.get_running_loop().call_soon(self._endpoint.safely, self._give_up)
                elif _LOST_TRACK_MESSAGE not in message and _TOO_LONG not in message:
                    raise
                break
            if packet is None:
                break
            made.append((packet[0], packet[1]))
        return made


_KINDS = {"aioquic": AioquicTransport, "qh3": Qh3Transport}


def explain(code: int, frame_type: int | None, reason: str) -> str:
    """Return why a connection ended."""
    details = f": {reason}" if reason else ""
    if code == _NO_APPLICATION_PROTOCOL or "ALPN" in reason:  # qh3 sends another alert
        return "no common protocol: the peer speaks none of the MoQT drafts that were offered"
    if code == _INVALID_TOKEN and frame_type is not None:
        return "the server accepts no more connections now; try another server, or later"
    if _CRYPTO_ERROR <= code < _CRYPTO_ERROR + 0x100 and frame_type is not None:
        return f"TLS failed (alert {code - _CRYPTO_ERROR}){details}"
    if frame_type is None and code:
        return f"closed with {name_of(code, SessionCode)}{details}"
    return f"the connection ended{details}" if code == 0 else f"QUIC error 0x{code:x}{details}"


def protocol_class(library: QuicLibrary, attach: Callable[[Any], Endpoint]) -> Any:
    """Return a subclass of the library's protocol that passes events to the `Endpoint` returned by ``attach``."""
    base: Any = library.protocol

    class EndpointProtocol(base):  # type: ignore[misc]  # the class depends on the library
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.endpoint = attach(self)
            kind = _KINDS[library.name]
            self.streams = self.endpoint.transport = kind(library, self, self._quic, self.endpoint)

        def quic_event_received(self, event: Any) -> None:
            self.endpoint.safely(self.streams.event, event)

        def _process_events(self) -> None:
            # Deliver the events of many packets at once: delivering is more expensive than receiving.
            super()._process_events()
            self.endpoint.safely(self.endpoint.settle)
            if (closing := self.streams.closing) is not None:
                self.streams.event(closing)

        def transmit(self) -> None:
            self.endpoint.feed()
            super().transmit()

    return EndpointProtocol
