"""`kvabr player`: a process that plays for the serving engines of a node."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import signal
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from annotated_types import Gt, Lt

from kvabr.cli.fields import declare_command
from kvabr.cli.interrupt import run_async
from kvabr.cli.options import parse_address
from kvabr.cli.serving import LogJson, Verbose, captured, keep_memory_flat, logger
from kvabr.types.errors import UsageError
from kvabr.types.fields import Shown


@dataclass(frozen=True, slots=True, kw_only=True)
class PlayerCommand:
    """Play for the serving engines of this node, in a process of its own.

    Engines whose setting is "player": "process" start one by themselves, and share it. Run it yourself to have it
    supervised, to give it other cores (taskset -c 0-3 kvabr player ...) or to read its metrics; then engines need
    "player": "/run/user/1000/kvabr/mine.sock". It serves engines of its own user and of its own version of kvabr.

    Each engine's process hands over where its caches are, with its token: what else comes from the environment, such as
    the keys of an object store, is that of this process.
    """

    socket: Annotated[Path | None, Shown("--socket PATH")] = None
    """Where to listen, in a folder that is yours alone (default: where engines look for it)."""
    idle: Annotated[float | None, Gt(0), Lt(1 << 30), Shown("--idle S")] = None
    """End after this many seconds without an engine (default: never)."""
    metrics: Annotated[str | None, Shown("--metrics HOST:PORT")] = None
    """Serve Prometheus metrics of all plays."""
    log_json: LogJson = False
    verbose: Verbose = False


def add(parser: argparse.ArgumentParser) -> None:
    """Declare the command."""
    declare_command(parser, PlayerCommand, run)


def run(args: PlayerCommand) -> int:
    """Serve until a signal comes, or nobody does."""
    from kvabr.engines.player_process.sockets import listening, own_socket

    path = own_socket() if args.socket is None else args.socket.absolute()
    try:
        taken = listening(path)
    except OSError as error:
        raise UsageError(f"--socket {path}: {error.strerror or error}") from error
    if taken is None and args.metrics is not None:
        raise UsageError(f"a player process serves {path} already, without --metrics: end it, or give another --socket")
    if taken is None:
        print(f"a player process serves {path} already")
        return 0
    listener, lock = taken
    try:
        with contextlib.closing(listener):
            return run_async(_serve(args, path, listener))
    finally:
        with contextlib.suppress(OSError):
            path.unlink()
        os.close(lock)


async def _serve(args: PlayerCommand, path: Path, listener: socket.socket) -> int:
    from kvabr.engines.player_process.process import PlayerProcess
    from kvabr.telemetry.client_metrics import ClientMetrics
    from kvabr.telemetry.prometheus import ScrapeServer
    from kvabr.transfer.work import cancel_all

    metrics, log = ClientMetrics(), logger(json=args.log_json or None, verbose=args.verbose)
    process = PlayerProcess(listener, log, metrics)
    serving = asyncio.create_task(process.serve(args.idle))
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, serving.cancel)
    with contextlib.ExitStack() as stack:
        stack.enter_context(captured(log))
        if args.metrics is not None:
            scrape = stack.enter_context(ScrapeServer(metrics, *parse_address(args.metrics, "--metrics")))
            log.info("metrics", url="http://{}:{}/metrics".format(*scrape.address))
        log.info("playing for engines", socket=str(path), idle_s=args.idle)
        keep_memory_flat()
        try:
            await asyncio.wait({serving})
        finally:
            await cancel_all([serving])
        if not serving.cancelled():  # by SIGTERM
            serving.result()
    return 0
