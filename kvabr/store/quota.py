"""Keeps what engines publish into a folder within a number of bytes: the least recently computed goes first.

Only assets that an engine published are counted and removed. Those of `kvabr encode` were measured, which is
expensive, and are never removed. A removed prompt is published again when an engine computes it again.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import tempfile
from pathlib import Path

from kvabr.store.asset import CATALOG
from kvabr.types.catalog import Catalog
from kvabr.types.errors import KvabrError

NOT_MEASURED = "not measured"
"""Start of `Catalog.loss_method` in what engines publish."""

_NAME = re.compile(r"[0-9a-f]{64}")
_SLACK = 0.05
"""Share of the bound after which the folder is read again, because others may publish into it too. As much more than
necessary is removed, so that a full folder of many assets is not read for each new one."""


class FolderQuota:
    """An `AssetQuota` for a folder of assets. Only `touch` may be called from several threads at once.

    Processes that share a folder each read it again after publishing a twentieth of the bound, so each of them may
    exceed it by as much.
    """

    def __init__(self, root: Path, max_bytes: int) -> None:
        """Take the folder; nothing is read or removed before the first `make_room`."""
        self._root, self._max_bytes = root, max_bytes
        self._sizes: dict[str, int] = {}
        """Bytes of all assets at the last look, by name; 0: not published by an engine."""
        self._published: dict[str, int] = {}
        """Bytes of those that engines published, the least recently computed first."""
        self._since_bytes: int | None = None
        """Bytes published since the last look; None before the first."""

    def touch(self, name: str) -> None:
        """See `AssetQuota.touch`."""
        with contextlib.suppress(OSError):
            # Not the catalog's own time: by that an origin sees that an asset was replaced.
            os.utime(self._root / name)

    def make_room(self, name: str) -> int:
        """See `AssetQuota.make_room`."""
        size = self._sizes[name] = _folder_bytes(self._root / name)
        self._published.pop(name, None)
        since = None if self._since_bytes is None else self._since_bytes + size
        if since is None or since > _SLACK * self._max_bytes or sum(self._published.values(), size) > self._max_bytes:
            self._look(but=name)
        else:
            self._since_bytes = since
        total, removed = sum(self._published.values(), size), 0
        room = self._max_bytes if total <= self._max_bytes else (1 - _SLACK) * self._max_bytes
        for oldest, its in list(self._published.items()):
            if total <= room:
                break
            del self._published[oldest]
            total -= its
            removed += self._remove(oldest)
        self._published[name] = size
        return removed

    def _look(self, but: str) -> None:
        """Find what is in the folder now, the least recently computed first, except for one asset."""
        used: dict[str, float] = {}
        with contextlib.suppress(OSError), os.scandir(self._root) as entries:
            for entry in entries:
                with contextlib.suppress(OSError):
                    if _NAME.fullmatch(entry.name) and entry.is_dir(follow_symlinks=False):
                        used[entry.name] = entry.stat(follow_symlinks=False).st_mtime
        sizes = {name: size for name, size in self._sizes.items() if name in used}
        for name in used.keys() - sizes.keys():
            path = self._root / name
            sizes[name] = _folder_bytes(path) if _is_published(path) else 0
        self._sizes, self._since_bytes = sizes, 0
        oldest_first = sorted(used, key=lambda name: used[name])
        self._published = {name: sizes[name] for name in oldest_first if name != but and sizes[name]}

    def _remove(self, name: str) -> bool:
        """Remove an asset, by a rename first, so that an origin has it whole or not at all."""
        aside: str | None = None
        try:
            aside = tempfile.mkdtemp(prefix=f".{name}.", suffix=".old", dir=self._root)
            (self._root / name).rename(aside)
        except OSError:
            return False  # another process was faster, or this one may not write here
        finally:
            if aside is not None:
                shutil.rmtree(aside, ignore_errors=True)
        self._sizes.pop(name, None)
        return True


def _folder_bytes(path: Path) -> int:
    total = 0
    for folder, _, files in os.walk(path):
        for file in files:
            with contextlib.suppress(OSError):
                total += (Path(folder) / file).lstat().st_size
    return total


def _is_published(path: Path) -> bool:
    try:
        return Catalog.read(path / CATALOG).loss_method.startswith(NOT_MEASURED)
    except (KvabrError, OSError):
        return False
