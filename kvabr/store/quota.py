"""Limits the total size of the assets that engines publish into a folder.

Outgrown turns of conversations are removed first: assets that another asset continues. Then the least recently used
assets are removed, by the access times of their catalogs. Assets of `kvabr encode` are never removed, as measuring them
was expensive.
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
from kvabr.types.naming import prefix_key

_SLACK = 0.05
"""Fraction of the limit after which the folder is read again, since other processes may publish into it, too. The same
fraction is removed in addition, so that a full folder is not read for each new asset.
"""
_KEY_BYTES = 8


@dataclass(slots=True)
class _Known:
    """An asset in the folder."""

    used_s: float = 0.0
    objects: dict[str, int] = field(default_factory=dict)
    """Sizes in bytes of its objects; empty for an asset that no engine published, which is never removed."""
    keys: bytes = b""
    """Keys of its groups, concatenated. Empty if the cache can only be played as a whole, so that no other asset
    continues it.
    """
    whole: int = 0

    def key(self, group: int) -> bytes:
        return self.keys[group * _KEY_BYTES : (group + 1) * _KEY_BYTES]


class FolderQuota:
    """The size limit of a folder. Only `touch` is thread-safe.

    Each process that shares a folder reads it again after publishing a twentieth of the limit, so each may exceed the
    limit by that much.
    """

    def __init__(self, store: LocalStore, max_bytes: int) -> None:
        self._store, self._max_bytes = store, max_bytes
        self._known: dict[str, _Known] = {}
        self._since_bytes: int | None = None
        """Bytes published since the folder was last read; None before the first time."""

    def touch(self, name: str) -> None:
        """Record that an asset was computed or looked up again, so that it is kept longer. Never raises."""
        path = self._store.path(catalog_name(name))
        with contextlib.suppress(OSError):
            os.utime(path, ns=(time.time_ns(), path.stat().st_mtime_ns))  # a new modification time means a new asset

    def make_room(self, name: str) -> int:
        """Count a new asset, remove others if they no longer fit, and return the number of removed assets."""
        made = self._known[name] = self._read(name)
        since = None if self._since_bytes is None else self._since_bytes + sum(made.objects.values())
        if since is None or since > _SLACK * self._max_bytes or self._total(self._known) > self._max_bytes:
            self._look(but=name)
        else:
            self._since_bytes = since
        left = dict(self._known)
        if self._total(left) <= self._max_bytes:
            return 0
        outgrown, going = self._outgrown(), list[str]()
        victims = [one for one, known in left.items() if known.objects and one != name]
        victims.sort(key=lambda one: (one not in outgrown, left[one].used_s))
        for victim in victims:
            if self._total(left) <= (1 - _SLACK) * self._max_bytes:
                break
            del left[victim]
            going.append(victim)
        with contextlib.suppress(KvabrError):  # another process was faster, or this process may not write here
            self._store.blocked(remove_assets(self._store, going))
        self._known = left
        return len(going)

    @staticmethod
    def _total(known: dict[str, _Known]) -> int:
        every: dict[str, int] = {}
        for one in known.values():
            every.update(one.objects)
        return sum(every.values())

    def _outgrown(self) -> set[str]:
        """Return the names of assets that another asset continues.

        The digest of a partial group does not occur in longer prompts. So an asset that ends with a partial group is
        outgrown if another asset has all its full groups and at least one more.
        """
        after_any, after_full = set[bytes](), set[bytes]()
        for known in self._known.values():
            after_any.update(map(known.key, range(len(known.keys) // _KEY_BYTES - 1)))
            after_full.update(map(known.key, range(known.whole - 1)))
        return {
            name
            for name, known in self._known.items()
            if known.whole
            and known.key(known.whole - 1) in (after_any if known.whole * _KEY_BYTES == len(known.keys) else after_full)
        }

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
        if not catalog.every_token:  # with windows and states, only an asset itself can be continued at its end
            return _Known(used_s, objects)
        keys = b"".join(map(prefix_key, catalog.chunks))
        return _Known(used_s, objects, keys, catalog.tokens // catalog.spec.group_tokens)
