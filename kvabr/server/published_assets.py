"""The assets of a store, published to clients with matching grants."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

from kvabr.server.grants import EVERYTHING, Grant, Grants
from kvabr.server.live_assets import LiveAssets
from kvabr.server.publication import BytesPublication, LevelPublication, Publication, Source
from kvabr.store.asset import Asset, read_profile
from kvabr.store.asset_index import AssetIndex, AssetView
from kvabr.store.locations import Location
from kvabr.store.lru import ByteLru
from kvabr.store.store_tree import StoreTree
from kvabr.types.errors import AssetError, FormatError, Reason, RequestError
from kvabr.types.naming import (
    CATALOG_TRACK,
    MODELS_NAMESPACE,
    MODELS_TRACK,
    PREFIX_TRACK,
    PROFILE_TRACK,
    TrackNamespace,
    is_live,
)

if TYPE_CHECKING:
    from structlog.typing import FilteringBoundLogger

MAX_CACHED_BYTES = 256 << 20
"""Maximum bytes of catalogs and profiles in memory."""


class PublishedAssets(Source):
    """All assets of an origin. `find` may be called during `refresh` in another thread."""

    def __init__(
        self,
        location: Location,
        grants: Grants | None = None,
        log: FilteringBoundLogger | None = None,
    ) -> None:
        """Find the assets of a store or a folder of stores; raises as `StoreTree`. No ``grants``: all are readable."""
        super().__init__(grants)
        self._lock = threading.Lock()
        self._views: dict[str, AssetView] = {}
        """Readable assets, by the grant's token."""
        self._cached: ByteLru[str, BytesPublication] = ByteLru(MAX_CACHED_BYTES, lambda answer: answer.open(0).size)
        """Recently used catalogs and profiles, by SHA-256."""
        self._cache_lock = threading.Lock()
        stores = StoreTree(location)
        self.look_every_s = stores.look_every_s
        self._index = AssetIndex(stores, log, self._changed)
        self.live: LiveAssets | None = None
        """Assets being prefilled; None unless the store is a folder."""
        if stores.folder is not None:
            self.live = LiveAssets(stores, self._index.log, on_ended=self.refresh, on_gone=self._notify)
        self._changed()
        self.refresh()

    @property
    def assets(self) -> Sequence[Asset]:
        """The undamaged assets, by name."""
        return self._index.assets

    @property
    def damaged(self) -> int:
        """Number of damaged assets, which are not served."""
        return self._index.damaged

    def regrant(self, grants: Grants) -> None:
        """Replace the grants, also for open connections."""
        self._grants = grants
        self._notify()  # first, so that withdrawn tokens lose their connections now
        self._update_grants()

    def refresh(self) -> bool:
        """Find new, replaced and removed assets; return True if anything changed."""
        with self._lock:
            return self._index.refresh()

    def find(self, grant: Grant, namespace: TrackNamespace, track: str, *, at_once: bool = False) -> Publication | None:
        """Return a track. For a forbidden track the steps are the same as for a missing one."""
        self._check_grant(grant, at_once=at_once)
        if namespace == MODELS_NAMESPACE:
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
        try:
            if track == PROFILE_TRACK:
                named = self.live.profile(grant, namespace) if asset is None and self.live is not None else asset
                if named is None:
                    return None
                return self._read(namespace.prompt, lambda: read_profile(named.store, named.catalog), at_once)
            if asset is not None and (track == CATALOG_TRACK or track.startswith(PREFIX_TRACK)):
                return self._read(asset.catalog_sha256, asset.catalog_bytes, at_once)
        except (AssetError, FormatError) as error:
            where = {"model": namespace.model, "prompt": namespace.prompt[:16]}
            self._index.log.warning("asset unreadable", **where, error=str(error))
            return None
        if asset is not None and track in asset.catalog.published:
            return LevelPublication(asset, track, self._readable)
        return self._find_live(grant, namespace, track)  # if a level was omitted, only the growing asset has it

    def _find_live(self, grant: Grant, namespace: TrackNamespace, track: str) -> Publication | None:
        found = None if self.live is None else self.live.find(grant, namespace, track)
        if found is None:
            return None
        asset, publication = found
        same = self._view(grant).assets.get(asset.namespace)
        # A different asset of that name, not the growing one's result, has other groups under the same names.
        return None if same is not None and asset.differs(same.catalog) else publication

    def _check_grant(self, grant: Grant, *, at_once: bool) -> None:
        if self.renewed(grant) is None:
            raise RequestError("the token is no longer accepted", reason=Reason.UNAUTHORIZED)
        if grant.token_sha256 not in self._views:
            # The token is new, and its assets are being looked up.
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
        return self._views.get(grant.token_sha256) or AssetView()  # without a view, it has just been withdrawn

    def _readable(self, grant: Grant, asset: Asset) -> bool:
        return self._view(grant).assets.get(asset.catalog.namespace) is asset

    def _changed(self) -> None:
        """Update the views; grants with the same assets share one."""
        assets = self._index.oldest_first
        shared: dict[tuple[str, ...], AssetView] = {}
        views = dict[str, AssetView]()
        for grant in (EVERYTHING,) if self._grants is None else self._grants:
            seen = [asset for asset in assets if grant.may_read(asset.name, asset.catalog.namespace.model)]
            key = tuple(asset.name for asset in seen)
            if key not in shared:
                shared[key] = AssetView.of(seen)
            views[grant.token_sha256] = shared[key]
        self._views = views
        self._notify()

    def _update_grants(self) -> None:
        with self._lock:
            self._changed()
