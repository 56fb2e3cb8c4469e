"""A warm folder over a cold store: what is used moves up, what a full folder drops is in the cold store first.

An asset keeps its version while it moves, so plays, relays and lookups do not notice. Only assets that engines
published move, and only those named by their prompt's digest, as all are in object stores; others in the folder stay.
"""

from __future__ import annotations

import hashlib
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NoReturn
from weakref import WeakValueDictionary

from kvabr.store.asset import (
    CATALOG,
    Asset,
    AssetListing,
    AssetStore,
    AssetVersion,
    AssetWriter,
    FrameReader,
)
from kvabr.store.asset_folder import FolderAsset, FolderAssetStore
from kvabr.store.eviction import DEFAULT_ORDER, Candidate, Order, ReuseTable, parts_of, victims
from kvabr.store.folder_notes import pin_end_s
from kvabr.store.quota import remove_asset
from kvabr.types.catalog import Catalog
from kvabr.types.errors import AssetError, KvabrError, UsageError
from kvabr.types.naming import prefix_key

_SLACK = 0.05
"""Share of the folder's bound that is freed beyond what must be."""
_MOST_UP = 4
"""Assets that move up in one step; it should not take long."""
_MOST_USES = 1 << 16
"""Uses that may wait to be counted."""


class TieredAsset(Asset):
    """An asset that is in one of two stores, or in both."""

    def __init__(self, name: str, version: AssetVersion, tiers: Sequence[Asset]) -> None:
        """Take the same asset from each store that has it, the fastest first; nothing is read."""
        first = tiers[0]
        self.location, self.name, self.version = first.location, name, version
        self.catalog, self.catalog_sha256, self.catalog_size = first.catalog, first.catalog_sha256, first.catalog_size
        self.use(tiers)

    def use(self, tiers: Sequence[Asset]) -> None:
        """Read from these from now on."""
        self._tiers = tuple(tiers)
        self.local, self.keeps_prompt = self._tiers[0].local, self._tiers[0].keeps_prompt

    @property
    def folder(self) -> FolderAsset | None:
        """The asset in the folder, if it is there."""
        first = self._tiers[0]
        return first if isinstance(first, FolderAsset) else None

    def is_current(self) -> bool:
        return any(tier.is_current() for tier in self._tiers)

    def check_parts(self) -> None:
        self._tiers[0].check_parts()

    def open_frame(self, group: int, track: str) -> FrameReader:
        *faster, last = self._tiers
        for tier in faster:
            try:
                return tier.open_frame(group, track)
            except AssetError:
                continue  # removed from there a moment ago
        return last.open_frame(group, track)

    def _read_part(self, part: str, max_bytes: int) -> bytes:
        *faster, last = self._tiers
        for tier in faster:
            try:
                data = _part_of(tier, part, max_bytes)
            except AssetError:
                continue
            # A copy may have its catalog written in other words.
            if part != CATALOG or hashlib.sha256(data).hexdigest() == self.catalog_sha256:
                return data
        return _part_of(last, part, max_bytes)

    def _frame_part(self, group: int, track: str) -> str:
        return f"{track}/{group}"


def _part_of(tier: Asset, part: str, max_bytes: int) -> bytes:
    """Read a part of an asset from one of its stores, each of which calls frames by names of its own."""
    track, slash, group = part.rpartition("/")
    name = tier._frame_part(int(group), track) if slash else part  # noqa: SLF001  # the same class
    return tier._read_part(name, max_bytes)  # noqa: SLF001


@dataclass(slots=True)
class Moves:
    """What one step moved, by name."""

    up: list[str] = field(default_factory=list)
    down: list[str] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)
    """What could not be moved, and why; it stays where it is."""


@dataclass(slots=True)
class _Known:
    """What is known of an asset that may move."""

    version: AssetVersion
    catalog: Catalog
    size: int
    """Bytes of its frames."""
    keys: tuple[bytes, ...]
    uses: int = 0
    first_s: float = 0.0
    last_s: float = 0.0


