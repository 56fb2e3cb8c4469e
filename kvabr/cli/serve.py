"""`kvabr serve`: publish a folder of assets over MoQT on QUIC."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvabr.cli.options import is_loopback, is_wildcard, moqt_url, parse_address
from kvabr.server.limits import ServerLimits
from kvabr.types.errors import AssetError, FormatError, UsageError

if TYPE_CHECKING:
    from structlog.typing import FilteringBoundLogger

    from kvabr.server.certificates import CertificateFacts
    from kvabr.server.published_assets import PublishedAssets
    from kvabr.server.server import Server

_EXPIRES_SOON_DAYS = 14

_EPILOG = """\
a first try, on this machine only:
  kvabr serve assets --dev
It makes a certificate by itself, and prints its fingerprint and the `kvabr fetch` line that accepts it.

for others:
  kvabr serve assets --bind 0.0.0.0:4443 --cert chain.pem --key key.pem --tokens tokens.json --metrics 127.0.0.1:9100

ROOT is an asset, or a folder with assets up to four levels down; new, replaced and removed ones are noticed within two
seconds. An asset that is damaged is left out, and the log says why.

tokens: `kvabr serve --new-token` prints a new token, to be given to clients (KVABR_TOKEN), and its entry for the file
given with --tokens:
  {"schema": "kvabr.grants/1", "grants": [ENTRY, ...]}
"assets" in an entry are patterns of the asset's folder below ROOT, such as "team-a/*", "models" patterns of the model's
name. The file is read again when it changes. Without --tokens everyone who can reach the address may read everything.

SIGTERM or Ctrl-C: clients are sent away by GOAWAY, and what is under way is finished for --drain seconds. A second one
ends it at once.
"""

_LIMITS = {
    "connections": "connections at a time",
    "requests_per_connection": "requests in flight on one connection",
    "requests": "requests in flight, all connections together",
    "requests_per_s": "requests per second of one connection, and as many changes of priorities",
    "idle_s": "seconds until a silent connection is closed",
    "handshake_s": "seconds that connecting may take",
}


def add(parser: argparse.ArgumentParser) -> None:
    """Declare the command."""
    defaults = ServerLimits()
    limits = "".join(
        f"\n  {field.name.replace('_', '-') + '=' + str(getattr(defaults, field.name)):40} {_LIMITS[field.name]}"
        for field in fields(ServerLimits)
    )
    parser.description = (
        "Publish a folder of assets as MoQT tracks on QUIC, for `kvabr fetch`, `kvabr relay`, and programs "
        "that use kvabr.Client."
    )
    parser.epilog = f"{_EPILOG}\nlimits (--limit NAME=VALUE, any number of times) and their defaults:{limits}\n"
    parser.add_argument("root", nargs="?", metavar="ROOT", help="folder with the assets")
    parser.add_argument(
        "--bind", default="127.0.0.1:4443", metavar="HOST:PORT", help="UDP address (default: 127.0.0.1:4443)"
    )
    parser.add_argument("--cert", type=Path, metavar="F", help="certificate chain, PEM, the server's own first")
    parser.add_argument("--key", type=Path, metavar="F", help="its private key, PEM, without a password")
    parser.add_argument("--dev", action="store_true", help="make a certificate for this run instead")
    parser.add_argument(
        "--quic",
        choices=("auto", "aioquic", "qh3"),
        default="auto",
        help="QUIC library (default: qh3 if it is installed, else aioquic)",
    )
    parser.add_argument("--tokens", type=Path, metavar="F", help="who may read what, JSON (default: all read all)")
    parser.add_argument("--new-token", action="store_true", help="print a new token and its entry, and exit")
    parser.add_argument("--metrics", metavar="HOST:PORT", help="serve /metrics (Prometheus) and /healthz over HTTP")
    parser.add_argument(
        "--drain", type=float, default=10.0, metavar="S", help="seconds to finish what is under way (default: 10)"
    )
    parser.add_argument("--limit", action="append", default=[], metavar="NAME=VALUE", help="see below")
    parser.add_argument("--log-json", action="store_true", help="log JSON lines (default where no terminal is)")
    parser.add_argument("--verbose", action="store_true", help="log more")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Serve until a signal comes."""
    import asyncio

    if args.new_token:
        return _new_token()
    if args.root is None:
        raise UsageError("give the folder with your assets: kvabr serve ROOT --dev")
    if args.dev == (args.cert is not None or args.key is not None) or (args.cert is None) != (args.key is None):
        raise UsageError("give both --cert and --key, or --dev alone for a certificate made for this run")
    if not 0 <= args.drain <= 3600:
        raise UsageError(f"--drain {args.drain}: must be 0 to 3600 seconds")
    host, port = parse_address(args.bind, "--bind")
    metrics_at = None if args.metrics is None else parse_address(args.metrics, "--metrics")
    limits = parse_limits(args.limit)
    return asyncio.run(_serve(args, host, port, metrics_at, limits))


