"""Upgrades of a cache that is in use: fetched and decoded at once, written when the engine says that it is safe.

An engine reads a cache at every step. Between two steps it may be bettered, group by group; when that is, only the
engine knows, so it gives the player a hook::

    played = await kvabr.play(origin, tokens, deadline=2.0, after=math.inf)
    if played.late is not None:
        played.late.into(engine_hook)

The hook takes the first token, the one after the last, and a function. It calls that function while nothing reads the
tokens, and returns True; or it returns False, and is asked again a little later. An engine that keeps a copy of the
cache copies these tokens anew behind the call. `StepGate` is such a hook for engines that read the tensor itself.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from kvabr.client.driver import Driver, said
from kvabr.client.executors import decoders, in_thread
from kvabr.player.assembler import Assembler
from kvabr.player.session import Session
from kvabr.player.session_types import Decode, PlayRecord
from kvabr.quic.interface import Connection, Download
from kvabr.types.catalog import Catalog, predicted_loss
from kvabr.types.errors import UsageError

Rewrite = Callable[[int, int, Callable[[], None]], bool]
"""The engine's hook: ``rewrite(first, last, write)``. Called in a thread of its own, one call at a time."""

_PAUSE_S = 0.005
"""Seconds before an engine that said no is asked again; twice as long after each no, up to the longest."""
_LONGEST_PAUSE_S = 0.2


class StepGate:
    """A hook for an engine that reads the played tensor itself: nothing is written while it takes a step.

    The engine does ``with gate.step(): ...`` around whatever reads the cache.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._next = threading.Lock()
        """Held by who waits for the other: an engine that goes from step to step would else be the first each time."""

    @contextmanager
    def step(self) -> Iterator[None]:
        """While inside, the cache stays as it is. Not to be entered again from inside."""
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


class LateDriver(Driver):
    """Drives upgrades of a cache in use: what it decodes waits for the engine."""

    def __init__(self, session: Session, connection: Connection, catalog: Catalog, assembler: Assembler) -> None:
        super().__init__(session, connection, catalog, assembler)
        self._rewrite: Rewrite | None = None
        self._hooked = asyncio.Event()
        self._turn = asyncio.Lock()
        self._writes: set[asyncio.Task[None]] = set()

    def use(self, rewrite: Rewrite) -> None:
        """The engine is ready; on the loop's thread."""
        self._rewrite = rewrite
        self._hooked.set()

    async def _clear(self) -> None:
        for task in self._writes:
            task.cancel()
        if self._writes:
            await asyncio.wait(self._writes)
        await super()._clear()

    def _tick(self) -> None:
        if self._connection.closed:
            self._tell(partial(self._session.stop, reason="the connection is closed"))
        else:
            super()._tick()

    def _decode(self, action: Decode) -> None:
        task = self._loop.create_task(self._better(action, self._frames.pop(action.request)))
        self._writes.add(task)
        task.add_done_callback(self._writes.discard)

    async def _better(self, action: Decode, download: Download) -> None:
        """Decode a group, and see it into its place."""
        prepare = partial(
            self._assembler.prepare, action.group, action.track, download.data, has_digest=download.has_digest
        )
        try:
            write = await self._loop.run_in_executor(decoders(), prepare)
        except Exception as error:  # noqa: BLE001  # whatever it is, this group cannot be used
            self._tell(self._session.refused, action.request, said(error))
            return
        first, last = self._catalog.spec.group_range(action.group, self._catalog.tokens)
        await self._hooked.wait()
        pause_s = _PAUSE_S
        try:
            while not await self._written(first, last, write):
                await asyncio.sleep(pause_s)
                pause_s = min(_LONGEST_PAUSE_S, 2 * pause_s)
        except Exception as error:  # noqa: BLE001  # an engine's, whatever it is: it wants no more upgrades
            self.engine_error = error
            self._tell(partial(self._session.stop, reason=said(error)))
        else:
            self._tell(self._session.decoded, action.request)

    async def _written(self, first: int, last: int, write: Callable[[], Any]) -> bool:
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


class Late:
    """The upgrades of one play after its cache was handed over. May be used from any thread."""

    def __init__(
        self,
        session: Session,
        driver: LateDriver,
        assembler: Assembler,
        catalog: Catalog,
        *,
        at_end: Callable[[], None] = lambda: None,
    ) -> None:
        """Begin; `kvabr.client.play` does so. ``at_end`` is called once nothing more comes."""
        self._at_end = at_end
        self._session, self._driver, self._assembler, self._catalog = session, driver, assembler, catalog
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
        """Let upgrades into the cache, by the engine's hook; until then they are fetched but wait, a few of them."""
        with contextlib.suppress(RuntimeError):  # the loop is closed, and with it these upgrades
            self._loop.call_soon_threadsafe(self._driver.use, rewrite)

    def cancel(self) -> None:
        """Nothing more is wanted. When this returns, nothing is written into the cache any more."""
        self._assembler.seal()
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._task.cancel)

    async def wait(self) -> PlayRecord:
        """Wait until the upgrades are over, for whatever reason, also `cancel`; what came of them.

        Raises:
            PolicyError: from the policy or the estimator.
            ModelError, Exception: whatever the engine's hook raised; it ends the upgrades.
        """
        await asyncio.wait([self._task])
        if not self._task.cancelled():
            self._task.result()
            if self._driver.engine_error is not None:
                raise self._driver.engine_error
        return self._session.record

    def join(self, timeout_s: float | None = None) -> bool:
        """Block until the upgrades are over, or so many seconds have passed; whether they are over.

        Not for the thread of the event loop.
        """
        return self._ended.wait(timeout_s)

    @property
    def over(self) -> bool:
        """Whether no more comes."""
        return self._ended.is_set()

    @property
    def coverage(self) -> tuple[str, ...]:
        """Per group, the track that is in place now, or ``recomputed``."""
        return tuple(track or "" for track in self._assembler.coverage)

    @property
    def loss(self) -> float:
        """Expected loss of the cache as it is now, nats per generated token."""
        return predicted_loss(self._catalog, self.coverage)

    @property
    def record(self) -> PlayRecord:
        """What came so far; times in seconds since the cache was handed over."""
        return self._session.record


_RUNNING: set[asyncio.Task[None]] = set()
"""Upgrades under way: a loop alone would not keep them."""
