"""One interface for two QUIC libraries: aioquic, and qh3, which has the same API and handles packets in Rust.

Only this file and `kvabr.link.quic.transport` depend on their differences.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

from kvabr.types.errors import TransportError
from kvabr.types.installing import WHERE, extra
from kvabr.types.peer import Quic

_MAX_GAPS = 1024
"""Maximum gaps in a stream's received data with aioquic, which scans all of them for each frame. Only a window with
losses above 14 % has more."""

LibraryName = Literal["aioquic", "qh3"]
LIBRARIES: tuple[LibraryName, ...] = ("qh3", "aioquic")

STREAM_WINDOW = 8 << 20
"""Flow control window of a stream, bytes."""
CONNECTION_WINDOW = 32 << 20
"""Flow control window of a connection, bytes. Larger windows make neither library faster."""
REQUESTS_STREAM_WINDOW, REQUESTS_CONNECTION_WINDOW = 256 << 10, 1 << 20
"""Windows of a server, which receives only requests, in bytes. A client that leaves gaps can make it buffer that
much."""
SOCKET_BUFFER = 4 << 20
"""Requested socket buffer per direction, bytes; the kernel may grant less."""
IDLE_S = 30.0
RETRY_LIFETIME_S = 30
"""Seconds for which a Retry token is valid; clients return it at once."""
_INSTALL = {"qh3": f"{extra('fast')} ({WHERE})", "aioquic": "pip install aioquic"}
_INTERNAL_ERROR = 0x1
"""QUIC error code INTERNAL_ERROR (RFC 9000, section 20.1)."""


@dataclass(frozen=True, slots=True)
class QuicLibrary:
    """One QUIC library: its events module and its classes."""

    name: LibraryName
    events: Any
    protocol: Any
    connection: Any
    configuration: Any
    server: Any

    def configure(self, *, client: bool, alpn: Iterable[str], **more: Any) -> Any:
        """Return a configuration with our flow control windows."""
        return self.configuration(
            is_client=client,
            alpn_protocols=list(alpn),
            max_data=CONNECTION_WINDOW if client else REQUESTS_CONNECTION_WINDOW,
            max_stream_data=STREAM_WINDOW if client else REQUESTS_STREAM_WINDOW,
            max_datagram_frame_size=65536,
            idle_timeout=more.pop("idle_timeout", IDLE_S),
            **more,
        )

    def demand_proof(self, server: Any, tokens: RetryTokens | None) -> None:
        """Require new clients to validate their address by a Retry, another round trip; None: no longer."""
        server._retry = tokens  # noqa: SLF001  # both libraries only accept it in the constructor

    def replace_configuration(self, server: Any, configuration: Any) -> None:
        """Use another configuration for new connections."""
        server._configuration = configuration  # noqa: SLF001  # as above

    async def open_socket(
        self, sock: socket.socket, protocol: Callable[[], Any]
    ) -> tuple[asyncio.DatagramTransport, Any]:
        """Attach a protocol to a bound socket, on the library's fast path if it has one."""
        for option in (socket.SO_RCVBUF, socket.SO_SNDBUF):
            with contextlib.suppress(OSError):
                sock.setsockopt(socket.SOL_SOCKET, option, SOCKET_BUFFER)
        loop = asyncio.get_running_loop()
        if self.name == "qh3":
            # reads many packets per system call; qh3 uses it only for clients
            fast = import_module("qh3.asyncio._transport").create_optimized_datagram_transport
            return await fast(loop, protocol, sock=sock)  # type: ignore[no-any-return]
        return await loop.create_datagram_endpoint(protocol, sock=sock)


@cache
def _limit_gaps() -> None:
    """Make aioquic end connections with more than `_MAX_GAPS` gaps in a stream."""
    receiver: Any = import_module("aioquic.quic.stream").QuicStreamReceiver
    failed: Any = import_module("aioquic.quic.connection").QuicConnectionError
    handle = receiver.handle_frame

    def handle_frame(self: Any, frame: Any) -> Any:
        if len(self._ranges) > _MAX_GAPS:
            raise failed(error_code=_INTERNAL_ERROR, frame_type=0x8, reason_phrase=f"more than {_MAX_GAPS} gaps")
        return handle(self, frame)

    receiver.handle_frame = handle_frame


