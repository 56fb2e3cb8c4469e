"""An event loop with a virtual clock: seconds of a play pass in no time, and in the same steps on every machine.

The clock advances only when nothing can happen before the next timer: no callback is ready, no executor job is pending,
and no engine thread is at work. A slow or loaded machine therefore changes how long a test takes, never its outcome.
A thread that must hang waits for a `Hang`, which tells the loop not to wait for it.
"""

import asyncio
import functools
import selectors
import threading
import time

from kvabr.client.engine_work import THREADS

_POLL_S = 0.002
"""Real seconds between two looks at threads; the end of a thread wakes no selector."""
_LIMIT_S = 300.0
"""Real seconds after which a thread that does not end fails the test."""


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
        """Whether a thread may still have something to tell this loop at the present time."""
        if Hang.active:
            return False
        return self.jobs > 0 or not all(thread.wait(0.0) for thread in list(THREADS))


class Hang:
    """Where threads of a test hang until `release`: ``with Hang() as hang: ...``, and ``hang.wait()`` in the thread.

    While one hangs, the clock waits for no thread: others may be queued behind it.
    """

    active = 0
    _left = threading.Condition()

    def __init__(self):
        self._waiting = 0
        self._released = threading.Event()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.release()

    def wait(self):
        self._count(1)
        try:
            self._released.wait()
        finally:
            self._count(-1)

    def release(self):
        """Let the threads go on, and return when they do: the next test's clock must not think that one still hangs."""
        self._released.set()
        with Hang._left:
            assert Hang._left.wait_for(lambda: not self._waiting, _LIMIT_S), "a thread still hangs"

    def _count(self, change):
        with Hang._left:
            Hang.active += change
            self._waiting += change
            Hang._left.notify_all()


class _Selector(selectors.DefaultSelector):
    """Advances the loop's clock instead of waiting."""

    def __init__(self, loop):
        super().__init__()
        self._loop = loop

    def select(self, timeout=None):
        if timeout is not None and timeout <= 0:
            self._loop.now += 1e-9  # as a real clock does: else a timer that rounding makes early would spin forever
            return super().select(0)
        limit = time.monotonic() + _LIMIT_S
        while not (events := super().select(0)):
            if not self._loop.busy() and timeout is not None:
                if events := super().select(0):  # a thread that has just ended
                    return events
                self._loop.now += timeout
                return []
            assert time.monotonic() < limit, f"no thread has done anything for {_LIMIT_S} s, and no timer is due"
            if events := super().select(_POLL_S):
                return events
        return events


def virtual(test):
    """Run an async test on such a loop; it must leave no task behind."""

    @functools.wraps(test)
    def run(*args, **kwargs):
        async def main():
            await test(*args, **kwargs)
            for _ in range(3):
                await asyncio.sleep(0)  # for tasks that end at this very moment
            left = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
            assert not left, left

        with asyncio.Runner(loop_factory=VirtualLoop) as runner:
            runner.run(main())

    return run
