"""A whole live replay: traces x starts x policies, one play after the other, and the same plays simulated."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from typing import Any

from kvabr.client.runner import guard_s
from kvabr.codec.threads import CORES, decoder_threads
from kvabr.player.assembler import Assembler
from kvabr.replay.experiment import Experiment
from kvabr.replay.report.timeline import losses
from kvabr.replay.run import Matrix, Report, finish, tasks
from kvabr.replay.verify import load_profile
from kvabr.store.asset import Asset
from kvabr.types.catalog import Catalog
from kvabr.types.errors import UsageError
from kvabr_lab.live.compare import comparison
from kvabr_lab.live.experiment import LiveExperiment, LiveOptions
from kvabr_lab.live.origin import LiveOrigin
from kvabr_lab.live.shaper import Shaper

_DECODES = 3
"""Number of times that a group is decoded per track; the median counts."""


async def replay_live(
    matrix: Matrix,
    asset: Asset,
    options: LiveOptions,
    *,
    on_progress: Callable[[int], None] | None = None,
) -> Report:
    """Play everything over real connections through a shaped link, and simulate the same plays.

    The report is that of `kvabr.replay.run.replay`. Its runs also have ``live`` and ``transport``, and its
    ``live_comparison`` compares them with their simulated counterparts. The matrix must have the asset's catalog.

    Raises:
        TransportError: A process of the replay died, or the origin cannot be reached.
        PolicyError: From a policy.
    """
    if matrix.catalog != asset.catalog:
        raise UsageError("a live replay needs an asset for its origin: give its folder with --asset")
    # Use this machine's decode times, since the comparison is about the link.
    decode_scale = decode_speed(asset)
    # Real players aim to end slightly early, see `kvabr.client`. The simulated player must do so, too.
    careful = replace(matrix.options, guard_s=guard_s(matrix.options.deadline_s), decoders=decoder_threads())
    experiment = Experiment(matrix.catalog, careful)
    model = Experiment(matrix.catalog, replace(careful, decode_scale=decode_scale))
    report = Report({})
    runs: list[dict[str, Any]] = []
    simulated: list[dict[str, Any]] = []
    with LiveOrigin(asset.store.where(asset.prompt_digest), options.quic) as origin, Shaper(origin.address) as shaper:
        live = LiveExperiment(experiment, asset, origin, shaper, options)
        for task in tasks(matrix):
            trace = matrix.traces[task.trace]
            for index, policy in enumerate(matrix.policies):
                played = await live.play(trace, task.start_s, policy, log=index < task.logged)
                simulated.append(model.play(trace, task.start_s, policy).run)
                if played.log is not None:
                    lost = losses(played.log, matrix.catalog)
                    line = {"run": len(runs), "log": played.log, "link": played.link, "losses": lost}
                    report.timelines.append(line)
                runs.append(played.run)
                report.steps.append(played.record.steps)
                if on_progress is not None:
                    on_progress(1)
    catalog = experiment.catalog
    compared = comparison(runs, simulated, catalog.shares)
    if not matrix.detail:
        for run in runs:
            del run["groups"]
    report.result = finish(replace(matrix, options=careful), runs)
    report.result["options"]["live"] = asdict(options)
    report.result["live_comparison"] = {"decode_scale": float(f"{decode_scale:.4g}"), **compared}
    return report


def decode_speed(asset: Asset) -> float:
    """Return the ratio of decode times on this machine to those in the catalog; 1.0 if the catalog has none.

    Raises:
        AssetError, FormatError: A group of the asset is missing or damaged.
    """
    catalog: Catalog = asset.catalog.to_play
    profile, largest = load_profile(asset), max(range(catalog.groups), key=catalog.share)
    promised = took = 0.0
    for track in catalog.tracks:
        if track.refines is not None:
            continue
        name, number = catalog.address(largest, track.name)
        frame = asset.frame(number, name)
        times = []
        for _ in range(_DECODES):
            assembler = Assembler(catalog, profile)
            with CORES.all_taken():
                began = time.perf_counter()
                assembler.put(largest, track.name, frame)
                times.append(time.perf_counter() - began)
        took += statistics.median(times)
        promised += track.decode_s * catalog.share(largest)
    return took / promised if promised > 0 else 1.0
