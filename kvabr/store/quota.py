"""Keeps what engines publish into a folder within a number of bytes: the least valuable goes first.

Only assets that an engine published are counted and removed. Those of `kvabr encode` were measured, which is
expensive, and are never removed. A removed prompt is published again when an engine computes it again.

Which asset is the least valuable, `kvabr.store.eviction` says. A folder keeps a copy of a shared beginning in each
asset, so an asset that another one continues goes before all others.
"""

from __future__ import annotations

import contextlib
import math
import os
import re
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from kvabr.store.asset import CATALOG
from kvabr.store.eviction import DEFAULT_ORDER, Candidate, Part, ReuseTable, parts_of, victims
from kvabr.store.files import folder_bytes
from kvabr.store.folder_notes import locked, pin_end_s, remove_folder_asset
from kvabr.types.catalog import Catalog
from kvabr.types.cost import PrefillCost
from kvabr.types.errors import AssetError, KvabrError
from kvabr.types.naming import prefix_key

_NAME = re.compile(r"[0-9a-f]{64}")
_SLACK = 0.05
"""Share of the bound after which the folder is read again, because others may publish into it too. As much more than
necessary is removed, so that a full folder of many assets is not read for each new one."""
_KEY_BYTES = 8


@dataclass(slots=True)
class _Known:
    """What is known of an asset."""

    size: int
    """Bytes that it takes; 0: not published by an engine, so that it is never removed."""
    stored_s: float
    used_s: float
    uses: int = 0
    keys: bytes = b""
    """Of its groups, one after the other. Empty if only all of it can be played: then it shares nothing."""
    tokens: int = 0
    group_tokens: int = 1
    prefill: PrefillCost | None = None

    @property
    def groups(self) -> list[bytes]:
        """Keys of its groups."""
        return [self.keys[place : place + _KEY_BYTES] for place in range(0, len(self.keys), _KEY_BYTES)]


class FolderQuota:
    """An `AssetQuota` for a folder of assets. Only `touch` may be called from several threads at once.

    Processes that share a folder each read it again after publishing a twentieth of the bound, so each of them may
    exceed it by as much. How often an asset was used, each of them knows of itself; when it was used last, is the time
    of its folder.
    """

    def __init__(
        self, root: Path, max_bytes: int, order: str = DEFAULT_ORDER, clock: Callable[[], float] = time.time
    ) -> None:
        """Take the folder; nothing is read or removed before the first `make_room`.

        ``order`` is one of `kvabr.store.eviction.ORDERS`; ``clock`` gives seconds since 1970, as files have them.
        """
        self._root, self._max_bytes, self._order, self._clock = root, max_bytes, order, clock
        self._known: dict[str, _Known] = {}
        """All assets at the last look, by name."""
        self._since_bytes: int | None = None
        """Bytes published since the last look; None before the first."""
        self._reuse = ReuseTable()
        self._touched: dict[str, int] = {}
        """How often assets were touched, since that was counted last."""
        self._lock = threading.Lock()
        """Guards the touches."""

    def touch(self, name: str) -> None:
        with contextlib.suppress(OSError):
            # Not the catalog's own time: by that an origin sees that an asset was replaced.
            os.utime(self._root / name)
            with self._lock:
                self._touched[name] = self._touched.get(name, 0) + 1

    def make_room(self, name: str) -> int:
        made = self._known[name] = self._read(name)
        since = None if self._since_bytes is None else self._since_bytes + made.size
        if since is None or since > _SLACK * self._max_bytes or self._total > self._max_bytes:
            self._look(but=name)
        else:
            self._since_bytes = since
        now, total, removed = self._clock(), self._total, 0
        self._reuse.note(self._parts(made, {made.keys[-_KEY_BYTES:]}), now)
        if total > self._max_bytes:
            excess = total - int((1 - _SLACK) * self._max_bytes)
            candidates = self._candidates(but=name)
            for victim in victims(candidates, excess, now, order=self._order, reuse=self._reuse):
                del self._known[victim.key]
                removed += remove_asset(self._root, victim.key, now)
        return removed

    @property
    def _total(self) -> int:
        return sum(known.size for known in self._known.values())

    def _candidates(self, but: str) -> Iterator[Candidate]:
        with self._lock:
            touched, self._touched = self._touched, {}
        ends = {known.keys[-_KEY_BYTES:] for known in self._known.values()}
        for name, known in self._known.items():
            known.uses += touched.get(name, 0)
            held = name == but or not known.size
            pinned_until_s = math.inf if held else pin_end_s(self._root, name) or -math.inf
            times = min(known.stored_s, known.used_s), known.used_s
            yield Candidate(name, known.size, *times, known.uses, self._parts(known, ends), pinned_until_s)

    @staticmethod
    def _parts(known: _Known, ends: set[bytes]) -> tuple[Part, ...]:
        return parts_of(known.groups, ends, known.tokens, known.group_tokens, seconds=known.prefill)

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
            stored_s, used_s = (path / CATALOG).stat().st_mtime, path.stat().st_mtime
        except (KvabrError, OSError):
            return _Known(0, 0.0, 0.0)
        size = folder_bytes(path) if catalog.estimated else 0
        # Of windows and states, each asset has what continuing its own end takes.
        shared = catalog.chunks if catalog.every_token else catalog.chunks[-1:]
        keys = b"".join(map(prefix_key, shared))
        tokens = catalog.tokens
        groups = catalog.spec.group_tokens if catalog.every_token else tokens
        return _Known(size, stored_s, used_s, 0, keys, tokens, groups, catalog.prefill)


def remove_asset(root: Path, name: str, now: float) -> bool:
    """Remove an asset from a folder; return whether it is gone. One that has just been pinned stays."""
    try:
        with locked(root):
            if (pin_end_s(root, name) or -math.inf) > now:
                return False
            remove_folder_asset(root / name)
    except (AssetError, OSError):
        return False  # another process was faster, or this one may not write here
    return True
