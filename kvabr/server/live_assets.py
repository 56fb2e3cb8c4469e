"""Assets in a folder that are still being written.

While an asset grows, it has the tracks `kvabr.live`, its live catalog; `kvabr.edge`, the news of each group of tokens;
and its levels, with the announced groups. Lookups among growing assets have a separate track name. After its end, the
complete asset serves the levels under the same names. Earlier players can finish for a while, even if the producer was
killed.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from kvabr.server.grants import Grant
from kvabr.server.live_tracks import GrowingAsset, LiveLevel
from kvabr.server.publication import ArrivingGroup, OpenedGroup, Publication
from kvabr.store.asset_store import AssetStore
from kvabr.store.live import LiveFollower, live_keys
from kvabr.store.local import LocalStore
from kvabr.store.store_tree import StoreTree
from kvabr.types.catalog import Catalog
from kvabr.types.errors import AssetError, FormatError, NotFoundError
from kvabr.types.naming import LIVE_PREFIX_TRACK, TrackNamespace, parse_prefix_track, prefix_key

if TYPE_CHECKING:
    from structlog.typing import FilteringBoundLogger

SCAN_S, POLL_S = 0.05, 0.004
"""Seconds between scans for new assets, and between reads of growing assets."""
MAX_LIVE = 64
"""Maximum number of growing assets, and of recently ended ones."""
LINGER_S = 120.0
"""Seconds for which an ended asset is served to earlier players."""
STALLED_S = 600.0
"""Seconds without news after which an asset is ended, even if its producer is alive."""
_ALIVE_S = 0.5
_FIND_S = 0.5


class FollowedAsset(GrowingAsset):
    """An asset that grows in a folder."""

    def __init__(self, follower: LiveFollower, label: str) -> None:
        """``label``: path of its store, ending in a slash. Raises as `GrowingAsset`."""
        super().__init__(follower.live)
        self._named = {prefix_key(chunk): count for count, chunk in enumerate(self.catalog.chunks, 1)}
        """Number of groups up to the one with a key in a lookup's name; built once, because lookups are in the loop."""
        self.follower, self.store = follower, follower.store
        self.name = label + follower.live.catalog.namespace.prompt
        self.settled = False
        """True if an ended asset needs no further checks."""
        self.partial = True
        """True until a scan has found it complete."""
        self.changed_s = time.monotonic()

    def open(self, level: LiveLevel, group: int, priority: int, on_more: Callable[[], None]) -> ArrivingGroup:
        del priority, on_more
        frame, objects = level.frame(group), level.objects(group)
        return OpenedGroup(self.follower.open_frame(frame.size, frame.digest), objects, frame.digest)

    def poll(self) -> bool:
        """Read a batch of new messages; return True if more may follow. Raises as `LiveFollower.read` and `take`."""
        messages = self.follower.read()
        for message in messages:
            if self.over:
                break
            self.changed_s = time.monotonic()
            self.take(message)
        return bool(messages) and not self.over

    def differs(self, catalog: Catalog) -> bool:
        """Return True if a complete asset of this name has different frames under the same track names."""
        for name, level in self.levels.items():
            track = catalog.published.get(name)
            if track is not None and 0 < level.groups <= len(track.digests):
                return level.frame(level.groups - 1).digest not in ("", track.digests[level.groups - 1])
        return False

    def readable(self, grant: Grant) -> bool:
        return not self.gone and grant.may_read(self.name, self.namespace.model)

    def shared(self, namespace: TrackNamespace, track: str) -> int:
        """Return the number of leading groups shared with a lookup; if the asset has ended, of published groups."""
        catalog = self.catalog
        if (catalog.namespace.model, catalog.chunks[0]) != (namespace.model, namespace.prompt):
            return 0
        try:
            keys = {prefix_key(namespace.prompt), *parse_prefix_track(track)}
        except FormatError:
            return 0
        named = max(self._named.get(key, 0) for key in keys)
        return min(named, self.chunks) if self.over else named


