"""`kvabr serve`: publish a store of assets over MoQT."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from annotated_types import Gt, Le

from kvabr.cli import kv_events, serving
from kvabr.cli.fields import command
from kvabr.cli.interrupt import run_async
from kvabr.types.errors import AssetError, FormatError, UsageError
from kvabr.types.fields import OptionGroup, Shown

if TYPE_CHECKING:
    from kvabr.server.limits import ServerLimits
    from kvabr.server.published_assets import PublishedAssets
    from kvabr.server.server import Server

_EXPIRES_SOON_DAYS = 14
_MAX_DAYS = 36_500


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeCommand:
    """Publish the assets of a store over MoQT, for `kvabr fetch`, `kvabr relay` and programs that use kvabr.Client.

    A first try, on this machine only:
      kvabr serve assets --dev
    It makes a certificate, and prints its fingerprint and a `kvabr fetch` line that accepts it.

    For others:
      kvabr serve assets --bind :4443 --cert chain.pem --key key.pem --grants grants.json --metrics 127.0.0.1:9100

    ROOT is a store, or a folder with stores up to four levels down. New and removed assets are found within 0.2
    seconds, within two in folders of many thousand assets, and within five in buckets. Damaged assets are logged and
    not served.

    Tokens: `kvabr serve --new-token` prints a new token for clients (--token-file, KVABR_TOKEN) and its entry for the
    --grants file:
      {"schema": "kvabr.grants/1", "grants": [ENTRY, ...]}
    In an entry, "assets" are patterns of the asset's name (the path of its store below ROOT and its digest), such as
    "team-a/*"; "models" are patterns of the model's name; "id" names the token in logs and metrics; "expires" is a time
    such as "2027-01-31T12:00:00Z". Without --grants anyone who can reach the address can read everything.

    Grants, certificate and key are reloaded when their files change, and on SIGHUP. Connections with a removed or
    expired token are closed at once. A file that cannot be used is logged, and the previous contents stay in use.

    After SIGTERM or Ctrl-C, clients receive GOAWAY, and transfers may finish for --drain seconds. A second signal ends
    the process at once.
    """

    root: Annotated[str | None, Shown("ROOT")] = None
    """The store: a folder or a URL, or a folder with stores."""
    serving: Annotated[serving.ServingOptions, OptionGroup()]
    grants: Annotated[Path | None, Shown("--grants F")] = None
    """JSON file with who may read which assets (default: everyone may read all)."""
    new_token: Annotated[bool, Shown()] = False
    """Print a new token and its entry, and exit."""
    expires: Annotated[float | None, Gt(0), Le(_MAX_DAYS), Shown("--expires DAYS", needs="new_token")] = None
    """Days until that token expires (default: never)."""
    json: Annotated[Path | None, Shown("--json F", needs="new_token", written=True)] = None
    """Write that token and its entry as JSON."""
    kv_events: Annotated[kv_events.KVEventOptions, OptionGroup()]


def run(args: ServeCommand) -> int:
    """Serve until a signal arrives."""
    if args.new_token:
        return _new_token(args.expires, args.json)
    if args.root is None:
        raise UsageError("give the folder with your assets: kvabr serve ROOT --dev")
    limits = serving.parse_limits(args.serving.limit)
    return run_async(_serve(args, args.root, limits))


add = command(ServeCommand, run, serving.limits_help)


def _new_token(days: float | None, file: Path | None) -> int:
    """Print only the token on standard output, for scripts, and instructions on standard error."""
    from kvabr.cli.display import write_result
    from kvabr.server.grants import new_token

    token, entry = new_token(days=days)
    before = os.umask(0o077)  # the file holds a secret
    try:
        write_result(file, "serve", {"token": token, "entry": entry})
    finally:
        os.umask(before)
    print("a new token; give it to the client (--token-file, KVABR_TOKEN). It is shown only here:", file=sys.stderr)
    print(token, flush=True)
    entry_text = f"\nits entry for the --grants file; change its id and assets:\n{json.dumps(entry)}"
    print(entry_text, file=sys.stderr)
    return 0


async def _serve(args: ServeCommand, root: str, limits: ServerLimits) -> int:
    from kvabr.server.grants import Grants
    from kvabr.server.published_assets import PublishedAssets
    from kvabr.server.server import Server, Watcher, run_until_signal

    # Check everything before binding the address.
    try:
        grants = None if args.grants is None else Grants.from_file(args.grants)
    except (AssetError, FormatError) as error:
        raise UsageError(f"--grants {error}") from error
    with serving.prepared(args.serving) as setup:
        log, metrics = setup.log, setup.metrics
        if grants is not None and not len(grants):
            log.warning("no grants", grants=str(args.grants), hint="no client can connect; see kvabr serve --new-token")
        library = PublishedAssets(root, grants, log)
        server = Server(
            library, setup.host, setup.port, setup.tls, limits, log, metrics,
            quic=args.serving.quic, tcp=args.serving.tcp, announce_rates=args.serving.announce_rates == "on",
        )  # fmt: skip
        async with Watcher(library, log, metrics), serving.reloads(setup, server) as files:
            if (path := args.grants) is not None:
                files.add("tokens", [path], lambda: library.regrant(Grants.from_file(path)))
            with kv_events.announcements(args.kv_events, library, log, metrics.registry):
                return await run_until_signal(
                    server, args.serving.drain, log, metrics, lambda: _announce(server, library, setup, args)
                )


def _announce(server: Server, library: PublishedAssets, setup: serving.ServerSetup, args: ServeCommand) -> None:
    """Print the URL and a command that fetches from it, and log warnings for operators."""
    from datetime import UTC, datetime

    assets, log = library.assets, setup.log
    if not assets and library.damaged:
        log.warning("no asset can be served", root=args.root, left_out=library.damaged, hint="the reasons are above")
    elif not assets:
        place = f"'{args.root}'" if "://" in str(args.root) else f"{args.root}/NAME"  # buckets name their assets
        log.warning(
            "no assets yet",
            root=args.root,
            hint=f"make one with: kvabr encode --text FILE --tokens N --out {place}; the server finds it by itself",
        )
    left = (setup.facts.not_after - datetime.now(UTC)).days
    if left < _EXPIRES_SOON_DAYS and not args.serving.dev:
        log.warning("certificate expires soon", days=left, hint="renew it; the new one is used at once")
    everyone = (
        "anyone who can reach this address can read every asset; --grants restricts access"
        if args.grants is None
        else None
    )
    url = setup.announce(server, "serving", everyone, assets=len(assets), left_out=library.damaged)
    whole = next((asset for asset in assets if asset.catalog.passage is None), None)
    if whole is not None:
        line = setup.fetch_line(url, whole.catalog.namespace, token=args.grants is not None)
        print(f"to fetch from it, for instance {whole.name}: {line}")
    elif assets:
        print(f"it has only passages, which programs can play: Client({url!r}).play(parts=[...])")
    sys.stdout.flush()
