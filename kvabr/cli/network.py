"""Options of every command that connects to an origin: certificates, token, QUIC library."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import TYPE_CHECKING, TypedDict

from kvabr.cli.options import add_quic_option
from kvabr.types.errors import UsageError

if TYPE_CHECKING:
    from kvabr.quic.backend import Quic

_MAX_TOKEN_BYTES = 4096


class ConnectionOptions(TypedDict):
    """Where to connect with what."""

    token: str | None
    ca: Path | None
    fingerprint: str | None
    insecure: bool
    quic: Quic
    timeout_s: float


def add_options(
    parser: argparse.ArgumentParser, title: str = "the connection", prefix: str = "", towards: str = ""
) -> None:
    """Declare the options, with a prefix if they are not the only ones; `options` reads them."""
    network = parser.add_argument_group(title)
    token = network.add_mutually_exclusive_group()
    token.add_argument(
        f"--{prefix}token", metavar="T", help="token for the origin (default: the environment's KVABR_TOKEN)"
    )
    token.add_argument(f"--{prefix}token-file", type=Path, metavar="F", help="read the token from a file")
    trust = network.add_mutually_exclusive_group()
    trust.add_argument(
        f"--{prefix}ca", type=Path, metavar="F.pem", help="certificates to trust instead of the system's"
    )
    trust.add_argument(f"--{prefix}fingerprint", metavar="HEX", help="SHA-256 of the only certificate to trust")
    insecure = "do not verify the certificate (exposes the token and the cache)"
    trust.add_argument(f"--{prefix}insecure", action="store_true", help=insecure)
    add_quic_option(network, f"--{prefix}quic", towards)
    if not prefix:
        network.add_argument(
            "--timeout", type=float, default=5.0, metavar="S", help="seconds to connect in (default: 5)"
        )


def options(args: argparse.Namespace, prefix: str = "") -> ConnectionOptions:
    """Return the keyword arguments of `kvabr.quic.connect.connect` and `kvabr.client.async_client.AsyncClient`.

    Raises:
        UsageError: A file cannot be read, or holds no token.
    """
    given = {name.removeprefix(prefix): value for name, value in vars(args).items() if name.startswith(prefix)}
    ca = given["ca"]
    if ca is not None and not ca.is_file():
        raise UsageError(f"--{prefix.replace('_', '-')}ca {ca}: no such file")
    return {
        "token": _token(given["token"], given["token_file"]),
        "ca": ca,
        "fingerprint": given["fingerprint"],
        "insecure": given["insecure"],
        "quic": given["quic"],
        "timeout_s": given.get("timeout", 5.0),
    }


def _token(token: str | None, path: Path | None) -> str | None:
    if path is not None:
        return read_token(path)
    token = token or os.environ.get("KVABR_TOKEN")
    return _checked(token, "the token") if token else None


def read_token(path: Path, option: str = "--token-file", *, least: int = 1) -> str:
    """Return the token in the file that an option names.

    Raises:
        UsageError: The file cannot be read, or holds no token.
    """
    try:
        with path.open("rb") as file:
            token = file.read(_MAX_TOKEN_BYTES + 1).decode().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{option} {path}: cannot be read as text ({error})") from error
    if not token:
        raise UsageError(f"{option} {path}: is empty")
    if len(token) < least:
        raise UsageError(f"{option} {path}: a token has {least} to {_MAX_TOKEN_BYTES} printable characters")
    return _checked(token, f"{option} {path}: the token")


def _checked(token: str, where: str) -> str:
    if len(token) > _MAX_TOKEN_BYTES or not token.isprintable():
        raise UsageError(f"{where} has more than {_MAX_TOKEN_BYTES} characters, or some that cannot be printed")
    return token
