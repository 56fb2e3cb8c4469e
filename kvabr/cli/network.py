"""Options of commands that connect to an origin."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from kvabr.types.errors import UsageError
from kvabr.types.fields import OptionGroup
from kvabr.types.peer import MAX_TOKEN_BYTES, PeerOptions
from kvabr.types.peer import read_token as read

Connecting = Annotated[PeerOptions, OptionGroup("the connection")]


def checked(how: PeerOptions, prefix: str = "") -> PeerOptions:
    """Check the files that connection options name, and return the options.

    Args:
        how: the options.
        prefix: prefix of their names.

    Raises:
        UsageError: A file cannot be read, or has no token.
    """
    if how.ca is not None and not how.ca.is_file():
        raise UsageError(f"--{prefix}ca {how.ca}: no such file")
    if how.token_file is None:
        how.secret()
    else:
        read_token(how.token_file, f"--{prefix}token-file")
    return how


def read_token(path: Path, option: str = "--token-file", *, least: int = 1) -> str:
    """Return the token in the file of an option, of at least ``least`` characters; raise `UsageError` if wrong."""
    try:
        token = read(path)
    except UsageError as error:
        raise UsageError(f"{option} {error}") from error
    if len(token) < least:
        raise UsageError(f"{option} {path}: a token must have {least} to {MAX_TOKEN_BYTES} printable characters")
    return token
