"""Keeps what engines publish into a folder within a number of bytes.

The outgrown turn of a conversation goes first: an asset that another one continues, which has a copy of it. Then the
least recently used goes. The time of an asset's last use is that of its folder.

Only assets that an engine published are counted and removed. Those of `kvabr encode` were measured, which is
expensive, and are never removed. A removed prompt is published again when an engine computes it again.
"""

from __future__ import annotations

import contextlib
import os
import re
from dataclasses import dataclass
from pathlib import Path

from kvabr.store.asset import CATALOG
from kvabr.store.files import folder_bytes, remove_folder
from kvabr.types.catalog import Catalog
from kvabr.types.errors import KvabrError
from kvabr.types.naming import prefix_key

_NAME = re.compile(r"[0-9a-f]{64}")
_SLACK = 0.05
"""Share of the bound after which the folder is read again, because others may publish into it too. As much more than
necessary is removed, so that a full folder of many assets is not read for each new one."""
_KEY_BYTES = 8


@dataclass(slots=True)
class _Known:
    """An asset in the folder."""

    size: int
    """Bytes that it takes; 0: not published by an engine, so that it is never removed."""
    used_s: float
    keys: bytes = b""
    """Of its groups, one after the other. Empty if only all of it can be played: then no other one has a copy of it."""
    whole: int = 0
    """Groups that have all their tokens."""

    def key(self, group: int) -> bytes:
        return self.keys[group * _KEY_BYTES : (group + 1) * _KEY_BYTES]


class FolderQuota:
    """The bound of a folder of assets. Only `touch` may be called from several threads at once.

    Processes that share a folder each read it again after publishing a twentieth of the bound, so each of them may
    exceed it by as much.
    """

    def __init__(self, root: Path, max_bytes: int) -> None:
        """Take the folder; nothing is read or removed before the first `make_room`."""
        self._root, self._max_bytes = root, max_bytes
        self._known: dict[str, _Known] = {}
        """All assets at the last look, by name."""
        self._since_bytes: int | None = None
        """Bytes published since the last look; None before the first."""

    def touch(self, name: str) -> None:
        """Note that an asset was computed or looked for again, so that it stays longer. Never raises."""
        with contextlib.suppress(OSError):
            # Not the catalog's own time: by that an origin sees that an asset was replaced.
            os.utime(self._root / name)

    def make_room(self, name: str) -> int:
        """Count a newly published asset, remove others if they no longer fit, and return how many were removed."""
        made = self._known[name] = self._read(name)
        since = None if self._since_bytes is None else self._since_bytes + made.size
        if since is None or since > _SLACK * self._max_bytes or self._total > self._max_bytes:
            self._look(but=name)
        else:
            self._since_bytes = since
        if (total := self._total) <= self._max_bytes:
            return 0
        outgrown, removed = self._outgrown(), 0
        victims = [one for one, known in self._known.items() if known.size and one != name]
        victims.sort(key=lambda one: (one not in outgrown, self._known[one].used_s))
        for victim in victims:
            if total <= (1 - _SLACK) * self._max_bytes:
                break
            total -= self._known.pop(victim).size
            with contextlib.suppress(OSError):  # another process was faster, or this one may not write here
                remove_folder(self._root / victim)
                removed += 1
        return removed

    @property
    def _total(self) -> int:
        return sum(known.size for known in self._known.values())

    def _outgrown(self) -> set[str]:
        """Return the names of assets that another one continues.

        The digest of a group that is not full tells nothing about other prompts. So an asset that ends with one is
        outgrown if another one has all its full groups and at least one more full group.
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
        """Find what is in the folder now."""
        used: dict[str, float] = {}
        with contextlib.suppress(OSError), os.scandir(self._root) as entries:
            for entry in entries:
                with contextlib.suppress(OSError):
                    if _NAME.fullmatch(entry.name) and entry.is_dir(follow_symlinks=False):
                        used[entry.name] = entry.stat(follow_symlinks=False).st_mtime
        for name in self._known.keys() - used.keys() - {but}:
            del self._known[name]
        for name, used_s in used.items():
            known = self._known.get(name)
            if known is None:
                known = self._known[name] = self._read(name)
            known.used_s = used_s
        self._since_bytes = 0

    def _read(self, name: str) -> _Known:
        """Return what an asset in the folder is."""
        path = self._root / name
        try:
            catalog = Catalog.read(path / CATALOG)
            used_s = path.stat().st_mtime
        except (KvabrError, OSError):
            return _Known(0, 0.0)
        size = folder_bytes(path) if catalog.estimated else 0
        if not catalog.every_token:  # of windows and states, each asset has what continuing its own end takes
            return _Known(size, used_s)
        keys = b"".join(map(prefix_key, catalog.chunks))
        return _Known(size, used_s, keys, catalog.tokens // catalog.spec.group_tokens)