class TieredAssetStore:
    """An `AssetStore`: a folder, and behind it a store that is slower and larger. Writers write into the folder."""

    def __init__(
        self,
        warm: FolderAssetStore,
        cold: AssetStore,
        warm_bytes: int,
        *,
        order: Order = DEFAULT_ORDER,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """Combine two stores; nothing is read or moved yet.

        Args:
            warm: the folder.
            cold: what is behind it.
            warm_bytes: bound on the frames of the folder's assets that may move.
            order: which of them go down first, see `kvabr.store.eviction`.
            clock: seconds since 1970, as files have them.

        Raises `UsageError` if the bound leaves room for nothing.
        """
        if warm_bytes < 1:
            raise UsageError(f"a folder for {warm_bytes} bytes holds nothing; give it more")
        self.warm, self.cold, self._warm_bytes, self._order, self._clock = warm, cold, warm_bytes, order, clock
        self._listing: dict[str, AssetVersion] = {}
        """What the cold store had at the last look."""
        self._complete, self._looked_s = True, float("-inf")
        self._moved: dict[str, tuple[frozenset[AssetVersion], AssetVersion]] = {}
        """Of assets that moved, by name: the versions in both stores, and the one that they keep."""
        self._open: WeakValueDictionary[str, TieredAsset] = WeakValueDictionary()
        self._used: deque[tuple[str, float]] = deque(maxlen=_MOST_USES)
        self._known: dict[str, _Known] = {}
        self._reuse = ReuseTable()
        self._lock = threading.Lock()
        """Held by `settle`: one at a time moves."""

    @property
    def location(self) -> str:
        """The folder's path."""
        return self.warm.location

    @property
    def look_every_s(self) -> float:
        """See `AssetStore.look_every_s`: the cold store is looked at less often than the folder."""
        return self.warm.look_every_s

    def prepare(self) -> None:
        """See `AssetStore.prepare`; checks both stores."""
        self.warm.prepare()
        self.cold.prepare()

    def list(self) -> AssetListing:
        """See `AssetStore.list`. A cold store that does not answer has what it had before."""
        now = self._clock()
        if not 0 <= now - self._looked_s < self.cold.look_every_s:
            try:
                found = self.cold.list()
            except AssetError:
                if self._looked_s == float("-inf"):
                    raise
            else:
                self._listing, self._complete = found.versions, found.complete
                self._looked_s = now
        warm = self.warm.list()
        both = {**self._listing, **warm.versions}
        versions = {name: self._stable(name, version) for name, version in both.items()}
        return AssetListing(versions, complete=warm.complete and self._complete, unreadable=warm.unreadable)

    def version(self, name: str) -> AssetVersion | None:
        found = self.warm.version(name) or self.cold.version(name)
        return None if found is None else self._stable(name, found)

    def open(self, name: str = ".") -> TieredAsset:
        asset: Asset = self.warm.open(name) if self.warm.version(name) is not None else self.cold.open(name)
        made = self._open[name] = TieredAsset(name, self._stable(name, asset.version), [asset])
        return made

    def writer(self, name: str = ".", *, force: bool = False, computed_s: float = math.inf) -> AssetWriter:
        return self.warm.writer(name, force=force, computed_s=computed_s)

    def touch(self, name: str) -> None:
        (self.cold if self.warm.version(name) is None else self.warm).touch(name)

    def quota(self, max_bytes: int, order: Order = DEFAULT_ORDER) -> NoReturn:  # noqa: ARG002  # of the protocol
        """Raise `UsageError`: the folder has its bound already."""
        raise UsageError(f"{self.location}: {self._warm_bytes:,} bytes are its bound, and what is over moves down")

    def close(self) -> None:
        self.warm.close()
        self.cold.close()

    def use(self, name: str) -> None:
        """Note that somebody looked an asset up. Quick, and safe from any thread."""
        self._used.append((name, self._clock()))

    def settle(self) -> Moves:
        """Move down what the folder has no room for, and up what is worth more than that. Takes long: use a thread."""
        moves = Moves()
        with self._lock:
            self._look()
            used = self._count_uses()
            warm = self.warm.list().versions
            self._move_down(warm, None, moves)
            wanted = [name for name in used if name not in warm and name in self._known]
            for name in sorted(wanted, key=lambda name: self._known[name].last_s, reverse=True)[:_MOST_UP]:
                if self._move_down(self.warm.list().versions, name, moves):
                    self._move(name, up=True, moves=moves)
        return moves

    def _look(self) -> None:
        """Learn what there is that may move."""
        versions = self.list().versions
        for name in self._known.keys() - versions.keys():
            del self._known[name]
        for name, version in versions.items():
            if name in self._known and self._known[name].version == version:
                continue
            asset = self._open.get(name)
            if asset is None or asset.version != version:
                continue  # nobody serves it yet
            catalog = asset.catalog
            if catalog.namespace.prompt != name or not catalog.estimated:
                self._known.pop(name, None)
                continue
            size = sum(sum(track.bytes) for track in catalog.published.values())
            shared = catalog.chunks if catalog.every_token else catalog.chunks[-1:]
            stored_s = version.modified_ns * 1e-9
            made = _Known(version, catalog, size, tuple(map(prefix_key, shared)), 0, stored_s, stored_s)
            self._known[name] = made

    def _count_uses(self) -> set[str]:
        used: set[str] = set()
        while self._used:
            name, at_s = self._used.popleft()
            if (known := self._known.get(name)) is None:
                continue
            known.uses, known.last_s = known.uses + 1, max(known.last_s, at_s)
            known.first_s = min(known.first_s, at_s)
            self._reuse.note(self._candidate(name, set()).parts, at_s)
            used.add(name)
        return used

    def _candidate(self, name: str, ends: set[bytes]) -> Candidate:
        known = self._known[name]
        catalog = known.catalog
        group_tokens = catalog.spec.group_tokens if catalog.every_token else catalog.tokens
        parts = parts_of(known.keys, ends, catalog.tokens, group_tokens, seconds=catalog.prefill)
        pin_s = pin_end_s(self.warm.root, name) or -math.inf
        return Candidate(name, known.size, known.first_s, known.last_s, known.uses, parts, pin_s)

    def _move_down(self, warm: dict[str, AssetVersion], coming: str | None, moves: Moves) -> bool:
        """Make room in the folder, also for an asset that would come up; return whether that is worth it."""
        there = [name for name in warm if name in self._known]
        names = there if coming is None else [*there, coming]
        excess = sum(self._known[name].size for name in names) - self._warm_bytes
        if excess <= 0:
            return True
        ends = {self._known[name].keys[-1] for name in names}
        candidates = [self._candidate(name, ends) for name in names]
        excess += int(_SLACK * self._warm_bytes) if coming is None else 0
        gone = [
            victim.key for victim in victims(candidates, excess, self._clock(), order=self._order, reuse=self._reuse)
        ]
        if coming in gone:
            return False
        return all(self._move(name, up=False, moves=moves) for name in gone)

    def _move(self, name: str, *, up: bool, moves: Moves) -> bool:
        """Move one asset; return whether it has moved."""
        try:
            kept = self._stable(name, (self.cold if up else self.warm).open(name).version)
            warm = self._copied(name, self.cold, self.warm) if up else self.warm.open(name)
            cold = self.cold.open(name) if up else self._copied(name, self.warm, self.cold)
            if _bytes_of(warm.catalog) == _bytes_of(cold.catalog):
                self._moved[name] = frozenset({warm.version, cold.version}), kept
                self._listing[name] = cold.version
                if (asset := self._open.get(name)) is not None and asset.version == kept:
                    asset.use([warm, cold] if up else [cold])
            if not up and not remove_asset(self.warm.root, name, self._clock()):
                raise AssetError(f"{self.warm.location}/{name}: cannot be removed")
        except KvabrError as error:
            moves.failed[name] = str(error)
            return False
        (moves.up if up else moves.down).append(name)
        return True

    @staticmethod
    def _copied(name: str, source: AssetStore, target: AssetStore) -> Asset:
        """Return the asset in ``target``, where it is copied to if it is not there yet; each frame is checked."""
        if target.version(name) is None:
            asset = source.open(name)
            with target.writer(name) as writer:
                profile = asset.profile_bytes()
                if profile is not None:
                    writer.profile(profile)
                for track in asset.catalog.published.values():
                    for group in range(len(track.bytes)):
                        writer.frame(group, track.name, asset.frame(group, track.name))
                writer.commit(asset.catalog)
        return target.open(name)

    def _stable(self, name: str, version: AssetVersion) -> AssetVersion:
        """Return the version that an asset keeps while it moves."""
        versions, kept = self._moved.get(name, (frozenset[AssetVersion](), version))
        return kept if version in versions else version


def _bytes_of(catalog: Catalog) -> dict[str, tuple[str, ...]]:
    """Return what decides the bytes that a catalog names."""
    return {name: tuple(track.digests) for name, track in catalog.published.items()}
