"""Worker processes that never outlive their parent process, and do not handle Ctrl-C.

`ProcessPoolExecutor` loses a Ctrl-C received while it forks (Python ignores exceptions in fork hooks), and can wait
forever for a worker killed while it sends a result.
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

_QUEUED_TASKS = 2

P = ParamSpec("P")
T = TypeVar("T")
Task = TypeVar("Task")
Found = TypeVar("Found")


def named_play(play: str, call: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
    """Simulate one play; add its name to any `PolicyError`."""
    try:
        return call(*args, **kwargs)
    except PolicyError as error:
        raise PolicyError(f"{error} (while playing {play})") from error


@contextmanager
def without_interrupts() -> Iterator[None]:
    """Postpone Ctrl-C to the end of the body; processes that are started in the body never receive it."""
    received: list[int] = []
    in_main = threading.current_thread() is threading.main_thread()
    # A library's thread may still receive a blocked signal and run the handler.
    handler = signal.signal(signal.SIGINT, lambda number, _: received.append(number)) if in_main else None
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        if in_main:
            signal.signal(signal.SIGINT, handler)
        if received:
            signal.raise_signal(signal.SIGINT)


def in_processes(
    work: Callable[[Task], Found], todo: Sequence[Task], processes: int
) -> Generator[tuple[int, Found], None, None]:
    """Yield each task's index and ``work(task)`` as results arrive from forked processes; with one process, run here.

    Closing the iterator kills the processes immediately. Raise `UsageError` for less than one process, `PlayError` if a
    process died, or the first exception of ``work``.
    """
    if processes < 1:
        raise UsageError(f"processes must be at least 1, got {processes}")
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
            process.kill()
        for pipe, process in workers.items():
            process.join()
            pipe.close()


def _answers(pipes: list[Connection], todo: Sequence[Any]) -> Iterator[tuple[int, Any]]:
    queue = enumerate(todo)
    sent: dict[Connection, deque[int]] = {pipe: deque() for pipe in pipes}
    free = pipes * _QUEUED_TASKS
    for _ in todo:
        try:
            for pipe, (index, task) in zip(free, queue, strict=False):
                pipe.send(task)
                sent[pipe].append(index)
            done: Any = wait(pipes)[0]
            answer = done.recv()
        except (EOFError, OSError) as error:
            raise PlayError(
                "a worker process died: it ran out of memory, or a policy ended it. Use --jobs 1 to play in one "
                "process and see where it fails; `kvabr lab` and `kvabr tune` keep finished plays"
            ) from error
        if isinstance(answer, Exception):
            raise answer
        free = [done]
        yield sent[done].popleft(), answer


def _serve(pipe: Connection, others: Sequence[Connection], work: Callable[[Any], Any]) -> None:
    """Serve tasks until the parent closes its end of the pipe, or dies."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for other in others:
        other.close()  # a pipe is closed only when all copies are, and a fork inherits copies
    with suppress(EOFError, OSError):
        while True:
            task = pipe.recv()
            try:
                answer = work(task)
            except Exception as error:  # noqa: BLE001 - raised again in the parent
                error.add_note(traceback.format_exc())  # pickling drops the traceback
                answer = error
            pipe.send(answer)
