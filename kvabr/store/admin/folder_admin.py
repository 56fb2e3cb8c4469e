"""Managing a folder of assets. Each asset owns its files, so its collection is the removal of whole assets.

The time of an asset's last use is that of its folder, which publishers renew (`kvabr.store.quota`). Pins and removals
take turns by a lock. All times are the file system's.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from kvabr.store.admin.collect import Collected
from kvabr.store.admin.protocol import REPAIR, Damage, Inventory, silent
from kvabr.store.admin.rules import Eviction, Holding, Rules, evictions, total_bytes
from kvabr.store.admin.survey import Progress
from kvabr.store.asset import AssetVersion, is_damage
from kvabr.store.asset_folder import FolderAsset, FolderAssetStore, asset_version
from kvabr.store.eviction import Part
from kvabr.store.files import folder_bytes
from kvabr.store.folder_notes import (
    REMOVED,
    expire_folder_model,
    expired_models,
    folder_time,
    locked,
    pin_end_s,
    pin_folder_asset,
    remove_folder_asset,
    unpin_folder_asset,
)
from kvabr.types.errors import AssetError, FormatError, KvabrError, NotFoundError, UsageError, VersionError

_NANO = 1e-9


class FolderAdmin:
    """A `StoreAdmin` over a folder of assets."""

    def __init__(self, store: FolderAssetStore) -> None:
        """Take the folder."""
        self._store, self._root = store, store.root

    @property
    def location(self) -> str:
        return self._store.location

    @property
    def tenant(self) -> str:
        return ""

    async def inventory(self, progress: Progress = silent) -> Inventory:
        """See `StoreAdmin.inventory`. Reads all catalogs."""
        listing = self._store.list()
        held, damaged, versions = [], dict(listing.unreadable), listing.versions
        for number, (name, version) in enumerate(sorted(versions.items())):
            progress("catalogs", number, len(versions))
            try:
                held.append(self._holding(name, version))
            except (AssetError, FormatError) as error:
                damaged[name] = str(error)
        return Inventory(await self.time_s(), tuple(held), damaged)

    async def names(self) -> list[str]:
        return list(self._store.list().versions)

    async def time_s(self) -> float:
        """See `StoreAdmin.time_s`: the file system's."""
        try:
            return folder_time(self._root)
        except AssetError:
            return time.time()

    async def pin(self, name: str, seconds: float) -> float:
        with locked(self._root):
            if asset_version(self._root / name) is None:
                raise NotFoundError(f"{name}: no such asset in {self._root}")
            until_s = folder_time(self._root) + seconds
            pin_folder_asset(self._root, name, until_s)
        return until_s

    async def unpin(self, name: str) -> bool:
        with locked(self._root):
            return unpin_folder_asset(self._root, name)

    async def expire(self, model: str, before_s: float | None = None) -> float:
        if not model:
            raise UsageError("name the model whose caches expire")
        with locked(self._root):
            return expire_folder_model(self._root, model, folder_time(self._root) if before_s is None else before_s)

    async def expired(self) -> Mapping[str, float]:
        return expired_models(self._root)

    async def collect(
        self,
        rules: Rules,
        *,
        dry_run: bool = False,
        cache_ttl_s: float | None = None,
        take_over: bool = False,  # noqa: ARG002 - of the protocol
        progress: Progress = silent,
    ) -> Collected:
        """See `StoreAdmin.collect`. Several at once do no harm; a folder has no single groups (``cache_ttl_s``)."""
        if cache_ttl_s is not None:
            raise UsageError(f"{self._root}: has no single groups, which only buckets cache (--cache-ttl)")
        found, done = await self.inventory(progress), Collected()
        if not dry_run and any(holding.name == "." for holding in found.holdings):
            raise UsageError(f"{self._root}: is one asset; give the folder that it lies in")
        done.damaged.update(found.damaged)
        broken = self._broken(found.holdings, progress)
        sound = [holding for holding in found.holdings if holding not in broken]
        gone = [Eviction(holding, "broken") for holding in broken if not holding.is_pinned(found.now_s)]
        gone += evictions(sound, rules, found.now_s, expired_models(self._root))
        for number, each in enumerate(gone):
            if dry_run or self._remove(each, found.now_s):
                done.evicted.append(each)
                done.bytes += each.holding.bytes
            else:
                done.busy += 1
            progress("evicting", number + 1, len(gone))
        done.kept = len(found.holdings) + len(found.damaged) - len(done.evicted)
        if rules.max_bytes is not None:
            left = total_bytes(found.holdings) - sum(each.holding.bytes for each in done.evicted)
            done.excess = max(0, left - rules.max_bytes)
        if not dry_run:
            self._tidy(found.now_s - rules.grace_s)
        return done

    async def verify(self, *, deep: bool = False, repair: bool = False, progress: Progress = silent) -> list[Damage]:
        listing = self._store.list()
        bad = [Damage(name, why, "it may be undamaged") for name, why in sorted(listing.unreadable.items())]
        names = sorted(listing.versions)
        for number, name in enumerate(names):
            progress("checking", number, len(names))
            try:
                _check(self._store.open(name), deep=deep)
            except KvabrError as error:
                repaired, advice = False, _advice(error)
                if repair and advice is None and name != ".":
                    with locked(self._root), contextlib.suppress(OSError):
                        remove_folder_asset(self._root / name)
                        unpin_folder_asset(self._root, name)
                        repaired = True
                bad.append(Damage(name, str(error), advice or REPAIR, repaired))
        return bad

    def _holding(self, name: str, version: AssetVersion) -> Holding:
        asset = self._store.open(name)
        catalog, size = asset.catalog, folder_bytes(asset.path)
        created_s = version.modified_ns * _NANO
        group_tokens = catalog.spec.group_tokens
        parts = []
        for group, digest in enumerate(catalog.chunks):
            tokens = min(group_tokens, catalog.tokens - group * group_tokens)
            parts.append(Part(digest, 0, tokens))
        return Holding(
            name=name,
            model=catalog.spec.model,
            tokens=catalog.tokens,
            created_s=created_s,
            used_s=max(created_s, _modified_s(asset.path)),
            bytes=size,
            own_bytes=size,
            pinned_until_s=pin_end_s(self._root, name),
            measured=not catalog.estimated,
            parts=tuple(parts),
            tracks={track.name: track.total_bytes for track in catalog.tracks},
        )

    def _broken(self, holdings: Sequence[Holding], progress: Progress) -> list[Holding]:
        """Return the assets that lack a part: players would try them in vain, and publishers take them for good."""
        broken = []
        for number, holding in enumerate(holdings):
            progress("checking", number, len(holdings))
            try:
                self._store.open(holding.name).check_parts()
            except KvabrError as error:
                if is_damage(error):
                    broken.append(holding)
        return broken

    def _remove(self, each: Eviction, now_s: float) -> bool:
        """Remove an asset unless it has been pinned, used or replaced since it was chosen."""
        held = each.holding
        path = self._root / held.name
        with locked(self._root):
            pin_s, version = pin_end_s(self._root, held.name), asset_version(path)
            if version is None or version.modified_ns * _NANO != held.created_s:
                return False
            if each.reason != "expired" and pin_s is not None and now_s < pin_s:
                return False
            if each.reason in ("unused", "over the quota") and _modified_s(path) > held.used_s:
                return False
            try:
                remove_folder_asset(path)
            except OSError as error:
                raise AssetError(f"{path}: cannot be removed ({error.strerror})") from error
            unpin_folder_asset(self._root, held.name)
        return True

    def _tidy(self, before_s: float) -> None:
        """Remove what killed processes were removing."""
        for folder, names, _ in os.walk(self._root):
            for name in [name for name in names if name.startswith(".")]:
                names.remove(name)
                path = Path(folder, name)
                with contextlib.suppress(OSError):
                    if name.endswith(REMOVED) and _modified_s(path) < before_s:
                        shutil.rmtree(path, ignore_errors=True)
            if (Path(folder) / "groups").is_dir():
                names.clear()


def _check(asset: FolderAsset, *, deep: bool) -> None:
    asset.check_parts()
    if deep:
        asset.check_frames()


def _advice(error: KvabrError) -> str | None:
    """Return what to do about an asset that is not damaged, and yet cannot be read; None: it is damaged."""
    if isinstance(error, VersionError):
        return "upgrade kvabr"
    return None if is_damage(error) else "it may be undamaged"


def _modified_s(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0
