"""Reads the weights in a model's directory tensor by tensor, so that the model need not fit into memory."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from kvabr.types.errors import ModelError

_INDEX = "model.safetensors.index.json"
_MAX_INDEX_BYTES = 64 << 20


class WeightFiles:
    """The tensors of a directory's safetensors files, by name."""

    def __init__(self, folder: Path) -> None:
        """List the tensors; raise `ModelError` if there are none, or a file is damaged or missing."""
        self.folder = folder
        self._places: dict[str, Path] = {}
        self._checked: set[str] = set()
        for path in _files(folder):
            try:
                with safe_open(path, framework="pt") as file:
                    self._places |= dict.fromkeys(file.keys(), path)
            except (OSError, SafetensorError) as error:
                raise ModelError(f"{path}: cannot be read as safetensors ({error})") from error

    def __contains__(self, name: str) -> bool:
        return name in self._places

    @property
    def nbytes(self) -> int:
        """Bytes of all files."""
        return sum(path.stat().st_size for path in set(self._places.values()))

    def read(self, wanted: Mapping[str, tuple[int, ...]], device: torch.device, dtype: torch.dtype) -> dict[str, Any]:
        """Return tensors by name; raise `ModelError` if one is missing, not finite, or has another shape."""
        out: dict[str, torch.Tensor] = {}
        for path, names in self._by_file(wanted).items():
            try:
                with safe_open(path, framework="pt") as file:
                    for name in names:
                        out[name] = self._checked_tensor(name, file.get_tensor(name), wanted[name], device, dtype)
            except (OSError, SafetensorError) as error:
                raise ModelError(f"{path}: cannot be read ({error})") from error
        return out

    def _by_file(self, wanted: Iterable[str]) -> dict[Path, list[str]]:
        found: dict[Path, list[str]] = {}
        for name in wanted:
            if name not in self._places:
                raise ModelError(
                    f"{self.folder}: no weights {name!r}: they are stored under other names than this class of models "
                    "has, or are quantised, so they cannot be read layer by layer; use --load whole"
                )
            found.setdefault(self._places[name], []).append(name)
        return found

    def _checked_tensor(
        self, name: str, tensor: torch.Tensor, shape: tuple[int, ...], device: torch.device, dtype: torch.dtype
    ) -> torch.Tensor:
        if tuple(tensor.shape) != shape or not tensor.is_floating_point():
            raise ModelError(
                f"{self.folder}: {name} is {tensor.dtype} {tuple(tensor.shape)}, but the model has numbers of {shape} "
                "there; use --load whole"
            )
        made = tensor.to(device=device, dtype=dtype)
        if name not in self._checked:
            check_finite(name, made)
            self._checked.add(name)
        return made


def check_finite(name: str, weights: torch.Tensor) -> None:
    """Raise `ModelError` if weights are not finite."""
    # A sum needs no memory. It is finite if all numbers are, unless it overflows.
    if not bool(torch.isfinite(weights.sum(dtype=torch.float32))) and not bool(torch.isfinite(weights).all()):
        raise ModelError(f"the weights {name} have numbers that are NaN or infinite; the model is damaged")


def _files(folder: Path) -> list[Path]:
    if (one := folder / "model.safetensors").is_file():
        return [one]
    index = folder / _INDEX
    try:
        with index.open("rb") as file:
            data = file.read(_MAX_INDEX_BYTES + 1)
        if len(data) > _MAX_INDEX_BYTES:
            raise ModelError(f"{index}: more than the {_MAX_INDEX_BYTES} bytes allowed")
        names = sorted(set(json.loads(data)["weight_map"].values()))
    except FileNotFoundError as error:
        raise ModelError(f"{folder}: has neither model.safetensors nor {_INDEX}") from error
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelError(f"{index}: not an index of safetensors files ({error!r})") from error
    if bad := [name for name in names if not isinstance(name, str) or Path(name).name != name]:
        raise ModelError(f"{index}: {bad[0]!r} is not a file of this directory")
    return [folder / name for name in names]
