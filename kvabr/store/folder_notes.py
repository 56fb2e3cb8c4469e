"""What a folder of assets notes about them, in the hidden folder ``.kvabr``: pins, and models that have expired.

Pins and removals take turns by a lock, which ends with its process. A tombstone is written before what it expires is
looked for, and a writer looks for it before and after its asset takes its name, so one of the two sees the other.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import math
import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from kvabr.store.files import PRIVATE, PRIVATE_FOLDER, read_bytes, write_file
from kvabr.types.errors import AssetError, FormatError

_NOTES, _PINS, _EXPIRED, _LOCK = ".kvabr", "pin", "expired", "lock"
_LEVELS = 4
"""Folders above an asset in which the store may begin, see `kvabr.store.asset_folder.MAX_DEPTH`."""
_MAX_NOTE_BYTES = 64 << 10
REMOVED = ".old"
"""Suffix of hidden folders that are being removed."""


@contextmanager
def locked(root: Path) -> Iterator[None]:
    """Hold the right to pin and to remove assets of a folder, alone among all processes; `AssetError` if it cannot."""
    flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
    try:
        (root / _NOTES).mkdir(mode=PRIVATE_FOLDER, exist_ok=True)
        handle = os.open(root / _NOTES / _LOCK, flags, PRIVATE)
    except OSError as error:
        raise AssetError(f"{root}: what it holds cannot be managed ({error.strerror})") from error
    try:
        with contextlib.suppress(OSError):  # a file system without locks
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def folder_time(root: Path) -> float:
    """Return the time by the clock of the folder's file system, seconds since 1970."""
    path = root / f"{_NOTES}.{secrets.token_hex(8)}.partial"
    try:
        path.touch(PRIVATE)
        try:
            return path.stat().st_mtime
        finally:
            path.unlink(missing_ok=True)
    except OSError as error:
        raise AssetError(f"{root}: cannot be written to ({error.strerror})") from error


def pin_folder_asset(root: Path, name: str, until_s: float) -> None:
    """Keep an asset until a time, by the clock of `folder_time`. Hold `locked`."""
    _write(root, _PINS, name, {"name": name, "until_s": until_s})


def unpin_folder_asset(root: Path, name: str) -> bool:
    """End a pin; return whether there was one."""
    try:
        _place(root, _PINS, name).unlink()
    except FileNotFoundError:
        return False
    except OSError as error:
        raise AssetError(f"{root}: the pin of {name} cannot be removed ({error.strerror})") from error
    return True


def pin_end_s(root: Path, name: str) -> float | None:
    """Return when the pin of an asset ends; None if it has none. A damaged pin never ends, so that nothing is lost."""
    try:
        value = _read(_place(root, _PINS, name))
        return None if value is None else _seconds(value["until_s"])
    except (FormatError, KeyError, TypeError, ValueError, OverflowError):
        return math.inf


def expire_folder_model(root: Path, model: str, before_s: float) -> float:
    """Say that everything of a model from before a time has expired; an earlier expiry of a later time stays."""
    before_s = max(before_s, _before_s(_place(root, _EXPIRED, model)))
    _write(root, _EXPIRED, model, {"model": model, "before_s": before_s})
    return before_s


def expired_models(root: Path) -> dict[str, float]:
    """Return the time before which everything is expired, by model."""
    found = {}
    with contextlib.suppress(FileNotFoundError):
        for path in (root / _NOTES / _EXPIRED).iterdir():
            value = _read(path) if path.suffix == ".json" else None
            if value is not None:
                found[str(value.get("model"))] = _before_s(path)
    return found


def check_expiry(path: Path, model: str, begun_s: float) -> None:
    """Raise `AssetError` if an asset that was begun then may not be published at ``path``: its model has expired."""
    for root in list(path.parents)[:_LEVELS]:
        if begun_s < _before_s(_place(root, _EXPIRED, model)):
            raise AssetError(
                f"{path}: caches of {model} from before its expiry (kvabr store expire) are not published; "
                "compute it again"
            )


def remove_folder_asset(path: Path) -> None:
    """Remove an asset: by a rename first, so that an origin has it whole or not at all. Raises `OSError`."""
    aside = path.with_name(f".{path.name}.{secrets.token_hex(4)}{REMOVED}")
    path.rename(aside)
    shutil.rmtree(aside, ignore_errors=True)


def _place(root: Path, kind: str, name: str) -> Path:
    return root / _NOTES / kind / f"{hashlib.sha256(os.fsencode(name)).hexdigest()[:32]}.json"


def _before_s(path: Path) -> float:
    value = _read(path)
    try:
        return -math.inf if value is None else _seconds(value["before_s"])
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise FormatError(f"{path}: not a note of kvabr; remove it, and expire the model again") from error


def _seconds(value: Any) -> float:
    seconds = float(value)
    if math.isnan(seconds):
        raise ValueError("not a number")
    return seconds


def _write(root: Path, kind: str, name: str, value: dict[str, Any]) -> None:
    path = _place(root, kind, name)
    try:
        path.parent.mkdir(mode=PRIVATE_FOLDER, parents=True, exist_ok=True)
    except OSError as error:
        raise AssetError(f"{path.parent}: cannot be made ({error.strerror})") from error
    write_file(path, json.dumps(value).encode(), mode=0o644)


def _read(path: Path) -> dict[str, Any] | None:
    """Return a note; None if there is none. Raises `FormatError`."""
    try:
        if not path.is_file():
            return None
        value = json.loads(read_bytes(path, _MAX_NOTE_BYTES, unfit=FormatError))
    except (ValueError, RecursionError, OSError) as error:
        raise FormatError(f"{path}: damaged; remove it, and expire or pin again") from error
    if not isinstance(value, dict):
        raise FormatError(f"{path}: not a note of kvabr; remove it")
    return value
