"""Upgrades of a cache that is in use: fetched and decoded at once, written when the engine says that it is safe.

An engine reads a cache at every step. Between two steps it may be improved, group by group; only the engine knows when,
so it gives the player a hook::

    played = await client.play(tokens, deadline=2.0, options=PlayOptions(after=math.inf))
    if isinstance(played, Played) and played.upgrades is not None:
        played.upgrades.into(engine_hook)

The hook takes the first token, the token after the last, and a function. It calls the function while nothing reads
these tokens, and returns True; or it returns False, and is asked again a little later. An engine that keeps a copy of
the cache copies these tokens again after the call. `StepGate` is such a hook for engines that read the tensor itself.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING

from kvabr.client.resources import in_thread
from kvabr.player.assembler import Assembler
from kvabr.player.session import Session
from kvabr.player.session_types import PlayRecord
from kvabr.types.catalog import predicted_loss
from kvabr.types.errors import UsageError

if TYPE_CHECKING:
    from kvabr.client.driver import Driver

Rewrite = Callable[[int, int, Callable[[], None]], bool]
"""The engine's hook: ``rewrite(first, last, write)``. Called in a thread of its own, one call at a time."""

_PAUSE_S = 0.005
"""Seconds before an engine that refused is asked again; doubled after each refusal, up to the maximum."""
_MAX_PAUSE_S = 0.2


class StepGate:
    """A hook for an engine that reads the played tensor itself: nothing is written while it takes a step.

    The engine does ``with gate.step(): ...`` around whatever reads the cache.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._next = threading.Lock()
        """Held by the thread that waits for the other: an engine that goes from step to step would always win."""

    @contextmanager
    def step(self) -> Iterator[None]:
        """While inside, the cache does not change. Not reentrant."""
        with self._my_turn():
            yield

    def __call__(self, first: int, last: int, write: Callable[[], None]) -> bool:
        """Write between two steps; see `Rewrite`."""
        del first, last  # a step reads all tokens
        with self._my_turn():
            write()
        return True

    @contextmanager
    def _my_turn(self) -> Iterator[None]:
        with self._next:
            self._lock.acquire()
        try:
            yield
        finally:
            self._lock.release()


class EngineHook:
    """Writes upgrades into a cache in use, one at a time, when the engine's hook allows it."""

    def __init__(self) -> None:
        self._rewrite: Rewrite | None = None
        self._there = asyncio.Event()
        self._turn = asyncio.Lock()

    def use(self, rewrite: Rewrite) -> None:
        """Set the engine's hook; on the loop's thread."""
        self._rewrite = rewrite
        self._there.set()

    async def write(self, first: int, last: int, write: Callable[[], object]) -> None:
        """Call ``write`` for tokens ``first`` to ``last`` - 1 as soon as the engine allows it, which may take long.

        Raises:
            UsageError: the hook says that it wrote, and did not.
            Exception: whatever the hook raises.
        """
        await self._there.wait()
        pause_s = _PAUSE_S
        while not await self._written(first, last, write):
            await asyncio.sleep(pause_s)
            pause_s = min(_MAX_PAUSE_S, 2 * pause_s)

    async def _written(self, first: int, last: int, write: Callable[[], object]) -> bool:
        rewrite = self._rewrite
        assert rewrite is not None  # noqa: S101  # it was waited for
        written = False

        def once() -> None:
            nonlocal written
            write()
            written = True

        async with self._turn:
            if not await in_thread(partial(rewrite, first, last, once)):
                return False
        # Not whether the group is any better: it is not if that was cancelled, or if it had as good a track already.
        if not written:
            raise UsageError(f"the engine's hook returned True for tokens {first} to {last - 1} and did not write")
        return True


class Upgrades:
    """Upgrades of one play after its cache was handed over. May be used from any thread."""

    def __init__(
        self,
        session: Session,
        driver: Driver,
        hook: EngineHook,
        assembler: Assembler,
        *,
        at_end: Callable[[], None] = lambda: None,
    ) -> None:
        """Begin; must be called on the event loop.

        Args:
            session: its goal is `UpgradeGoal`.
            driver: of the session, with ``hook``.
            hook: where the engine's hook goes.
            assembler: has handed over the cache, and takes upgrades.
            at_end: called once nothing more comes.
        """
        self._session, self._driver, self._hook, self._assembler = session, driver, hook, assembler
        self._at_end = at_end
        self._loop = asyncio.get_running_loop()
        self._ended = threading.Event()
        self._task = self._loop.create_task(self._run())
        _RUNNING.add(self._task)
        self._task.add_done_callback(self._done)

    async def _run(self) -> None:
        await self._driver.run()

    def _done(self, task: asyncio.Task[None]) -> None:
        _RUNNING.discard(task)
        self._assembler.seal()
        self._at_end()
        self._ended.set()

    def into(self, rewrite: Rewrite) -> None:
        """Let upgrades into the cache by the engine's hook. Until then a few are fetched, and wait."""
        with contextlib.suppress(RuntimeError):  # the loop is closed, and with it these upgrades
            self._loop.call_soon_threadsafe(self._hook.use, rewrite)

    def cancel(self) -> None:
        """End the upgrades. When this returns, nothing is written into the cache any more."""
        self._assembler.seal()
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
        return self._session.record

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
        return tuple(track or "" for track in self._assembler.coverage)

    @property
    def loss(self) -> float:
        """Expected loss of the cache as it is now, nats per generated token."""
        return predicted_loss(self._session.view.catalog, self.coverage)

    @property
    def record(self) -> PlayRecord:
        """What came so far; times in seconds since the cache was handed over."""
        return self._session.record


_RUNNING: set[asyncio.Task[None]] = set()
"""Upgrades under way: the event loop keeps only weak references to tasks."""
