"""Totals of a matrix: per cell, policy and family (for the JSON result), and along each axis (for tables)."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from typing import Any, TypeVar

import numpy as np

from kvabr.replay.summary import mean, percentile, summarise, wilson
from kvabr_lab.causes import totals as mean_causes
from kvabr_lab.matrix import Cell, LabMatrix
from kvabr_lab.paired import Bootstrap, Comparison, Interval, compare
from kvabr_lab.results_folder import Line
from kvabr_lab.run import PlayedMatrix

SCHEMA = "kvabr.lab/1"
_DIGITS = 9

T = TypeVar("T")


def result(matrix: LabMatrix, played: PlayedMatrix) -> dict[str, Any]:
    """Return the totals of a matrix as plain JSON values."""
    everything = [line for lines in played.lines for line in lines]
    where = [place for place, lines in enumerate(played.lines) for _ in lines]
    return {
        "schema": SCHEMA,
        "matrix": describe(matrix),
        "plays": len(everything),
        "summary": _per_policy(everything),
        "comparison": _comparison(comparison(everything, where)),
        "cells": [
            {
                **asdict(cell),
                "summary": _per_policy(lines),
                "comparison": _comparison(comparison(lines, [0] * len(lines))),
                "families": {
                    family: _per_policy(part) for family, part in by(lines, lambda line: line["trace_family"]).items()
                },
            }
            for cell, lines in zip(played.cells, played.lines, strict=True)
        ],
        "families": {
            family: {
                "summary": _per_policy([line for line, _ in part]),
                "comparison": _comparison(comparison([line for line, _ in part], [place for _, place in part])),
            }
            for family, part in by(zip(everything, where, strict=True), lambda item: item[0]["trace_family"]).items()
        },
    }


def describe(matrix: LabMatrix) -> dict[str, Any]:
    """Return the axes of a matrix as plain JSON values."""
    counts: dict[str, int] = {}
    for trace in matrix.traces:
        counts[trace.family] = counts.get(trace.family, 0) + 1
    return {
        "assets": [
            {"name": o.name, "model": o.catalog.spec.model, "tokens": o.catalog.tokens, "groups": o.catalog.groups}
            for o in matrix.offers
        ],
        "families": counts,
        "policies": list(matrix.policies),
        "deadlines": list(matrix.deadlines),
        "loads": list(matrix.loads),
        "rtts_s": list(matrix.rtts),
        "engines": [engine.text for engine in matrix.engines],
        "starts": matrix.starts,
        "per_family": matrix.per_family,
        "seed": matrix.seed,
        "estimator": matrix.estimator,
        "decode_scale": matrix.decode_scale,
        "decoders": matrix.decoders,
        "time_price": matrix.time_price,
        "slow_start": matrix.slow_start,
        "question": matrix.question,
        "tail": matrix.tail,
    }


def by(items: Iterable[T], key: Callable[[T], str]) -> dict[str, list[T]]:
    """Group items by sorted keys."""
    found: dict[str, list[T]] = {}
    for item in items:
        found.setdefault(key(item), []).append(item)
    return dict(sorted(found.items()))


def comparison(lines: Sequence[Line], where: Sequence[int]) -> Comparison:
    """Compare policies, paired over the feasible plays that all policies have; ``where`` has each play's cell."""
    table: dict[tuple[int, str, float], dict[str, float]] = {}
    for line, place in zip(lines, where, strict=True):
        if line["feasible"]:
            table.setdefault((place, line["trace"], line["start_s"]), {})[line["policy"]] = line["regret"]
    policies = list(dict.fromkeys(line["policy"] for line in lines))
    shared = {key: row for key, row in table.items() if len(row) == len(policies)}
    traces = [trace for _, trace, _ in shared]
    return compare({policy: [row[policy] for row in shared.values()] for policy in policies}, traces)


def _per_policy(lines: Sequence[Line]) -> dict[str, Any]:
    summary = summarise(lines)
    for policy, part in by(lines, lambda line: line["policy"]).items():
        summary[policy] |= _more(part)
    return summary


