"""Upgrades of a cache that is in use: fetched and decoded at once, written when the engine says that it is safe.

An engine reads a cache at every step. Between two steps it may be improved, group by group; only the engine knows when,
so it gives the player a hook (`kvabr.client.engine_hook`)::

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
    """Upgrades of one play after its cache was handed over. May be used from any thread."""

    def __init__(self, driver: Driver, hook: EngineHook, at_end: Callable[[], None]) -> None:
        """Begin, on the event loop. The driver's goal is `UpgradeGoal`; its assembler has handed over the cache."""
        self._driver, self._hook, self._at_end = driver, hook, at_end
        self._loop = asyncio.get_running_loop()
        self._ended = threading.Event()
        self._task = self._loop.create_task(driver.run())
        self._task.add_done_callback(lambda _: self._done())

    def _done(self) -> None:
        self._driver.assembler.seal()
        self._at_end()
        self._ended.set()

    def into(self, rewrite: Rewrite) -> None:
        """Let upgrades into the cache by the engine's hook. Until then a few are fetched, and wait."""
        with contextlib.suppress(RuntimeError):  # the loop is closed, and with it these upgrades
            self._loop.call_soon_threadsafe(self._hook.use, rewrite)

    def cancel(self) -> None:
        """End the upgrades. When this returns, nothing is written into the cache any more."""
        self._driver.assembler.seal()
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._task.cancel)

    async def wait(self) -> PlayRecord:
        """Wait until the upgrades are over, for whatever reason, and return what came of them.

        Raises:
            PolicyError: from the policy or the estimator.
            Exception: whatever the engine's hook raised; it ends the upgrades.
        """
        await asyncio.wait([self._task])
        if not self._task.cancelled():
            self._task.result()
            if self._driver.engine_error is not None:
                raise self._driver.engine_error
        return self.record

    def join(self, timeout_s: float | None = None) -> bool:
        """Block until the upgrades are over or ``timeout_s`` has passed, and return whether they are over.

        Not for the thread of the event loop.
        """
        return self._ended.wait(timeout_s)

    @property
    def over(self) -> bool:
        """Whether nothing more comes."""
        return self._ended.is_set()

    @property
    def coverage(self) -> tuple[str, ...]:
        """Per group, the track that is in place now, or ``recomputed``."""
        return tuple(track or "" for track in self._driver.assembler.coverage)

    @property
    def loss(self) -> float:
        """Expected loss of the cache as it is now, nats per generated token."""
        catalog, coverage = self._driver.session.view.catalog, self.coverage
        return promised_loss(catalog, coverage, predicted_loss(catalog, coverage))

    @property
    def record(self) -> PlayRecord:
        """What came so far; times in seconds since the cache was handed over."""
        return self._driver.session.record