def library(name: LibraryName) -> QuicLibrary:
    """Import a library; raise `TransportError` if that fails."""
    try:
        import_module(name)
        asyncio_part: Any = import_module(f"{name}.asyncio.protocol")
        if name == "qh3":
            logging.getLogger("quic").setLevel(logging.CRITICAL)  # it logs every end of a connection as an error
        else:
            _limit_gaps()
        return QuicLibrary(
            name,
            import_module(f"{name}.quic.events"),
            asyncio_part.QuicConnectionProtocol,
            import_module(f"{name}.quic.connection").QuicConnection,
            import_module(f"{name}.quic.configuration").QuicConfiguration,
            import_module(f"{name}.asyncio.server").QuicServer,
        )
    except ImportError as error:
        why = f"the QUIC library {name} is not installed or does not load ({error})"
        raise TransportError(f"{why}; install it with: {_INSTALL[name]}") from error


def installed_libraries(quic: Quic) -> tuple[LibraryName, ...]:
    """Return the usable libraries, fastest first: with ``auto`` all installed ones, else only the named one."""
    if quic != "auto":
        return (quic,)
    if not (found := tuple(filter(_is_installed, LIBRARIES))):
        raise TransportError(f"no QUIC library is installed; install one with: {_INSTALL['aioquic']}")
    return found


def _is_installed(name: LibraryName) -> bool:
    try:
        return find_spec(name) is not None
    except ValueError:  # a module put into `sys.modules` by hand
        return False


def load_certificates(configuration: Any, certfile: Path, keyfile: Path) -> None:
    """Load a server's certificate; raise `TransportError` if that fails."""
    try:
        configuration.load_cert_chain(certfile, keyfile)
    except BaseException as error:  # the library's TLS raises anything; qh3 panics, which is no `Exception`
        if isinstance(error, KeyboardInterrupt | SystemExit):
            raise
        raise TransportError(f"{certfile}, {keyfile}: not a certificate and its key ({error})") from error


class RetryTokens:
    """Tokens for QUIC's Retry, which prove that a client receives at its address (RFC 9000, section 8.1.2).

    qh3's own tokens decrypt RSA for every packet that claims to have one, and raise unhandled errors. These are bound
    to address and time. Methods accept the arguments of qh3 and of all versions of aioquic.
    """

    def __init__(self) -> None:
        from cryptography.fernet import Fernet  # noqa: PLC0415  # slow to load

        self._fernet = Fernet(Fernet.generate_key())

    def create_token(
        self,
        addr: Any = None,
        original_destination_connection_id: bytes = b"",
        retry_source_connection_id: bytes = b"",
        *,
        address: Any = None,
        **_: Any,
    ) -> bytes:
        """Return a token for a client at ``addr`` or ``address``, with the connection IDs of the Retry."""
        ids = original_destination_connection_id.hex(), retry_source_connection_id.hex()
        return self._fernet.encrypt(",".join((_at(addr or address), *ids)).encode())

    def validate_token(
        self,
        addr: Any = None,
        token: bytes = b"",
        *,
        address: Any = None,
        destination_cid: bytes | None = None,
        **_: Any,
    ) -> bytes | tuple[bytes, bytes]:
        """Return both connection IDs of a token, or only the client's if the Retry's is given as ``destination_cid``.

        Raises ValueError if the token is not ours, has expired, or is for another address or connection.
        """
        from cryptography.fernet import InvalidToken  # noqa: PLC0415  # as above

        try:
            where, original, source = self._fernet.decrypt(token, ttl=RETRY_LIFETIME_S).decode().split(",")
        except InvalidToken as error:
            raise ValueError("not one of our tokens, or an expired one") from error
        if where != _at(addr or address) or destination_cid not in (None, bytes.fromhex(source)):
            raise ValueError("the token of another connection")
        ids = bytes.fromhex(original), bytes.fromhex(source)
        return ids if destination_cid is None else ids[0]


def _at(address: Any) -> str:
    return f"{address[0]} {address[1]}"


class NoTokens(RetryTokens):
    """Accepts no token, so that new connections are refused before they take memory."""

    def validate_token(self, *_: Any, **__: Any) -> bytes | tuple[bytes, bytes]:
        """Raise `ValueError`."""
        raise ValueError("no more connections")
