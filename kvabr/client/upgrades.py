"""Upgrades of a returned cache: fetched and decoded in advance, written when the engine allows it.

An engine reads a cache at every step, so it gives the player a hook that decides when a group may change
(`kvabr.client.engine_hook`)::

    played = await client.play(tokens, deadline=2.0, options=PlayOptions(after=math.inf))
    if isinstance(played, Played) and played.upgrades is not None:
        played.upgrades.into(engine_hook)
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable

from kvabr.client.driver import Driver
from kvabr.client.engine_hook import EngineHook, Rewrite
from kvabr.player.session_types import PlayRecord
from kvabr.types.loss import predicted_loss, promised_loss


class Upgrades:
    """Upgrades of a play that has returned its cache. Thread-safe."""

    def __init__(self, driver: Driver, hook: EngineHook, at_end: Callable[[], None]) -> None:
        """Start, on the event loop. The driver has an `UpgradeGoal`."""
        self._driver, self._hook, self._at_end = driver, hook, at_end
        self._loop = asyncio.get_running_loop()
        self._ended = threading.Event()
        self._task = self._loop.create_task(driver.run())
        self._task.add_done_callback(lambda _: self._done())

    def _done(self) -> None:
        self._driver.assembler.seal()
        self._hook.close()
        self._at_end()
        self._ended.set()

    def into(self, rewrite: Rewrite) -> None:
        """Write upgrades with the engine's hook. Until then a few are fetched, and wait."""
        with contextlib.suppress(RuntimeError):  # the loop and these upgrades have ended
            self._loop.call_soon_threadsafe(self._hook.use, rewrite)

    def cancel(self) -> None:
        """End the upgrades; after this returns, the cache does not change."""
        self._driver.assembler.seal()
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._task.cancel)

    async def wait(self) -> PlayRecord:
        """Wait until the upgrades end, and return their record.

        Raises `PolicyError`, or any error of the engine's hook.
        """
        await asyncio.wait([self._task])
        if not self._task.cancelled():
            self._task.result()
            if self._driver.engine_error is not None:
                raise self._driver.engine_error
        return self.record

    def join(self, timeout_s: float | None = None) -> bool:
        """Block until the upgrades end or ``timeout_s`` has passed; return True if they ended. Not for the loop."""
        return self._ended.wait(timeout_s)

    @property
    def over(self) -> bool:
        return self._ended.is_set()

    @property
    def coverage(self) -> tuple[str, ...]:
        """Per group, the track now in place, or ``recomputed``."""
        return tuple(track or "" for track in self._driver.assembler.coverage)

    @property
    def loss(self) -> float:
        """Expected loss of the current cache, nats per generated token."""
        catalog, coverage = self._driver.session.view.catalog, self.coverage
        return promised_loss(catalog, coverage, predicted_loss(catalog, coverage))

    @property
    def record(self) -> PlayRecord:
        """Record so far, in seconds since the cache was returned."""
        return self._driver.session.record
