"""Follow a cache that is still being prefilled, for one play: its news, and base groups as they are published.

News announce groups of tokens with the sizes and digests of their frames, later ones additional frames. The play
subscribes to the news and the base track, so a base group is sent when published; other layers are fetched. Bytes that
arrive before their news wait undecoded.

Peers are not trusted. News must fit together (`GrowingCatalog`), and a base frame of unknown size may have four times
its expected size. Requests lost with a connection are repeated until the play's deadline.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Protocol

from kvabr.client.lookup import fetch_catalog
from kvabr.player.goals.live import EdgeChanges
from kvabr.player.requests import DEARER_PRIORITY
from kvabr.transfer.interface import Connection
from kvabr.transfer.news import News, Retries
from kvabr.transfer.transfer import GroupReader, GroupRequest
from kvabr.transfer.work import cancel_all
from kvabr.types.catalog import Catalog
from kvabr.types.errors import ConnectionLostError, FormatError, NotFoundError, TransportError
from kvabr.types.live import (
    EdgeMessage,
    GrowingCatalog,
    LiveEnd,
    PublishedFrames,
)

_MAX_AHEAD = 64
"""Most groups subscribed to at a time; other pushed groups are fetched."""
_TIMES_EXPECTED, _SLACK_BYTES = 4, 64 << 10
"""Most bytes of a base frame of unknown size: this multiple of the expected size plus a slack."""


class FeedListener(Protocol):
    """Receives a feed's changes."""

    def published(self, edge: int, changes: EdgeChanges) -> None:
        """Handle that the first ``edge`` groups exist, and other changes; see `Session.published`."""

    def stopped(self, reason: str) -> None:
        """Handle the end of publication, with its reason."""


class _Ahead:
    """The base of a group, requested before its publication."""

    def __init__(self, connection: Connection, request: GroupRequest, priority: int) -> None:
        self._connection, self._request, self._priority = connection, request, priority
        self.download: GroupReader | None = None
        self.received = 0
        self.task = asyncio.get_running_loop().create_task(self._keep())
        """Reads; cancel it to take over the download."""

    def cancel(self) -> None:
        self.task.cancel()
        if self.download is not None:
            self.download.cancel()

    async def _keep(self) -> None:
        """Read to detect failures, and retry."""
        retries = Retries(self._connection)
        while True:
            self.download, self.received = self._connection.request(self._request, self._priority), 0
            try:
                while part := await self.download.read():
                    self.received += len(part)
            except Exception as error:  # noqa: BLE001  # any transport error
                self.download.cancel()
                self.download = None
                try:
                    await retries.wait(error)
                except Exception:  # noqa: BLE001  # nothing to request: the news report why
                    return
            else:
                return


