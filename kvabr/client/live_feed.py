"""Follows a cache that is still being prefilled, for one play: its news, and the base of groups before they exist.

The news of a group of tokens say that it exists, how large its frames are, and what their SHA-256 is; further ones name
the frames that were not encoded at first. News and base are asked for ahead: the peer holds the requests until there is
something to send, so a group leaves the peer the moment it is published. What came of a group before its news waits
undecoded.

A peer is not believed. News must fit together (`GrowingCatalog`), and a base frame may have four times its expected
size while its size is not known. A request that ends without an answer is made again for as long as the play lasts;
what ends the play is its deadline.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Protocol

from kvabr.client.lookup import fetch_catalog
from kvabr.player.goals.live import EdgeChanges
from kvabr.player.requests import DEARER
from kvabr.transfer.interface import Connection, read_all
from kvabr.transfer.transfer import GroupReader, GroupRequest
from kvabr.transfer.work import cancel_all, decoders
from kvabr.types.backoff import Backoff
from kvabr.types.catalog import Catalog
from kvabr.types.errors import ConnectionLostError, FormatError, NotFoundError, Reason, RequestError, TransportError
from kvabr.types.live import (
    MAX_EDGE_BYTES,
    EdgeMessage,
    GrowingCatalog,
    LiveEnd,
    PublishedFrames,
    news_bytes,
    parse_edges,
)
from kvabr.types.naming import EDGE_TRACK

HELD_S = 10.0
"""Seconds for which a peer may hold a request. The same for all plays: equal requests share a download."""
_AT_ONCE_S = 1.0
"""A peer that has nothing and says so sooner than this holds no requests."""
_POLL_S, _MOST_PAUSE_S = 0.05, 0.5
"""Pauses before a request is made again, doubled each time; a peer that holds none is asked at the shorter one."""
_LEAST_AHEAD, _MOST_AHEAD, _MOST_UNITS = 2, 8, 16
"""Groups of tokens whose news and base are asked for ahead; and groups of all layer classes together."""
_ROUND_TRIPS = 1.5
"""Round trips that what is asked for ahead must last."""
_TIMES_EXPECTED, _SLACK_BYTES = 4, 64 << 10
"""Most bytes of a base frame whose size is not known: this multiple of what is expected, plus a slack."""
_END_BYTES = 7 << 10
"""What the last news may take more: they have a reason in JSON, 500 characters of up to 12 bytes."""
_URGENT = 0


class FeedListener(Protocol):
    """Takes what a feed has found out."""

    def published(self, edge: int, changes: EdgeChanges) -> None:
        """Note that the first ``edge`` groups exist, and what else has changed; see `Session.published`."""

    def stopped(self, reason: str) -> None:
        """Note that no more groups will exist, and why."""


class _Ahead:
    """The base of one group, from before it was published."""

    def __init__(self, feed: LiveFeed, request: GroupRequest, priority: int) -> None:
        self._feed, self._request, self._priority = feed, request, priority
        self.download: GroupReader | None = None
        self.received = 0
        self.task = asyncio.get_running_loop().create_task(self._keep())
        """Reads; cancel it to read on from the download."""

    def cancel(self) -> None:
        """End it."""
        self.task.cancel()
        if self.download is not None:
            self.download.cancel()

    async def _keep(self) -> None:
        """Read, so that an end without an answer is noticed, and ask again."""
        pauses = _Pauses()
        while self._feed.holds:
            self.download, self.received = self._feed.connection.request(self._request, self._priority), 0
            pauses.asked()
            try:
                while part := await self.download.read():
                    self.received += len(part)
            except Exception as error:  # noqa: BLE001  # a transport's, whatever it is
                self.download.cancel()
                self.download = None
                if not await self._feed.again(error, pauses):
                    return
            else:
                return


class _Pauses:
    """The pauses between attempts."""

    def __init__(self) -> None:
        self._pauses = Backoff(_POLL_S, _MOST_PAUSE_S)
        self._asked_s = 0.0

    def asked(self) -> None:
        """Note that a request was made now."""
        self._asked_s = asyncio.get_running_loop().time()

    @property
    def took_s(self) -> float:
        """Seconds since then."""
        return asyncio.get_running_loop().time() - self._asked_s

    async def wait(self, at_least_s: float = 0.0) -> None:
        """Wait before the next attempt."""
        await asyncio.sleep(max(self._pauses.longer(), min(at_least_s, _MOST_PAUSE_S)))


class LiveFeed:
    """The live edge of one asset, for one play."""

    def __init__(self, connection: Connection, growing: GrowingCatalog, base: str) -> None:
        """Ask for nothing yet; ``base``: the track on which groups are asked for ahead."""
        self.connection, self.growing = connection, growing
        self._base, self._catalog = growing.catalog.by_name[base], growing.catalog
        self.holds = True
        """Whether the peer holds requests, as far as is known."""
        self._ahead: dict[int, _Ahead] = {}
        self._asked = 0
        """Groups whose base was asked for ahead, or that existed before it could be."""
        self._news: dict[int, asyncio.Task[list[EdgeMessage]]] = {}
        self._news_bytes = news_bytes(len(growing.known))
        seconds = [*growing.seconds, 0.0]
        self._pace_s = max(seconds) / len(growing.seconds)
        self.published_s: float | None = None
        """When the last group of the play was known to exist, on the event loop's clock; None: it is not yet."""
        self.reason: str | None = None
        """Why no more groups will exist although some are missing; None: nothing is known of that."""

    async def run(self, listener: FeedListener) -> None:
        """Tell a listener of groups as they are published, until nothing follows; cancelling it ends everything."""
        try:
            self._ask_ahead()
            await self._follow(listener)
        except (TransportError, FormatError) as error:
            self._stop(listener, str(error))
        finally:
            for ahead in self._ahead.values():
                ahead.cancel()
            await cancel_all({*self._news.values(), *(ahead.task for ahead in self._ahead.values())})
            self._ahead.clear()

    def take(self, group: int) -> tuple[GroupReader, int] | None:
        """Hand over the download of a group's base that was asked for ahead, and the bytes read; None if it failed."""
        if (ahead := self._ahead.pop(group, None)) is None:
            return None
        ahead.task.cancel()
        return None if ahead.download is None else (ahead.download, ahead.received)

    async def again(self, error: Exception, pauses: _Pauses) -> bool:
        """Wait for the right moment to ask again after an error; return whether that makes sense."""
        if self.connection.closed or not isinstance(error, TransportError):
            return False
        if isinstance(error, NotFoundError):
            if error.reason != Reason.NOT_YET:
                return False
            if pauses.took_s < _AT_ONCE_S:
                self.holds = False
                await asyncio.sleep(_POLL_S)
            return True
        wanted_s = error.retry_after_s if isinstance(error, RequestError) else None
        await pauses.wait(wanted_s or 0.0)
        return True

    # ---------------------------------------------------------------- news

    async def _follow(self, listener: FeedListener) -> None:
        growing = self.growing
        most = MAX_EDGE_BYTES // self._news_bytes
        behind = True
        while not growing.settled:
            try:
                if behind:
                    messages = await self._fetch_news(growing.order.messages, most)
                    behind = len(messages) >= most
                else:
                    messages = await self._next_news()
            except NotFoundError:
                messages = await self._from_catalog()
            if self._take(messages, listener):
                return

    def _take(self, messages: Iterable[EdgeMessage], listener: FeedListener) -> bool:
        """Handle news in their order, and return whether nothing follows."""
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
            self._ahead.pop(group).cancel()  # the play does not want it
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

    async def _next_news(self) -> list[EdgeMessage]:
        """Return the next news, and ask for those that follow."""
        loop, wanted = asyncio.get_running_loop(), self.growing.order.messages
        for number in range(wanted, wanted + (self._window if self.holds else 1)):
            if number not in self._news:
                task = self._news[number] = loop.create_task(self._fetch_news(number))
                task.add_done_callback(_retrieve)
        try:
            return await self._news[wanted]
        finally:
            self._news.pop(wanted).cancel()

    async def _fetch_news(self, number: int, most: int = 1) -> list[EdgeMessage]:
        """Return up to ``most`` news, given the number of the first, which is waited for."""
        limit = min(MAX_EDGE_BYTES, most * self._news_bytes + _END_BYTES)
        namespace = self._catalog.namespace
        request = GroupRequest(namespace, EDGE_TRACK, number, limit, wait_s=HELD_S, groups=most)
        pauses = _Pauses()
        while True:
            pauses.asked()
            try:
                data = await read_all(self.connection.request(request, _URGENT))
            except TransportError as error:
                if not await self.again(error, pauses):
                    raise
            else:
                messages = await asyncio.get_running_loop().run_in_executor(decoders(), parse_edges, data)
                if not messages:
                    raise FormatError(f"edge message {number}: it is empty")
                return messages

    async def _from_catalog(self) -> list[EdgeMessage]:
        """Return the news that are left from the catalog: the asset is complete, and the peer has forgotten its edge.

        Raises:
            TransportError: there is no catalog, either.
            FormatError: it is of something else.
        """
        pauses = _Pauses()
        while True:
            pauses.asked()
            try:
                found = await fetch_catalog(self.connection, self._catalog.namespace)
            except NotFoundError:
                raise NotFoundError("the peer has neither the live asset any more, nor a complete one") from None
            except ConnectionLostError as error:
                if not await self.again(error, pauses):
                    raise
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

    @property
    def _window(self) -> int:
        """Groups of tokens to ask for ahead."""
        rtt_s = self.connection.stats().rtt_s or 0.0
        within = _ROUND_TRIPS * rtt_s / self._pace_s if self._pace_s > 0 else _MOST_AHEAD
        return int(min(_MOST_AHEAD, _LEAST_AHEAD + within))

    def _ask_ahead(self) -> None:
        """Ask for the base of the next groups."""
        growing, catalog = self.growing, self._catalog
        group, last = max(self._asked, growing.edge), growing.order.groups - catalog.offset + self._window
        while (
            self.holds
            and group < catalog.groups
            and catalog.unit(group).chunk < last
            and len(self._ahead) < _MOST_UNITS
        ):
            track, number = catalog.address(group, self._base.name)
            limit = _TIMES_EXPECTED * self._base.bytes[group] + _SLACK_BYTES
            request = GroupRequest(catalog.namespace, track, number, limit, wait_s=HELD_S)
            self._ahead[group] = _Ahead(self, request, group * DEARER // catalog.groups)
            group += 1
        self._asked = group


def _retrieve(task: asyncio.Task[list[EdgeMessage]]) -> None:
    """Take the error of a task that nobody may wait for any more."""
    if not task.cancelled():
        task.exception()