class LiveAssets:
    """Follows all assets being written in a folder. Not thread-safe, except for `find`."""

    def __init__(
        self,
        stores: StoreTree,
        log: FilteringBoundLogger,
        *,
        on_ended: Callable[[], object] = lambda: None,
        on_gone: Callable[[], object] = lambda: None,
    ) -> None:
        """``on_ended`` is called in a thread when assets may be complete; ``on_gone`` after one was removed."""
        self._stores, self._log, self._on_ended, self._on_gone = stores, log, on_ended, on_gone
        self._assets: tuple[FollowedAsset, ...] = ()
        """Oldest first. The tuple is replaced, never changed, because other threads read it."""
        self._refused: set[str] = set()
        self._found: dict[str, AssetStore] = {}
        self._found_s = -math.inf
        self._outdated = self._crowded = False

    @property
    def assets(self) -> tuple[FollowedAsset, ...]:
        """All followed assets, including recently ended ones."""
        return self._assets

    @property
    def growing(self) -> int:
        """Number of assets that have not ended."""
        return sum(not asset.over for asset in self._assets)

    async def follow(self) -> None:
        """Scan for assets and follow them until cancelled."""
        scanning = asyncio.get_running_loop().create_task(self._scan_forever())
        try:
            while True:
                self.poll()
                await asyncio.sleep(POLL_S if self.growing else SCAN_S)
        finally:
            scanning.cancel()
            await asyncio.wait({scanning})
            for asset in self._assets:
                asset.abandon("the server is going away")
            self._assets = ()

    async def _scan_forever(self) -> None:
        checked_s = time.monotonic()
        while True:
            try:
                await self.scan()
                if time.monotonic() - checked_s >= _ALIVE_S:
                    await self.check()
                    checked_s = time.monotonic()
                await self.notify()
            except Exception:  # noqa: BLE001  # keep following assets
                self._log.exception("cannot look for live assets")
            await asyncio.sleep(SCAN_S)

    async def scan(self) -> None:
        """Add new assets; drop removed assets, and those that ended a while ago."""
        keys, new, refused, crowded = await asyncio.to_thread(self._scan_folder, self._assets)
        self._refused &= keys
        for key, why in refused.items():
            self._refused.add(key)
            self._log.warning("live asset left out", production=key, error=why)
        if crowded and not self._crowded:
            self._log.warning(
                "too many live assets", followed=MAX_LIVE, hint="further ones are served once some of these have ended"
            )
        self._crowded = crowded
        self._assets += tuple(new)
        for asset in new:
            where = {"model": asset.namespace.model, "groups": len(asset.catalog.chunks)}
            self._log.info("live asset", asset=asset.name, **where)
            self._poll(asset)  # before lookups can find it, since they need its published groups
        now_s, ended = time.monotonic(), [asset for asset in self._assets if asset.over]
        for asset in self._assets:
            if asset.partial and asset.over and not asset.settled:
                asset.changed_s = now_s  # its producer is still writing
            if asset.gone:
                asset.settled = True
                asset.end("the asset was removed")
                self._log.info("live asset removed", asset=asset.name)
                self._drop(asset)
                self._on_gone()
            elif asset.over and (now_s - asset.changed_s > LINGER_S or asset in ended[:-MAX_LIVE]):
                self._drop(asset)

    def poll(self) -> None:
        """Read the news of all growing assets."""
        for asset in self._assets:
            if not asset.over:
                self._poll(asset)

    async def check(self) -> None:
        """End assets with a killed or stalled producer."""
        for asset in self._assets:
            if asset.settled:
                continue
            if await asyncio.to_thread(asset.follower.has_writer):
                if not asset.over and time.monotonic() - asset.changed_s > STALLED_S:
                    self._end(asset, f"its producer has published nothing for {STALLED_S:g} s")
                continue
            while not asset.over:  # its producer may just have ended it
                if not self._poll(asset):
                    break
                await asyncio.sleep(0)
            asset.settled = True
            if not asset.over:
                whole = asset.chunks == len(asset.catalog.chunks) and asset.follower.is_published(0)
                self._end(asset, "" if whole else "its process is gone")

    async def notify(self) -> None:
        """Rescan the store if assets may have become complete."""
        if self._outdated:
            self._outdated = False
            await asyncio.to_thread(self._on_ended)

    def find(self, grant: Grant, namespace: TrackNamespace, track: str) -> tuple[FollowedAsset, Publication] | None:
        """Return the asset and its track, if the grant may read it, or None."""
        readable = [asset for asset in self._assets if asset.readable(grant)]
        if track.startswith(LIVE_PREFIX_TRACK):
            shared = [(asset.shared(namespace, track), not asset.over, asset) for asset in readable]
            # Of equal ones the oldest, so that all lookups of one prompt agree.
            best = max(shared, key=lambda each: each[:2], default=None)
            return None if best is None or not best[0] else (best[2], best[2].text)
        named = [asset for asset in readable if asset.namespace == namespace]
        named.sort(key=lambda asset: asset.over)
        return next(((asset, found) for asset in named[:1] if (found := asset.track(track)) is not None), None)

    def profile(self, grant: Grant, namespace: TrackNamespace) -> FollowedAsset | None:
        """Return an asset that uses this codec profile and that the grant may read, or None."""
        named = namespace.model, namespace.prompt
        readable = (asset for asset in self._assets if asset.readable(grant))
        return next((one for one in readable if (one.namespace.model, one.catalog.profile) == named), None)

    def _poll(self, asset: FollowedAsset) -> bool:
        more = False
        try:
            more = asset.poll()
        except FormatError as error:
            self._end(asset, str(error)[:300])
        except AssetError as error:
            self._log.warning("live asset unreadable", asset=asset.name, error=str(error))
            self._end(asset, "its updates cannot be read")  # without the path, which players should not see
        if asset.over:
            self._outdated = True
        return more

    def _end(self, asset: FollowedAsset, reason: str) -> None:
        if reason:
            self._log.warning("live asset ended", asset=asset.name, groups=asset.chunks, error=reason)
        asset.end(reason)
        asset.changed_s = time.monotonic()
        self._outdated = True

    def _drop(self, asset: FollowedAsset) -> None:
        self._assets = tuple(each for each in self._assets if each is not asset)
        self._refused.add(asset.follower.key)

    # ------------------------------------------------------------------ in a thread

    def _scan_folder(
        self, known: Sequence[FollowedAsset]
    ) -> tuple[set[str], list[FollowedAsset], dict[str, str], bool]:
        for asset in known:
            if not asset.follower.is_partial:
                complete = asset.follower.is_published(asset.chunks)
                asset.gone = asset.gone or (not complete and asset.chunks > 0)
                if complete and asset.partial:
                    asset.partial, self._outdated = False, True
        if time.monotonic() > self._found_s + _FIND_S:
            self._found, self._found_s = self._stores.find()[0], time.monotonic()
        stores = ((label, store.store) for label, store in self._found.items())
        keys = [(label, own, key) for label, own in stores if isinstance(own, LocalStore) for key in live_keys(own)]
        barred = self._refused | {asset.follower.key for asset in known}
        fresh = [each for each in keys if each[2] not in barred]
        free = max(0, MAX_LIVE - sum(not asset.over for asset in known))
        new, refused = list[FollowedAsset](), dict[str, str]()
        for label, own, key in fresh[:free]:
            try:
                new.append(FollowedAsset(LiveFollower(own, key), label))
            except (AssetError, FormatError) as error:
                if not isinstance(error.__cause__, NotFoundError):  # else it has just become complete
                    refused[key] = str(error)
        return {key for _, _, key in keys}, new, refused, len(fresh) > free
