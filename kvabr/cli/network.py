"""Options of every command that connects to an origin: certificates, token, QUIC library."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import TYPE_CHECKING

from kvabr.cli.options import add_quic_option
from kvabr.types.errors import UsageError

if TYPE_CHECKING:
    from kvabr.link.moqt.options import DialArguments


def add_options(
    parser: argparse.ArgumentParser, title: str = "the connection", prefix: str = "", towards: str = ""
) -> None:
    """Declare the options, with a prefix if they are not the only ones; `options` reads them."""
    network = parser.add_argument_group(title)
    token = network.add_mutually_exclusive_group()
    shown = "token for the origin; visible to every user in the process list, so prefer"
    token.add_argument(
        f"--{prefix}token", metavar="T", help=f"{shown} --{prefix}token-file (default: the environment's KVABR_TOKEN)"
    )
    token.add_argument(
        f"--{prefix}token-file", type=Path, metavar="F", help="read the token from a file, again for each connection"
    )
    trust = network.add_mutually_exclusive_group()
    trust.add_argument(
        f"--{prefix}ca", type=Path, metavar="F.pem", help="certificates to trust instead of the system's"
    )
    trust.add_argument(f"--{prefix}fingerprint", metavar="HEX", help="SHA-256 of the only certificate to trust")
    insecure = "do not verify the certificate (exposes the token and the cache)"
    trust.add_argument(f"--{prefix}insecure", action="store_true", help=insecure)
    add_quic_option(network, f"--{prefix}quic", towards)
    network.add_argument(
        f"--{prefix}transport",
        choices=("auto", "quic", "tcp"),
        default="auto",
        help=f"how to connect{towards}: quic, tcp (faster on fast and short links), or auto (default)",
    )
    if not prefix:
        network.add_argument(
            "--lanes",
            type=int,
            default=1,
            metavar="N",
            help="most connections to an origin: further ones are opened where they bring more (default: 1)",
        )
        network.add_argument(
            "--timeout", type=float, default=5.0, metavar="S", help="seconds to connect in (default: 5)"
        )


def options(args: argparse.Namespace, prefix: str = "") -> DialArguments:
    """Return the keyword arguments of `kvabr.link.moqt.connect.connect` and `kvabr.client.async_client.AsyncClient`.

    Raises:
        UsageError: A file cannot be read, or holds no token.
    """
    given = {name.removeprefix(prefix): value for name, value in vars(args).items() if name.startswith(prefix)}
    ca = given["ca"]
    if ca is not None and not ca.is_file():
        raise UsageError(f"--{prefix.replace('_', '-')}ca {ca}: no such file")
    file = given["token_file"]
    if file is not None:
        read_token(file, f"--{prefix.replace('_', '-')}token-file")
    return {
        "token": None if file is not None else _token(given["token"]),
        "token_file": file,
        "ca": ca,
        "fingerprint": given["fingerprint"],
        "insecure": given["insecure"],
        "quic": given["quic"],
        "transport": given["transport"],
        "timeout_s": given.get("timeout", 5.0),
        "lanes": given.get("lanes", 1),
    }


def _token(token: str | None) -> str | None:
    from kvabr.link.moqt.options import check_token

    token = token or os.environ.get("KVABR_TOKEN")
    return check_token(token, "the token") if token else None


def read_token(path: Path, option: str = "--token-file", *, least: int = 1) -> str:
    """Return the token in the file that an option names.

    Raises:
        UsageError: The file cannot be read, or holds no token.
    """
    from kvabr.link.moqt.options import MAX_TOKEN_BYTES
    from kvabr.link.moqt.options import read_token as read

    try:
        token = read(path)
    except UsageError as error:
        raise UsageError(f"{option} {error}") from error
    if len(token) < least:
        raise UsageError(f"{option} {path}: a token has {least} to {MAX_TOKEN_BYTES} printable characters")
    return token
