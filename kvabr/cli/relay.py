"""`kvabr relay`: a node-local cache between an origin and players."""

from __future__ import annotations

import argparse
import asyncio
import re
from pathlib import Path
from typing import TYPE_CHECKING

from kvabr.cli import kv_events, network, serving
from kvabr.cli.interrupt import run_async
from kvabr.types.errors import TransportError, UsageError

if TYPE_CHECKING:
    from structlog.typing import FilteringBoundLogger

    from kvabr.transfer.interface import Connection

_EPILOG = """\
a first try, next to `kvabr serve assets --dev` on the same machine:
  kvabr relay --upstream moqt://localhost:4443/ --upstream-fingerprint HEX --bind 127.0.0.1:4444 --dev

A group is fetched from the origin once, however many players wait for it, and passed on as it comes. It is kept, in
memory and in the folder or object store of --disk, if its digest is the one in the asset's catalog; a wrong group is
broken off at its end. What the origin removes or replaces is dropped at once, and everything is dropped if the origin
takes the relay's token back; the players' connections are closed then. If the origin does not announce changes, the
relay asks again for catalogs and lookups after two seconds. While the origin cannot be reached, it serves what it has,
and keeps trying; it also starts without its origin. Which groups the folder of --disk holds only the origin's
catalogs tell, so a relay that has just started serves nothing before it has reached the origin once.

--memory bounds the groups; catalogs and lookups take up to an eighth of it in addition (at least 64 MiB).

Everyone who may enter the relay may read what its own token opens at the origin. --player-token-file says who may
enter.

Tokens, the certificate and the key are read again when their files change, and on SIGHUP. With a new token of its own
the relay connects to the origin again, and keeps what it has.
"""
_SIZE = re.compile(r"(\d{1,12})([kmgt]i?b?)?", re.IGNORECASE)
_UNITS = {"": 0, "k": 10, "m": 20, "g": 30, "t": 40}


def add(parser: argparse.ArgumentParser) -> None:
    """Declare the command."""
    parser.description = (
        "Stand between an origin and many players: one fetch from the origin serves all players that wait for it."
    )
    parser.epilog = f"{_EPILOG}\n{serving.limits_help()}"
    parser.add_argument(
        "--upstream",
        required=True,
        metavar="URL",
        help="the origin: moqt://HOST[:PORT]/, or an object store, s3://BUCKET/PREFIX; with the #kvcache:... of an "
        "asset the relay prints how to fetch that",
    )
    serving.add_options(parser, "relay")
    parser.add_argument(
        "--memory", default="1GiB", metavar="BYTES", help="groups kept in memory, as 800MiB or 4GiB (default: 1GiB)"
    )
    parser.add_argument(
        "--disk",
        "--cache",
        metavar="DIR|URL",
        help="also keep groups in this folder, which survives a restart, or in an object store, which relays can share",
    )
    parser.add_argument(
        "--disk-gib",
        type=float,
        default=16.0,
        metavar="N",
        help="size of that folder in GiB (default: 16); stores are not bounded",
    )
    needed = "token that players must show (default: everyone may enter)"
    parser.add_argument("--player-token-file", type=Path, metavar="F", help=needed)
    parser.add_argument(
        "--connections", type=int, metavar="N", help="players at a time (default: 512), as --limit connections=N"
    )
    kv_events.add_options(parser)
    theirs = (
        "KV events of the origin, which tell the tokens of the prompts that are looked up here: --kv-events needs it"
    )
    parser.add_argument("--upstream-kv-events", metavar="ENDPOINT[,REPLAY]", help=theirs)
    network.add_options(parser, "the origin", "upstream-")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Relay until a signal comes."""
    if not 0 < args.disk_gib < 1 << 30:
        raise UsageError(f"--disk-gib {args.disk_gib:g}: must be a positive number of GiB")
    return run_async(_relay(args, parse_size(args.memory)))


def parse_size(text: str) -> int:
    """Return bytes, from a number with or without a unit.

    Raises:
        UsageError: this is not a size, or too small for a relay.
    """
    found = _SIZE.fullmatch(text.strip())
    if found is None:
        raise UsageError(f"--memory {text}: give bytes, or a number with KiB, MiB, GiB or TiB")
    size = int(found[1]) << _UNITS[(found[2] or "")[:1].lower()]
    if size < 1 << 26:
        raise UsageError(f"--memory {text}: a relay needs at least 64MiB, room for a few groups")
    return size


async def _relay(args: argparse.Namespace, memory: int) -> int:
    from kvabr.client.origins import asset_of, dialling
    from kvabr.server.relay import Relay
    from kvabr.server.server import Server, run_until_signal

    limits = serving.parse_limits(
        args.limit if args.connections is None else [*args.limit, f"connections={args.connections}"]
    )
    asset = asset_of(args.upstream)
    token = None if args.player_token_file is None else _player_token(args.player_token_file)
    with (
        serving.prepared(args) as setup,
        kv_events.relaying(args, setup.log, setup.metrics.registry) as prompts,
    ):
        log, metrics = setup.log, setup.metrics
        async with dialling(args.upstream, network.options(args, "upstream-"), needed=False) as upstream:
            if upstream.trouble is None:
                log.info("upstream", url=args.upstream, transport=upstream.backend, protocol=upstream.protocol)
            else:
                hint = "the relay starts all the same, and keeps dialling"
                log.warning("the origin cannot be reached", why=upstream.trouble, hint=hint)
            disk_bytes = int(args.disk_gib * (1 << 30))
            async with Relay(
                upstream, log, metrics,
                memory_bytes=memory, disk=args.disk, disk_bytes=disk_bytes, token=token, prompts=prompts,
            ) as relay:  # fmt: skip
                server = Server(
                    relay, setup.host, setup.port, setup.tls, limits, log, metrics,
                    quic=args.quic, tcp=args.tcp,
                )  # fmt: skip
                loop = asyncio.get_running_loop()

                def renew_upstream() -> None:
                    network.read_token(args.upstream_token_file, "--upstream-token-file")
                    asyncio.run_coroutine_threadsafe(_renew(upstream, log), loop)

                def started() -> None:
                    everyone = "who can reach this address may read what the relay may; see --player-token-file"
                    url = setup.announce(server, "relaying", None if token else everyone, memory_bytes=memory)
                    if asset is None:
                        # The origin does not list its assets; `kvabr serve` prints one, in the fragment of a URL.
                        entry = "" if token is None else "KVABR_TOKEN=... "
                        line = f"{entry}kvabr fetch '{url}' --name MODEL/DIGEST {setup.fetch_options()}"
                    else:
                        line = setup.fetch_line(url, asset, token=token is not None)
                    print(f"fetch through it: {line}", flush=True)

                async with serving.reloads(setup, server) as files:
                    if (path := args.player_token_file) is not None:
                        files.add("player token", [path], lambda: relay.regrant(_player_token(path)))
                    if args.upstream_token_file is not None:
                        files.add("upstream token", [args.upstream_token_file], renew_upstream)
                    return await run_until_signal(server, args.drain, log, metrics, started)


async def _renew(upstream: Connection, log: FilteringBoundLogger) -> None:
    """Connect with the relay's new token."""
    refused = None
    try:
        await upstream.renew()
    except TransportError as error:
        refused = str(error)
    if refused is not None:
        log.error("the origin cannot be reached with the new token", error=refused, hint="the old connection stays")


def _player_token(path: Path) -> str:
    return network.read_token(path, "--player-token-file", least=16)
