"""The two QUIC libraries behind one face: aioquic, and qh3, which has its API and handles packets in Rust.

Only this file knows where they differ.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, Literal

from kvabr.quic.retry import RetryTokens
from kvabr.quic.udp import BatchTransport
from kvabr.types.errors import TransportError

LibraryName = Literal["aioquic", "qh3"]

STREAM_WINDOW = 8 << 20
"""Bytes that a peer may send ahead on one stream."""
CONNECTION_WINDOW = 32 << 20
"""Bytes that a peer may send ahead in all. Beyond this neither library gets faster."""
SOCKET_BUFFER = 4 << 20
"""Bytes asked of the kernel for each direction of a socket; it may give less."""
IDLE_S = 30.0
_LATER = ("capacity exhausted", "reserved stream is missing")
"""In what qh3 says when a packet does not fit, and when it meant to send on a stream that is gone."""


@dataclass(frozen=True, slots=True)
class QuicLibrary:
    """One of the libraries."""

    name: LibraryName
    events: Any
    """The module with the event classes."""
    protocol: Any
    """The class ``QuicConnectionProtocol``."""
    connection: Any
    """The class ``QuicConnection``."""
    configuration: Any
    """The class ``QuicConfiguration``."""
    server: Any
    """The class ``QuicServer``: a datagram protocol that has a connection for each peer."""

    def configure(self, *, client: bool, alpn: Iterable[str], **more: Any) -> Any:
        """A configuration with our windows."""
        return self.configuration(
            is_client=client,
            alpn_protocols=list(alpn),
            max_data=CONNECTION_WINDOW,
            max_stream_data=STREAM_WINDOW,
            max_datagram_frame_size=65536,
            idle_timeout=more.pop("idle_timeout", IDLE_S),
            **more,
        )

    def peer_certificate(self, quic: Any) -> bytes | None:
        """The peer's certificate, DER."""
        if self.name == "qh3":
            certificate = quic.get_peercert()
            return None if certificate is None else bytes(certificate.public_bytes())
        from cryptography.hazmat.primitives.serialization import Encoding  # noqa: PLC0415  # slow to load

        certificate = quic.tls._peer_certificate  # noqa: SLF001  # aioquic has no public way
        return None if certificate is None else bytes(certificate.public_bytes(Encoding.DER))

    def unsent(self, quic: Any, streams: Iterable[int]) -> int:
        """Bytes of our streams that wait to be sent for the first time."""
        if self.name == "qh3":
            return int(quic.get_send_buffer_size())
        known = quic._streams  # noqa: SLF001  # aioquic has no public way
        total = 0
        for stream in streams:
            if (found := known.get(stream)) is not None:
                total += found.sender._buffer_stop - found.sender.highest_offset  # noqa: SLF001
        return total

    def demand_proof(self, server: Any, tokens: RetryTokens | None) -> None:
        """Have newcomers prove, or no longer, that their address is theirs: by a Retry (RFC 9000, section 8.1.2).

        It costs them a round trip, and us no memory for those who only pretend.
        """
        server._retry = tokens  # noqa: SLF001  # both libraries only let it be set when the server is made

    def closing(self, quic: Any) -> Any:
        """The event ``ConnectionTerminated`` of a connection that either end has closed; None while it lasts.

        The libraries tell of it only when no late packet of it can come any more, which takes three probe timeouts:
        seconds, behind a long queue.
        """
        return quic._close_event  # noqa: SLF001  # neither has a public way

    def may_open(self, quic: Any, stream: int) -> bool:
        """Whether the peer allows so many streams of ours that this is one of them.

        Beyond that qh3 raises, and aioquic breaks the rules if such a stream is reset before it is allowed.
        """
        one_way = bool(stream & 2)
        if self.name == "qh3":
            return stream // 4 < quic._core.stream_limits[one_way]  # type: ignore[no-any-return]  # noqa: SLF001
        limit = quic._remote_max_streams_uni if one_way else quic._remote_max_streams_bidi  # noqa: SLF001
        return bool(stream // 4 < limit)

    def delivered(self, quic: Any, stream: int) -> bool:
        """Whether the peer has acknowledged all of a stream of ours that has ended, or gave it up."""
        if self.name == "qh3":
            return stream not in quic._created_local_stream_ids  # noqa: SLF001  # qh3 has no public way
        found = quic._streams.get(stream)  # noqa: SLF001  # nor has aioquic
        return found is None or bool(found.sender.is_finished)

    def backlog(self, quic: Any, stream: int) -> int:
        """Bytes of one of our streams that the peer has not taken yet."""
        if self.name == "qh3":
            return int(quic.get_send_buffer_size(stream))
        found = quic._streams.get(stream)  # noqa: SLF001  # no public way
        return 0 if found is None else found.sender._buffer_stop - found.sender._buffer_start  # noqa: SLF001

    def hurry(self, quic: Any, stream: int) -> None:
        """Let a stream's RESET_STREAM or STOP_SENDING go before the data of others.

        aioquic fills a packet with data first, finds no room for such a frame, and sends no more than that packet until
        there is.
        """
        if self.name == "aioquic" and (found := quic._streams.get(stream)) is not None:  # noqa: SLF001  # no public way
            queue = quic._streams_queue  # noqa: SLF001
            if found in queue:
                queue.remove(found)
                queue.insert(0, found)

    def window(self, quic: Any) -> int:
        """The congestion window: bytes of ours that may be on their way."""
        if self.name == "qh3":
            return int(quic._core.congestion_window)  # noqa: SLF001  # neither has a public way
        return int(quic._loss.congestion_window)  # noqa: SLF001

    def round_trip(self, quic: Any) -> float | None:
        """The smoothed round trip, seconds."""
        if self.name == "qh3":
            return None if quic._core is None else quic._core.smoothed_rtt  # noqa: SLF001
        loss = quic._loss  # noqa: SLF001
        return float(loss._rtt_smoothed) if loss._rtt_initialized else None  # noqa: SLF001

    def prepare(self, quic: Any) -> None:
        """Mend what a fresh connection of the library's needs mended."""
        if self.name == "qh3":
            quic.datagrams_to_send = partial(_packets_there_is_room_for, quic)

    def lost(self, quic: Any) -> int | None:
        """Packets of ours that were lost, where the library counts them."""
        return None if self.name == "aioquic" or quic._core is None else int(quic._core.loss_total)  # noqa: SLF001

    async def open_socket(
        self, sock: socket.socket, protocol: Callable[[], Any]
    ) -> tuple[asyncio.DatagramTransport, Any]:
        """Attach a protocol to a bound socket, by the library's fast path if it has one."""
        _enlarge(sock)
        loop = asyncio.get_running_loop()
        if self.name == "qh3":
            return await _fast_qh3()(loop, protocol, sock=sock)  # type: ignore[no-any-return]
        made = protocol()
        return BatchTransport(loop, sock, made), made

    async def open_server(
        self, sock: socket.socket, configuration: Any, protocol: Any
    ) -> tuple[asyncio.DatagramTransport, Any]:
        """Serve on a bound socket, with a ``protocol`` for every connection."""
        _enlarge(sock)
        make = lambda: self.server(configuration=configuration, create_protocol=protocol)  # noqa: E731
        loop = asyncio.get_running_loop()
        if self.name == "qh3":
            return await _fast_qh3()(loop, make, sock=sock)  # type: ignore[no-any-return]
        return await loop.create_datagram_endpoint(make, sock=sock)


def _fast_qh3() -> Any:
    """qh3's way to a socket that takes many packets in one system call; it uses it for clients only, by itself."""
    return import_module("qh3.asyncio._transport").create_optimized_datagram_transport


def _enlarge(sock: socket.socket) -> None:
    for option in (socket.SO_RCVBUF, socket.SO_SNDBUF):
        with contextlib.suppress(OSError):
            sock.setsockopt(socket.SOL_SOCKET, option, SOCKET_BUFFER)


def _packets_there_is_room_for(quic: Any, now: float) -> list[tuple[bytes, Any]]:
    """What a connection of qh3 has to send.

    Until a peer's address is validated it may be sent three times the bytes that came from it (RFC 9000, section 8.1).
    Where what is left of that holds no whole packet, qh3 2.1 raises, and loses the packets it has just made: clients
    whose first packet is not as long as its own then take a second to connect. What does not fit now is sent later.
    It also raises, and loses them, where a stream is gone that it still meant to send on: seen after outages. Asked
    again it goes on.
    """
    core = quic._core  # noqa: SLF001  # as its own method, but for the error
    made: list[tuple[bytes, Any]] = []
    try:
        while core is not None and (packet := core.poll_transmit(now)) is not None:
            made.append((packet[0], packet[1]))
    except (RuntimeError, ValueError) as error:
        if not any(known in str(error) for known in _LATER):
            raise
    return made


def library(name: LibraryName) -> QuicLibrary:
    """A library by name.

    Raises:
        TransportError: it is not installed.
    """
    try:
        asyncio_part: Any = import_module(f"{name}.asyncio.protocol")
        return QuicLibrary(
            name,
            import_module(f"{name}.quic.events"),
            asyncio_part.QuicConnectionProtocol,
            import_module(f"{name}.quic.connection").QuicConnection,
            import_module(f"{name}.quic.configuration").QuicConfiguration,
            import_module(f"{name}.asyncio.server").QuicServer,
        )
    except ImportError as error:
        hint = "pip install 'kvabr[fast]'" if name == "qh3" else f"pip install {name}"
        raise TransportError(f"the QUIC library {name} is not installed ({error}); {hint}") from error


def load_certificates(configuration: Any, certfile: Path, keyfile: Path) -> None:
    """Give a server its certificate.

    Raises:
        TransportError: the library cannot read them.
    """
    try:
        configuration.load_cert_chain(certfile, keyfile)
    except Exception as error:  # whatever the library's TLS raises
        raise TransportError(f"{certfile}, {keyfile}: not a certificate and its key ({error})") from error
