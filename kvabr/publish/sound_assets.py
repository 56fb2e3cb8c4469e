"""Which published assets are as they were published: a damaged one is published anew when it is computed again.

Each asset is checked when somebody has computed it again: that all parts are there, and on a local disk also every
byte. That is done once an hour at most, of one asset at a time, at a low priority; what is told meanwhile is that it
is sound. Buckets check their objects themselves, so their bytes are not read.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading

from cachetools import LRUCache, TTLCache

from kvabr.store.asset import AssetStore, is_damage
from kvabr.types.errors import KvabrError

_log = logging.getLogger(__name__)

_MAX_KNOWN = 1 << 16
_AGAIN_S = 3600.0
_NICENESS = 10


class SoundAssets:
    """What checks have found, of one store; for several threads."""

    def __init__(self, store: AssetStore) -> None:
        """Nothing is checked yet."""
        self._store = store
        self._sound: TTLCache[tuple[str, str], bool] = TTLCache(_MAX_KNOWN, _AGAIN_S)
        self._damaged: LRUCache[str, str] = LRUCache(_MAX_KNOWN)
        """By name, the version that is damaged."""
        self._lock, self._checking = threading.Lock(), threading.Lock()

    def look(self, name: str) -> bool:
        """Return whether an asset is undamaged, as far as is known; check it if nobody has lately. May take long.

        Call it in a thread that does nothing else: it gets a low priority.
        """
        try:
            version = self._store.version(name)
        except KvabrError:
            return True
        if version is None:
            return False
        with self._lock:
            if self._damaged.get(name) == version.tag:
                return False
            if (name, version.tag) in self._sound:
                return True
        if not self._checking.acquire(blocking=False):
            return True
        try:
            return self._check(name, version.tag)
        finally:
            self._checking.release()

    def is_damaged(self, name: str) -> bool:
        """Return whether a check has found an asset of this name damaged; it may have been replaced since."""
        with self._lock:
            return name in self._damaged

    def replaced(self, name: str) -> None:
        """Note that an asset was published again."""
        with self._lock:
            self._damaged.pop(name, None)

    def _check(self, name: str, tag: str) -> bool:
        with contextlib.suppress(OSError, AttributeError):  # threads have no priority of their own except on Linux
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)
        try:
            asset = self._store.open(name)
            asset.check_parts()
            if asset.local:
                asset.check_frames()
        except KvabrError as error:
            if is_damage(error):
                _log.warning(
                    "kvabr: a published cache is damaged; it is published again once it is computed: %s", error
                )
                with self._lock:
                    self._damaged[name] = tag
                return False
            return True
        with self._lock:
            self._sound[name, tag] = True
        return True
