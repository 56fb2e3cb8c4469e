"""The peers of a client: one connection each, dialled when the first play wants it and shared by all."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack

from kvabr.client.lookup import fetch_models
from kvabr.client.metrics import ClientMetrics
from kvabr.client.shared_downloads import SharedDownloads
from kvabr.quic.connect import Connecting
from kvabr.quic.interface import Connection, ConnectionStats, Download, DownloadStats
from kvabr.store.group_store import TieredGroupStore
from kvabr.types.errors import ConnectionLostError, NotFoundError, TransportError, UsageError
from kvabr.types.kv import KVSpec
from kvabr.types.naming import TrackNamespace


class _FailedDownload(Download):
    def __init__(self, why: str) -> None:
        self.stats = DownloadStats(requested_s=asyncio.get_running_loop().time())
        self._why = why

    @property
    def data(self) -> memoryview:
        return memoryview(b"")

    async def read(self) -> memoryview:
        raise ConnectionLostError(self._why)

    def prioritise(self, priority: int) -> None:
        del priority

    def cancel(self) -> None:
        pass


class UnreachedConnection(Connection):
    """Stands for a peer that cannot be reached: a play on it does what it does when it loses its peer."""

    backend = protocol = "none"

    def __init__(self, why: str) -> None:
        """Let every download fail with this message."""
        self._why = why

    def fetch(
        self,
        namespace: TrackNamespace,
        track: str,
        group: int = 0,
        *,
        priority: int = 128,
        limit: int,
        exact: bool = False,
    ) -> Download:
        """See `Connection.fetch`."""
        del namespace, track, group, priority, limit, exact
        return _FailedDownload(self._why)

    def stats(self) -> ConnectionStats:
        """See `Connection.stats`."""
        return ConnectionStats()

    @property
    def closed(self) -> bool:
        """See `Connection.closed`."""
        return True

    async def close(self) -> None:
        """See `Connection.close`."""


class ClientPeer:
    """An origin or a relay; `AsyncClient.peer` makes it."""

    def __init__(
        self, name: str, source: Connecting | Connection, store: TieredGroupStore, metrics: ClientMetrics
    ) -> None:
        """Dial nothing yet.

        Args:
            name: for messages.
            source: dials the peer, or an open connection, which stays open when this is closed.
            store: the client's.
            metrics: the client's.
        """
        self.name = name
        self._models: list[KVSpec] | None = None
        """Models of which we may read an asset, once the peer was asked."""
        self._store, self._metrics = store, metrics
        self._connecting = source if isinstance(source, Connecting) else None
        self._downloads = SharedDownloads(source, store, metrics) if isinstance(source, Connection) else None
        self._stack = AsyncExitStack()
        self._dialling: asyncio.Task[SharedDownloads] | None = None

    @property
    def connection(self) -> Connection | None:
        """The shared connection; None before the first play."""
        return None if self._downloads is None else self._downloads.connection

    async def downloads(self) -> SharedDownloads:
        """Return the downloads of the connection, which is dialled if there is none; callers share one dial.

        Raises:
            TransportError: the peer cannot be reached, or does not let us in. The next call dials again.
        """
        if self._downloads is None:
            if self._dialling is None:
                self._dialling = asyncio.get_running_loop().create_task(self._dial())
                self._dialling.add_done_callback(self._dialled)
            # A play that is cancelled must not end the dial of the others.
            return await asyncio.shield(self._dialling)
        return self._downloads

    async def downloads_within(self, seconds: float) -> SharedDownloads:
        """Return `downloads`; if the peer cannot be reached in time, a stub whose downloads all fail."""
        try:
            async with asyncio.timeout(seconds):
                return await self.downloads()
        except TimeoutError:
            why = f"{self.name}: no connection within {seconds:.3g} s"
        except TransportError as error:
            why = str(error)
        return SharedDownloads(UnreachedConnection(why), self._store, self._metrics)

    async def spec_of(self, connection: Connection, model: KVSpec | str | None) -> KVSpec:
        """Return the spec of a model.

        Args:
            connection: asks the peer.
            model: its spec, its name at the peer, or None for the only one that the peer has.

        Raises:
            UsageError: the peer has no such model, or several.
            TransportError: it cannot be asked.
            FormatError: it answers with something else.
        """
        if isinstance(model, KVSpec):
            return model
        if self._models is None:
            try:
                self._models = await fetch_models(connection)
            except NotFoundError as error:
                raise UsageError(
                    "the origin does not tell which models it has: give a spec, model=KVSpec(...), or an engine"
                ) from error
        specs = [spec for spec in self._models if model in (None, spec.model)]
        if len(specs) == 1:
            return specs[0]
        known, self._models = self._models, None  # another may be published until the next play
        names = ", ".join(sorted({spec.model for spec in known})) or "none"
        if model is None and known:
            raise UsageError(f"the origin has caches of several models: say which, model=...; there are {names}")
        if specs:
            shapes = len(specs)
            raise UsageError(f"the origin has caches of {model} in {shapes} shapes: give a spec, model=KVSpec(...)")
        raise UsageError(f"the origin has no caches of {model or 'any model'} that we may read; there are {names}")

    async def close(self) -> None:
        """End all downloads, and the connection if this dialled it."""
        if self._dialling is not None:
            self._dialling.cancel()
            await asyncio.wait({self._dialling})
        if self._downloads is not None:
            await self._downloads.close()
            if self._connecting is not None:
                self._metrics.peers.dec()
                self._downloads = None
        await self._stack.aclose()

    async def _dial(self) -> SharedDownloads:
        assert self._connecting is not None  # noqa: S101  # or there were downloads from the start
        connection = await self._stack.enter_async_context(self._connecting)
        self._downloads = SharedDownloads(connection, self._store, self._metrics)
        self._metrics.peers.inc()
        return self._downloads

    def _dialled(self, task: asyncio.Task[SharedDownloads]) -> None:
        self._dialling = None
        if not task.cancelled() and task.exception() is not None:
            self._metrics.dials_failed_total.inc()
