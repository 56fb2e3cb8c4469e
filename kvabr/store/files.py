"""Files of the user's: written whole or not at all, and read up to a bound."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from kvabr.types.errors import AssetError, KvabrError, UsageError

MIN_SALT_BYTES = 16
MAX_SALT_BYTES = 4096


def read_text(
    path: Path,
    limit: int = 1 << 28,
    *,
    unreadable: type[KvabrError] = AssetError,
    unfit: type[KvabrError] = UsageError,
) -> str:
    """Read a text file, of which a byte order mark is no part.

    Args:
        path: the file.
        limit: bytes that it may have.
        unreadable: raised if it cannot be read.
        unfit: raised if it is larger, or not UTF-8.
    """
    try:
        with path.open("rb") as file:
            data = file.read(limit + 1)
    except OSError as error:
        raise unreadable(f"{path}: cannot be read ({error.strerror})") from error
    if len(data) > limit:
        raise unfit(f"{path}: larger than the {limit} bytes allowed; cut it in pieces")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise unfit(f"{path}: not a text file in UTF-8 (byte {error.start}); convert or unpack it first") from error


def read_salt(path: Path | None) -> bytes:
    """Return a tenant's salt: all bytes of the file at ``path``, or ``b""`` without a path.

    The salt is mixed into every digest of a prompt, so that only its owners can name the prompt.

    Raises:
        UsageError: The file cannot be read, or does not hold 16 to 4096 bytes.
    """
    if path is None:
        return b""
    try:
        with path.open("rb") as file:
            salt = file.read(MAX_SALT_BYTES + 1)
    except OSError as error:
        raise UsageError(f"salt file {path}: cannot be read ({error.strerror})") from error
    if not MIN_SALT_BYTES <= len(salt) <= MAX_SALT_BYTES:
        raise UsageError(
            f"salt file {path}: must hold {MIN_SALT_BYTES} to {MAX_SALT_BYTES} random bytes; make one with: "
            f"head -c 32 /dev/urandom > {path}"
        )
    return salt


def write_text(path: Path, text: str) -> None:
    """Write ``text`` as UTF-8; otherwise as `write_file`."""
    write_file(path, text.encode(errors="backslashreplace"))


def write_file(path: Path, data: bytes) -> None:
    """Write ``data`` to ``path`` such that a reader sees the old file or the new one, never half of it.

    Raises:
        AssetError: it cannot be written; nothing is left behind, and a file that was there before still is.
    """
    name: str | None = None
    try:
        if path.exists() and not path.is_file():
            # A pipe or a device: there is nothing to replace, and replacing it would destroy it. That one may write to
            # /dev/stdout is why this is asked first: what that leads to may have no path.
            with path.open("wb") as file:
                file.write(data)
            return
        path = path.resolve()  # a link stays one: what it leads to is replaced
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".partial")
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        Path(name).chmod(0o666 & ~umask())
        Path(name).replace(path)
    except BaseException as error:
        if name is not None:
            Path(name).unlink(missing_ok=True)
        if isinstance(error, OSError):
            raise AssetError(f"{path}: cannot be written ({error.strerror})") from error
        raise


def umask() -> int:
    """Permissions that this process takes from the files it makes; files of `tempfile` do not know it."""
    mask = os.umask(0)
    os.umask(mask)
    return mask
