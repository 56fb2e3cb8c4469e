"""Follows the news of a growing asset on one connection.

Earlier messages are fetched, many at a time; later ones arrive by a subscription.
"""

from __future__ import annotations

import asyncio

from kvabr.transfer.interface import Connection, GroupReader, GroupRequest, read_all
from kvabr.transfer.work import decoders
from kvabr.types.backoff import Backoff
from kvabr.types.errors import FormatError, NotFoundError, Reason, RequestError, TransportError
from kvabr.types.live import MAX_EDGE_BYTES, EdgeMessage, news_bytes, parse_edges
from kvabr.types.naming import EDGE_TRACK, TrackNamespace

_MAX_REQUESTED = 8
_END_BYTES = 7 << 10
"""Additional bytes of the last message: a reason of 500 characters with up to 12 bytes each."""
_PAUSE_S, _MAX_PAUSE_S = 0.05, 0.5
_TOP_PRIORITY = 0


class Retries:
    """Pauses before requests for live data are repeated."""

    def __init__(self, connection: Connection) -> None:
        self._connection, self._pauses = connection, Backoff(_PAUSE_S, _MAX_PAUSE_S)

    async def wait(self, error: Exception) -> None:
        """Pause before repeating a request that failed with ``error``; raise the error if repeating is useless."""
        if self._connection.closed or not isinstance(error, TransportError) or isinstance(error, NotFoundError):
            raise error
        wanted_s = error.retry_after_s if isinstance(error, RequestError) else None
        await asyncio.sleep(max(self._pauses.longer(), min(wanted_s or 0.0, _MAX_PAUSE_S)))


class News:
    """The messages of one asset, each delivered once, in order."""

    def __init__(self, connection: Connection, namespace: TrackNamespace, tracks: int) -> None:
        self._connection, self._namespace = connection, namespace
        self._bytes = news_bytes(tracks)
        self._requested: dict[int, GroupReader] = {}
        self._past = True
        """True if there may be earlier messages to fetch."""

    def close(self) -> None:
        """Cancel all requests."""
        for reader in self._requested.values():
            reader.cancel()
        self._requested.clear()

    async def after(self, number: int) -> list[EdgeMessage]:
        """Wait for message ``number``, and return it with those after it that are available.

        Raises:
            NotFoundError: the peer does not have it, and never will.
            TransportError: it cannot be received.
            FormatError: it is malformed.
        """
        if self._past:
            most = MAX_EDGE_BYTES // self._bytes
            try:
                messages = await self._read(self._request(number, most), number)
            except RequestError as error:
                # There are none yet; or the peer serves only one group per request, as moq-rs does.
                if not isinstance(error, NotFoundError) and error.reason != Reason.UNSUPPORTED:
                    raise
                messages = []
            self._past = len(messages) >= most
            if messages:
                return messages
        retries = Retries(self._connection)
        while True:
            for ahead in range(number, number + _MAX_REQUESTED):
                if ahead not in self._requested:
                    self._requested[ahead] = self._request(ahead)
            try:
                return await self._read(self._requested.pop(number), number)
            except TransportError as error:
                await retries.wait(error)

    def _request(self, number: int, most: int = 0) -> GroupReader:
        limit = min(MAX_EDGE_BYTES, max(1, most) * self._bytes + _END_BYTES)
        live = not most
        request = GroupRequest(self._namespace, EDGE_TRACK, number, limit, live=live, groups=max(1, most))
        return self._connection.request(request, _TOP_PRIORITY)

    @staticmethod
    async def _read(reader: GroupReader, number: int) -> list[EdgeMessage]:
        data = await read_all(reader)
        messages = await asyncio.get_running_loop().run_in_executor(decoders(), parse_edges, data)
        if not messages:
            raise FormatError(f"edge message {number} is empty")
        return messages
