"""The option ``--salt-file``: a tenant's secret, mixed into every digest of a prompt."""

from __future__ import annotations

import argparse
from pathlib import Path

from kvabr.types.errors import UsageError

MIN_BYTES = 16
MAX_BYTES = 4096


def add_option(parser: argparse.ArgumentParser) -> None:
    """Declare it; the value is ``args.salt_file``, for `read_salt`."""
    parser.add_argument(
        "--salt-file",
        type=Path,
        metavar="F",
        help="mix the bytes of this file into the prompt's digests, so that only who has them can name the prompt; "
        "make one with: head -c 32 /dev/urandom > F",
    )


def read_salt(path: Path | None) -> bytes:
    """The bytes of the file, all of them; none without a file.

    Raises:
        UsageError: it cannot be read, is too short to be a secret, or is too long to be meant.
    """
    if path is None:
        return b""
    try:
        with path.open("rb") as file:
            salt = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise UsageError(f"--salt-file {path}: cannot be read ({error.strerror})") from error
    if not MIN_BYTES <= len(salt) <= MAX_BYTES:
        raise UsageError(
            f"--salt-file {path}: must hold {MIN_BYTES} to {MAX_BYTES} random bytes; make one with: "
            f"head -c 32 /dev/urandom > {path}"
        )
    return salt
