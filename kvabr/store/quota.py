"""Keeps the assets that engines publish into a folder within a number of bytes.

The least recently used asset is removed first; the time of its last use is the access time of its catalog. Assets of
`kvabr encode`, which were measured at some expense, are neither counted nor removed. A removed prompt is published
again when an engine computes it again.
"""

from __future__ import annotations

import contextlib
import os
import time
from dataclasses import dataclass, field

from kvabr.store.asset import Asset, AssetVersion
from kvabr.store.asset_store import AssetStore
from kvabr.store.local import LocalStore
from kvabr.store.names import catalog_name
from kvabr.store.removing import remove_assets
from kvabr.types.errors import KvabrError

_SLACK = 0.05
"""Share of the bound after which the folder is read again, because others may publish into it too. This share more
than necessary is removed, so that a full folder is not read for each new asset."""


@dataclass(slots=True)
class _Known:
    """An asset in the folder."""

    used_s: float = 0.0
    objects: dict[str, int] = field(default_factory=dict)
    """Bytes of its objects; none if no engine published it, so that it is never removed."""


class FolderQuota:
    """The bound of a folder. Only `touch` may be called from several threads at once.

    Processes that share a folder read it again after publishing a twentieth of the bound, so each may exceed the bound
    by as much.
    """

    def __init__(self, store: LocalStore, max_bytes: int) -> None:
        self._store, self._max_bytes = store, max_bytes
        self._known: dict[str, _Known] = {}
        self._since_bytes: int | None = None
        """Bytes published since the last scan; None before the first."""

    def touch(self, name: str) -> None:
        """Mark an asset as used, so that it stays longer. Never raises."""
        path = self._store.path(catalog_name(name))
        with contextlib.suppress(OSError):
            os.utime(
                path, ns=(time.time_ns(), path.stat().st_mtime_ns)
            )  # a new modification time would mean a new asset

    def make_room(self, name: str) -> int:
        """Count a newly published asset, and remove others if they no longer fit; return the number of removed ones."""
        made = self._known[name] = self._read(name)
        since = None if self._since_bytes is None else self._since_bytes + sum(made.objects.values())
        if since is None or since > _SLACK * self._max_bytes or self._total(self._known) > self._max_bytes:
            self._look(but=name)
        else:
            self._since_bytes = since
        left = dict(self._known)
        if self._total(left) <= self._max_bytes:
            return 0
        going = list[str]()
        victims = [one for one, known in left.items() if known.objects and one != name]
        victims.sort(key=lambda one: left[one].used_s)
        for victim in victims:
            if self._total(left) <= (1 - _SLACK) * self._max_bytes:
                break
            del left[victim]
            going.append(victim)
        with contextlib.suppress(KvabrError):  # another process was faster, or this one may not write
            self._store.blocked(remove_assets(self._store, going))
        self._known = left
        return len(going)

    @staticmethod
    def _total(known: dict[str, _Known]) -> int:
        every: dict[str, int] = {}
        for one in known.values():
            every.update(one.objects)
        return sum(every.values())

    def _look(self, but: str) -> None:
        names = AssetStore(self._store).list()
        for name in self._known.keys() - names.keys() - {but}:
            del self._known[name]
        for name in names:
            if name in self._known:
                self._known[name].used_s = self._used_s(name)
            else:
                self._known[name] = self._read(name)
        self._since_bytes = 0

    def _used_s(self, name: str) -> float:
        try:
            return self._store.path(catalog_name(name)).stat().st_atime
        except OSError:
            return 0.0

    def _read(self, name: str) -> _Known:
        used_s = self._used_s(name)
        try:
            asset = Asset(self._store, name, name, AssetVersion(0, 0.0))
        except KvabrError:
            return _Known()
        catalog = asset.catalog
        objects = {**asset.objects, catalog_name(name): asset.catalog_size} if catalog.estimated else {}
        return _Known(used_s, objects)
