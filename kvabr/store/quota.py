"""Keeps what engines publish into a folder within so many bytes: what was computed longest ago goes first.

Only assets that an engine published are counted and removed, never those of `kvabr encode`: these were measured, and
nobody makes them again by the way. A removed prompt is published again when an engine computes it again.
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
"""How the catalogs of what engines publish begin to say where their losses are from."""

_NAME = re.compile(r"[0-9a-f]{64}")
_LOOK_AGAIN = 0.05
"""Share of the bytes after which the folder is looked at again, for others may publish into it too; and so much more
than must be is removed, so that a full folder of very many assets is not looked at for each."""


class Room:
    """The bytes that a folder of published assets may take. Not for several threads at once, but for `touch`."""

    def __init__(self, root: Path, most_bytes: int) -> None:
        """Nothing is read, nor removed, before the first `make`.

        Args:
            root: the folder.
            most_bytes: what engines have published there may take together. Processes that share a folder each look
                at it again after a twentieth of this, so several may exceed it by as much each.
        """
        self._root, self._most = root, most_bytes
        self._bytes: dict[str, int] = {}
        """Of what is there, by name; 0: neither to be counted nor removed."""
        self._looked = False
        self._since = 0

    def touch(self, name: str) -> None:
        """An asset was computed, or looked for, again: it stays longer. Quick, and says nothing if it is gone."""
        with contextlib.suppress(OSError):
            # Not the catalog's own time: by that an origin sees that an asset was replaced.
            os.utime(self._root / name)

    def make(self, name: str) -> int:
        """Count an asset that was just published; if they do not all fit, remove others until there is some room again.

        Args:
            name: of its folder. It is kept, even if it is larger than everything may be.

        Returns:
            How many were removed.
        """
        self._bytes[name] = size = _size(self._root / name)
        self._since += size
        if self._looked and self._taken() <= self._most and self._since <= _LOOK_AGAIN * self._most:
            return 0
        oldest, removed = self._look(), 0
        taken = self._taken()
        if taken <= self._most:
            return 0
        for other in oldest:
            if taken <= (1 - _LOOK_AGAIN) * self._most:
                break
            size = self._bytes[other]
            if other != name and self._remove(other):
                taken -= size
                removed += 1
        return removed

    def _taken(self) -> int:
        return sum(self._bytes.values())

    def _look(self) -> list[str]:
        """What is there now, the oldest first."""
        here: dict[str, float] = {}
        with contextlib.suppress(OSError), os.scandir(self._root) as entries:
            for entry in entries:
                with contextlib.suppress(OSError):
                    if _NAME.fullmatch(entry.name) and entry.is_dir(follow_symlinks=False):
                        here[entry.name] = entry.stat(follow_symlinks=False).st_mtime
        self._bytes = {name: size for name, size in self._bytes.items() if name in here}
        for name in here.keys() - self._bytes.keys():
            path = self._root / name
            self._bytes[name] = _size(path) if _is_published(path) else 0
        self._looked, self._since = True, 0
        return sorted((name for name in here if self._bytes[name]), key=lambda name: here[name])

    def _remove(self, name: str) -> bool:
        """Whether it is gone; by one rename first, so that an origin has it whole or not at all."""
        aside: str | None = None
        try:
            aside = tempfile.mkdtemp(prefix=f".{name}.", suffix=".old", dir=self._root)
            (self._root / name).rename(aside)
        except OSError:
            return False  # another process was faster, or this one may not write here
        finally:
            if aside is not None:
                shutil.rmtree(aside, ignore_errors=True)
        self._bytes.pop(name, None)
        return True


def _size(path: Path) -> int:
    """Bytes of all files below a folder; of one that is just being removed, those that are left."""
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
