"""Which QUIC library carries a server."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from kvabr.server.metrics import Metrics
from kvabr.server.published_assets import PublishedAssets
from kvabr.server.server import Server, ServerLimits, ServerTls
from kvabr.types.errors import TransportError

if TYPE_CHECKING:
    from structlog.typing import FilteringBoundLogger

    from kvabr.quic.library import LibraryName

FASTEST_FIRST = ("qh3", "aioquic")
"""Measured; see the table in the README."""

_INSTALL = {"qh3": "pip install 'kvabr[fast]'", "aioquic": "pip install kvabr"}


def missing(backend: str) -> str | None:
    """Why a library cannot be used, in words; None if it can."""
    try:
        import_module(backend)
    except ImportError as error:
        return f"{backend} is not installed or does not load here ({error}); install it with: {_INSTALL[backend]}"
    return None


def make_server(
    backend: str,
    library: PublishedAssets,
    host: str,
    port: int,
    tls: ServerTls,
    limits: ServerLimits,
    log: FilteringBoundLogger,
    metrics: Metrics,
) -> Server:
    """The server of one QUIC library: ``moq``, ``qh3``, ``aioquic``, or with ``auto`` the first of these that will do.

    The other arguments are those of `Server`.

    Raises:
        TransportError: it is not installed; the message says how to install it.
    """
    for name in FASTEST_FIRST if backend == "auto" else (backend,):
        why = missing(name)
        if why is None:
            return _make(name, library, host, port, tls, limits, log, metrics)
        if backend != "auto":
            raise TransportError(f"--quic {why}")
        log.info("not used", quic=name, why=why)
    raise TransportError(f"no QUIC library is installed; the smallest: {_INSTALL['aioquic']}")


def _make(
    name: str,
    library: PublishedAssets,
    host: str,
    port: int,
    tls: ServerTls,
    limits: ServerLimits,
    log: FilteringBoundLogger,
    metrics: Metrics,
) -> Server:
    from kvabr.server.quic_server import QuicServer  # noqa: PLC0415 - loads only the library that was chosen

    library_name: LibraryName = "qh3" if name == "qh3" else "aioquic"
    return QuicServer(library, host, port, tls, limits, log, metrics, library_name=library_name)
