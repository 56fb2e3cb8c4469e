"""Looks up whether a store has an undamaged asset, without blocking an engine on a slow store.

If a cache is computed again, its published asset is checked (all parts present; in a folder also every byte), and
replaced if damaged. Checks run at most hourly per asset, one at a time, at a low priority. An unchecked asset counts as
undamaged.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from queue import Empty, SimpleQueue

from cachetools import LRUCache, TTLCache

from kvabr.store.asset import AssetVersion, is_damage, version_in
from kvabr.store.asset_store import AssetStore
from kvabr.store.local import LocalStore
from kvabr.types.errors import KvabrError

WAIT_S = 0.5
CHECK_S = 0.03
"""Additional time limit of a check, seconds; a later result is used for the next lookup."""
PAUSE_S = 5.0
"""Pause after a store did not answer in time, seconds."""


class PublishedLookup:
    """Looks up assets in a store; thread-safe."""

    def __init__(
        self,
        published: Callable[[str], bool],
        touch: Callable[[str], None],
        *,
        sound: Callable[[str], bool] = lambda _name: True,
        wait_s: float = WAIT_S,
        check_s: float = CHECK_S,
        pause_s: float = PAUSE_S,
    ) -> None:
        """Create a lookup; the functions may block.

        ``published`` returns True if the store has an asset, and may raise `KvabrError`. ``sound`` returns False for a
        damaged asset; its result counts if it arrives within ``check_s``. ``touch`` records the use of an asset.
        Lookups pause after a late answer or an error.
        """
        self._published, self._touch = published, touch
        self._sound, self._wait_s, self._check_s, self._pause_s = sound, wait_s, check_s, pause_s
        self._late: threading.Thread | None = None
        self._again_s = 0.0
        self._lock = threading.Lock()

    def exists(self, name: str) -> bool | None:
        """Return True if the store has an undamaged asset of this name, False if not, None without a timely answer."""
        with self._lock:
            waits = self._late is not None and self._late.is_alive()
            if waits or time.monotonic() < self._again_s:
                return None
        answer: SimpleQueue[bool | None] = SimpleQueue()
        thread = threading.Thread(target=self._look, args=(name, answer), name="kvabr-lookup", daemon=True)
        thread.start()
        try:
            found = answer.get(timeout=self._wait_s)
        except Empty:
            found = None
        if found is None:
            with self._lock:
                self._late, self._again_s = thread, time.monotonic() + self._pause_s
        if found:
            with suppress(Empty):
                return answer.get(timeout=self._check_s)
        return found

    def _look(self, name: str, answer: SimpleQueue[bool | None]) -> None:
        try:
            found = self._published(name)
        except KvabrError:  # for instance an unmounted share, or a folder without permission; the engine continues
            answer.put(None)
            return
        answer.put(found)
        if not found:
            return
        sound = True
        try:
            sound = self._sound(name)
        finally:
            answer.put(sound)
        if sound:
            self._touch(name)


_log = logging.getLogger(__name__)

_MAX_KNOWN = 1 << 16
_RECHECK_S = 3600.0
_NICENESS = 10


class SoundAssets:
    """Cached results of checks of one store; thread-safe."""

    def __init__(self, store: AssetStore) -> None:
        self._store = store
        self._sound: TTLCache[tuple[str, AssetVersion], bool] = TTLCache(_MAX_KNOWN, _RECHECK_S)
        self._damaged: LRUCache[str, AssetVersion] = LRUCache(_MAX_KNOWN)
        self._lock, self._checking = threading.Lock(), threading.Lock()

    def look(self, name: str) -> bool:
        """Return False if an asset is damaged; check it unless a recent result exists.

        May block; lowers the priority of the calling thread.
        """
        store = self._store.store
        version = version_in(store, name) if isinstance(store, LocalStore) else AssetVersion(0, 0.0)
        if version is None:
            return False
        with self._lock:
            if self._damaged.get(name) == version:
                return False
            if (name, version) in self._sound:
                return True
        if not self._checking.acquire(blocking=False):
            return True
        try:
            return self._check(name, version)
        finally:
            self._checking.release()

    def is_damaged(self, name: str) -> bool:
        """Return True if a check found this asset damaged."""
        with self._lock:
            return name in self._damaged

    def replaced(self, name: str) -> None:
        """Record that an asset was published again."""
        with self._lock:
            self._damaged.pop(name, None)

    def _check(self, name: str, version: AssetVersion) -> bool:
        with contextlib.suppress(OSError, AttributeError):  # only Linux threads have their own priority
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)
        try:
            asset = self._store.open(name)
            asset.check_parts()
            if asset.local:
                asset.check_frames()
        except KvabrError as error:
            if is_damage(error):
                _log.warning(
                    "kvabr: a published cache is damaged and will be replaced when it is computed again: %s", error
                )
                with self._lock:
                    self._damaged[name] = version
                return False
            return True
        with self._lock:
            self._sound[name, version] = True
        return True
