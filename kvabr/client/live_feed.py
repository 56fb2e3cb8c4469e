"""Follow a cache that is still being prefilled, for one play: its news, and base groups as they are published.

News announce groups with the sizes and digests of their frames, then additional frames. The play subscribes to the news
and the base track, and fetches other layers. Bytes that arrive before their announcement are held undecoded. Peers are
not trusted: news must be consistent (`GrowingCatalog`), and base frames have a maximum size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from kvabr.client.lookup import fetch_catalog
from kvabr.player.goals.live import EdgeChanges
from kvabr.player.requests import DEARER_PRIORITY
from kvabr.transfer.interface import Connection, GroupReader, GroupRequest
from kvabr.transfer.news import News, Retries
from kvabr.types.catalog import Catalog
from kvabr.types.errors import ConnectionLostError, FormatError, NotFoundError, TransportError
from kvabr.types.live import EdgeMessage, GrowingCatalog, LiveEnd, PublishedFrames

_MAX_AHEAD = 64
"""Most groups to subscribe to in advance; later ones are fetched."""
_TIMES_EXPECTED, _SLACK_BYTES = 4, 64 << 10
"""Maximum size of a base frame before its announcement: this multiple of the expected size, plus slack bytes."""


class LiveFeed:
    """The growth of one asset, for one play."""

    def __init__(self, connection: Connection, growing: GrowingCatalog, base: str) -> None:
        """``base``: the track to subscribe to."""
        self._connection, self.growing = connection, growing
        self._base, self._catalog = growing.catalog.by_name[base], growing.catalog
        self._ahead: dict[int, GroupReader] = {}
        self._news = News(connection, growing.catalog.namespace, len(growing.known))

    async def run(self, published: Callable[[int, EdgeChanges], None], stopped: Callable[[str], None]) -> None:
        """Follow the publication until the last group; cancellation ends everything.

        ``published`` receives the number of existing groups, and other changes (`Session.published`). If the
        publication ends early, ``stopped`` receives the reason.
        """
        try:
            self._request_ahead()
            reason = await self._follow(published)
        except (TransportError, FormatError) as error:
            reason = str(error)
        finally:
            self._news.close()
            for ahead in self._ahead.values():
                ahead.cancel()
            self._ahead.clear()
        if reason:
            stopped(reason)

    def take(self, group: int) -> GroupReader | None:
        """Return the download of a group that was requested in advance; None if it failed."""
        ahead = self._ahead.pop(group, None)
        return None if ahead is None or ahead.error is not None else ahead

    # ---------------------------------------------------------------- news

    async def _follow(self, published: Callable[[int, EdgeChanges], None]) -> str:
        """Follow until the end; return why groups are missing, or "" if all are published."""
        growing, ended = self.growing, None
        while ended is None and not growing.settled:
            try:
                messages = await self._news.after(growing.order.messages)
            except NotFoundError:
                messages = await self._from_catalog()
            ended = self._take(messages, published)
        return ended or ""

    def _take(self, messages: Iterable[EdgeMessage], published: Callable[[int, EdgeChanges], None]) -> str | None:
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
        self._request_ahead()
        pushed = [group for group, ahead in self._ahead.items() if group < growing.edge and ahead.error is None]
        new = range(before, growing.edge)
        left_out = [
            key for group in new for track in self._catalog.by_name if (key := (group, track)) in growing.left_out
        ]
        published(growing.edge, EdgeChanges(left_out, added, growing.coming_changed(), pushed))
        for group in [group for group in self._ahead if group < growing.edge]:
            self._ahead.pop(group).cancel()  # the play does not use it
        if growing.settled or (growing.complete and end is not None):
            return ""
        if fault is not None:
            raise fault
        return None if end is None else end.reason or "it has published fewer groups than announced"

    async def _from_catalog(self) -> list[EdgeMessage]:
        """Return the missing news, derived from the complete catalog; raise `TransportError` or `FormatError`."""
        retries = Retries(self._connection)
        while True:
            try:
                found = await fetch_catalog(self._connection, self._catalog.namespace)
            except NotFoundError:
                raise NotFoundError("the peer has neither the live asset nor a complete one") from None
            except ConnectionLostError as error:
                await retries.wait(error)
            else:
                return self._messages_of(found.catalog)

    def _messages_of(self, catalog: Catalog) -> list[EdgeMessage]:
        ours, order = self._catalog, self.growing.order
        chunks = catalog.chunks[ours.offset : ours.offset + len(ours.chunks)]
        if catalog.spec.digest() != ours.spec.digest() or chunks != ours.chunks:
            raise FormatError("the catalog of the complete asset does not match that of the live asset")
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

    def _request_ahead(self) -> None:
        catalog, edge = self._catalog, self.growing.edge
        for group in range(edge, min(edge + _MAX_AHEAD, catalog.groups)):
            ahead = self._ahead.get(group)
            if ahead is None or isinstance(ahead.error, ConnectionLostError):
                track, number = catalog.address(group, self._base.name)
                limit = _TIMES_EXPECTED * self._base.bytes[group] + _SLACK_BYTES
                request = GroupRequest(catalog.namespace, track, number, limit, live=True)
                self._ahead[group] = self._connection.request(request, group * DEARER_PRIORITY // catalog.groups)
