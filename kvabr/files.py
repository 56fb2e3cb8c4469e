"""Writing result files: whole or not at all."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from kvabr.errors import AssetError


def write_text(path: Path, text: str) -> None:
    """Write ``text`` to ``path`` such that a reader sees the old file or the new one, never half of it.

    Raises:
        AssetError: it cannot be written; nothing is left behind.
    """
    name: str | None = None
    try:
        path = path.resolve()  # a link stays one: what it leads to is replaced
        if path.exists() and not path.is_file():
            # A pipe or a device: there is nothing to replace, and replacing it would destroy it.
            with path.open("w", encoding="utf-8", errors="backslashreplace") as file:
                file.write(text)
            return
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        with os.fdopen(handle, "w", encoding="utf-8", errors="backslashreplace") as file:
            file.write(text)
        mask = os.umask(0)
        os.umask(mask)
        Path(name).chmod(0o666 & ~mask)
        Path(name).replace(path)
    except BaseException as error:
        if name is not None:
            Path(name).unlink(missing_ok=True)
        if isinstance(error, OSError):
            raise AssetError(f"{path}: cannot be written ({error.strerror})") from error
        raise
