"""The stores at a location: a single store, or all stores in a folder, at most `MAX_DEPTH` levels deep."""

from __future__ import annotations

import os
from pathlib import Path

from kvabr.store.asset_store import AssetStore
from kvabr.store.local import LocalStore
from kvabr.store.locations import Location, open_store
from kvabr.store.names import CATALOGS, GROUPS, LIVE, MODELS, PAGES, PRIVATE_PREFIX, PROFILES

MAX_DEPTH = 4
"""Levels of folders below the root that may contain a store: ``ROOT/a/b/c/store``."""
MAX_FOLDERS = 100_000
_OWN = {name.rstrip("/") for name in (CATALOGS, GROUPS, LIVE, MODELS, PAGES, PRIVATE_PREFIX, PROFILES)}
_LOOK_EVERY_S = 5.0
"""Seconds between two scans of a store other than a folder."""
_MARKS = (CATALOGS.rstrip("/"), LIVE.rstrip("/"))
"""Subfolders that only a store has, to distinguish it from a folder of stores."""


class StoreTree:
    """A store, or a folder of stores, such as one for each tenant."""

    def __init__(self, location: Location) -> None:
        self._top = open_store(location, must_exist=True)
        self.location = self._top.location
        self._known: dict[str, AssetStore] = {}

    @property
    def folder(self) -> Path | None:
        """Path of the folder; None for a store that is not on this machine."""
        return self._top.store.folder if isinstance(self._top.store, LocalStore) else None

    @property
    def look_every_s(self) -> float:
        """Minimum seconds between two scans for new assets."""
        return 0.0 if self.folder is not None else _LOOK_EVERY_S

    def find(self) -> tuple[dict[str, AssetStore], dict[str, str]]:
        """Return stores by path relative to the location, with a final slash, and errors of unreadable folders.

        The location itself is always first, with an empty path.
        """
        found, unreadable = {"": self._top}, dict[str, str]()
        if self.folder is None or self._top.only is not None:
            return found, unreadable
        todo, left = [("", self.folder, 0)], MAX_FOLDERS
        while todo and left:
            label, folder, depth = todo.pop()
            left -= 1
            try:
                names = sorted(entry.name for entry in os.scandir(folder) if entry.name[0] != "." and entry.is_dir())
            except (FileNotFoundError, NotADirectoryError):
                continue
            except OSError as error:
                unreadable[label.rstrip("/") or "."] = _why(folder, error)
                continue
            if label and any(mark in names for mark in _MARKS):
                found[label] = self._known.get(label) or AssetStore(LocalStore(folder))
            for name in _OWN.intersection(names):
                if any((folder / name / mark).is_dir() for mark in _MARKS):
                    why = "is a store, but its folder has a reserved name; rename the folder"
                    unreadable[f"{label}{name}"] = f"{folder / name}: {why}"
            if depth < MAX_DEPTH:
                todo += [(f"{label}{name}/", folder / name, depth + 1) for name in names if name not in _OWN]
        self._known = found
        return found, unreadable

    def close(self) -> None:
        """Release connections."""
        self._top.close()


def _why(path: Path, error: OSError) -> str:
    what = f"{path}: cannot be read ({error.strerror})"
    if not isinstance(error, PermissionError):
        return what
    return f"{what}; let this user read it, or publish with the group's right to read (chmod g+s on the folder above)"
