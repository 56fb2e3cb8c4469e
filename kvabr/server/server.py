"""What every server of an origin has in common, whatever QUIC library carries it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, fields
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Self

from kvabr.types.errors import UsageError

if TYPE_CHECKING:
    from structlog.typing import FilteringBoundLogger

    from kvabr.server.metrics import Metrics
    from kvabr.server.published_assets import PublishedAssets


@dataclass(frozen=True, slots=True)
class ServerTls:
    """Who the server says it is."""

    certfile: Path
    """The certificate and those between it and a root, PEM."""
    keyfile: Path
    """The certificate's private key, PEM, without a password."""


@dataclass(frozen=True, slots=True)
class ServerLimits:
    """What peers may take of the server; beyond that they are refused or slowed down, never served from more memory."""

    connections: int = 512
    """At a time, in all."""
    requests_per_connection: int = 128
    """In flight."""
    requests: int = 8192
    """In flight, of all connections together."""
    requests_per_s: float = 2000.0
    """Of one connection, averaged over seconds."""
    idle_s: float = 60.0
    """A connection on which nothing comes for so long is closed."""
    handshake_s: float = 10.0
    """So long may a peer take until its SETUP has come."""

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if not 0 < value < 1 << 53:
                raise UsageError(f"limit {field.name.replace('_', '-')}: {value} is not positive")


class Server(ABC):
    """Serves a library; use it as an async context manager, or `start` it and `close` it."""

    backend: str
    """``aioquic`` or ``qh3``."""

    def __init__(
        self,
        library: PublishedAssets,
        host: str,
        port: int,
        tls: ServerTls,
        limits: ServerLimits,
        log: FilteringBoundLogger,
        metrics: Metrics,
    ) -> None:
        """Take note of everything; nothing is bound before `start`.

        Args:
            library: what to serve, and who may read what of it.
            host: name or address to bind.
            port: UDP port to bind; 0 takes a free one.
            tls: certificate and key; they have been checked, see `kvabr.server.certificates.check`.
            limits: what peers may take.
            log: takes the events.
            metrics: takes the counts.
        """
        self.holdings, self.host, self.port = library, host, port
        self.tls, self.limits, self.log, self.metrics = tls, limits, log, metrics

    @abstractmethod
    async def start(self) -> None:
        """Bind, and serve from now on.

        Raises:
            TransportError: the address is in use or not ours.
        """

    @property
    @abstractmethod
    def address(self) -> tuple[str, int]:
        """Host and port that are bound."""

    @abstractmethod
    async def drain(self, grace_s: float) -> None:
        """Say GOAWAY to everyone, refuse new requests, finish what is under way for ``grace_s`` seconds, then close."""

    @abstractmethod
    async def close(self) -> None:
        """End every connection now; may be called twice, and while `drain` waits."""

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()
