"""The assets below a folder, and which of them each grant may read.

Each grant has an index of its own, made of the assets that it may read and of nothing else. A request is answered from
that index alone, so what is missing and what is forbidden are found out by the same steps, and neither the answer nor
the time that it takes depends on assets that the grant cannot read.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import structlog

from kvabr.store.asset import CATALOG
from kvabr.store.asset_snapshot import ShelvedAsset, Stamp, shelve
from kvabr.store.grants import EVERYTHING, Grant, Grants
from kvabr.store.publication import BytesPublication, Publication
from kvabr.types.errors import AssetError, FormatError
from kvabr.types.naming import (
    CATALOG_TRACK,
    PREFIX_TRACK,
    PROFILE_TRACK,
    TrackNamespace,
    parse_prefix_track,
    plain_track,
)

if TYPE_CHECKING:
    from structlog.typing import FilteringBoundLogger

MAX_DEPTH = 4
"""Folders below the root that an asset may lie in: ``ROOT/a/b/c/asset``."""
MAX_FOLDERS = 100_000
"""Folders that are looked at; more are left out, and the log says so."""
KEPT_BYTES = 256 << 20
"""Bytes of catalogs and profiles that are kept in memory; others are read when they are asked for."""


@dataclass(frozen=True, slots=True, eq=False)
class _Index:
    """What one grant may read."""

    spaces: dict[TrackNamespace, ShelvedAsset] = field(default_factory=dict)
    profiles: dict[TrackNamespace, ShelvedAsset] = field(default_factory=dict)
    prefixes: dict[TrackNamespace, dict[bytes, tuple[int, ShelvedAsset]]] = field(default_factory=dict)
    """By namespace of the lookup: for each digest that one of the assets has, the group it belongs to, and the newest
    of those assets."""

    @classmethod
    def of(cls, assets: Iterable[ShelvedAsset]) -> _Index:
        """Index assets; of two with the same name the later wins."""
        index = cls()
        for asset in assets:
            catalog, model = asset.asset.catalog, asset.namespace.model
            index.spaces[asset.namespace] = asset
            if catalog.profile is not None:
                index.profiles[TrackNamespace(model, catalog.profile)] = asset
            table = index.prefixes.setdefault(TrackNamespace(model, catalog.chunks[0]), {})
            table.update((key, (group, asset)) for group, key in enumerate(asset.keys))
        return index

    def longest(self, namespace: TrackNamespace, track: str) -> ShelvedAsset | None:
        """The asset that answers a lookup."""
        table = self.prefixes.get(namespace, {})
        try:
            keys = parse_prefix_track(track)
        except FormatError:
            return None
        # The namespace is the first group's digest: whatever is in the table shares at least that group.
        first = bytes.fromhex(namespace.prompt[:16])
        found = [table[key] for key in (first, *keys) if key in table]
        return max(found, key=lambda entry: entry[0])[1] if found else None


@dataclass(frozen=True, slots=True)
class _Damaged:
    """An asset that is left out, and what was logged about it."""

    stamp: Stamp
    why: str


class Library:
    """All assets of an origin. `find` may be called while another thread is in `refresh`."""

    def __init__(self, root: Path, grants: Grants | None = None, log: FilteringBoundLogger | None = None) -> None:
        """Look through a folder for assets.

        Args:
            root: an asset, or a folder with assets in it, at most `MAX_DEPTH` levels down.
            grants: who may read what; None: everyone may read everything.
            log: takes the events; None: structlog's own logger.

        Raises:
            AssetError: there is no such folder.
        """
        if not root.is_dir():
            raise AssetError(f"{root}: no such folder; give the folder that your assets are in")
        self.root = root
        self._grants = grants
        self._log: FilteringBoundLogger = structlog.get_logger() if log is None else log
        self._refreshing = threading.Lock()
        self._assets: dict[str, ShelvedAsset] = {}
        self._damaged: dict[str, _Damaged] = {}
        self._indexes: dict[str, _Index] = {}
        self._kept = _KeptBytes(KEPT_BYTES)
        self._too_many = False
        self._index()
        self.refresh()

    @property
    def assets(self) -> Sequence[ShelvedAsset]:
        """The good ones, by folder."""
        assets = self._assets
        return [assets[folder] for folder in sorted(assets)]

    @property
    def damaged(self) -> int:
        """How many were left out."""
        return len(self._damaged)

    @property
    def open_to_all(self) -> bool:
        """Whether everyone may read everything."""
        return self._grants is None

    def admit(self, token: bytes | None) -> Grant | None:
        """What the holder of a token may read; None: nothing, refuse the connection. Takes the same time for all."""
        grants = self._grants
        return EVERYTHING if grants is None else grants.check(token)

    def regrant(self, grants: Grants) -> None:
        """Put other grants in place of those there are; connections that are open feel it with their next request."""
        with self._refreshing:
            self._grants = grants
            self._index()

    def refresh(self) -> bool:
        """Look for assets that are new, were replaced, or are gone. Costs one look per folder where nothing changed.

        Returns:
            Whether anything did.
        """
        with self._refreshing:
            return self._refresh()

    def find(self, grant: Grant, namespace: TrackNamespace, track: str, *, at_once: bool = False) -> Publication | None:
        """What a grant may read under a name.

        Args:
            grant: from `admit`.
            namespace: of the track.
            track: a level, `kvabr.types.naming.CATALOG_TRACK`, `kvabr.types.naming.PROFILE_TRACK`, or the name of a
                lookup from `kvabr.types.naming.prefix_track`; any of them may be as
                `kvabr.types.naming.fresh_track` writes it.
            at_once: do not read files, nor wait for who does: an event loop has others to serve.

        Returns:
            None if there is no such track, or none that the grant may read.

        Raises:
            BlockingIOError: it cannot be told at once. Ask again in a thread, see `find_soon`.
        """
        track = plain_track(track)
        asset = self._lookup(grant, namespace, track)
        if asset is not None and not asset.is_current():
            # Replaced or removed since the last look: do not wait for the next one.
            if at_once:
                raise BlockingIOError(f"{asset.folder}: has changed")
            with self._refreshing:
                self._renew(asset)
            asset = self._lookup(grant, namespace, track)
        if asset is None:
            return None
        try:
            if track == PROFILE_TRACK:
                return self._kept.get(asset.asset.catalog.profile or "", asset.profile_data, at_once=at_once)
            if track == CATALOG_TRACK or track.startswith(PREFIX_TRACK):
                return self._kept.get(asset.catalog_sha256, asset.catalog_data, at_once=at_once)
        except AssetError as error:
            self._log.warning("asset unreadable", asset=asset.folder, error=str(error))
            return None
        return asset.levels.get(track)

    async def find_soon(self, grant: Grant, namespace: TrackNamespace, track: str) -> Publication | None:
        """As `find`, for an event loop: what takes long is done in a thread."""
        try:
            return self.find(grant, namespace, track, at_once=True)
        except BlockingIOError:
            return await asyncio.to_thread(self.find, grant, namespace, track)

    def namespaces(self, grant: Grant) -> list[TrackNamespace]:
        """Every namespace under which a grant may read something: of assets, of profiles, and of lookups."""
        index = self._index_of(grant)
        names = {*index.spaces, *index.profiles, *index.prefixes}
        return sorted(names, key=lambda space: (space.model, space.prompt))

    def _lookup(self, grant: Grant, namespace: TrackNamespace, track: str) -> ShelvedAsset | None:
        index = self._index_of(grant)
        if track.startswith(PREFIX_TRACK):
            return index.longest(namespace, track)
        return (index.profiles if track == PROFILE_TRACK else index.spaces).get(namespace)

    def _index_of(self, grant: Grant) -> _Index:
        return self._indexes.get(grant.token_sha256, _NOTHING)

    def _refresh(self) -> bool:
        before, assets, damaged = self._assets, dict[str, ShelvedAsset](), dict[str, _Damaged]()
        for folder, path, stamp in self._scan():
            kept = before.get(folder)
            asset = kept if kept is not None and kept.stamp == stamp else self._shelve(folder, path, stamp, damaged)
            if asset is not None:
                assets[folder] = asset
        self._damaged = damaged
        return self._replace(assets)

    def _renew(self, asset: ShelvedAsset) -> None:
        """Look at the folder of one asset again."""
        if self._assets.get(asset.folder) is not asset:
            return
        path, assets, damaged = asset.asset.path, dict(self._assets), dict(self._damaged)
        stamp = Stamp.of(path / CATALOG)
        renewed = None if stamp is None else self._shelve(asset.folder, path, stamp, damaged)
        if renewed is None:
            del assets[asset.folder]
        else:
            assets[asset.folder] = renewed
        self._damaged = damaged
        self._replace(assets)

    def _shelve(self, folder: str, path: Path, stamp: Stamp, damaged: dict[str, _Damaged]) -> ShelvedAsset | None:
        """Check an asset that is new or has changed; one that is damaged is noted, and logged once."""
        try:
            return shelve(path, folder, stamp)
        except (OSError, ValueError, AssetError, FormatError) as error:
            # It is checked again each time: a slow copy brings the catalog first and the frames later.
            damaged[folder] = _Damaged(stamp, str(error))
            if self._damaged.get(folder) != damaged[folder]:
                self._log.warning("asset left out", asset=folder, error=str(error))
            return None

    def _replace(self, assets: dict[str, ShelvedAsset]) -> bool:
        before = self._assets
        if assets == before:
            return False
        self._assets = assets
        self._index()
        # Told only now: whoever acts on it will find what it says.
        for folder, asset in assets.items():
            if before.get(folder) is not asset:
                event = "asset replaced" if folder in before else "asset added"
                catalog = asset.asset.catalog
                self._log.info(event, asset=folder, model=catalog.namespace.model, groups=catalog.groups)
        for folder in before.keys() - assets.keys():
            self._log.info("asset removed", asset=folder)
        return True

    def _index(self) -> None:
        """Give every grant its index; grants that may read the same share one."""
        oldest_first = sorted(self._assets.values(), key=lambda asset: (asset.stamp.modified_ns, asset.folder))
        shared: dict[tuple[str, ...], _Index] = {}
        indexes: dict[str, _Index] = {}
        for grant in (EVERYTHING,) if self._grants is None else self._grants:
            seen = [asset for asset in oldest_first if grant.may_read(asset.folder, asset.namespace.model)]
            key = tuple(asset.folder for asset in seen)
            indexes[grant.token_sha256] = shared.setdefault(key, _Index()) if key in shared else _Index.of(seen)
            shared[key] = indexes[grant.token_sha256]
        self._indexes = indexes

    def _scan(self) -> Iterator[tuple[str, Path, Stamp]]:
        """Folders with a catalog: as `ShelvedAsset.folder` has them, their paths, and their catalogs' stamps."""
        left = MAX_FOLDERS
        todo = [(".", self.root, 0)]
        while todo and left:
            folder, path, depth = todo.pop()
            left -= 1
            stamp = Stamp.of(path / CATALOG)
            if stamp is not None:
                yield folder, path, stamp
            elif depth < MAX_DEPTH:
                prefix = "" if depth == 0 else f"{folder}/"
                todo += [(prefix + name, path / name, depth + 1) for name in _folders(path)]
        if todo and not self._too_many:
            self._log.warning("too many folders", root=str(self.root), limit=MAX_FOLDERS)
        self._too_many = bool(todo)


