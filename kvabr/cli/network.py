"""Options of every command that connects to an origin: certificates, token, QUIC library."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import TYPE_CHECKING, TypedDict

from kvabr.types.errors import UsageError

if TYPE_CHECKING:
    from kvabr.client.async_client import AsyncClient
    from kvabr.client.options import PlayOptions
    from kvabr.quic.backend import Quic
    from kvabr.quic.connect import Connecting
    from kvabr.types.engine import Engine
    from kvabr.types.kv import KVSpec

_MAX_TOKEN_BYTES = 4096


class _Options(TypedDict):
    token: str | None
    ca: Path | None
    fingerprint: str | None
    insecure: bool
    quic: Quic
    timeout_s: float


def add_options(parser: argparse.ArgumentParser) -> None:
    """Declare the options; `connecting` reads them."""
    network = parser.add_argument_group("the connection")
    token = network.add_mutually_exclusive_group()
    token.add_argument("--token", metavar="T", help="token for the origin (default: the environment's KVABR_TOKEN)")
    token.add_argument("--token-file", type=Path, metavar="F", help="read the token from a file")
    trust = network.add_mutually_exclusive_group()
    trust.add_argument("--ca", type=Path, metavar="F.pem", help="certificates to trust instead of the system's")
    trust.add_argument(
        "--fingerprint",
        metavar="HEX",
        help="SHA-256 of the only certificate to trust",
    )
    trust.add_argument(
        "--insecure", action="store_true", help="do not verify the certificate (exposes the token and the cache)"
    )
    network.add_argument(
        "--quic",
        choices=("auto", "aioquic", "qh3"),
        default="auto",
        help="QUIC library (default: qh3 if it is installed, else aioquic)",
    )
    network.add_argument("--timeout", type=float, default=5.0, metavar="S", help="seconds to connect in (default: 5)")


def connecting(url: str, args: argparse.Namespace, *, needed: bool = True) -> Connecting:
    """Return `kvabr.quic.connect.connect` with the options.

    Args:
        url: of the origin or relay.
        args: the options.
        needed: see `kvabr.quic.connect.connect`.

    Raises:
        UsageError: an option is wrong.
    """
    from kvabr.quic.connect import connect

    return connect(url, **_options(args), needed=needed)


def new_client(
    url: str,
    args: argparse.Namespace,
    *,
    model: KVSpec | None = None,
    engine: Engine | None = None,
    options: PlayOptions | None = None,
    cache: Path | None = None,
) -> AsyncClient:
    """Return a client with the options.

    Raises:
        UsageError: an option is wrong.
    """
    from kvabr.client.async_client import AsyncClient

    return AsyncClient(url, **_options(args), model=model, engine=engine, options=options, cache=cache)


def _options(args: argparse.Namespace) -> _Options:
    if args.ca is not None and not args.ca.is_file():
        raise UsageError(f"--ca {args.ca}: no such file")
    return {
        "token": _token(args),
        "ca": args.ca,
        "fingerprint": args.fingerprint,
        "insecure": args.insecure,
        "quic": args.quic,
        "timeout_s": args.timeout,
    }


def _token(args: argparse.Namespace) -> str | None:
    if args.token_file is None:
        token = args.token or os.environ.get("KVABR_TOKEN")
    else:
        try:
            with args.token_file.open("rb") as file:
                token = file.read(_MAX_TOKEN_BYTES + 1).decode().strip()
        except (OSError, UnicodeDecodeError) as error:
            raise UsageError(f"--token-file {args.token_file}: cannot be read as text ({error})") from error
        if not token:
            raise UsageError(f"--token-file {args.token_file}: is empty")
    if token is not None and (len(token) > _MAX_TOKEN_BYTES or not token.isprintable()):
        raise UsageError(f"the token has more than {_MAX_TOKEN_BYTES} characters, or some that cannot be printed")
    return token or None
