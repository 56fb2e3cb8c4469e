"""Child processes of a live replay, and their processor time.

A child ends when its pipe is closed, so it never outlives its parent. It is spawned: a forked child would keep the
pipes of its siblings open, so that these would not notice if the parent ends.
"""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import resource_tracker
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from kvabr.replay.workers import without_interrupts
from kvabr.types.errors import TransportError

_PATIENCE_S = 60.0
_MAX_END_S = 2.0


class Child:
    """A child process; a context manager that ends it."""

    patience_s = _PATIENCE_S
    """Maximum seconds to start, including imports, or to answer."""

    def __init__(self, name: str, main: Callable[..., None], *arguments: object) -> None:
        """Start a process that runs the module-level ``main(pipe, *arguments)``, and wait until it is ready.

        The process must send its ``greeting`` when it is ready, or the reason why it cannot start. It must end when the
        pipe is closed.

        Raises:
            TransportError: The process did not start.
        """
        self._name = name
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=main, args=(theirs, *arguments), name=f"kvabr {name}", daemon=True)
        try:
            resource_tracker.ensure_running()  # otherwise it would start later, and unblock the signal
            with without_interrupts():
                self._process.start()
            theirs.close()
            self.greeting = self._greeting()
        except BaseException:
            self.close()
            raise

    @property
    def pid(self) -> int | None:
        """Process ID."""
        return self._process.pid

    def send(self, message: object) -> None:
        """Send a message.

        Raises:
            TransportError: The process has ended.
        """
        try:
            self._pipe.send(message)
        except OSError as error:
            raise self._gone() from error

    def ask(self, question: object) -> Any:
        """Send a message and return the answer.

        Raises:
            TransportError: The process has ended, or does not answer.
        """
        self.send(question)
        return self.answer()

    def close(self) -> None:
        """End the process; may be called twice."""
        self._pipe.close()  # the child waits for this
        if self._process.pid is not None:
            self._process.join(_MAX_END_S)
            if self._process.is_alive():
                self._process.kill()
                self._process.join()

    def _greeting(self) -> Any:
        said = self.answer()
        if isinstance(said, str):
            raise TransportError(f"the {self._name} of this replay cannot start: {said}")
        return said

    def answer(self) -> Any:
        """Return the next message; errors are those of `ask`."""
        with suppress(EOFError, OSError):
            if self._pipe.poll(self.patience_s):
                return self._pipe.recv()
            raise TransportError(f"the {self._name} of this replay has not answered for {self.patience_s:.0f} s")
        raise self._gone()

    def _gone(self) -> TransportError:
        self._process.join(0.1)
        code = self._process.exitcode
        how = "" if code is None else f" (exit status {code})"
        return TransportError(f"the {self._name} of this replay has exited{how}; start the replay again")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


@dataclass(frozen=True, slots=True)
class Usage:
    """Processor time of a process, in total or between two moments, to distinguish a slow link from a busy machine."""

    cpu_s: float
    waited_s: float
    """Seconds that the main thread waited for a processor; 0 if unknown."""
    wall_s: float

    @classmethod
    def now(cls) -> Self:
        """Return this process's usage so far."""
        return cls(time.process_time(), _waited(), time.monotonic())

    def since(self, before: Usage) -> Usage:
        """Return the usage since ``before``."""
        return Usage(self.cpu_s - before.cpu_s, self.waited_s - before.waited_s, self.wall_s - before.wall_s)

    @property
    def busy(self) -> float:
        """Mean number of processors in use."""
        return self.cpu_s / self.wall_s if self.wall_s > 0 else 0.0

    @property
    def waited(self) -> float:
        """Fraction of the time that the main thread waited for a processor."""
        return self.waited_s / self.wall_s if self.wall_s > 0 else 0.0


def _waited() -> float:
    try:
        return int(Path("/proc/self/schedstat").read_text().split()[1]) / 1e9
    except (OSError, ValueError, IndexError):
        return 0.0
