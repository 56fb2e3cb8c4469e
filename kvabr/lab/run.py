"""Play what a matrix has and the store lacks, in parallel processes; then gather every line.

Lines are stored as they come, so that an interrupted run continues where it stopped.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from typing import Any

from kvabr.lab import digests
from kvabr.lab.cell import CellPlayer
from kvabr.lab.matrix import Cell, LabMatrix
from kvabr.lab.results_folder import Line, PlayStore
from kvabr.replay.cpu_limit import watched
from kvabr.types.errors import PlayError, UsageError

_CHUNK = 48
"""Approximate plays per batch: enough to outweigh its overhead, few enough to keep all processes busy."""
_COMMIT_S = 2.0

Progress = Callable[[int], None]


@dataclass(frozen=True, slots=True)
class PlayBatch:
    """Some starts of one trace in one cell, each with the policies that still have to play it."""

    cell: int
    trace: int
    todo: tuple[tuple[int, tuple[str, ...]], ...]
    """(index of the start, policies)."""


@dataclass(frozen=True, slots=True)
class PlayedMatrix:
    """The lines of a whole matrix."""

    cells: tuple[Cell, ...]
    lines: list[list[Line]]
    """Per cell, one line per play: by trace, start and policy, in the matrix's order."""
    fresh: int
    """Plays of this run; the others were stored before."""


class Keys:
    """The store's key of every play of a matrix; the starts of a trace share one."""

    def __init__(self, matrix: LabMatrix) -> None:
        self._traces = [digests.of_trace(trace) for trace in matrix.traces]
        self._policies = {policy: digests.of_policy(policy) for policy in matrix.policies}
        assets = {offer.name: digests.of_catalog(offer.catalog) for offer in matrix.offers}
        self._cells = {
            cell: digests.digest(assets[cell.asset], digests.of_options(matrix.options(cell)))
            for cell in matrix.cells()
        }
        self._rest = digests.digest(digests.of_code(), matrix.seed)

    def key(self, cell: Cell, trace: int, policy: str) -> str:
        """Return the key of all starts of one trace, played with one policy in one cell."""
        return digests.digest(self._cells[cell], self._traces[trace], self._policies[policy], self._rest)


def run(
    matrix: LabMatrix, store: PlayStore, *, jobs: int | None = None, progress: Progress | None = None,
    planned: Callable[[int, int], None] | None = None,
) -> PlayedMatrix:  # fmt: skip
    """Play a matrix.

    Args:
        matrix: What to play.
        store: Keeps the plays; what it has is not repeated.
        jobs: Processes; None for one per core. With 1, play in this process.
        progress: Called with the number of plays finished since the last call.
        planned: Called once with the number of missing plays and of all plays.

    Raises:
        PolicyError: A policy raised, returned nonsense or did not return; earlier plays are kept.
        PlayError: A worker process died; earlier plays are kept.
    """
    if jobs is not None and jobs < 1:
        raise UsageError(f"{jobs} processes; at least one is needed")
    cells = tuple(matrix.cells())
    keys = Keys(matrix)
    known, todo = _survey(matrix, cells, keys, store)
    fresh = sum(len(policies) for task in todo for _, policies in task.todo)
    if planned is not None:
        planned(fresh, matrix.plays)
    last = time.monotonic()
    try:
        for task, found in _outcomes(matrix, cells, todo, jobs or os.cpu_count() or 1):
            for policy, fresh_lines in found.items():
                known[task.cell, task.trace, policy].update(fresh_lines)
                store.put(keys.key(cells[task.cell], task.trace, policy), fresh_lines)
            if time.monotonic() - last > _COMMIT_S:
                store.commit()
                last = time.monotonic()
            if progress is not None:
                progress(sum(map(len, found.values())))
    finally:
        store.commit()
    counts = matrix.counts()
    lines = [
        [
            known[place, trace, policy][start]
            for trace, count in enumerate(counts)
            for start in range(count)
            for policy in matrix.policies
        ]
        for place in range(len(cells))
    ]
    return PlayedMatrix(cells, lines, fresh)


_Known = dict[tuple[int, int, str], dict[int, Line]]


