"""Sockets of player processes. Imports only modules that load quickly, so that an unneeded process ends soon."""

from __future__ import annotations

import fcntl
import hashlib
import os
import socket
import stat
import sys
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from kvabr import __version__
from kvabr.types.errors import UsageError

_MAX_CHARACTERS = 107


def own_socket() -> Path:
    """Return the socket of this user's engines, one per installation of kvabr and Python environment.

    Raise `UsageError` if there is no folder that only this user can enter.
    """
    installation = hashlib.sha256(os.fsencode(f"{Path(__file__).resolve()}\n{sys.prefix}")).hexdigest()[:8]
    given, wrong = os.environ.get("XDG_RUNTIME_DIR"), []
    for folder in (Path(given) / "kvabr",) if given else _folders():
        try:
            private_folder(folder.absolute())
        except (OSError, UsageError) as error:
            wrong.append(str(error))
        else:
            return folder.absolute() / f"player-{__version__}-{installation}.sock"
    raise UsageError(f"no folder for the socket of a player process: set XDG_RUNTIME_DIR ({'; '.join(wrong)})")


def _folders() -> Iterator[Path]:
    with suppress(FileNotFoundError):  # no temporary folder
        yield Path(tempfile.gettempdir()) / f"kvabr-{os.geteuid()}"
    with suppress(RuntimeError):  # no home
        yield Path.home() / ".cache" / "kvabr" / "run"


def private_folder(folder: Path) -> None:
    """Create a folder that only this user can enter; raise `UsageError` if others can enter it, or `OSError`."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o077:
        raise UsageError(
            f"{folder}: must belong to you, and no other user may enter it, because anyone who can reach a player "
            "process can use its tokens: `chmod 700` it, or give another folder"
        )


def listening(path: Path) -> tuple[socket.socket, int] | None:
    """Return a listening socket and its open lock file; None if another process listens.

    Raise `UsageError` if the path is too long or others can enter its folder, or `OSError`.
    """
    if len(os.fsencode(path)) > _MAX_CHARACTERS:
        raise UsageError(
            f"{path}: the path of a socket must have at most {_MAX_CHARACTERS} characters; give a shorter one"
        )
    private_folder(path.parent)
    lock = os.open(path.with_suffix(".lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    made = socket.socket(socket.AF_UNIX)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        path.unlink(missing_ok=True)
        made.bind(str(path))
        made.listen(64)
        made.setblocking(False)
    except BaseException as error:
        made.close()
        os.close(lock)
        if isinstance(error, BlockingIOError):
            return None
        raise
    return made, lock
