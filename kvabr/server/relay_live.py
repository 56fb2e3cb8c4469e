"""Assets that grow at a relay's origin: their news are asked for once, for all who play them here.

Requests for groups that are not published yet wait at the relay, and as few as possible of them at the origin: those
for the next news, and those for the groups that players wait for. So a group comes through the relay without a round
trip of its own, and its bytes come once. Groups are checked by the news, and kept as those of other assets are.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING

from kvabr.server.live_tracks import EdgeTrack, GrowingAsset, LiveLevel, PublishedFrame
from kvabr.server.publication import ArrivingGroup, BytesPublication, Publication
from kvabr.server.relay_catalogs import Catalogs, is_unauthorized
from kvabr.server.relay_groups import RelayGroups
from kvabr.transfer.interface import Connection, read_all
from kvabr.transfer.transfer import GroupRequest
from kvabr.transfer.work import decoders
from kvabr.types.errors import AssetError, NotFoundError, Reason, RequestError, TransportError
from kvabr.types.live import MAX_EDGE_BYTES, EdgeMessage, LiveCatalog, news_bytes, parse_edge, parse_edges
from kvabr.types.naming import EDGE_TRACK, LIVE_TRACK, TrackNamespace

if TYPE_CHECKING:
    from structlog.typing import FilteringBoundLogger

HOLD_S = 10.0
"""Seconds for which the origin may hold a request."""
IDLE_S = 60.0
"""Seconds without a request after which an asset is forgotten."""
MOST_LIVE = 64
"""Assets that are followed at a time."""
_AHEAD, _MOST_ASKED = 4, 16
"""News that are asked for before they exist, of one asset and of all; of each asset at least one."""
_AHEAD_GROUPS = 8
"""Groups that are asked for before they exist, of one level."""
_SLACK = 4
"""How much larger than expected such a group may be."""
_SLACK_BYTES = 64 << 10
_PAUSE_S = 0.1
"""Pause after an answer that came too soon, or not at all."""
_URGENT = 0
_REMOVED = "the asset was removed or replaced; ask for its catalog again"


class RelayedAsset(GrowingAsset):
    """An asset that grows at the origin."""

    dear = True

    def __init__(self, text: BytesPublication, groups: RelayGroups, now_s: float) -> None:
        """Begin without groups; takes time, and raises as `LiveCatalog.loads`."""
        super().__init__(LiveCatalog.loads(bytes(text.open(0).data)), text)
        self._groups = groups
        self.asked_s = now_s
        """When somebody asked for something of it last."""

    def open(self, level: LiveLevel, group: int, priority: int, on_more: Callable[[], None]) -> ArrivingGroup:
        if self.gone:
            raise AssetError(_REMOVED)
        frame = level.frame(group)
        request = GroupRequest(self.namespace, level.name, group, frame.size)
        return self._groups.open(request, frame.digest, level.objects(group), priority, on_more)

    def loads(self, frame: PublishedFrame) -> int:
        return 0 if self._groups.has(frame.digest, frame.size) else frame.size

    def awaited(self, level: LiveLevel, group: int) -> None:
        """Somebody waits for a group: have the origin hold a request for it too."""
        if not self.over and group < min(level.groups + _AHEAD_GROUPS, len(level.expected)):
            limit = _SLACK * level.expected[group] + _SLACK_BYTES
            self._groups.hold(GroupRequest(self.namespace, level.name, group, limit, wait_s=HOLD_S))

    def take(self, message: EdgeMessage) -> None:
        """See `GrowingAsset.take`; fetch what the origin holds requests for, even without a player."""
        before = [(level, level.groups) for level in self.levels.values()]
        super().take(message)
        for level, groups in before:
            for group in filter(level.has, range(groups, level.groups)):
                frame = level.frame(group)
                request = GroupRequest(self.namespace, level.name, group, frame.size)
                self._groups.take_over(request, frame.digest, level.objects(group))
        if self.over:
            self._groups.release_all(self.namespace)

    def abandon(self, reason: str) -> None:
        super().abandon(reason)
        self._groups.release_all(self.namespace)


class LiveRelay:
    """All assets that grow and that players of this relay ask for."""

    def __init__(
        self, upstream: Connection, catalogs: Catalogs, groups: RelayGroups, log: FilteringBoundLogger,
        on_gone: Callable[[RelayedAsset], None] = lambda _: None,
    ) -> None:  # fmt: skip
        """Begin without any; ``on_gone`` hears of those that the origin has taken back."""
        self._upstream, self._catalogs, self._groups, self._log = upstream, catalogs, groups, log
        self._on_gone = on_gone
        self._assets: dict[TrackNamespace, RelayedAsset] = {}
        self._following: dict[TrackNamespace, asyncio.Task[None]] = {}
        self._beginning: dict[TrackNamespace, asyncio.Task[RelayedAsset]] = {}

    def __len__(self) -> int:
        """Return how many assets are known."""
        return len(self._assets)

    def find(self, namespace: TrackNamespace) -> RelayedAsset | None:
        """Return an asset that is followed, or that ended while followed and has not been begun again."""
        asset = self._assets.get(namespace)
        if asset is not None and asset.over and self._begun_again(asset):
            self._forget(asset)
            return None
        if asset is not None:
            asset.asked_s = asyncio.get_running_loop().time()
        return asset

    async def begin(self, namespace: TrackNamespace) -> RelayedAsset:
        """Return an asset that is followed from now on.

        Raises:
            NotFoundError: the origin has none of that name.
            TransportError: it does not answer, or refuses; or there are too many.
        """
        if (asset := self.find(namespace)) is not None:
            return asset
        task = self._beginning.get(namespace)
        if task is None:
            task = self._beginning[namespace] = asyncio.get_running_loop().create_task(self._begin(namespace))
            task.add_done_callback(lambda done: self._begun(namespace, done))
        return await asyncio.shield(task)

    def taken_back(self, chosen: Callable[[RelayedAsset], bool]) -> list[RelayedAsset]:
        """Drop assets that the origin has taken back, and return them."""
        found = [asset for asset in self._assets.values() if chosen(asset)]
        for asset in found:
            asset.gone = True
            asset.abandon(_REMOVED)
            self._forget(asset)
        return found

    async def close(self) -> None:
        """Follow nothing any more."""
        tasks = [*self._following.values(), *self._beginning.values()]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        for asset in self._assets.values():
            asset.abandon("the relay is going away")
        self._assets.clear()

    def _begun_again(self, asset: RelayedAsset) -> bool:
        """Return whether the origin has named another production of an asset since."""
        answer = self._catalogs.last(asset.namespace, LIVE_TRACK)
        if answer is None or answer.publication is asset.text:
            return False
        return bytes(answer.publication.open(0).data) != bytes(asset.text.open(0).data)

    def _begun(self, namespace: TrackNamespace, task: asyncio.Task[RelayedAsset]) -> None:
        self._beginning.pop(namespace, None)
        if not task.cancelled():
            task.exception()  # those who wait for it hear of it, if there are any left

    async def _begin(self, namespace: TrackNamespace) -> RelayedAsset:
        loop = asyncio.get_running_loop()
        self._forget_idle()
        if len(self._assets) >= MOST_LIVE:
            raise RequestError("too many live assets at a time", reason=Reason.BUSY, retry_after_s=1.0)
        # Its news show whether the live catalog is still that of the production under way.
        answer = self._catalogs.last(namespace, LIVE_TRACK) or await self._catalogs.get(namespace, LIVE_TRACK)
        asset = await loop.run_in_executor(decoders(), RelayedAsset, answer.publication, self._groups, loop.time())
        self._assets[namespace] = asset
        task = self._following[namespace] = loop.create_task(self._follow(asset))
        task.add_done_callback(lambda done: self._followed(asset, done))
        self._log.info("live asset", model=namespace.model, prompt=namespace.prompt[:16])
        return asset

    async def _follow(self, asset: RelayedAsset) -> None:
        """Take the news of an asset until it has ended; some are asked for before they exist."""
        loop, asked = asyncio.get_running_loop(), dict[int, asyncio.Task[EdgeMessage | None]]()
        try:
            await self._catch_up(asset)
            while not asset.over and (asset.watched or loop.time() - asset.asked_s < IDLE_S):
                ahead = max(1, min(_AHEAD, _MOST_ASKED // len(self._assets)))
                for number in range(asset.order.messages, asset.order.messages + ahead):
                    if number not in asked:
                        asked[number] = loop.create_task(self._news(asset, number))
                if (message := await asked.pop(asset.order.messages)) is not None:
                    asset.take(message)
        finally:
            for task in asked.values():
                task.cancel()
            await asyncio.gather(*asked.values(), return_exceptions=True)

    async def _catch_up(self, asset: RelayedAsset) -> None:
        """Handle the news that exist already, many at a time; raises as `_news`."""
        most = MAX_EDGE_BYTES // news_bytes(len(asset.levels))
        while not asset.over:
            request = GroupRequest(asset.namespace, EDGE_TRACK, asset.order.messages, MAX_EDGE_BYTES, groups=most)
            try:
                data = await read_all(self._upstream.request(request, _URGENT))
            except TransportError:
                return  # there are none, or the next request finds out why
            messages = await asyncio.get_running_loop().run_in_executor(decoders(), parse_edges, data)
            for message in messages:
                if not asset.over:
                    asset.take(message)
            if len(messages) < most:
                return

    async def _news(self, asset: RelayedAsset, number: int) -> EdgeMessage | None:
        """Return a message, given its number; None if it must be asked for again.

        Raises:
            TransportError: the origin has it no more, or refuses.
            FormatError: it is no message.
        """
        loop = asyncio.get_running_loop()
        begun_s = loop.time()
        request = GroupRequest(asset.namespace, EDGE_TRACK, number, MAX_EDGE_BYTES, wait_s=HOLD_S)
        try:
            return parse_edge(await read_all(self._upstream.request(request, _URGENT)))
        except RequestError as error:
            lost = isinstance(error, NotFoundError) and error.reason != Reason.NOT_YET
            if lost or is_unauthorized(error) or error.reason == Reason.WRONG:
                raise
        except TransportError as error:
            if is_unauthorized(error):
                raise
        await asyncio.sleep(_PAUSE_S if loop.time() - begun_s < HOLD_S / 2 else 0)
        return None

    def _followed(self, asset: RelayedAsset, task: asyncio.Task[None]) -> None:
        self._following.pop(asset.namespace, None)
        error = None if task.cancelled() else task.exception()
        if error is None:
            if not asset.over:
                asset.abandon("no player has asked for it for a while")
                self._forget(asset)
            return
        where = {"model": asset.namespace.model, "prompt": asset.namespace.prompt[:16]}
        self._log.warning("live asset lost", **where, groups=asset.chunks, why=str(error))
        if is_unauthorized(error):
            self._catalogs.revoke()
        self._catalogs.forget_live(asset.namespace)
        self._forget(asset)
        asset.gone = isinstance(error, NotFoundError) and asset.chunks > 0
        lost = isinstance(error, NotFoundError)
        asset.abandon(f"{'the origin has it no more' if lost else 'its news are wrong'}: {error}")
        if asset.gone:
            self._on_gone(asset)

    def _forget(self, asset: RelayedAsset) -> None:
        if self._assets.get(asset.namespace) is asset:
            del self._assets[asset.namespace]
            if (task := self._following.get(asset.namespace)) is not None:
                task.cancel()

    def _forget_idle(self) -> None:
        now_s = asyncio.get_running_loop().time()
        for asset in [one for one in self._assets.values() if one.over and now_s - one.asked_s >= IDLE_S]:
            self._forget(asset)


def relayed_asset_of(publication: Publication) -> RelayedAsset | None:
    """Return the asset that a track belongs to, if it is one that grows."""
    if isinstance(publication, LiveLevel | EdgeTrack) and isinstance(publication.asset, RelayedAsset):
        return publication.asset
    return None
