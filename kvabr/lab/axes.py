"""The plays of a matrix cut along each of its axes: regret and hit ratio by family, deadline, load, round trip."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvabr.lab.matrix import Cell
from kvabr.lab.results_store import Line
from kvabr.lab.run import Played
from kvabr.replay.summary import mean, wilson


@dataclass(frozen=True, slots=True)
class Score:
    """One policy over one value of an axis; feasible plays only."""

    plays: int
    regret: float | None
    network_regret: float | None
    hits: float | None
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class Cut:
    """One axis."""

    title: str
    values: tuple[str, ...]
    scores: dict[tuple[str, str], Score]
    """By policy and value."""


def cuts(played: Played, policies: Sequence[str]) -> list[Cut]:
    """Every axis that has more than one value, families first."""
    rows = [(cell, line) for cell, lines in zip(played.cells, played.lines, strict=True) for line in lines]
    axes: list[tuple[str, Callable[[Cell, Line], str]]] = [
        ("trace family", lambda _, line: str(line["trace_family"])),
        ("deadline", lambda cell, _: f"{cell.deadline_s:g} s"),
        ("load", lambda cell, _: "as recorded" if cell.load is None else f"{cell.load:g} of FP16"),
        ("round trip", lambda cell, _: "the trace's" if cell.rtt_s is None else f"{1000 * cell.rtt_s:g} ms"),
        ("engine", lambda cell, _: cell.engine),
        ("asset", lambda cell, _: cell.asset),
    ]
    found = []
    for title, name in axes:
        parts: dict[tuple[str, str], list[Line]] = {}
        values: dict[str, None] = {}
        for cell, line in rows:
            value = name(cell, line)
            values[value] = None
            parts.setdefault((line["policy"], value), []).append(line)
        if len(values) > 1:
            scores = {key: _score(lines) for key, lines in parts.items() if key[0] in policies}
            found.append(Cut(title, tuple(values), scores))
    return found


def _score(lines: Sequence[Line]) -> Score:
    feasible = [line for line in lines if line["feasible"]]
    hits = sum(line["met"] for line in feasible)
    low, high = wilson(hits, len(feasible))
    return Score(
        plays=len(feasible),
        regret=mean(line["regret"] for line in feasible),
        network_regret=mean(line["network_regret"] for line in lines if line["network_regret"] is not None),
        hits=hits / len(feasible) if feasible else None,
        low=low,
        high=high,
    )
