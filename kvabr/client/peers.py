"""The peers of a node: one connection each, dialled when the first play wants it, shared by all."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from typing import Any

from kvabr.client.metrics import NodeMetrics
from kvabr.client.shared_downloads import Flights
from kvabr.quic.connect import connect
from kvabr.quic.interface import Connection, ConnectionStats, Download, DownloadStats
from kvabr.store.group_store import TieredGroupStore
from kvabr.types.errors import ConnectionLostError
from kvabr.types.naming import TrackNamespace


class _NoDownload(Download):
    """Nothing comes of it."""

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
    """To a peer that could not be reached: a play on it does what it does when it loses its peer."""

    backend = protocol = "none"

    def __init__(self, why: str) -> None:
        """Say what happened."""
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
        """A download that fails; see `Connection.fetch`."""
        del namespace, track, group, priority, limit, exact
        return _NoDownload(self._why)

    def stats(self) -> ConnectionStats:
        """Nothing is known."""
        return ConnectionStats()

    @property
    def closed(self) -> bool:
        """It was never open."""
        return True

    async def close(self) -> None:
        """There is nothing to close."""


class Peer:
    """An origin or a relay, as `Fetcher.peer` gives it out."""

    def __init__(self, url: str, options: dict[str, Any], store: TieredGroupStore, metrics: NodeMetrics) -> None:
        """Take note; nothing is dialled.

        Args:
            url: as for `kvabr.connect`.
            options: as for `kvabr.connect`.
            store: of the node.
            metrics: where to count.

        Raises:
            UsageError: the URL or an option makes no sense.
        """
        self.url = url
        self._options, self._store, self._metrics = options, store, metrics
        connect(url, **options)  # says what is wrong with them, now
        self._stack = AsyncExitStack()
        self._flights: Flights | None = None
        self._dialling: asyncio.Task[Flights] | None = None

    @property
    def connection(self) -> Connection | None:
        """The shared connection; None before the first play."""
        return None if self._flights is None else self._flights.connection

    async def flights(self) -> Flights:
        """Of the connection, which is dialled if there is none; whoever asks meanwhile waits for the same dial.

        Raises:
            TransportError: the peer cannot be reached, or does not let us in; the next to ask dials again.
        """
        if self._flights is None:
            if self._dialling is None:
                self._dialling = asyncio.get_running_loop().create_task(self._dial())
                self._dialling.add_done_callback(self._dialled)
            # One play that does not wait any more must not end the dial of the others.
            return await asyncio.shield(self._dialling)
        return self._flights

    async def close(self) -> None:
        """End the connection, and the dial."""
        if self._dialling is not None:
            self._dialling.cancel()
            await asyncio.wait({self._dialling})
        if self._flights is not None:
            await self._flights.close()
            self._metrics.peers.dec()
            self._flights = None
        await self._stack.aclose()

    async def _dial(self) -> Flights:
        connection = await self._stack.enter_async_context(connect(self.url, **self._options))
        self._flights = Flights(connection, self._store, self._metrics)
        self._metrics.peers.inc()
        return self._flights

    def _dialled(self, task: asyncio.Task[Flights]) -> None:
        self._dialling = None
        if not task.cancelled() and task.exception() is not None:
            self._metrics.dials_failed_total.inc()
