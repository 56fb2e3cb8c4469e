"""Plays the missing plays of a matrix in parallel processes, then collects every line.

Lines are stored as they arrive, so an interrupted run can continue.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any

from kvabr.replay.workers import in_processes, named_play
from kvabr_lab import digests
from kvabr_lab.cell import CellPlayer
from kvabr_lab.matrix import Cell, LabMatrix
from kvabr_lab.results_folder import Line, PlayStore

_CHUNK = 48
"""Number of plays per batch: enough to outweigh the overhead, few enough to keep all processes busy."""
_COMMIT_S = 2.0

Progress = Callable[[int], None]


@dataclass(frozen=True, slots=True)
class PlayBatch:
    """Some starts of one trace in one cell, with the policies that must still play them."""

    cell: int
    trace: int
    todo: tuple[tuple[int, tuple[str, ...]], ...]


@dataclass(frozen=True, slots=True)
class PlayedMatrix:
    """The lines of a whole matrix."""

    cells: tuple[Cell, ...]
    lines: list[list[Line]]
    """For each cell, one line per play: by trace, start and policy, in the matrix's order."""
    fresh: int


class Keys:
    """The store's key of every play. All starts of a trace have the same key."""

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
        """Return the key of all starts of a trace with one policy in one cell."""
        return digests.digest(self._cells[cell], self._traces[trace], self._policies[policy], self._rest)


def run(
    matrix: LabMatrix, store: PlayStore, *, jobs: int | None = None, progress: Progress | None = None,
    planned: Callable[[int, int], None] | None = None,
) -> PlayedMatrix:  # fmt: skip
    """Play a matrix; stored plays are not repeated.

    ``jobs`` is the number of processes (None: one per core); with 1, this process plays. ``progress`` is called with
    the number of plays finished since its last call; ``planned`` once, with the numbers of missing plays and of all
    plays.

    Raises:
        PolicyError: A policy raised an error, returned an invalid decision or did not return; earlier plays are kept.
        PlayError: A worker process died; earlier plays are kept.
    """
    cells = tuple(matrix.cells())
    keys = Keys(matrix)
    known, todo = _survey(matrix, cells, keys, store)
    fresh = sum(len(policies) for task in todo for _, policies in task.todo)
    if planned is not None:
        planned(fresh, matrix.plays)
    last = time.monotonic()
    processes = (os.cpu_count() or 1) if jobs is None else jobs
    try:
        with closing(in_processes(_Player(matrix, cells).play, todo, processes)) as outcomes:
            for index, found in outcomes:
                task = todo[index]
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
    known: _Known = {}
    todo: list[PlayBatch] = []
    counts = matrix.counts()
    for place, cell in enumerate(cells):
        for trace, count in enumerate(counts):
            wanting: dict[int, list[str]] = {}
            for policy in matrix.policies:
                found = store.get(keys.key(cell, trace, policy), count)
                # In this folder, a policy file may have another path.
                known[place, trace, policy] = {start: line | {"policy": policy} for start, line in found.items()}
                for start in range(count):
                    if start not in found:
                        wanting.setdefault(start, []).append(policy)
            rows = [(start, tuple(policies)) for start, policies in sorted(wanting.items())]
            size = max(1, _CHUNK // max((len(policies) for _, policies in rows), default=1))
            todo += [PlayBatch(place, trace, tuple(rows[at : at + size])) for at in range(0, len(rows), size)]
    return known, todo


_Found = dict[str, dict[int, Line]]


class _Player:
    """Keeps the player of the last cell, as batches are ordered by cell."""

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
                play = f"{trace.name} from {link.start_s:.2f} s, {cell.title()}"
                line: dict[str, Any] = named_play(play, self._bench.play, trace, link, policy)[0]
                found.setdefault(policy, {})[start] = line
        return found
