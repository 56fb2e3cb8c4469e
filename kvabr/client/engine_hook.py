"""The engine's hook: it allows a cache in use to be rewritten, between two steps of the engine that reads it.

It takes the first token, the token after the last, and a function. It calls the function while nothing reads these
tokens, and returns True; or it returns False, and is asked again a little later. An engine that keeps a copy of the
cache copies these tokens again after the call, those of every layer class that still has them. `StepGate` is such a
hook for engines that read the tensors themselves.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

from kvabr.client.resources import in_thread
from kvabr.types.errors import UsageError

Rewrite = Callable[[int, int, Callable[[], None]], bool]
"""The engine's hook: ``rewrite(first, last, write)``. Called in a thread of its own, one call at a time."""

_PAUSE_S = 0.005
"""Seconds before an engine that refused is asked again; doubled after each refusal, up to the maximum."""
_MAX_PAUSE_S = 0.2


class StepGate:
    """A hook for an engine that reads the played tensors themselves: nothing is written while it takes a step.

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
        pause_s, written = _PAUSE_S, False

        def once() -> None:
            nonlocal written
            write()
            written = True

        while not await self._called(first, last, once):
            await asyncio.sleep(pause_s)
            pause_s = min(_MAX_PAUSE_S, 2 * pause_s)
        # Not whether the group is any better: it is not if that was cancelled, or if it had as good a track already.
        if not written:
            raise UsageError(f"the engine's hook returned True for tokens {first} to {last - 1} and did not write")

    async def _called(self, first: int, last: int, write: Callable[[], None]) -> bool:
        assert self._rewrite is not None  # noqa: S101  # it was waited for
        async with self._turn:
            return await in_thread(partial(self._rewrite, first, last, write))
