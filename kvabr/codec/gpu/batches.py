"""Batches of jobs from several threads, as a single group does not fill a GPU."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Sequence
from functools import cache
from typing import Generic, TypeVar

import torch

from kvabr.types.errors import FormatError

Job = TypeVar("Job")
Result = TypeVar("Result")


class _Request(Generic[Job, Result]):
    def __init__(self, jobs: Sequence[Job], device: torch.device) -> None:
        self.jobs, self.done = jobs, False
        self.results: list[Result | Exception] = []
        self._ready = torch.cuda.current_stream(device).record_event() if device.type == "cuda" else None

    def await_memory(self, device: torch.device) -> None:
        """Make this thread's stream wait until the requesting thread's stream no longer uses the memory."""
        if self._ready is not None:
            torch.cuda.current_stream(device).wait_event(self._ready)


class Batches(Generic[Job, Result]):
    """Batches the jobs of several threads on one device; the first thread to arrive runs each batch."""

    def __init__(self, device: torch.device, work: Callable[[Sequence[Job]], Sequence[Result | Exception]]) -> None:
        """``work`` returns each job's result or error once all jobs are done."""
        self._device, self._work = device, work
        self._changed = threading.Condition()
        self._waiting: list[_Request[Job, Result]] = []
        self._working = False

    def run(self, jobs: Sequence[Job]) -> list[Result | Exception]:
        """Run jobs and return the results of ``work``. Other threads' errors do not affect them."""
        own, batch = _Request[Job, Result](jobs, self._device), list[_Request[Job, Result]]()
        try:
            with self._changed:
                self._waiting.append(own)
                self._changed.wait_for(lambda: own.done or not self._working)
                if not own.done:
                    batch, self._waiting = self._waiting, []
                    self._working = True
            self._run(batch)
        finally:  # on Ctrl-C, release other threads, and remove jobs of threads that have left
            with self._changed:
                for each in batch:
                    if not each.done:
                        each.results, each.done = (
                            [FormatError("coding on the GPU was interrupted")] * len(each.jobs),
                            True,
                        )
                if own in self._waiting:
                    self._waiting.remove(own)
                if batch:
                    self._working = False
                    self._changed.notify_all()
        return own.results

    def _run(self, batch: Sequence[_Request[Job, Result]]) -> None:
        for each in batch:
            each.await_memory(self._device)
        left = iter(self._work([job for each in batch for job in each.jobs]) if batch else ())
        for each in batch:
            each.results, each.done = [next(left) for _ in each.jobs], True


def warn_of(done: str, error: Exception) -> None:
    """Warn, once per error, that a group was ``done`` on the processor."""
    _warn(done, f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else 'no reason given'}")


@cache
def _warn(done: str, reason: str) -> None:
    warnings.warn(
        f"a group was {done} on the processor instead of its GPU: the result is correct, but took longer ({reason})",
        RuntimeWarning,
        stacklevel=2,
    )
