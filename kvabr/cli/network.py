"""Options of every command that connects to an origin."""

from __future__ import annotations

import argparse
from pathlib import Path

from kvabr.cli.fields import add_fields, read_fields
from kvabr.types.errors import UsageError
from kvabr.types.peer import MAX_TOKEN_BYTES, PeerOptions
from kvabr.types.peer import read_token as read


def add_options(parser: argparse.ArgumentParser, title: str = "the connection", prefix: str = "") -> None:
    """Declare the options, with a prefix if they are not the only ones; `options` reads them."""
    add_fields(parser.add_argument_group(title), PeerOptions, prefix=prefix)


def options(args: argparse.Namespace, prefix: str = "") -> PeerOptions:
    """Return what the options say.

    Raises:
        UsageError: A value is wrong, a file cannot be read, or holds no token.
    """
    how = read_fields(args, PeerOptions, prefix)
    if how.ca is not None and not how.ca.is_file():
        raise UsageError(f"--{prefix}ca {how.ca}: no such file")
    if how.token_file is None:
        how.secret()
    else:
        read_token(how.token_file, f"--{prefix}token-file")
    return how


def read_token(path: Path, option: str = "--token-file", *, least: int = 1) -> str:
    """Return the token in the file that an option names.

    Raises:
        UsageError: The file cannot be read, or holds no token.
    """
    try:
        token = read(path)
    except UsageError as error:
        raise UsageError(f"{option} {error}") from error
    if len(token) < least:
        raise UsageError(f"{option} {path}: a token has {least} to {MAX_TOKEN_BYTES} printable characters")
    return token
