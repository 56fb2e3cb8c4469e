"""Worker processes: they play in parallel, never outlive their parent, and leave Ctrl-C to it.

They are not a `ProcessPoolExecutor`: that loses a Ctrl-C which comes while it forks (Python ignores exceptions in its
hooks after a fork), and can wait forever for a worker that was ended in the middle of an answer.
"""

from __future__ import annotations

import multiprocessing
import signal
import threading
import traceback
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkProcess
from typing import Any, ParamSpec, TypeVar

from kvabr.types.errors import PlayError, PolicyError, UsageError

_AHEAD = 2
"""Tasks that a worker has at a time, so that it does not wait for its parent between two."""

P = ParamSpec("P")
T = TypeVar("T")
Task = TypeVar("Task")
Found = TypeVar("Found")


def named_play(play: str, call: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
    """Simulate one play; a `PolicyError` names it."""
    try:
        return call(*args, **kwargs)
    except PolicyError as error:
        raise PolicyError(f"{error}; it was playing {play}") from error


@contextmanager
def without_interrupts() -> Iterator[None]:
    """Postpone Ctrl-C to the end of the body; processes that the body starts never get it."""
    came: list[int] = []
    in_main = threading.current_thread() is threading.main_thread()
    # A blocked signal may still come to a thread of a library, and from there to the handler.
    handler = signal.signal(signal.SIGINT, lambda number, _: came.append(number)) if in_main else None
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        if in_main:
            signal.signal(signal.SIGINT, handler)
        if came:
            signal.raise_signal(signal.SIGINT)


def in_processes(
    work: Callable[[Task], Found], todo: Sequence[Task], processes: int
) -> Generator[tuple[int, Found], None, None]:
    """Yield each task's index and ``work(task)``, as they come from forked processes; with one process, from this one.

    Closing the iterator ends the processes at once, also in the middle of a task.

    Raises:
        UsageError: ``processes`` is less than one.
        PlayError: A process died.
        Exception: The first that ``work`` raised.
    """
    if processes < 1:
        raise UsageError(f"{processes} processes; at least one is needed")
    if processes == 1 or len(todo) < 2:
        yield from enumerate(map(work, todo))
        return
    fork = multiprocessing.get_context("fork")
    workers: dict[Connection, ForkProcess] = {}
    try:
        with without_interrupts():
            for _ in range(min(processes, len(todo))):
                ours, theirs = fork.Pipe()
                process = fork.Process(target=_serve, args=(theirs, [*workers, ours], work), daemon=True)
                process.start()
                theirs.close()
                workers[ours] = process
        yield from _answers(list(workers), todo)
    finally:
        for process in workers.values():
            process.kill()  # nobody wants what it still computes
        for pipe, process in workers.items():
            process.join()
            pipe.close()


def _answers(pipes: list[Connection], todo: Sequence[Any]) -> Iterator[tuple[int, Any]]:
    queue = enumerate(todo)
    asked: dict[Connection, deque[int]] = {pipe: deque() for pipe in pipes}
    free = pipes * _AHEAD
    for _ in todo:
        try:
            for pipe, (index, task) in zip(free, queue, strict=False):
                pipe.send(task)
                asked[pipe].append(index)
            done: Any = wait(pipes)[0]
            answer = done.recv()
        except (EOFError, OSError) as error:
            raise PlayError(
                "a worker process died: it ran out of memory, or a policy ended it. --jobs 1 plays in one process and "
                "shows where it fails; `kvabr lab` and `kvabr tune` keep finished plays"
            ) from error
        if isinstance(answer, Exception):
            raise answer
        free = [done]
        yield asked[done].popleft(), answer


def _serve(pipe: Connection, others: Sequence[Connection], work: Callable[[Any], Any]) -> None:
    """Answer tasks until the parent closes its end of the pipe, or dies."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for other in others:
        other.close()  # a pipe ends only when every process has closed it, and a fork has them all
    with suppress(EOFError, OSError):
        while True:
            task = pipe.recv()
            try:
                answer = work(task)
            except Exception as error:  # noqa: BLE001 - it is raised in the parent
                error.add_note(traceback.format_exc())  # which is not sent otherwise
                answer = error
            pipe.send(answer)
