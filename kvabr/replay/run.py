"""A whole replay: traces x starts x policies, in parallel processes, reported in a fixed order.

The same traces, options and seed give the same report, byte for byte, on any number of processes.
"""

from __future__ import annotations

import math
import os
import random
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any

from kvabr.abr.plugins import load_estimator, load_policy
from kvabr.replay.experiment import Experiment, ReplayOptions
from kvabr.replay.report.timeline import losses
from kvabr.replay.summary import by_family, summarise
from kvabr.replay.trace import Trace
from kvabr.replay.workers import in_processes, named_play
from kvabr.types.catalog import Catalog
from kvabr.types.errors import UsageError

SCHEMA = "kvabr.replay/1"
MAX_STARTS = 100_000


@dataclass(frozen=True, slots=True)
class Matrix:
    """The plays of a replay."""

    catalog: Catalog
    traces: tuple[Trace, ...]
    policies: tuple[str, ...]
    options: ReplayOptions
    starts: int = 1
    """Start points per trace: its beginning, then random ones."""
    seed: int = 0
    timelines: int = 0
    """Maximum number of plays with a timeline: first starts of each trace and policy are preferred; -1: all plays."""
    detail: bool = True
    """True if the report lists every group of every run, and the steps for verification."""

    def __post_init__(self) -> None:
        if not self.traces:
            raise UsageError("traces must not be empty")
        if self.timelines < -1:
            raise UsageError(f"timelines must be 0 or more, or -1 for all, got {self.timelines}")
        if not 1 <= self.starts <= MAX_STARTS:
            raise UsageError(f"starts must be 1 to {MAX_STARTS:,} per trace, got {self.starts:,}")
        for policy in self.policies:
            load_policy(policy)()  # find a wrong name or file before hours of work
        if self.options.estimator is not None:
            load_estimator(self.options.estimator)()


@dataclass(slots=True)
class Report:
    """The result of a replay."""

    result: dict[str, Any]
    timelines: list[dict[str, Any]] = field(default_factory=list)
    """``{"run": index into the runs, "log": [PlayEvent, ...], "link": [[t, bytes/s], ...], "losses": [(t, nats per
    token), ...]}`` per timeline."""
    steps: list[list[tuple[str, int, int | str]]] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Task:
    """One start of one trace, to play with every policy."""

    trace: int
    start_s: float
    logged: int


def replay(matrix: Matrix, *, jobs: int | None = None, on_progress: Callable[[int], None] | None = None) -> Report:
    """Play all plays of a matrix, in ``jobs`` processes (None: one per core; 1: this process).

    ``on_progress`` is called with the number of plays finished since the last call. Raise `PolicyError` for a policy's
    error or invalid decision, `PlayError` if a worker process died.
    """
    todo = list(tasks(matrix))
    play = partial(_play, matrix, Experiment(matrix.catalog, matrix.options))
    played: dict[int, _Outcomes] = {}
    with closing(in_processes(play, todo, (os.cpu_count() or 1) if jobs is None else jobs)) as outcomes:
        for index, found in outcomes:
            played[index] = found
            if on_progress is not None:
                on_progress(len(found))
    runs: list[dict[str, Any]] = []
    report = Report({})
    for index in range(len(todo)):
        for run, steps, log, link, lost in played[index]:
            if log is not None:
                report.timelines.append({"run": len(runs), "log": log, "link": link, "losses": lost})
            runs.append(run)
            report.steps.append(steps)
    report.result = finish(matrix, runs)
    return report


def finish(matrix: Matrix, runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the report for the given runs."""
    catalog, options = matrix.catalog, matrix.options
    return {
        "schema": SCHEMA,
        "asset": {
            "model": catalog.spec.model,
            "prompt": catalog.namespace.prompt,
            "tokens": catalog.tokens,
            "groups": catalog.groups,
            "fp16_bytes": catalog.fp16_bytes,
            "tracks": [
                {"track": track.name, "bytes": track.total_bytes, "loss": float(f"{sum(track.loss):.6g}")}
                for track in catalog.tracks
            ],
        },
        "options": {
            "deadline_s": options.deadline_s,
            "rtt_s": options.rtt_s,
            "scale_to_mean": options.scale_to_mean,
            **({"links": [link.name for link in options.links]} if options.links else {}),
            "engine_mode": options.mode,
            "recompute": None if options.cost is None else options.cost.to_json(),
            "time_price": options.config.time_price,
            "gpu_price": options.config.gpu_price if math.isfinite(options.config.gpu_price) else None,
            "max_loss": options.config.max_loss if math.isfinite(options.config.max_loss) else None,
            "decode_scale": options.decode_scale,
            "decoders": options.decoders,
            "slow_start": options.slow_start,
            "cold": options.cold,
            "patience": options.config.give_up_after,
            "sharing": None if options.sharing is None else asdict(options.sharing),  # type: ignore[call-overload]  # a dataclass
            "producer": None if options.producer is None else asdict(options.producer),
            "estimator": options.estimator,
            "question": options.question,
            "tail": options.tail if options.question and options.cost is not None else 0,
            "starts": matrix.starts,
            "seed": matrix.seed,
        },
        "summary": summarise(runs),
        "families": by_family(runs),
        "runs": runs,
    }


def tasks(matrix: Matrix) -> Iterator[Task]:
    """Yield all tasks in order. The same seed gives the same starts."""
    kept = 0
    for index, trace in enumerate(matrix.traces):
        dice = random.Random(f"{matrix.seed}:{trace.family}:{trace.name}")  # noqa: S311  # start points, not secrets
        for number in range(matrix.starts):
            start_s = 0.0 if number == 0 else dice.uniform(0.0, trace.duration_s)
            if matrix.timelines < 0:
                logged = len(matrix.policies)
            else:
                logged = min(len(matrix.policies), matrix.timelines - kept) if number == 0 else 0
            kept += logged
            yield Task(index, start_s, logged)


_Outcomes = list[tuple[dict[str, Any], list[Any], list[Any] | None, list[Any] | None, list[Any] | None]]


def _play(matrix: Matrix, experiment: Experiment, task: Task) -> _Outcomes:
    trace = matrix.traces[task.trace]
    capacity, rtt_s, bound = experiment.prepare(trace, task.start_s)
    out: _Outcomes = []
    for index, policy in enumerate(matrix.policies):
        log = index < task.logged
        play = f"{trace.name} from {task.start_s:.2f} s"
        played = named_play(play, experiment.play_on, trace, task.start_s, policy, capacity, rtt_s, bound, log=log)
        steps = played.record.steps if matrix.detail else []
        if not matrix.detail:
            del played.run["groups"]
        lost = None if played.log is None else losses(played.log, played.catalog)
        out.append((played.run, steps, played.log, played.link, lost))
    return out
