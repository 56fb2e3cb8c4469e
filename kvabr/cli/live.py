"""`kvabr replay --live`: the part of the command that plays over a real transport."""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING

from kvabr.types.errors import UsageError

if TYPE_CHECKING:
    from kvabr.replay.run import Matrix, Report
    from kvabr.store.asset import Asset


def add_live(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    live = parser.add_argument_group(
        "live",
        "Play real bytes: an origin, a link shaped by the trace and the player run as three processes over QUIC. The "
        "trace counts whole packets. The same plays are simulated as well, and the two compared. There is no recompute "
        "unless --prefill-rate is given; then an engine is stood in for by one that only takes the time.",
    )
    live.add_argument("--live", action="store_true", help="play over a real transport (needs --asset)")
    live.add_argument("--quic", choices=("aioquic", "qh3", "moq"), help="QUIC library (default: aioquic)")
    live.add_argument("--loss", type=float, metavar="PERCENT", help="packets lost at random in each direction")
    live.add_argument(
        "--queue", type=float, metavar="KB",
        help="the bottleneck's queue (default: a round trip of the trace at its best, at least 64 packets)",
    )  # fmt: skip


def check_live(args: argparse.Namespace) -> None:
    """Refuse what makes no sense together.

    Raises:
        UsageError: it does not.
    """
    if args.cold and args.no_slow_start:
        raise UsageError("--cold counts the handshake, --no-slow-start says that it is long past; give one of them")
    given = [name for name in ("quic", "loss", "queue") if getattr(args, name) is not None]
    if given and not args.live:
        raise UsageError(f"--{given[0]} is about a real transport: it needs --live")
    if args.live and (args.asset is None or not args.asset.is_dir()):
        raise UsageError("--live plays real bytes: `kvabr encode` makes an asset, --asset names its folder")
    if args.live and args.decode_scale != 1.0:
        raise UsageError("--decode-scale is for simulations: with --live the groups are really decoded")


def replay_live(args: argparse.Namespace, matrix: Matrix, asset: Asset, on_progress: Callable[[int], None]) -> Report:
    """Play.

    Raises:
        UsageError: an option is out of its range.
        KvabrError: see `kvabr.replay.live.run.replay_live`.
    """
    from kvabr.replay.live.playing import LiveOptions  # noqa: PLC0415  # loads torch and the QUIC library
    from kvabr.replay.live.run import replay_live as play_all  # noqa: PLC0415

    options = LiveOptions(
        quic=args.quic or "aioquic",
        loss=(args.loss or 0.0) / 100.0,
        queue_bytes=None if args.queue is None else int(1000 * args.queue),
        cold=args.cold,
        warm=args.no_slow_start,
        seed=args.seed,
    )
    return asyncio.run(play_all(matrix, asset, options, on_progress=on_progress))