def _survey(matrix: LabMatrix, cells: Sequence[Cell], keys: Keys, store: PlayStore) -> tuple[_Known, list[PlayBatch]]:
    """Return what the store has, and batches for the rest."""
    known: _Known = {}
    todo: list[PlayBatch] = []
    counts = matrix.counts()
    for place, cell in enumerate(cells):
        for trace, count in enumerate(counts):
            wanting: dict[int, list[str]] = {}
            for policy in matrix.policies:
                found = store.get(keys.key(cell, trace, policy), count)
                known[place, trace, policy] = found
                for start in range(count):
                    if start not in found:
                        wanting.setdefault(start, []).append(policy)
            rows = [(start, tuple(policies)) for start, policies in sorted(wanting.items())]
            size = max(1, _CHUNK // max((len(policies) for _, policies in rows), default=1))
            todo += [PlayBatch(place, trace, tuple(rows[at : at + size])) for at in range(0, len(rows), size)]
    return known, todo


_Found = dict[str, dict[int, Line]]


def _outcomes(
    matrix: LabMatrix, cells: Sequence[Cell], todo: Sequence[PlayBatch], jobs: int
) -> Iterator[tuple[PlayBatch, _Found]]:
    if jobs == 1 or len(todo) < 2:
        player = _Player(matrix, cells)
        for task in todo:
            yield task, player.play(task)
        return
    # Forked children share the traces for free; where there is no fork, each child is sent them once.
    method = "fork" if "fork" in multiprocessing.get_all_start_methods() else None
    others = set(multiprocessing.active_children())
    pool = ProcessPoolExecutor(
        min(jobs, len(todo)), multiprocessing.get_context(method), initializer=_begin, initargs=(matrix, tuple(cells))
    )
    over = False
    try:
        queue = iter(todo)
        flying: dict[Future[_Found], PlayBatch] = {}
        while True:
            # Keep the queue short, so that an interrupt has little to wait for.
            while len(flying) < 2 * jobs and (item := next(queue, None)) is not None:
                flying[pool.submit(_play_in_child, item)] = item
            if not flying:
                over = True
                return
            for future in wait(flying, return_when=FIRST_COMPLETED).done:
                done = flying.pop(future)
                yield done, future.result()
    except BrokenProcessPool as error:
        raise PlayError(
            "a worker process died: it ran out of memory, or a policy ended it. Finished plays are kept; --jobs 1 "
            "plays the rest in one process and shows where it fails"
        ) from error
    finally:
        if not over:
            # Do not wait for running batches: their plays are lost anyway, and a policy may never return.
            for process in set(multiprocessing.active_children()) - others:
                process.terminate()
        pool.shutdown(wait=True, cancel_futures=True)


class _Player:
    """Play batches; keep the last cell's player, because batches come cell by cell."""

    def __init__(self, matrix: LabMatrix, cells: Sequence[Cell]) -> None:
        self._matrix, self._cells = matrix, cells
        self._at = -1
        self._bench: CellPlayer | None = None

    def play(self, task: PlayBatch) -> _Found:
        matrix, cell = self._matrix, self._cells[task.cell]
        if self._bench is None or self._at != task.cell:
            self._at, self._bench = task.cell, CellPlayer(matrix.catalog(cell), matrix.options(cell))
        trace = matrix.traces[task.trace]
        starts = matrix.starts_of(trace, task.todo[-1][0] + 1)
        found: _Found = {}
        for start, policies in task.todo:
            link = self._bench.link(trace, starts[start])
            for policy in policies:
                with watched(policy, f"{trace.name} from {link.start_s:.2f} s, {cell.title()}"):
                    line: dict[str, Any] = self._bench.play(trace, link, policy)[0]
                found.setdefault(policy, {})[start] = line
        return found


_child: _Player | None = None


def _begin(matrix: LabMatrix, cells: Sequence[Cell]) -> None:
    global _child  # noqa: PLW0603  # set once per process by the pool's initialiser
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C and keeps what is done
    _child = _Player(matrix, cells)


def _play_in_child(task: PlayBatch) -> _Found:
    assert _child is not None  # noqa: S101
    return _child.play(task)