class LiveFeed:
    """The live edge of one asset, for one play."""

    def __init__(self, connection: Connection, growing: GrowingCatalog, base: str) -> None:
        """Prepare without requests; ``base`` is the track to subscribe to."""
        self.connection, self.growing = connection, growing
        self._base, self._catalog = growing.catalog.by_name[base], growing.catalog
        self._ahead: dict[int, _Ahead] = {}
        self._asked = 0
        """Leading groups requested ahead, or published before that."""
        self._news = News(connection, growing.catalog.namespace, len(growing.known))
        self.published_s: float | None = None
        """Time when the last group was announced, on the event loop's clock; None: not yet."""
        self.reason: str | None = None
        """Why publication ended with groups missing; None: it has not."""

    async def run(self, listener: FeedListener) -> None:
        """Report published groups to a listener until the last; cancellation ends everything."""
        try:
            self._ask_ahead()
            await self._follow(listener)
        except (TransportError, FormatError) as error:
            self._stop(listener, str(error))
        finally:
            self._news.close()
            for ahead in self._ahead.values():
                ahead.cancel()
            await cancel_all({ahead.task for ahead in self._ahead.values()})
            self._ahead.clear()

    def take(self, group: int) -> tuple[GroupReader, int] | None:
        """Return a download requested ahead and its bytes read so far; None if it failed."""
        if (ahead := self._ahead.pop(group, None)) is None:
            return None
        ahead.task.cancel()
        return None if ahead.download is None else (ahead.download, ahead.received)

    # ---------------------------------------------------------------- news

    async def _follow(self, listener: FeedListener) -> None:
        growing = self.growing
        while not growing.settled:
            try:
                messages = await self._news.after(growing.order.messages)
            except NotFoundError:
                messages = await self._from_catalog()
            if self._take(messages, listener):
                return

    def _take(self, messages: Iterable[EdgeMessage], listener: FeedListener) -> bool:
        """Handle news in order, and return True after the last."""
        growing, before = self.growing, self.growing.edge
        end: LiveEnd | None = None
        fault: FormatError | None = None
        added: list[tuple[int, str]] = []
        for message in messages:
            try:
                growing.order.check_key(message)
                if isinstance(message, LiveEnd):
                    end = message
                    growing.end()
                    break
                added += growing.publish(message)
            except FormatError as error:
                fault = error
                break
        if growing.complete and self.published_s is None:
            self.published_s = asyncio.get_running_loop().time()
        self._ask_ahead()
        pushed = [group for group in self._ahead if group < growing.edge]
        new = range(before, growing.edge)
        left_out = [
            key for group in new for track in self._catalog.by_name if (key := (group, track)) in growing.left_out
        ]
        listener.published(growing.edge, EdgeChanges(left_out, added, growing.coming_changed(), pushed))
        for group in [group for group in self._ahead if group < growing.edge]:
            self._ahead.pop(group).cancel()  # the play does not use it
        if growing.settled or (growing.complete and end is not None):
            return True
        if fault is not None:
            raise fault
        if end is not None:
            self._stop(listener, end.reason or "it has published fewer groups than it said")
        return end is not None

    def _stop(self, listener: FeedListener, reason: str) -> None:
        if not self.growing.complete:
            self.reason = reason
        listener.stopped(reason)

    async def _from_catalog(self) -> list[EdgeMessage]:
        """Return the remaining news from the catalog: the asset is complete, and its edge gone.

        Raises:
            TransportError: there is no catalog either.
            FormatError: it is of another asset.
        """
        retries = Retries(self.connection)
        while True:
            try:
                found = await fetch_catalog(self.connection, self._catalog.namespace)
            except NotFoundError:
                raise NotFoundError("the peer has neither the live asset any more, nor a complete one") from None
            except ConnectionLostError as error:
                await retries.wait(error)
            else:
                return self._told_by(found.catalog)

    def _told_by(self, catalog: Catalog) -> list[EdgeMessage]:
        ours, order = self._catalog, self.growing.order
        chunks = catalog.chunks[ours.offset : ours.offset + len(ours.chunks)]
        if catalog.spec.digest() != ours.spec.digest() or chunks != ours.chunks:
            raise FormatError("the catalog of the complete asset is not that of the live one")
        frames: list[dict[str, tuple[int, str]]] = [{} for _ in catalog.chunks]
        for group in range(catalog.groups):
            for track in catalog.tracks:
                name, _ = catalog.address(group, track.name)
                frames[catalog.unit(group).chunk][name] = track.bytes[group], track.digests[group]
        wanted = {group: set(names) for group, names in order.coming.items()}
        wanted |= {group: order.tracks(group) for group in range(order.groups, ours.offset + len(ours.chunks))}
        return [
            PublishedFrames(
                self.growing.key, group, 0.0, {name: frames[group][name] for name in names & frames[group].keys()}
            )
            for group, names in wanted.items()
        ]

    # ---------------------------------------------------------------- the base

    def _ask_ahead(self) -> None:
        catalog = self._catalog
        group = max(self._asked, self.growing.edge)
        while group < catalog.groups and len(self._ahead) < _MAX_AHEAD:
            track, number = catalog.address(group, self._base.name)
            limit = _TIMES_EXPECTED * self._base.bytes[group] + _SLACK_BYTES
            request = GroupRequest(catalog.namespace, track, number, limit, live=True)
            self._ahead[group] = _Ahead(self.connection, request, group * DEARER_PRIORITY // catalog.groups)
            group += 1
        self._asked = group
