"""Finds out whether an asset is in a store already, and as it was published; an engine never waits for a silent store.

A damaged asset is published anew when it is computed again, which is when each is checked: that all parts are there,
and on a local disk also every byte. That is done once an hour at most, of one asset at a time, at a low priority; what
is told meanwhile is that it is sound. Buckets check their objects themselves, so their bytes are not read.
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
"""Seconds that an engine waits for the answer at most."""
CHECK_S = 0.03
"""Seconds that it waits besides for a check of what was found; a later answer counts the next time."""
PAUSE_S = 5.0
"""Seconds in which a store is left alone that did not answer in time."""


class PublishedLookup:
    """Asks a store, from any thread."""

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
        """Ask for nothing yet.

        Args:
            published: returns whether the store has an asset of this name; may take long, and raise `KvabrError`.
            touch: notes that an asset was looked for, once the answer is known; may take long.
            sound: returns whether an asset is undamaged, as far as it knows; may take long.
            wait_s: seconds that `ask` waits.
            check_s: seconds that it waits for ``sound``.
            pause_s: seconds without any request after an answer that did not come in time, or was an error.
        """
        self._published, self._touch = published, touch
        self._sound, self._wait_s, self._check_s, self._pause_s = sound, wait_s, check_s, pause_s
        self._late: threading.Thread | None = None
        """Still waits for an answer that came too late for its caller."""
        self._again_s = 0.0
        self._lock = threading.Lock()

    def ask(self, name: str) -> bool | None:
        """Return whether the store has an asset of this name, undamaged; None if it does not say so soon."""
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
        except KvabrError:  # a share that is gone, a folder that must not be entered: the engine goes on
            answer.put(None)
            return
        answer.put(found)
        if not found:
            return
        sound = True
        try:
            sound = self._sound(name)
        finally:
            answer.put(sound)  # whatever happens: somebody may wait for it
        if sound:
            self._touch(name)


_log = logging.getLogger(__name__)

_MAX_KNOWN = 1 << 16
_AGAIN_S = 3600.0
_NICENESS = 10


class SoundAssets:
    """What checks have found, of one store; for several threads."""

    def __init__(self, store: AssetStore) -> None:
        """Nothing is checked yet."""
        self._store = store
        self._sound: TTLCache[tuple[str, AssetVersion], bool] = TTLCache(_MAX_KNOWN, _AGAIN_S)
        self._damaged: LRUCache[str, AssetVersion] = LRUCache(_MAX_KNOWN)
        """By name, the version that is damaged."""
        self._lock, self._checking = threading.Lock(), threading.Lock()

    def look(self, name: str) -> bool:
        """Return whether an asset is undamaged, as far as is known; check it if nobody has lately. May take long.

        Call it in a thread that does nothing else: it gets a low priority.
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
        """Return whether a check has found an asset of this name damaged; it may have been replaced since."""
        with self._lock:
            return name in self._damaged

    def replaced(self, name: str) -> None:
        """Note that an asset was published again."""
        with self._lock:
            self._damaged.pop(name, None)

    def _check(self, name: str, version: AssetVersion) -> bool:
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
                    "kvabr: a published cache is of no use; it is published again once it is computed: %s", error
                )
                with self._lock:
                    self._damaged[name] = version
                return False
            return True
        with self._lock:
            self._sound[name, version] = True
        return True
