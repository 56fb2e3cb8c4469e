"""Finds out whether an asset is in a store already, without keeping an engine waiting for a store that is silent."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import suppress
from queue import Empty, SimpleQueue

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
