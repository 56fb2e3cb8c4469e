"""`kvabr relay`: a node-local cache between an origin and players."""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from kvabr.cli import network
from kvabr.cli.options import is_loopback, is_wildcard, moqt_url, parse_address
from kvabr.types.errors import UsageError

if TYPE_CHECKING:
    from structlog.typing import FilteringBoundLogger

    from kvabr.server.server import Server
    from kvabr.types.naming import TrackNamespace

_EPILOG = """\
a first try, next to `kvabr serve assets --dev` on the same machine:
  kvabr relay --upstream moqt://localhost:4443/ --upstream-fingerprint HEX --bind 127.0.0.1:4444 --dev

A group is fetched from the origin once, however many players wait for it, and passed on as it comes. It is kept, in
memory and in the folder of --disk, if its SHA-256 is the one in the asset's catalog; a wrong group is broken off at its
end. Catalogs and lookups are asked for again after two seconds. What the origin removes or replaces is dropped, and
everything is dropped if the origin refuses the relay's token. While the origin cannot be reached, the relay serves what
it has, and keeps trying; it also starts without its origin. Which groups the folder of --disk holds only the origin's
catalogs tell, so a relay that has just started serves nothing before it has reached the origin once.

--memory bounds the groups; catalogs and lookups take up to an eighth of it in addition (at least 64 MiB).

Everyone who may enter the relay may read what its own token opens at the origin. --token-file says who may enter.
"""
_SIZE = re.compile(r"(\d{1,12})([kmgt]i?b?)?", re.IGNORECASE)
_UNITS = {"": 0, "k": 10, "m": 20, "g": 30, "t": 40}


