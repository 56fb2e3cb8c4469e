"""A results folder: plays in an SQLite file by digest, the matrix's axes, and the totals."""

from __future__ import annotations

import json
import math
import sqlite3
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from kvabr.store.files import read_text, write_text
from kvabr.types.errors import AssetError, MissingAssetError
from kvabr_lab.causes import CAUSES
from kvabr_lab.matrix import SHIPPED, LabMatrix, build

FILE = "plays.sqlite"
AXES = "matrix.json"
RESULT = "result.json"
_MAX_BYTES = 1 << 28
SCHEMA = 1
_MAX_LINE = 1 << 16
_PATIENCE_S = 60.0
"""Seconds to wait for the file if another process has locked it."""

Line = dict[str, Any]

_NUMBERS = (
    *(
        "start_s",
        "deadline_s",
        "loss",
        "objective",
        "bytes_fetched",
        "bytes_wasted",
        "tokens_recomputed",
        "recompute_s",
    ),
    "abandoned",
)
_MAYBE = (
    *("ttft_s", "clairvoyant_loss", "clairvoyant_objective", "clairvoyant_ttft_s", "regret", "network_loss"),
    *("network_regret", "rtt_s"),
)
_FLAGS = ("met", "feasible", "wrapped")


class PlayStore:
    """Lines of results by key and start. A context manager; leaving it, or `commit`, writes to disk.

    Raises:
        AssetError: The file cannot be opened, or is not a store of this version.
    """

    def __init__(self, folder: Path) -> None:
        self._path = folder / FILE
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._db = sqlite3.connect(self._path, timeout=_PATIENCE_S)
            version = self._db.execute("PRAGMA user_version").fetchone()[0]
            if version not in {0, SCHEMA}:
                raise AssetError(f"{self._path}: written by another version of kvabr; give a new folder")
            self._db.execute("PRAGMA journal_mode=WAL")
            self._db.execute(
                "CREATE TABLE IF NOT EXISTS plays (key TEXT, start INTEGER, line TEXT, PRIMARY KEY (key, start)) "
                "WITHOUT ROWID"
            )
            self._db.execute(f"PRAGMA user_version={SCHEMA}")
            self._db.commit()
        except OSError as error:
            raise AssetError(f"{folder}: cannot be written ({error.strerror})") from error
        except sqlite3.Error as error:
            raise self._fault(error) from error

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self._db.commit()
        finally:
            self._db.close()

    def get(self, key: str, starts: int) -> dict[int, Line]:
        """Return the stored lines of a key's first ``starts`` starts, by start; invalid lines count as missing."""
        try:
            query = "SELECT start, line FROM plays WHERE key = ? AND start >= 0 AND start < ?"
            rows = self._db.execute(query, (key, starts)).fetchall()
        except sqlite3.Error as error:
            raise self._fault(error) from error
        return {int(start): line for start, text in rows if (line := _sound(text)) is not None}

    def put(self, key: str, lines: Mapping[int, Line]) -> None:
        """Store lines by start."""
        rows: Iterable[tuple[str, int, str]] = (
            (key, start, json.dumps(line, separators=(",", ":"), allow_nan=False)) for start, line in lines.items()
        )
        try:
            self._db.executemany("INSERT OR REPLACE INTO plays VALUES (?, ?, ?)", rows)
        except sqlite3.Error as error:
            raise self._fault(error) from error

    def commit(self) -> None:
        """Write stored lines to disk."""
        try:
            self._db.commit()
        except sqlite3.Error as error:
            raise self._fault(error) from error

    def _fault(self, error: sqlite3.Error) -> AssetError:
        return AssetError(f"{self._path}: {error}; delete it to play everything again, or give another folder")


def _sound(text: Any) -> Line | None:
    if not isinstance(text, str) or len(text) > _MAX_LINE:
        return None
    try:
        line = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return line if isinstance(line, dict) and _complete(line) else None


def _complete(line: Line) -> bool:
    causes, tokens = line.get("causes"), line.get("track_tokens")
    return (
        all(isinstance(line.get(name), str) for name in ("trace", "trace_family", "policy"))
        and all(_number(line.get(name)) for name in _NUMBERS)
        and all(name in line and (line[name] is None or _number(line[name])) for name in _MAYBE)
        and all(isinstance(line.get(name), bool) for name in _FLAGS)
        and (line.get("gave_up") is None or isinstance(line["gave_up"], str))
        and isinstance(tokens, dict)
        and all(map(_number, tokens.values()))
        and (line["regret"] is None) == (causes is None) == (not line["feasible"])
        and (causes is None or (isinstance(causes, dict) and all(_number(causes.get(name)) for name in CAUSES)))
    )


def _number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def save_axes(folder: Path, axes: Mapping[str, Any]) -> None:
    """Save a run's axes with absolute paths, so that other commands find the same traces and assets."""
    whole = dict(axes)
    for name in ("traces", "assets"):
        whole[name] = [item if item == SHIPPED else _absolute(item) for item in axes.get(name) or []]
    whole["families"] = {name: list(map(_absolute, paths)) for name, paths in (axes.get("families") or {}).items()}
    whole["policies"] = [_policy(item) for item in axes.get("policies") or []]
    write_text(folder / AXES, json.dumps(whole, indent=1) + "\n")


def load_matrix(folder: Path) -> LabMatrix:
    """Rebuild the matrix of a folder; its traces and assets are read again.

    Raises:
        AssetError: This is not a results folder.
    """
    value = _json(folder / AXES)
    lists = {name: value.get(name) or [] for name in ("traces", "exclude", "policies", "deadlines", "loads", "rtts")}
    families = value.get("families") or {}
    if not all(isinstance(items, list) for items in (*lists.values(), *families.values())):
        raise AssetError(f"{folder / AXES}: not a result of `kvabr lab`; run it again")
    return build(value | {"policies": [_from_here(str(policy)) for policy in lists["policies"]]})


def save_result(folder: Path, result: Mapping[str, Any]) -> None:
    """Save the totals."""
    write_text(folder / RESULT, json.dumps(result, indent=1, allow_nan=False) + "\n")


def _json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise MissingAssetError(
            f"{path.parent}: contains no results; make them with: kvabr lab TRACES --out {path.parent}"
        )
    try:
        value = json.loads(read_text(path, _MAX_BYTES))
    except (ValueError, RecursionError) as error:
        raise AssetError(f"{path}: not JSON ({error}); run `kvabr lab` again") from error
    if not isinstance(value, dict) or not isinstance(value.get("families") or {}, dict):
        raise AssetError(f"{path}: not a result of `kvabr lab`; run it again")
    return value


def _absolute(path: str) -> str:
    return str(Path.cwd() / path)


def _from_here(policy: str) -> str:
    """Return a policy's name, relative to the current folder if its file is in it."""
    path, colon, rest = policy.partition(":")
    if colon and path.endswith(".py") and Path(path).is_relative_to(Path.cwd()):
        return f"./{Path(path).relative_to(Path.cwd())}{colon}{rest}"
    return policy


def _policy(text: str) -> str:
    file, colon, rest = text.partition(":")
    return f"{_absolute(file)}{colon}{rest}" if file.endswith(".py") else text
