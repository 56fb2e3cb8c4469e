"""A process of a live replay, seen from its parent: started, asked, ended; and never left behind.

It lives as long as its pipe. Spawned, not forked: a forked child would hold its siblings' pipes open, so that none of
them would see the parent die.
"""

from __future__ import annotations

import multiprocessing
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing import resource_tracker
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from kvabr.types.errors import TransportError

_PATIENCE_S = 60.0
"""Seconds that a child may take to start, with all that it loads, or to answer."""
_GOODBYE_S = 2.0
"""Seconds that it may take to end by itself."""


class Child:
    """Use it as a context manager: leaving it ends the process."""

    def __init__(self, name: str, main: Callable[..., None], *arguments: object) -> None:
        """Start a process that runs ``main(pipe, *arguments)``, and wait until it has said that it is ready.

        It must send something when it is ready, which is then the ``greeting``, or a text that says why it cannot
        start; and it must end when its pipe does.

        Args:
            name: what it is, for people.
            main: a function of a module.
            arguments: sent to the process.

        Raises:
            TransportError: it did not start.
        """
        self._name = name
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=main, args=(theirs, *arguments), name=f"kvabr {name}", daemon=True)
        try:
            with _without_interrupts():
                self._process.start()
            theirs.close()
            self.greeting = self._greeting()
        except BaseException:
            self.close()
            raise

    @property
    def pid(self) -> int | None:
        """The process."""
        return self._process.pid

    def send(self, message: object) -> None:
        """Tell it something.

        Raises:
            TransportError: it is gone.
        """
        try:
            self._pipe.send(message)
        except OSError as error:
            raise self._gone() from error

    def ask(self, question: object) -> Any:
        """Tell it something that it answers.

        Raises:
            TransportError: it is gone, or does not answer.
        """
        self.send(question)
        return self._answer()

    def close(self) -> None:
        """End the process; may be called twice."""
        self._pipe.close()  # which is what it waits for
        if self._process.pid is not None:
            self._process.join(_GOODBYE_S)
            if self._process.is_alive():
                self._process.kill()
                self._process.join()

    def _greeting(self) -> Any:
        """What it said when it was ready."""
        said = self._answer()
        if isinstance(said, str):
            raise TransportError(f"the {self._name} of this replay cannot start: {said}")
        return said

    def _answer(self) -> Any:
        with suppress(EOFError, OSError):
            if self._pipe.poll(_PATIENCE_S):
                return self._pipe.recv()
            raise TransportError(f"the {self._name} of this replay has not answered for {_PATIENCE_S:.0f} s")
        raise self._gone()

    def _gone(self) -> TransportError:
        self._process.join(0.1)
        code = self._process.exitcode
        how = "" if code is None else f" (exit status {code})"
        return TransportError(f"the {self._name} of this replay has died{how}; start the replay again")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


@contextmanager
def _without_interrupts() -> Iterator[None]:
    """Block SIGINT in this thread: a process that is started meanwhile never hears of Ctrl-C, which is the parent's."""
    resource_tracker.ensure_running()  # else it would be started within, and unblock the signal
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@dataclass(frozen=True, slots=True)
class Usage:
    """Since the process began, or between two moments, seconds."""

    cpu_s: float
    """Of all its threads."""
    waited_s: float
    """That its main thread was ready to run and did not; 0 where the system does not tell."""
    wall_s: float

    @classmethod
    def now(cls) -> Self:
        """Of this process, so far."""
        return cls(time.process_time(), _waited(), time.monotonic())

    def since(self, before: Usage) -> Usage:
        """What came on top of ``before``."""
        return Usage(self.cpu_s - before.cpu_s, self.waited_s - before.waited_s, self.wall_s - before.wall_s)

    @property
    def busy(self) -> float:
        """Processors used, 1.0 being one of them all the time."""
        return self.cpu_s / self.wall_s if self.wall_s > 0 else 0.0

    @property
    def waited(self) -> float:
        """Share of the time that the main thread waited for a processor."""
        return self.waited_s / self.wall_s if self.wall_s > 0 else 0.0


def _waited() -> float:
    """Linux keeps, in nanoseconds: time on a processor, time spent waiting for one, and a count."""
    try:
        return int(Path("/proc/self/schedstat").read_text().split()[1]) / 1e9
    except (OSError, ValueError, IndexError):
        return 0.0