def add(parser: argparse.ArgumentParser) -> None:
    """Declare the command."""
    parser.description = (
        "Stand between an origin and many players: one fetch from the origin serves all players that wait for it."
    )
    parser.epilog = _EPILOG
    parser.add_argument(
        "--upstream",
        required=True,
        metavar="URL",
        help="the origin: moqt://HOST[:PORT]/; with the #kvcache:... of an asset the relay prints how to fetch that",
    )
    parser.add_argument(
        "--bind", default="127.0.0.1:4443", metavar="HOST:PORT", help="UDP address (default: 127.0.0.1:4443)"
    )
    parser.add_argument("--cert", type=Path, metavar="F", help="certificate chain, PEM, the relay's own first")
    parser.add_argument("--key", type=Path, metavar="F", help="its private key, PEM, without a password")
    parser.add_argument("--dev", action="store_true", help="make a certificate for this run instead")
    parser.add_argument(
        "--memory", default="1GiB", metavar="BYTES", help="groups kept in memory, as 800MiB or 4GiB (default: 1GiB)"
    )
    parser.add_argument(
        "--disk", type=Path, metavar="DIR", help="also keep groups in this folder, which survives a restart"
    )
    parser.add_argument(
        "--disk-gib", type=float, default=16.0, metavar="N", help="size of that folder in GiB (default: 16)"
    )
    parser.add_argument(
        "--quic",
        choices=("auto", "aioquic", "qh3"),
        default="auto",
        help="QUIC library towards the players (default: qh3 if it is installed, else aioquic)",
    )
    parser.add_argument(
        "--token-file", type=Path, metavar="F", help="token that players must show (default: everyone may enter)"
    )
    parser.add_argument("--connections", type=int, default=512, metavar="N", help="players at a time (default: 512)")
    parser.add_argument("--metrics", metavar="HOST:PORT", help="serve /metrics (Prometheus) and /healthz over HTTP")
    parser.add_argument(
        "--drain", type=float, default=10.0, metavar="S", help="seconds to finish what is under way (default: 10)"
    )
    parser.add_argument("--log-json", action="store_true", help="log JSON lines (default where no terminal is)")
    parser.add_argument("--verbose", action="store_true", help="log more")
    upstream = parser.add_argument_group("the origin")
    shown = upstream.add_mutually_exclusive_group()
    shown.add_argument(
        "--upstream-token", metavar="T", help="token for the origin (default: the environment's KVABR_TOKEN)"
    )
    shown.add_argument("--upstream-token-file", type=Path, metavar="F", help="read it from a file")
    trust = upstream.add_mutually_exclusive_group()
    trust.add_argument("--upstream-ca", type=Path, metavar="F.pem", help="certificates to trust, not the system's")
    trust.add_argument("--upstream-fingerprint", metavar="HEX", help="SHA-256 of the only certificate to trust")
    trust.add_argument(
        "--upstream-insecure",
        action="store_true",
        help="do not verify the origin's certificate",
    )
    upstream.add_argument(
        "--upstream-quic",
        choices=("auto", "aioquic", "qh3"),
        default="auto",
        help="QUIC library towards the origin (default: qh3 if it is installed, else aioquic)",
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Relay until a signal comes."""
    import asyncio

    if args.dev == (args.cert is not None or args.key is not None) or (args.cert is None) != (args.key is None):
        raise UsageError("give both --cert and --key, or --dev alone for a certificate made for this run")
    if not 0 <= args.drain <= 3600:
        raise UsageError(f"--drain {args.drain}: must be 0 to 3600 seconds")
    if not 0 < args.disk_gib < 1 << 30:
        raise UsageError(f"--disk-gib {args.disk_gib:g}: must be a positive number of GiB")
    memory = parse_size(args.memory)
    host, port = parse_address(args.bind, "--bind")
    metrics_at = None if args.metrics is None else parse_address(args.metrics, "--metrics")
    return asyncio.run(_relay(args, host, port, metrics_at, memory))


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


async def _relay(
    args: argparse.Namespace, host: str, port: int, metrics_at: tuple[str, int] | None, memory: int
) -> int:
    import socket
    from contextlib import AsyncExitStack, ExitStack

    from kvabr.cli.server_log import captured, logger
    from kvabr.quic.connect import asset_of
    from kvabr.server import certificates
    from kvabr.server.certificates import ServerTls
    from kvabr.server.limits import ServerLimits
    from kvabr.server.metrics import Metrics
    from kvabr.server.relay import Relay
    from kvabr.server.server import Server, run_until_signal
    from kvabr.telemetry.prometheus import ScrapeServer

    asset = asset_of(args.upstream)
    log = logger(json=args.log_json or None, verbose=args.verbose)
    metrics = Metrics()
    token = None if args.token_file is None else _read_token(args.token_file)
    with ExitStack() as stack:
        stack.enter_context(captured(log))
        names = (socket.gethostname(),) if is_wildcard(host) else (host,)
        tls = stack.enter_context(certificates.development(*names)) if args.dev else ServerTls(args.cert, args.key)
        facts = certificates.check(tls)
        async with AsyncExitStack() as running:
            upstream = await running.enter_async_context(
                network.connecting(args.upstream, _upstream(args), needed=False)
            )
            if upstream.trouble is None:
                log.info("upstream", url=args.upstream, quic=upstream.backend, protocol=upstream.protocol)
            else:
                hint = "the relay starts all the same, and keeps trying: each request dials the origin again"
                log.warning("the origin cannot be reached", why=upstream.trouble, hint=hint)
            disk_bytes = int(args.disk_gib * (1 << 30))
            relay = await running.enter_async_context(
                Relay(upstream, log, metrics, memory_bytes=memory, disk=args.disk, disk_bytes=disk_bytes, token=token)
            )
            limits = ServerLimits(connections=args.connections)
            server = Server(relay, host, port, tls, limits, log, metrics, quic=args.quic)
            if metrics_at is not None:
                scrape = ScrapeServer(metrics, *metrics_at, healthy=lambda: not metrics.value("kvabr_draining"))
                running.enter_context(scrape)
                log.info("metrics", url="http://{}:{}/metrics".format(*scrape.address))
            fingerprint = facts.fingerprint if args.dev else None
            return await run_until_signal(
                server, args.drain, log, metrics, lambda: _announce(server, memory, asset, fingerprint, token, log)
            )


def _upstream(args: argparse.Namespace) -> argparse.Namespace:
    """Return the options of the upstream connection, under the names that `network.connecting` expects."""
    return argparse.Namespace(
        token=args.upstream_token,
        token_file=args.upstream_token_file,
        ca=args.upstream_ca,
        fingerprint=args.upstream_fingerprint,
        insecure=args.upstream_insecure,
        quic=args.upstream_quic,
        timeout=5.0,
    )


def _read_token(path: Path) -> str:
    try:
        with path.open("rb") as file:
            token = file.read(4097).decode().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"--token-file {path}: cannot be read as text ({error})") from error
    if not 16 <= len(token) <= 4096 or not token.isprintable():
        raise UsageError(f"--token-file {path}: a token has 16 to 4096 printable characters")
    return token


def _announce(
    server: Server,
    memory: int,
    asset: TrackNamespace | None,
    fingerprint: str | None,
    token: str | None,
    log: FilteringBoundLogger,
) -> None:
    """Print the relay's URL and how to fetch through it; warn if everyone may enter."""
    from urllib.parse import quote

    from kvabr.quic.connect import FRAGMENT_TYPE

    url = moqt_url(*server.address)
    log.info("relaying", url=url, quic=server.backend, memory_bytes=memory)
    if token is None and not is_loopback(server.address[0]):
        log.warning("open to all", hint="who can reach this address may read what the relay may; see --token-file")
    print(url)
    if fingerprint is not None:
        print(f"certificate, for development: SHA-256 fingerprint {fingerprint}")
    words = ["--deadline 2", "--out cache.safetensors"]
    words += [f"--fingerprint {fingerprint}"] if fingerprint is not None else []
    entry = "" if token is None else "KVABR_TOKEN=... "
    if asset is None:
        # Which assets there are no origin tells; `kvabr serve` prints one, in the fragment of a URL.
        print(f"fetch through it: what you would fetch from the origin, from {url} instead, with {' '.join(words)}")
    else:
        name = f"{quote(asset.model)}/{asset.prompt}"
        print(f"fetch through it: {entry}kvabr fetch '{url}#{FRAGMENT_TYPE}:{name}' {' '.join(words)}")
    sys.stdout.flush()
