"""`kvabr relay`: a node-local cache between an origin and players."""

from __future__ import annotations

import asyncio
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from annotated_types import Gt, Lt

from kvabr.cli import kv_events, network, serving
from kvabr.cli.fields import command
from kvabr.cli.interrupt import run_async
from kvabr.types.errors import TransportError, UsageError
from kvabr.types.fields import Part, Shown
from kvabr.types.peer import PeerOptions

if TYPE_CHECKING:
    from structlog.typing import FilteringBoundLogger

    from kvabr.transfer.interface import Connection

_SIZE = re.compile(r"(\d{1,12})([kmgt]i?b?)?", re.IGNORECASE)
_UNITS = {"": 0, "k": 10, "m": 20, "g": 30, "t": 40}


def parse_size(text: str) -> int:
    """Return bytes, from a number with or without a unit; `UsageError` for something else, or too few for a relay."""
    found = _SIZE.fullmatch(text.strip())
    if found is None:
        raise UsageError(f"{text!r}: give bytes, or a number with KiB, MiB, GiB or TiB")
    size = int(found[1]) << _UNITS[(found[2] or "")[:1].lower()]
    if size < 1 << 26:
        raise UsageError(f"{text}: a relay needs at least 64MiB, room for a few groups")
    return size


@dataclass(frozen=True, slots=True, kw_only=True)
class RelayCommand:
    """Stand between an origin and many players: one fetch from the origin serves all players that wait for it.

    A first try, next to `kvabr serve assets --dev` on the same machine:
      kvabr relay --upstream moqt://localhost:4443/ --upstream-fingerprint HEX --bind 127.0.0.1:4444 --dev

    A group is fetched from the origin once, however many players wait for it, and passed on as it comes. It is kept, in
    memory and in the folder or object store of --disk, if its digest is the one in the asset's catalog; a wrong group
    is broken off at its end. What the origin removes or replaces is dropped at once, and everything is dropped if the
    origin takes the relay's token back; the players' connections are closed then. If the origin does not announce
    changes, the relay asks again for catalogs and lookups after two seconds. While the origin cannot be reached, it
    serves what it has, and keeps trying; it also starts without its origin. Which groups the folder of --disk holds
    only the origin's catalogs tell, so a relay that has just started serves nothing before it has reached the origin
    once.

    --memory bounds the groups; catalogs and lookups take up to an eighth of it in addition (at least 64 MiB).

    Everyone who may enter the relay may read what its own token opens at the origin. --player-token-file says who may
    enter.

    Tokens, the certificate and the key are read again when their files change, and on SIGHUP. With a new token of its
    own the relay connects to the origin again, and keeps what it has.
    """

    upstream: Annotated[str, Shown("--upstream URL")]
    """The origin: moqt://HOST[:PORT]/, or an object store, s3://BUCKET/PREFIX; with the #kvcache:MODEL/DIGEST of an
    asset the relay prints how to fetch that."""
    serving: Annotated[serving.ServingOptions, Part()]
    memory: Annotated[int, Shown("--memory BYTES", parse=parse_size)] = 1 << 30
    """Groups kept in memory, at least 64MiB, as 800MiB or 4GiB (default: 1GiB)."""
    disk: Annotated[str | None, Shown("--disk DIR|URL")] = None
    """Also keep groups in this folder, which survives a restart, or in an object store, which relays can share."""
    disk_gib: Annotated[float, Gt(0), Lt(1 << 30), Shown("--disk-gib N")] = 16.0
    """Size of that folder in GiB (default: 16); stores are not bounded."""
    player_token_file: Annotated[Path | None, Shown("--player-token-file F")] = None
    """Token that players must show (default: everyone may enter)."""
    kv_events: Annotated[kv_events.KVEventOptions, Part()]
    upstream_kv_events: Annotated[str | None, Shown("--upstream-kv-events ENDPOINT[,REPLAY]")] = None
    """KV events of the origin, which tell the tokens of the prompts that are looked up here: --kv-events needs it."""
    peer: Annotated[PeerOptions, Part("the origin", prefix="upstream-")]


def run(args: RelayCommand) -> int:
    """Relay until a signal comes."""
    return run_async(_relay(args))


add = command(RelayCommand, run, serving.limits_help)


async def _relay(args: RelayCommand) -> int:
    from kvabr.client.origins import asset_of, dialling
    from kvabr.server.relay import Relay
    from kvabr.server.server import Server, run_until_signal

    limits = serving.parse_limits(args.serving.limit)
    asset = asset_of(args.upstream)
    token = None if args.player_token_file is None else _player_token(args.player_token_file)
    with (
        serving.prepared(args.serving) as setup,
        kv_events.relaying(args.kv_events, args.upstream_kv_events, setup.log, setup.metrics.registry) as prompts,
    ):
        log, metrics = setup.log, setup.metrics
        async with dialling(args.upstream, network.checked(args.peer, "upstream-"), needed=False) as upstream:
            if upstream.trouble is None:
                log.info("upstream", url=args.upstream, transport=upstream.backend, protocol=upstream.protocol)
            else:
                hint = "the relay starts all the same, and keeps dialling"
                log.warning("the origin cannot be reached", why=upstream.trouble, hint=hint)
            disk_bytes = int(args.disk_gib * (1 << 30))
            async with Relay(
                upstream, log, metrics,
                memory_bytes=args.memory, disk=args.disk, disk_bytes=disk_bytes, token=token, prompts=prompts,
            ) as relay:  # fmt: skip
                server = Server(
                    relay, setup.host, setup.port, setup.tls, limits, log, metrics,
                    quic=args.serving.quic, tcp=args.serving.tcp,
                )  # fmt: skip
                loop = asyncio.get_running_loop()

                def renew_upstream() -> None:
                    network.checked(args.peer, "upstream-")
                    asyncio.run_coroutine_threadsafe(_renew(upstream, log), loop)

                def started() -> None:
                    everyone = "who can reach this address may read what the relay may; see --player-token-file"
                    url = setup.announce(server, "relaying", None if token else everyone, memory_bytes=args.memory)
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
                    if args.peer.token_file is not None:
                        files.add("upstream token", [args.peer.token_file], renew_upstream)
                    return await run_until_signal(server, args.serving.drain, log, metrics, started)


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
