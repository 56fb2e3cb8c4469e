"""`kvabr relay`: a cache between an origin and players."""

from __future__ import annotations

import asyncio
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from annotated_types import Gt, Lt

from kvabr.cli import network, serving
from kvabr.cli.fields import command
from kvabr.cli.interrupt import run_async
from kvabr.types.errors import TransportError, UsageError
from kvabr.types.fields import OptionGroup, Shown
from kvabr.types.peer import PeerOptions

if TYPE_CHECKING:
    from structlog.typing import FilteringBoundLogger

    from kvabr.transfer.interface import Connection

_SIZE = re.compile(r"(\d{1,12})([kmgt]i?b?)?", re.IGNORECASE)
_UNITS = {"": 0, "k": 10, "m": 20, "g": 30, "t": 40}


def parse_size(text: str) -> int:
    """Parse a number of bytes with an optional unit; raise `UsageError` if malformed or too small for a relay."""
    found = _SIZE.fullmatch(text.strip())
    if found is None:
        raise UsageError(f"{text!r}: give bytes, or a number with KiB, MiB, GiB or TiB")
    size = int(found[1]) << _UNITS[(found[2] or "")[:1].lower()]
    if size < 1 << 26:
        raise UsageError(f"{text}: must be at least 64MiB, which is enough for a few groups")
    return size


@dataclass(frozen=True, slots=True, kw_only=True)
class RelayCommand:
    """Cache an origin for many players: one fetch from the origin serves all players that wait for it.

    A first try, next to `kvabr serve assets --dev` on the same machine:
      kvabr relay --upstream moqt://localhost:4443/ --upstream-fingerprint HEX --bind 127.0.0.1:4444 --dev

    A group is fetched from the origin once and passed on as it arrives. It is kept, in memory and in the folder or
    object store of --disk, if its digest matches the asset's catalog; otherwise its transfer is aborted at the end.

    If players need a catalog or a lookup that is older than two seconds (up to 30, if fetching it takes long), the
    relay requests it again. So within 30 seconds it stops serving an asset that the origin has removed or replaced. If
    the origin refuses the relay's token, the relay drops everything and closes the players' connections. While the
    origin cannot be reached, the relay serves its cache. It also starts without its origin, but serves the folder of
    --disk only after it has reached the origin once.

    --memory limits the groups that are kept. In addition, catalogs and lookups may use an eighth of it (at least 64
    MiB), and groups in transfer the memory that --limit allows.

    Every player that may connect to the relay can read everything that the relay's own token gives access to.
    --player-token-file restricts which players may connect.

    Tokens, certificate and key are reloaded when their files change, and on SIGHUP. If its own token changes, the relay
    reconnects to the origin and keeps its cache.
    """

    upstream: Annotated[str, Shown("--upstream URL")]
    """The origin: moqt://HOST[:PORT]/, or an object store, s3://BUCKET/PREFIX; with #kvcache:MODEL/DIGEST of an asset,
    the relay prints how to fetch it."""
    serving: Annotated[serving.ServingOptions, OptionGroup()]
    memory: Annotated[int, Shown("--memory BYTES", parse=parse_size)] = 1 << 30
    """Memory for groups, at least 64MiB, such as 800MiB or 4GiB (default: 1GiB)."""
    disk: Annotated[str | None, Shown("--disk DIR|URL")] = None
    """Also keep groups in this folder, which survives a restart, or in an object store, which relays can share."""
    disk_gib: Annotated[float, Gt(0), Lt(1 << 30), Shown("--disk-gib N")] = 16.0
    """Maximum size of the --disk folder, GiB (default: 16); object stores are not limited."""
    player_token_file: Annotated[Path | None, Shown("--player-token-file F")] = None
    """File with a token that players must present (default: every player may connect)."""
    peer: Annotated[PeerOptions, OptionGroup("the origin", prefix="upstream-")]


def run(args: RelayCommand) -> int:
    """Relay until a signal arrives."""
    return run_async(_relay(args))


add = command(RelayCommand, run, serving.limits_help)


async def _relay(args: RelayCommand) -> int:
    from kvabr.link.moqt.connect import asset_of, connect
    from kvabr.server.relay import Relay
    from kvabr.server.server import Server, run_until_signal

    limits = serving.parse_limits(args.serving.limit)
    asset = asset_of(args.upstream)
    token = None if args.player_token_file is None else _player_token(args.player_token_file)
    with serving.prepared(args.serving) as setup:
        log, metrics = setup.log, setup.metrics
        async with connect(args.upstream, network.checked(args.peer, "upstream-"), needed=False) as upstream:
            if upstream.trouble is None:
                log.info("upstream", url=args.upstream, transport=upstream.backend, protocol=upstream.protocol)
            else:
                hint = "the relay starts anyway, and connects again when players request something"
                log.warning("the origin cannot be reached", why=upstream.trouble, hint=hint)
            disk_bytes = int(args.disk_gib * (1 << 30))
            async with Relay(
                upstream, log, metrics,
                memory_bytes=args.memory, disk=args.disk, disk_bytes=disk_bytes, token=token,
            ) as relay:  # fmt: skip
                server = Server(
                    relay, setup.host, setup.port, setup.tls, limits, log, metrics,
                    quic=args.serving.quic, tcp=args.serving.tcp, announce_rates=args.serving.announce_rates == "on",
                )  # fmt: skip
                loop = asyncio.get_running_loop()

                def renew_upstream() -> None:
                    network.checked(args.peer, "upstream-")
                    asyncio.run_coroutine_threadsafe(_renew(upstream, log), loop)

                def started() -> None:
                    everyone = (
                        "anyone who can reach this address can read what the relay can read; see --player-token-file"
                    )
                    url = setup.announce(server, "relaying", None if token else everyone, memory_bytes=args.memory)
                    if asset is None:
                        # The origin does not list its assets; `kvabr serve` prints a URL with one.
                        entry = "" if token is None else "KVABR_TOKEN=... "
                        line = f"{entry}kvabr fetch '{url}' --name MODEL/DIGEST {setup.fetch_options()}"
                    else:
                        line = setup.fetch_line(url, asset, token=token is not None)
                    print(f"fetch through it: {line}", flush=True)

                async with serving.reloads(setup, server) as files:
                    if (path := args.player_token_file) is not None:
                        files.add("player token", [path], lambda: relay.regrant(_player_token(path)))
                    if args.peer.token_file is not None:
                        files.add("upstream token", [args.peer.token_file], renew_upstream)
                    return await run_until_signal(server, args.serving.drain, log, metrics, started)


async def _renew(upstream: Connection, log: FilteringBoundLogger) -> None:
    try:
        await upstream.renew()
    except TransportError as error:
        hint = "the old connection stays"
        log.error("the origin cannot be reached with the new token", error=str(error), hint=hint)  # noqa: TRY400


def _player_token(path: Path) -> str:
    return network.read_token(path, "--player-token-file", least=16)
