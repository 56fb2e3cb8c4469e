"""The assets of a store, as a server publishes them to those who may read them."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, NamedTuple

from kvabr.server.changes import ChangeLog, mark_of, position_in
from kvabr.server.grants import EVERYTHING, Grant, Grants
from kvabr.server.live_assets import FollowedAsset, LiveAssets
from kvabr.server.publication import BytesPublication, LevelPublication, Publication, Source, Suspect
from kvabr.store.asset import Asset, read_profile
from kvabr.store.asset_index import AssetIndex, AssetView
from kvabr.store.locations import Location
from kvabr.store.lru import ByteLru
from kvabr.store.store_tree import StoreTree
from kvabr.types.errors import AssetError, FormatError, NotFoundError, Reason, RequestError, TransportError
from kvabr.types.naming import (
    CATALOG_TRACK,
    CHANGES_TRACK,
    MODELS_NAMESPACE,
    MODELS_TRACK,
    PREFIX_TRACK,
    PROFILE_TRACK,
    TrackNamespace,
    is_live,
)

if TYPE_CHECKING:
    from structlog.typing import FilteringBoundLogger

_MAX_SUSPECTS = 4096
_CHECK_S = 0.2
"""Processor time for one check of suspects; the current group is finished."""
MAX_CACHED_BYTES = 256 << 20
"""Catalogs and profiles kept in memory."""

_EMPTY_VIEW = AssetView()


class _Reader(NamedTuple):
    grant: Grant
    view: AssetView
    log: ChangeLog


class PublishedAssets(Source):
    """All assets of an origin. `find` may be called during `refresh` in another thread."""

    def __init__(
        self,
        location: Location,
        grants: Grants | None = None,
        log: FilteringBoundLogger | None = None,
    ) -> None:
        """Find the assets of a store or a folder of stores; raises as `StoreTree`. Without ``grants`` all are open."""
        super().__init__(grants)
        self._lock = threading.Lock()
        self._readers: dict[str, _Reader] = {}
        self._levels: dict[Asset, dict[str, LevelPublication]] = {}
        self._suspects: deque[Suspect] = deque(maxlen=_MAX_SUSPECTS)
        """Groups for `check_suspects`: players request damaged groups again."""
        self._damaged: set[Asset] = set()
        self._cached: ByteLru[str, BytesPublication] = ByteLru(MAX_CACHED_BYTES, lambda kept: kept.open(0).size)
        """Recently used catalogs and profiles, by SHA-256."""
        self._cache_lock = threading.Lock()
        stores = StoreTree(location)
        self.look_every_s = stores.look_every_s
        self._index = AssetIndex(stores, log, self._changed)
        self.live: LiveAssets | None = None
        """Assets being prefilled; None except for folders."""
        if stores.folder is not None:
            self.live = LiveAssets(stores, self._index.log, on_ended=self.refresh, on_gone=self._live_gone)
        self._changed()
        self.refresh()

    @property
    def assets(self) -> Sequence[Asset]:
        """The good assets, by name."""
        return self._index.assets

    @property
    def damaged(self) -> int:
        """Number of assets left out, or with a damaged group that was requested."""
        return self._index.damaged + len(self._damaged.intersection(self._index.assets))

    def holds(self, grant: Grant, publication: Publication) -> bool:
        """Return whether a grant may still read a track; short catalogs and profiles are sent completely."""
        if not isinstance(publication, LevelPublication):
            return super().holds(grant, publication)
        asset = publication.asset
        return self._view(grant).assets.get(asset.catalog.namespace) is asset

    def regrant(self, grants: Grants) -> None:
        """Replace the grants, also for open connections."""
        self._grants = grants
        self._notify()  # first: withdrawn tokens lose their connections now
        self._update_grants()

    def refresh(self) -> bool:
        """Find new, replaced and removed assets; return whether anything changed."""
        with self._lock:
            return self._index.refresh()

    def check_suspects(self) -> None:
        """Read some suspected groups, each once, and log damaged ones."""
        until_s = time.thread_time() + _CHECK_S
        while self._suspects and time.thread_time() < until_s:
            asset, group, track = self._suspects.popleft()
            try:
                asset.frame(group, track)
            except (AssetError, FormatError) as error:
                if isinstance(error.__cause__, TransportError) and not isinstance(error.__cause__, NotFoundError):
                    self._suspects.appendleft((asset, group, track))
                    break  # the store does not answer, so the group may be good
                if asset.is_current():
                    self._damaged.add(asset)
                    where = {"asset": asset.name, "group": group, "track": track}
                    self._index.log.warning("group damaged", **where, error=str(error))

    def find(self, grant: Grant, namespace: TrackNamespace, track: str, *, at_once: bool = False) -> Publication | None:
        """Return a track. A forbidden one takes the same steps as a missing one."""
        self._check_grant(grant, at_once=at_once)
        if namespace == MODELS_NAMESPACE:
            if at_once and track.startswith(CHANGES_TRACK):
                raise BlockingIOError(f"{track}: must be waited for")
            return self._models(grant) if track == MODELS_TRACK else None
        if is_live(track):
            return self._find_live(grant, namespace, track)
        asset = self._view(grant).find(namespace, track)
        if asset is not None and not asset.is_current():
            # Replaced or removed since the last refresh.
            if at_once:
                raise BlockingIOError(f"{asset.location}: has changed")
            with self._lock, suppress(AssetError):
                self._index.renew(asset)
            asset = self._view(grant).find(namespace, track)
        if asset is None:
            return self._of_live(grant, namespace, track, at_once=at_once)
        try:
            if track == PROFILE_TRACK:
                return self._read(asset.catalog.profile or "", lambda: asset.profile_bytes() or b"", at_once)
            if track == CATALOG_TRACK or track.startswith(PREFIX_TRACK):
                return self._read(asset.catalog_sha256, asset.catalog_bytes, at_once)
        except (AssetError, FormatError) as error:
            self._index.log.warning("asset unreadable", asset=asset.name, error=str(error))
            return None
        # If a level was left out, only the growing asset has it.
        return self._levels.get(asset, {}).get(track) or self._find_live(grant, namespace, track)

    def _find_live(self, grant: Grant, namespace: TrackNamespace, track: str) -> Publication | None:
        found = None if self.live is None else self.live.find(grant, namespace, track)
        if found is None:
            return None
        asset, publication = found
        same = self._view(grant).assets.get(asset.namespace)
        # Another asset of that name, not the growing one's result, has other groups under the same names.
        return None if same is not None and asset.differs(same.catalog) else publication

    def _of_live(self, grant: Grant, namespace: TrackNamespace, track: str, *, at_once: bool) -> Publication | None:
        if track != PROFILE_TRACK:
            return self._find_live(grant, namespace, track)
        asset = None if self.live is None else self.live.profile(grant, namespace)
        try:
            if asset is None:
                return None
            return self._read(namespace.prompt, lambda: read_profile(asset.follower.store, asset.catalog), at_once)
        except (AssetError, FormatError) as error:
            self._index.log.warning("asset unreadable", profile=namespace.prompt[:16], error=str(error))
            return None

    def _live_gone(self, asset: FollowedAsset) -> None:
        for reader in self._readers.values():
            if reader.grant.may_read(asset.name, asset.namespace.model):
                reader.log.add([mark_of(asset.namespace)])
        self._notify()

    def _check_grant(self, grant: Grant, *, at_once: bool) -> None:
        if self.renewed(grant) is None:
            raise RequestError("the token is no longer accepted", reason=Reason.UNAUTHORIZED)
        if grant.token_sha256 not in self._readers:
            # A new token, while its assets are being looked up.
            if at_once:
                raise BlockingIOError(f"{grant.id}: is new")
            self._update_grants()

    def _models(self, grant: Grant) -> Publication:
        growing = () if self.live is None else self.live.assets
        live = [one.catalog.spec for one in growing if one.readable(grant)]
        known = {spec.digest(): spec for spec in (*live, *self._view(grant).models.values())}
        specs = sorted(known.values(), key=lambda spec: spec.model)
        return BytesPublication(json.dumps({"models": [spec.to_json() for spec in specs]}).encode())

    async def find_soon(self, grant: Grant, namespace: TrackNamespace, track: str) -> Publication | None:
        if namespace == MODELS_NAMESPACE and (position := position_in(track)) is not None:
            if grant.token_sha256 not in self._readers and self.renewed(grant) is not None:
                await asyncio.to_thread(self._update_grants)
            reader = self._readers.get(grant.token_sha256)
            return None if reader is None else reader.log.follow(position)
        try:
            return self.find(grant, namespace, track, at_once=True)
        except BlockingIOError:
            return await asyncio.to_thread(self.find, grant, namespace, track)

    def _read(self, sha256: str, read: Callable[[], bytes], at_once: bool) -> BytesPublication:
        with self._cache_lock:
            cached = self._cached.get(sha256)
        if cached is not None:
            return cached
        if at_once:
            raise BlockingIOError(f"{sha256}: must be read")
        made = BytesPublication(read())
        with self._cache_lock:
            self._cached.add(sha256, made)
        return made

    def _view(self, grant: Grant) -> AssetView:
        reader = self._readers.get(grant.token_sha256)
        return _EMPTY_VIEW if reader is None else reader.view  # withdrawn a moment ago

    def _changed(self) -> None:
        """Update publications and views, and report removals; grants of the same assets share one view."""
        assets, before, known = self._index.oldest_first, self._readers, self._levels
        self._levels = {
            asset: known.get(asset)
            or {name: LevelPublication(asset, name, self._suspects.append) for name in asset.catalog.published}
            for asset in assets
        }
        self._damaged.intersection_update(assets)
        live = () if self.live is None else self.live.assets
        shared: dict[tuple[str, ...], AssetView] = {}
        lost: dict[tuple[int, int], list[str]] = {}
        readers, news = dict[str, _Reader](), list[tuple[ChangeLog, list[str]]]()
        for grant in (EVERYTHING,) if self._grants is None else self._grants:
            seen = [asset for asset in assets if grant.may_read(asset.name, asset.catalog.namespace.model)]
            key = tuple(asset.name for asset in seen)
            if key not in shared:
                shared[key] = AssetView.of(seen)
            old = before.get(grant.token_sha256) or _Reader(grant, _EMPTY_VIEW, ChangeLog())
            new = readers[grant.token_sha256] = _Reader(grant, shared[key], old.log)
            both = id(old.view), id(new.view)
            if both not in lost:
                spaces = (space for space, asset in old.view.assets.items() if new.view.assets.get(space) is not asset)
                lost[both] = list(map(mark_of, spaces))
            growing = ((one.namespace, one.name, one.namespace.model) for one in live)
            closed = [space for space, *name in growing if old.grant.may_read(*name) and not grant.may_read(*name)]
            news.append((new.log, [*lost[both], *map(mark_of, closed)]))
        self._readers = readers
        named = {name for asset in assets for name in (asset.catalog_sha256, asset.catalog.profile)}
        with self._cache_lock:
            for sha256 in [sha256 for sha256 in self._cached if sha256 not in named]:
                del self._cached[sha256]
        for log, marks in news:
            log.add(marks)
        self._notify()

    def _update_grants(self) -> None:
        with self._lock:
            self._changed()
