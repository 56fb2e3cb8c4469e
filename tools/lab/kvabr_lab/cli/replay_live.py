"""`kvabr replay --live`: plays real bytes through a shaped link."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from kvabr.cli.interrupt import run_async
from kvabr.cli.replay import ReplayCommand
from kvabr.replay.run import Matrix, Report
from kvabr.store.asset import Asset
from kvabr.types.errors import UsageError

_ALONE = "has the link to itself"
_SIMULATED = {
    "rivals": _ALONE,
    "one_connection": _ALONE,
    "codel": _ALONE,
    "question": "has no engine that would compute it",
    "producer": "plays published caches only",
}


def check(args: ReplayCommand) -> None:
    """Raise UsageError for options that do not apply to real plays."""
    if args.passages:
        raise UsageError("--passages cannot be used with --live: a real play needs an asset's groups")
    if args.asset is None or Path(args.asset).is_file():
        raise UsageError(
            "--live needs an asset with its groups: make one with `kvabr encode`, and give it with --asset"
        )
    for name, why in _SIMULATED.items():
        if getattr(args, name):
            raise UsageError(f"--{name.replace('_', '-')} cannot be used with --live: a real play {why}")
    if args.decode_scale != 1.0:
        raise UsageError("--decode-scale cannot be used with --live: a real play really decodes the groups")
    if args.decoders != 1:
        raise UsageError("--decoders cannot be used with --live: a real play decodes in the client's threads")


def run(
    args: ReplayCommand,
    matrix: Matrix,
    asset: Asset,
    queue_bytes: int | None,
    on_progress: Callable[[int], None],
) -> Report:
    """Play the matrix both over real connections and in simulation."""
    from kvabr_lab.live.experiment import LiveOptions
    from kvabr_lab.live.run import replay_live

    options = LiveOptions(
        quic=args.quic or "aioquic",
        loss=(args.loss or 0.0) / 100.0,
        queue_bytes=queue_bytes,
        cold=args.cold,
        warm=args.no_slow_start,
        seed=args.seed,
    )
    return run_async(replay_live(matrix, asset, options, on_progress=on_progress))