def parse_limits(texts: Sequence[str]) -> ServerLimits:
    """Limits from ``NAME=VALUE`` options.

    Raises:
        UsageError: there is no such limit, or its value is not a positive number.
    """
    given: dict[str, Any] = {}
    for text in texts:
        option, _, value = text.partition("=")
        name = option.replace("-", "_")
        if name not in _LIMITS:
            names = ", ".join(_LIMITS).replace("_", "-")
            raise UsageError(f"--limit {text}: there is no limit {option!r}; there are {names}")
        seconds = name.endswith("_s")
        try:
            given[name] = float(value) if seconds else int(value)
        except ValueError as error:
            raise UsageError(f"--limit {text}: {value!r} is not a {'' if seconds else 'whole '}number") from error
    return ServerLimits(**given)


def _new_token() -> int:
    from kvabr.server.grants import new_token

    token, entry = new_token()
    print(f"a new token; give it to the client (KVABR_TOKEN). It is shown only here:\n{token}\n")
    print(f"its entry for the file of --tokens; name it, and narrow what it opens:\n{json.dumps(entry)}")
    return 0


async def _serve(
    args: argparse.Namespace, host: str, port: int, metrics_at: tuple[str, int] | None, limits: ServerLimits
) -> int:
    import socket
    from contextlib import AsyncExitStack, ExitStack

    from kvabr.cli.server_log import captured, logger
    from kvabr.server import certificates
    from kvabr.server.grants import Grants
    from kvabr.server.metrics import Metrics
    from kvabr.server.published_assets import PublishedAssets
    from kvabr.server.server import Server, Watcher, run_until_signal
    from kvabr.telemetry.prometheus import ScrapeServer

    log = logger(json=args.log_json or None, verbose=args.verbose)
    metrics = Metrics()
    # Check everything before binding the address.
    try:
        grants = None if args.tokens is None else Grants.from_file(args.tokens)
    except (AssetError, FormatError) as error:
        raise UsageError(f"--tokens {error}") from error
    if grants is not None and not len(grants):
        log.warning("no grants", tokens=str(args.tokens), hint="nobody can connect; see kvabr serve --new-token")
    with ExitStack() as stack:
        stack.enter_context(captured(log))
        names = (socket.gethostname(),) if is_wildcard(host) else (host,)
        tls = (
            stack.enter_context(certificates.development(*names))
            if args.dev
            else certificates.ServerTls(args.cert, args.key)
        )
        facts = certificates.check(tls)
        library = PublishedAssets(args.root, grants, log)
        watcher = Watcher(library, args.tokens, log, metrics)
        server = Server(library, host, port, tls, limits, log, metrics, quic=args.quic)
        async with AsyncExitStack() as running:
            if metrics_at is not None:
                scrape = ScrapeServer(metrics, *metrics_at, healthy=lambda: not metrics.value("kvabr_draining"))
                running.enter_context(scrape)
                log.info("metrics", url="http://{}:{}/metrics".format(*scrape.address))
            await running.enter_async_context(watcher)
            return await run_until_signal(
                server, args.drain, log, metrics, lambda: _announce(server, library, facts, args, log)
            )


def _announce(
    server: Server,
    library: PublishedAssets,
    facts: CertificateFacts,
    args: argparse.Namespace,
    log: FilteringBoundLogger,
) -> None:
    """Print the URL and how to fetch from it; warn about what an operator should know."""
    from datetime import UTC, datetime
    from urllib.parse import quote

    url = moqt_url(*server.address)
    assets = library.assets
    log.info("serving", url=url, quic=server.backend, assets=len(assets), left_out=library.damaged)
    if not assets:
        log.warning(
            "no assets yet",
            root=args.root,
            hint=f"make one with: kvabr encode --text FILE --tokens N --out {args.root}/NAME; it is noticed at once",
        )
    if args.tokens is None and not is_loopback(server.address[0]):
        log.warning("open to all", hint="who can reach this address may read every asset; --tokens limits that")
    left = (facts.not_after - datetime.now(UTC)).days
    if left < _EXPIRES_SOON_DAYS and not args.dev:
        log.warning("certificate expires soon", days=left, hint="renew it, and start again")
    print(url)
    if args.dev:
        print(f"certificate, for development: SHA-256 fingerprint {facts.fingerprint}")
    if assets:
        space = assets[0].catalog.namespace
        words = [f"'{url}#kvcache:{quote(space.model)}/{space.prompt}'", "--deadline 2", "--out cache.safetensors"]
        words += [f"--fingerprint {facts.fingerprint}"] if args.dev else []
        token = "" if args.tokens is None else "KVABR_TOKEN=... "
        print(f"fetch from it, for instance {assets[0].name}: {token}kvabr fetch {' '.join(words)}")
    sys.stdout.flush()
