"""Indexes the assets of a store, and resolves names to assets.

`AssetView` has only the assets that one reader may see. Lookups of missing and of forbidden assets run the same code,
so neither the answer nor its timing reveals forbidden assets.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import structlog

from kvabr.store.asset import Asset, AssetVersion, object_sizes
from kvabr.store.asset_store import MAX_LISTED, AssetStore
from kvabr.store.names import GROUPS
from kvabr.store.store_tree import StoreTree
from kvabr.types.catalog import Catalog
from kvabr.types.digests import TITLES, is_digest, kind_of
from kvabr.types.errors import AssetError, FormatError
from kvabr.types.kv import KVSpec
from kvabr.types.naming import (
    CATALOG_TRACK,
    MAX_FULL_TRACK_NAME,
    PREFIX_TRACK,
    PROFILE_TRACK,
    TrackNamespace,
    is_live,
    is_lookup,
    parse_prefix_track,
)

if TYPE_CHECKING:
    from structlog.typing import FilteringBoundLogger

_DIGEST = re.compile(r"[0-9a-f]{64}")


_UNKNOWN = AssetVersion(0, 0.0)
MAX_PAUSE_S, RECHECK_S = 60.0, 1.0
"""Maximum seconds between checks of a damaged asset, and seconds after which a refresh begins no further such check."""


class _Damage(NamedTuple):
    version: AssetVersion
    error: str
    since_s: float = 0.0
    again_s: float = 0.0
    """When to check again: the pauses double, since each is as long as the asset has been damaged."""


class Shared(NamedTuple):
    """An asset that has a prefix in common with a prompt."""

    playable: int
    """Number of leading groups that can be played: fewer than those in common if a state has no snapshot at their end.
    """
    group: int
    asset: Asset


@dataclass(frozen=True, slots=True, eq=False)
class AssetView:
    """The names that one reader may use, and the assets for them."""

    assets: dict[TrackNamespace, Asset] = field(default_factory=dict)
    profiles: dict[TrackNamespace, Asset] = field(default_factory=dict)
    prefixes: dict[TrackNamespace, dict[bytes, Shared]] = field(default_factory=dict)
    """By the lookup's namespace (the first group's digest) and a group's key: the asset with the most playable groups;
    if several are equal, the newest. Passages are not included.
    """

    models: dict[bytes, KVSpec] = field(default_factory=dict)

    @classmethod
    def of(cls, assets: Iterable[Asset]) -> AssetView:
        """Index assets, given oldest first; of two assets with the same name, the later one is used."""
        view = cls()
        for asset in assets:
            catalog = asset.catalog
            model = catalog.namespace.model
            view.assets[catalog.namespace] = asset
            view.models[catalog.spec.digest()] = catalog.spec
            if catalog.profile is not None:
                view.profiles[TrackNamespace(model, catalog.profile)] = asset
            if catalog.passage is not None:
                continue
            table = view.prefixes.setdefault(TrackNamespace(model, catalog.chunks[0]), {})
            for group, key in enumerate(asset.prefix_keys):
                shared = Shared(catalog.playable(group + 1)[0], group, asset)
                if key not in table or shared.playable >= table[key].playable:
                    table[key] = shared
        return view

    def find(self, namespace: TrackNamespace, track: str) -> Asset | None:
        """Return the asset for a track (level, catalog, profile or lookup), or None."""
        if track.startswith(PREFIX_TRACK):
            return self._longest(namespace, track)
        return (self.profiles if track == PROFILE_TRACK else self.assets).get(namespace)

    def _longest(self, namespace: TrackNamespace, track: str) -> Asset | None:
        table = self.prefixes.get(namespace, {})
        try:
            keys = parse_prefix_track(track)
        except FormatError:
            return None
        # The namespace is the first group's digest, which all assets in the table have in common.
        first = bytes.fromhex(namespace.prompt[:16])
        found = [table[key] for key in (first, *keys) if key in table]
        return max(found, key=lambda shared: shared[:2]).asset if found else None


class AssetIndex:
    """All undamaged assets of a store or folder of stores. Call `refresh` and `renew` in one thread at a time."""

    def __init__(
        self,
        stores: StoreTree,
        log: FilteringBoundLogger | None = None,
        on_change: Callable[[], object] = lambda: None,
    ) -> None:
        """``on_change`` is called after a change, before it is logged."""
        self.stores = stores
        self.log: FilteringBoundLogger = structlog.get_logger() if log is None else log
        self._on_change = on_change
        self._assets: dict[str, Asset] = {}
        self._damaged: dict[str, _Damage] = {}
        self._recheck_s = 0.0
        """Seconds that this refresh has spent on checks of damaged assets."""
        self._complete = True

    @property
    def assets(self) -> Sequence[Asset]:
        """All undamaged assets, sorted by name."""
        assets = self._assets
        return [assets[name] for name in sorted(assets)]

    @property
    def oldest_first(self) -> Sequence[Asset]:
        """All undamaged assets, oldest first, as `AssetView.of` requires."""
        return sorted(self._assets.values(), key=lambda asset: (asset.version.modified_s, asset.name))

    @property
    def damaged(self) -> int:
        """Number of damaged assets, which are left out."""
        return len(self._damaged)

    def refresh(self) -> bool:
        """Find new, replaced and removed assets; return True if there were any."""
        assets, damaged = dict[str, Asset](), dict[str, _Damage]()
        self._recheck_s = 0.0
        found, unreadable = self.stores.find()
        complete = True
        for label, store in found.items():
            try:
                listed = store.list()
            except AssetError as error:
                if not label:
                    raise
                unreadable[label.rstrip("/")] = str(error)
                continue
            complete = complete and len(listed) < MAX_LISTED
            assets |= self._refreshed(label, store, listed, damaged)
        for name, why in unreadable.items():
            damaged[name] = _Damage(_UNKNOWN, why)
            if self._damaged.get(name) != damaged[name]:
                self.log.warning("folder left out", folder=name, error=why)
        if self._complete and not complete:
            self.log.warning("too many assets", root=self.stores.location, looked_at=len(assets))
        self._complete = complete
        self._damaged = damaged
        return self._replace(assets)

    def _refreshed(
        self,
        label: str,
        store: AssetStore,
        listed: Mapping[str, AssetVersion],
        damaged: dict[str, _Damage],
    ) -> dict[str, Asset]:
        """Return the undamaged assets of one store, by name; log each damaged asset once."""
        assets: dict[str, Asset] = {}
        sizes: dict[str, int] | None = None
        for prompt, version in listed.items():
            name = label + prompt
            asset = self._assets.get(name)
            if asset is None or asset.version != version:
                known = self._damaged.get(name)
                if known is not None and self._skips(known, version):
                    damaged[name] = known
                    continue
                sizes = object_sizes(store.store, (GROUPS,)) if sizes is None else sizes
                start_s = time.monotonic()
                try:
                    asset = store.open(prompt, name, version)
                    check_names(asset.catalog)
                    _ = asset.prefix_keys
                    asset.check_objects(sizes)
                except (OSError, ValueError, AssetError, FormatError) as error:
                    # Check damaged assets again: a slow copy may write the catalog before the frames.
                    now_s, why = time.monotonic(), str(error)
                    since_s = start_s if known is None or known.version != version else known.since_s
                    damaged[name] = _Damage(version, why, since_s, now_s + min(MAX_PAUSE_S, start_s - since_s))
                    self._recheck_s += 0.0 if known is None else now_s - start_s
                    if known is None or known[:2] != (version, why):
                        self.log.warning("asset left out", asset=name, error=why)
                    continue
            assets[name] = asset
        return assets

    def _skips(self, known: _Damage, version: AssetVersion) -> bool:
        """Return True if a damaged asset is not checked again now, so that a damaged store cannot delay the others."""
        early = known.version == version and time.monotonic() < known.again_s
        return early or self._recheck_s > RECHECK_S

    def renew(self, asset: Asset) -> None:
        """Refresh if an asset is no longer current."""
        if self._assets.get(asset.name) is asset:
            self.refresh()

    def _replace(self, assets: dict[str, Asset]) -> bool:
        before = self._assets
        if assets == before:
            return False
        self._assets = assets
        self._on_change()
        # Log last, so that readers of the log can find the new assets.
        for name, asset in assets.items():
            if before.get(name) is not asset:
                event = "asset replaced" if name in before else "asset added"
                catalog = asset.catalog
                self.log.info(event, asset=name, model=catalog.namespace.model, groups=catalog.groups)
        for name in before.keys() - assets.keys():
            self.log.info("asset removed", asset=name)
        return True


def check_names(catalog: Catalog) -> None:
    """Raise `FormatError` if a catalog contains names or sizes that cannot be served."""
    space = catalog.namespace
    catalog.check_frame_sizes()
    for track in catalog.published.values():
        if track.name in {CATALOG_TRACK, PROFILE_TRACK} or is_lookup(track.name) or is_live(track.name):
            raise FormatError(f"catalog: the track name {track.name!r} is reserved")
        if space.full_name_bytes(track.name) > MAX_FULL_TRACK_NAME:
            raise FormatError(f"catalog: full track names must have at most {MAX_FULL_TRACK_NAME} bytes")
        # Not `all(map(...))`: a single call would block other threads for too long.
        if any(not is_digest(digest) or kind_of(digest) != catalog.digest_kind for digest in track.digests):
            title = TITLES[catalog.digest_kind]
            raise FormatError(f"catalog: track {track.name} has a digest that is not 64 hex digits of {title}")
    if catalog.profile is not None and not _DIGEST.fullmatch(catalog.profile):
        raise FormatError("catalog: the profile's digest is not 64 hex digits")
    if catalog.spec.model != space.model:
        raise FormatError(f"catalog: the model is {catalog.spec.model!r}, but its namespace has {space.model!r}")
    if catalog.chunks[-1] != space.prompt:
        raise FormatError("catalog: the last prompt digest is not the one in the namespace")
