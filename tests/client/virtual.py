"""An event loop whose clock jumps: seconds of a play pass in no time, while real threads get the time they need."""

from __future__ import annotations

import asyncio
import functools
import selectors
import threading
import time

_THREADS = ("kvabr-engine",)
_PATIENCE_S = 0.3
"""Real seconds that the clock stands still for a thread; one that takes longer is meant to hang."""


class VirtualLoop(asyncio.SelectorEventLoop):
    def __init__(self):
        self.now = 1000.0
        self.jobs = 0
        super().__init__(_Selector(self))

    def time(self):
        return self.now

    def run_in_executor(self, executor, func, *args):
        self.jobs += 1
        future = super().run_in_executor(executor, func, *args)
        future.add_done_callback(self._done)
        return future

    def _done(self, future):
        self.jobs -= 1

    def busy(self):
        return self.jobs > 0 or any(thread.name in _THREADS for thread in threading.enumerate())


class _Selector(selectors.DefaultSelector):
    """Instead of waiting, lets the loop's clock jump."""

    def __init__(self, loop):
        super().__init__()
        self._loop = loop
        self._patience_s = None

    def select(self, timeout=None):
        if timeout is not None and timeout <= 0:
            self._loop.now += 1e-9  # real clocks go on: else a timer that rounding makes too early would come for ever
            return super().select(0)
        while True:
            busy = self._loop.busy()
            if events := super().select(0):
                self._patience_s = None
                return events
            if not busy:
                self._patience_s = None
                break
            # Once it has run out the clock goes on until something comes of the threads.
            self._patience_s = self._patience_s or time.monotonic() + _PATIENCE_S
            if time.monotonic() > self._patience_s:
                break
            if events := super().select(0.002):
                return events
        if timeout is None:
            return super().select(_PATIENCE_S)
        self._loop.now += timeout
        return super().select(0)


def virtual(test):
    """Run an async test on such a loop; it must leave no task behind."""

    @functools.wraps(test)
    def run(*args, **kwargs):
        async def main():
            await test(*args, **kwargs)
            left = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
            assert not left, left

        with asyncio.Runner(loop_factory=VirtualLoop) as runner:
            runner.run(main())

    return run
