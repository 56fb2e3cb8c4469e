"""A results folder: what was played, the axes that it was played over, and what it showed."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvabr.lab import matrixfile
from kvabr.lab.matrix import LabMatrix
from kvabr.store.files import read_text, write_text
from kvabr.types.errors import AssetError

AXES = "matrix.json"
RESULT = "result.json"
_MAX_BYTES = 1 << 28


def save_axes(folder: Path, axes: Mapping[str, Any]) -> None:
    """Write down what a run was asked for, such that another command finds the same traces and assets."""
    whole = dict(axes)
    for name in ("traces", "assets"):
        whole[name] = [item if item == matrixfile.SHIPPED else _absolute(item) for item in axes.get(name) or []]
    whole["families"] = {name: list(map(_absolute, paths)) for name, paths in (axes.get("families") or {}).items()}
    whole["policies"] = [_policy(item) for item in axes.get("policies") or []]
    write_text(folder / AXES, json.dumps(whole, indent=1) + "\n")


def load_matrix(folder: Path) -> LabMatrix:
    """The matrix that a folder was made from, read anew.

    Raises:
        AssetError: this is no results folder.
    """
    value = _json(folder / AXES)
    lists = {name: value.get(name) or [] for name in ("traces", "exclude", "policies", "deadlines", "loads", "rtts")}
    families = value.get("families") or {}
    if not all(isinstance(items, list) for items in (*lists.values(), *families.values())):
        raise AssetError(f"{folder / AXES}: not what `kvabr lab` writes; run it again")
    return matrixfile.build(value)


def save_result(folder: Path, result: Mapping[str, Any]) -> None:
    """Write the totals."""
    write_text(folder / RESULT, json.dumps(result, indent=1, allow_nan=False) + "\n")


def _json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise AssetError(f"{path.parent}: no results in it; `kvabr lab TRACES --out {path.parent}` makes them")
    try:
        value = json.loads(read_text(path, _MAX_BYTES))
    except (ValueError, RecursionError) as error:
        raise AssetError(f"{path}: not JSON ({error}); run `kvabr lab` again") from error
    if not isinstance(value, dict) or not isinstance(value.get("families") or {}, dict):
        raise AssetError(f"{path}: not what `kvabr lab` writes; run it again")
    return value


def _absolute(path: str) -> str:
    return str(Path.cwd() / path)


def _policy(text: str) -> str:
    file, colon, rest = text.partition(":")
    return f"{_absolute(file)}{colon}{rest}" if file.endswith(".py") else text
