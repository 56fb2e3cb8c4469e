"""Replays the worst plays of every policy to get their logs; a replayed play is identical."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from kvabr.replay.report.timeline import losses
from kvabr_lab.cell import CellPlayer
from kvabr_lab.matrix import Cell, LabMatrix, varying
from kvabr_lab.results_folder import Line
from kvabr_lab.run import PlayedMatrix

PER_POLICY = 3
MAX_POLICIES = 12


@dataclass(frozen=True, slots=True)
class ShownPlay:
    """A play on the page."""

    play: int
    cell: Cell
    line: Line


@dataclass(slots=True)
class Replayed:
    """Plays with their logs, for the page."""

    shown: list[ShownPlay]
    runs: list[dict[str, Any]]
    timelines: list[dict[str, Any]]
    """Timelines as in a replay's report; ``run`` is an index into `runs`."""


def replay_worst(
    matrix: LabMatrix, played: PlayedMatrix, policies: Sequence[str], *, per_policy: int = PER_POLICY
) -> Replayed:
    """Find the worst plays of each policy and replay them.

    ``policies`` are best first. Every worst play of another policy is also replayed with the first policy.
    """
    out = Replayed([], [], [])
    again = _Again(matrix, out)
    for policy in policies[:MAX_POLICIES]:
        for cell, line in _worst_of(played, policy, per_policy):
            out.shown.append(ShownPlay(again.play(cell, line, policy), cell, line))
            again.play(cell, line, policies[0])
    return out


def _worst_of(played: PlayedMatrix, policy: str, count: int) -> list[tuple[Cell, Line]]:
    rows = [
        (cell, line)
        for cell, lines in zip(played.cells, played.lines, strict=True)
        for line in lines
        if line["policy"] == policy and line["feasible"]
    ]
    rows.sort(key=lambda row: -float(row[1]["regret"]))
    found: dict[str, tuple[Cell, Line]] = {}
    for cell, line in rows:
        if len(found) < count:
            found.setdefault(line["trace"], (cell, line))
    return list(found.values())


class _Again:
    def __init__(self, matrix: LabMatrix, out: Replayed) -> None:
        self._matrix, self._out = matrix, out
        self._traces = {trace.name: trace for trace in matrix.traces}
        self._counts = dict(zip(self._traces, matrix.counts(), strict=True))
        self._benches: dict[Cell, CellPlayer] = {}
        self._done: dict[tuple[Cell, str, float, str], int] = {}
        cells = list(matrix.cells())
        self._axes = varying(cells) if len(cells) > 1 else []

    def play(self, cell: Cell, line: Line, policy: str) -> int:
        key = (cell, line["trace"], line["start_s"], policy)
        if key not in self._done:
            bench = self._benches.setdefault(cell, CellPlayer(self._matrix.catalog(cell), self._matrix.options(cell)))
            trace = self._traces[line["trace"]]
            # The line's start is rounded, so take the exact start from the matrix; then the play is identical.
            starts = self._matrix.starts_of(trace, self._counts[line["trace"]])
            start_s = min(starts, key=lambda start: abs(start - line["start_s"]))
            outcome = bench.play(trace, bench.link(trace, start_s), policy, log=True)[1]
            run = dict(outcome.run)
            if self._axes:
                run["trace"] = f"{run['trace']} · {cell.title(self._axes)}"
            self._done[key] = len(self._out.timelines)
            lost = losses(outcome.log or (), self._matrix.catalog(cell))
            line = {"run": len(self._out.runs), "log": outcome.log, "link": outcome.link, "losses": lost}
            self._out.timelines.append(line)
            self._out.runs.append(run)
        return self._done[key]