class _KeptBytes:
    """Files that were read lately, by their SHA-256, up to some bytes in all."""

    def __init__(self, limit: int) -> None:
        self._limit, self._bytes = limit, 0
        self._kept: OrderedDict[str, BytesPublication] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, sha256: str, read: Callable[[], bytes], *, at_once: bool) -> BytesPublication:
        """The file, read with ``read`` unless it is at hand; the least recently asked for make room.

        Raises:
            BlockingIOError: it is not at hand, but is wanted at once.
        """
        with self._lock:
            kept = self._kept.get(sha256)
            if kept is not None:
                self._kept.move_to_end(sha256)
                return kept
        if at_once:
            raise BlockingIOError(f"{sha256}: must be read")
        made = BytesPublication(read())
        with self._lock:
            if self._kept.setdefault(sha256, made) is made:
                self._bytes += made.size(0)
            while self._bytes > self._limit:
                self._bytes -= self._kept.popitem(last=False)[1].size(0)
        return made


_NOTHING = _Index()


def _folders(path: Path) -> list[str]:
    """Names of the folders in a folder that are not hidden; links to folders count. In reverse, for a stack."""
    try:
        with os.scandir(path) as entries:
            return sorted((entry.name for entry in entries if entry.name[0] != "." and entry.is_dir()), reverse=True)
    except OSError:
        return []
