"""The engine's hook: lets kvabr rewrite a cache in use, between two steps of the engine.

kvabr calls the hook with the first token, the token after the last, and a function. The hook calls the function while
the engine does not read these tokens, and returns True; or it returns False, and is called again later. An engine with
its own copy then copies these tokens, in every layer class that has them.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

from kvabr.client.engine_work import WorkThread
from kvabr.types.errors import UsageError

Rewrite = Callable[[int, int, Callable[[], None]], bool]
"""``rewrite(first, last, write)``; called in its own thread, one call at a time."""

_PAUSE_S = 0.005
"""Initial pause before repeating a refused call, doubled each time."""
_MAX_PAUSE_S = 0.2


class StepGate:
    """A hook that writes between the steps of an engine that reads the tensors within ``with gate.step(): ...``."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._next = threading.Lock()
        """Held by waiting writers; otherwise an engine that runs step after step would never let one in."""

    @contextmanager
    def step(self) -> Iterator[None]:
        """Hold off writes during the block. Not reentrant."""
        with self._next:
            self._lock.acquire()
        try:
            yield
        finally:
            self._lock.release()

    def __call__(self, first: int, last: int, write: Callable[[], None]) -> bool:
        """Write between two steps; see `Rewrite`."""
        del first, last  # a step reads all tokens
        with self.step():
            write()
        return True


class EngineHook:
    """Writes upgrades into a cache in use when the engine's hook allows it."""

    def __init__(self) -> None:
        self._rewrite: Rewrite | None = None
        self._ready = asyncio.Event()
        self._thread = WorkThread()

    def close(self) -> None:
        """End the hook's thread once a running call has returned."""
        self._thread.close()

    def use(self, rewrite: Rewrite) -> None:
        """Set the engine's hook; call on the loop's thread."""
        self._rewrite = rewrite
        self._ready.set()

    async def write(self, first: int, last: int, write: Callable[[], object]) -> None:
        """Call ``write`` for tokens ``first`` to ``last`` - 1 when the engine allows it, which may take long.

        Raises:
            UsageError: the hook returned True without writing.
            Exception: any error of the hook.
        """
        await self._ready.wait()
        pause_s, written = _PAUSE_S, False

        def once() -> None:
            nonlocal written
            write()
            written = True

        assert self._rewrite is not None  # noqa: S101  # after _ready is set
        while not await self._thread.run(partial(self._rewrite, first, last, once)):
            await asyncio.sleep(pause_s)
            pause_s = min(_MAX_PAUSE_S, 2 * pause_s)
        # A callback may write nothing: the upgrade was cancelled, or the track is already in place.
        if not written:
            raise UsageError(f"the engine's hook returned True for tokens {first} to {last - 1} but did not write them")