def _more(lines: Sequence[Line]) -> dict[str, Any]:
    """Return the entries that a replay's summary does not have: intervals, second bound, causes, infeasible plays."""
    feasible = [line for line in lines if line["feasible"]]
    network = [line for line in lines if line["network_regret"] is not None]
    hopeless = [line for line in lines if not line["feasible"]]
    return {
        "traces": len({line["trace"] for line in feasible}),
        "feasible_ttft_p50_s": _quantile(feasible, 0.50),
        "feasible_ttft_p95_s": _quantile(feasible, 0.95),
        "feasible_wasted_share": _share(feasible, "bytes_wasted", "bytes_fetched"),
        "regret_ci95": _interval(feasible, "regret"),
        "network_feasible": len(network),
        "network_loss_mean": _mean(line["network_loss"] for line in network),
        "network_regret_mean": _mean(line["network_regret"] for line in network),
        "causes": {
            cause: _number(value)
            for cause, value in mean_causes([line["causes"] for line in feasible if line["causes"]]).items()
        },
        "apart": {
            "plays": len(hopeless),
            "gave_up": sum(line["gave_up"] is not None for line in hopeless),
            "ttft_over_deadline_mean": _mean(
                line["ttft_s"] / line["deadline_s"] for line in hopeless if line["ttft_s"] is not None
            ),
            "loss_mean": _mean(line["loss"] for line in hopeless),
            "tokens_recomputed_mean": _mean(line["tokens_recomputed"] for line in hopeless),
        },
    }


def _interval(lines: Sequence[Line], name: str) -> list[float] | None:
    if not lines:
        return None
    bootstrap = _bootstrap(tuple(line["trace"] for line in lines))
    found = bootstrap.interval(np.array([line[name] for line in lines], dtype=float))
    return [_number(found.low), _number(found.high)]


@lru_cache(maxsize=4)
def _bootstrap(traces: tuple[str, ...]) -> Bootstrap:
    """Return a bootstrap; policies with the same plays use the same draws."""
    return Bootstrap(traces)


def _comparison(found: Comparison) -> dict[str, Any]:
    return {
        "plays": found.plays,
        "traces": found.traces,
        "ranking": [
            {
                "policy": row.policy, "place": row.place, "regret_mean": _number(row.regret.mean),
                "regret_ci95": _ends(row.regret), "like": list(row.like),
            }
            for row in found.ranking
        ],
        "pairs": [
            {
                "first": pair.first, "second": pair.second, "difference": _number(pair.difference.mean),
                "difference_ci95": _ends(pair.difference), "wins": _number(pair.wins),
                "losses": _number(pair.losses), "chance": _number(pair.chance), "apart": pair.apart,
            }
            for pair in found.pairs
        ],
    }  # fmt: skip


def _ends(interval: Interval) -> list[float]:
    return [_number(interval.low), _number(interval.high)]


def _quantile(lines: Sequence[Line], share: float) -> float | None:
    """Return a quantile of TTFT; abandoned plays count as infinite."""
    value = percentile((math.inf if line["ttft_s"] is None else line["ttft_s"] for line in lines), share)
    return None if value is None or not math.isfinite(value) else _number(value)


def _share(lines: Sequence[Line], part: str, whole: str) -> float:
    total = sum(line[whole] for line in lines)
    return _number(sum(line[part] for line in lines) / total) if total else 0.0


def _mean(values: Iterable[float]) -> float | None:
    listed = list(values)
    return _number(sum(listed) / len(listed)) if listed else None


def _number(value: float) -> float:
    return float(f"{value:.{_DIGITS}g}")


@dataclass(frozen=True, slots=True)
class Score:
    """A policy at one value of an axis, over feasible plays only."""

    plays: int
    regret: float | None
    network_regret: float | None
    hits: float | None
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class Cut:
    """A matrix's plays along one axis."""

    title: str
    values: tuple[str, ...]
    scores: dict[tuple[str, str], Score]


def cuts(played: PlayedMatrix, policies: Sequence[str]) -> list[Cut]:
    """Cut the plays along every axis that has several values, families first."""
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
