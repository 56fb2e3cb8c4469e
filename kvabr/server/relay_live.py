"""Assets that grow at a relay's origin. The relay subscribes to each of their tracks once, for all of its players.

The relay follows only assets and levels that its players follow. Each group arrives once, without a round trip. It is
forwarded while it arrives, then stored like other groups.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import TYPE_CHECKING

from kvabr.server.live_tracks import GrowingAsset, LiveLevel
from kvabr.server.publication import ArrivingGroup, BytesPublication
from kvabr.server.relay_catalogs import Catalogs, is_unauthorized
from kvabr.server.relay_groups import RelayGroups
from kvabr.transfer.interface import Connection, GroupRequest, cancel_all
from kvabr.transfer.news import News
from kvabr.transfer.work import decoders
from kvabr.types.errors import AssetError, NotFoundError, Reason, RequestError
from kvabr.types.live import EdgeMessage, LiveCatalog
from kvabr.types.naming import LIVE_TRACK, TrackNamespace

if TYPE_CHECKING:
    from structlog.typing import FilteringBoundLogger

IDLE_S = 60.0
"""Seconds without a request after which an asset is no longer followed."""
MAX_LIVE = 64
_AHEAD_GROUPS = 64
_SLACK = 4
"""Maximum size of a group of unknown size, as a multiple of the expected size."""
_SLACK_BYTES = 64 << 10
REMOVED = "the asset was removed or replaced; request its catalog again"


class RelayedAsset(GrowingAsset):
    """An asset that grows at the origin."""

    dear = True

    def __init__(self, text: BytesPublication, groups: RelayGroups, now_s: float) -> None:
        """Parse the catalog, which is slow; errors as in `LiveCatalog.loads`."""
        super().__init__(LiveCatalog.loads(bytes(text.open(0).data)), text)
        self._groups = groups
        self.used_s = now_s

    def open(self, level: LiveLevel, group: int, priority: int, on_more: Callable[[], None]) -> ArrivingGroup:
        if self.gone:
            raise AssetError(REMOVED)
        return self._groups.open(self._request(level, group), level.objects(group), priority, on_more)

    def loads(self, level: LiveLevel, group: int) -> int:
        request = self._request(level, group)
        return 0 if request in self._groups else request.limit

    def _request(self, level: LiveLevel, group: int) -> GroupRequest:
        frame = level.frame(group)
        return GroupRequest(self.namespace, level.name, group, frame.size, exact=True, digest=frame.digest)

    def subscribed(self, level: LiveLevel) -> None:
        """Subscribe to the level at the origin, too."""
        if not self.over:
            for group in range(level.groups, min(level.groups + _AHEAD_GROUPS, len(level.expected))):
                limit = _SLACK * level.expected[group] + _SLACK_BYTES
                self._groups.expect(GroupRequest(self.namespace, level.name, group, limit, live=True))

    def unsubscribed(self, level: LiveLevel) -> None:
        self._groups.stop_expecting(self.namespace, level.name)

    def take(self, message: EdgeMessage) -> None:
        """Process the next message; receive expected groups even if no player reads them."""
        before = [(level, level.groups) for level in self.levels.values()]
        super().take(message)
        for level, groups in before:
            if level.watched:
                self.subscribed(level)
            for group in filter(level.has, range(groups, level.groups)):
                self._groups.receive_expected(self._request(level, group))

    def abandon(self, reason: str) -> None:
        super().abandon(reason)
        self._groups.stop_expecting(self.namespace)


class LiveRelay:
    """All growing assets that players request."""

    def __init__(
        self, upstream: Connection, catalogs: Catalogs, groups: RelayGroups, log: FilteringBoundLogger,
        on_gone: Callable[[], None],
    ) -> None:  # fmt: skip
        """``on_gone`` is called after the origin has removed an asset."""
        self._upstream, self._catalogs, self._groups, self._log = upstream, catalogs, groups, log
        self._on_gone = on_gone
        self._assets: dict[TrackNamespace, RelayedAsset] = {}
        self._beginning = asyncio.Lock()
        self._following: dict[RelayedAsset, asyncio.Task[None]] = {}

    def find(self, namespace: TrackNamespace) -> RelayedAsset | None:
        """Return an asset that is followed, or that has ended and was not restarted; else None."""
        asset = self._assets.get(namespace)
        if asset is not None and asset.over and self._restarted(asset):
            self._forget(asset)
            return None
        if asset is not None:
            asset.used_s = asyncio.get_running_loop().time()
        return asset

    async def begin(self, namespace: TrackNamespace) -> RelayedAsset:
        """Return an asset, and start to follow it.

        Raises `NotFoundError` if the origin has none, `TransportError` if it does not answer, or too many are followed.
        """
        if (asset := self.find(namespace)) is not None and asset.over:
            try:
                await self._catalogs.get(namespace, LIVE_TRACK)
            except NotFoundError:
                self.remove(lambda other: other is asset)
                raise
            asset = self.find(namespace)  # None if it was restarted
        if asset is not None:
            return asset
        # The news will show whether an old live catalog is still current.
        answer = self._catalogs.last(namespace, LIVE_TRACK) or await self._catalogs.get(namespace, LIVE_TRACK)
        async with self._beginning:  # once for all players that wait for it
            return self.find(namespace) or await self._begin(namespace, answer.publication)

    def remove(self, chosen: Callable[[RelayedAsset], bool]) -> None:
        """Drop the assets chosen, which the origin has removed."""
        for asset in [asset for asset in self._assets.values() if chosen(asset)]:
            asset.gone = True
            asset.abandon(REMOVED)
            self._forget(asset)
            self._on_gone()

    async def close(self) -> None:
        """Stop following all assets."""
        await cancel_all(self._following.values())
        for asset in self._assets.values():
            asset.abandon("the relay is going away")
        self._assets.clear()

    def _restarted(self, asset: RelayedAsset) -> bool:
        answer = self._catalogs.last(asset.namespace, LIVE_TRACK)
        if answer is None or answer.publication is asset.text:
            return False
        return bytes(answer.publication.open(0).data) != bytes(asset.text.open(0).data)

    async def _begin(self, namespace: TrackNamespace, text: BytesPublication) -> RelayedAsset:
        if len(self._assets) >= MAX_LIVE:
            raise RequestError("too many live assets at a time", reason=Reason.BUSY, retry_after_s=1.0)
        loop = asyncio.get_running_loop()
        asset = await loop.run_in_executor(decoders(), RelayedAsset, text, self._groups, loop.time())
        self._assets[namespace] = asset
        task = self._following[asset] = loop.create_task(self._follow(asset))
        task.add_done_callback(lambda _: self._following.pop(asset, None))
        self._log.info("live asset", model=namespace.model, prompt=namespace.prompt[:16])
        return asset

    async def _follow(self, asset: RelayedAsset) -> None:
        news, loop = News(self._upstream, asset.namespace, len(asset.levels)), asyncio.get_running_loop()
        try:
            while asset.watched or loop.time() - asset.used_s < IDLE_S:
                if asset.over:
                    await asyncio.sleep(IDLE_S)
                    continue
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(IDLE_S):
                        messages = await news.after(asset.order.messages)
                    for message in messages:
                        if not asset.over:
                            asset.take(message)
            asset.abandon("no player has requested it for a while")
        except Exception as error:  # noqa: BLE001  # after any error, end the asset for its players
            self._lost(asset, error)
        finally:
            news.close()
            self._forget(asset)

    def _lost(self, asset: RelayedAsset, error: Exception) -> None:
        where = {"model": asset.namespace.model, "prompt": asset.namespace.prompt[:16]}
        self._log.warning("live asset lost", **where, groups=asset.chunks, why=str(error))
        if is_unauthorized(error):
            self._catalogs.revoke()
        self._catalogs.forget_live(asset.namespace)
        lost = isinstance(error, NotFoundError)
        asset.gone = lost and asset.chunks > 0
        asset.abandon(f"{'the origin no longer has it' if lost else 'its updates are invalid'}: {error}")
        if asset.gone:
            self._on_gone()

    def _forget(self, asset: RelayedAsset) -> None:
        if self._assets.get(asset.namespace) is asset:
            del self._assets[asset.namespace]
            if (task := self._following.get(asset)) is not None:
                task.cancel()
