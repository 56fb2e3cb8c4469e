"""`kvabr player`: a process that plays for the serving engines of a node."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from annotated_types import Gt, Lt

from kvabr.cli.fields import command
from kvabr.cli.interrupt import run_async
from kvabr.cli.serving import SeenOptions, keep_memory_flat, observed
from kvabr.types.errors import UsageError
from kvabr.types.fields import OptionGroup, Shown


@dataclass(frozen=True, slots=True, kw_only=True)
class PlayerCommand:
    """Play for the serving engines of this node in a separate process.

    Engines with the setting "player": "process" start a player process and share it. Run it yourself to supervise it,
    to give it other cores (taskset -c 0-3 kvabr player ...) or to read its metrics; then set its socket in the engines,
    such as "player": "/run/user/1000/kvabr/mine.sock". It serves only engines of the same user and the same version of
    kvabr.

    Each engine sends the location of its caches and its token. All other settings from the environment, such as the
    keys of an object store, are taken from this process.
    """

    socket: Annotated[Path | None, Shown("--socket PATH")] = None
    """Path of the socket, in a folder that only you can access (default: the path that engines use)."""
    idle: Annotated[float | None, Gt(0), Lt(1 << 30), Shown("--idle S")] = None
    """End after this many seconds without an engine (default: never)."""
    seen: Annotated[SeenOptions, OptionGroup()]


def run(args: PlayerCommand) -> int:
    """Serve until a signal arrives or no engine is left."""
    from kvabr.engines.player_process.sockets import listening, own_socket

    path = own_socket() if args.socket is None else args.socket.absolute()
    try:
        taken = listening(path)
    except OSError as error:
        raise UsageError(f"--socket {path}: {error.strerror or error}") from error
    if taken is None and args.seen.metrics is not None:
        raise UsageError(f"a player process without --metrics already serves {path}: stop it, or give another --socket")
    if taken is None:
        print(f"a player process already serves {path}")
        return 0
    listener, lock = taken
    try:
        with contextlib.closing(listener):
            return run_async(_serve(args, path, listener))
    finally:
        with contextlib.suppress(OSError):
            path.unlink()
        os.close(lock)


add = command(PlayerCommand, run)


async def _serve(args: PlayerCommand, path: Path, listener: socket.socket) -> int:
    from kvabr.engines.player_process.process import PlayerProcess
    from kvabr.telemetry.client_metrics import ClientMetrics
    from kvabr.transfer.interface import cancel_all

    metrics = ClientMetrics()
    with observed(args.seen, metrics) as log:
        process = PlayerProcess(listener, log, metrics)
        serving = asyncio.create_task(process.serve(args.idle))
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, serving.cancel)
        log.info("playing for engines", socket=str(path), idle_s=args.idle)
        keep_memory_flat()
        try:
            await asyncio.wait({serving})
        finally:
            await cancel_all([serving])
        if not serving.cancelled():  # by SIGTERM
            serving.result()
    return 0
