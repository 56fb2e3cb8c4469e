"""What a bench keeps between runs, in a work folder: caches that took minutes to compute, and results by their key."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from kvabr.types.errors import AssetError
from kvabr.types.kv import KVSpec


class Store:
    """A work folder. Everything in it can be removed at any time; it is then made again."""

    def __init__(self, folder: Path, spec: KVSpec) -> None:
        """Open or make it.

        Args:
            folder: where.
            spec: of the caches; other models' results lie beside them, apart.

        Raises:
            AssetError: it cannot be made.
        """
        self.spec = spec
        # The length of groups is the scheme's business here.
        self._folder = folder / f"{spec.model.replace('/', '-')}-{spec.digest().hex()[:8]}"
        self._results: dict[str, Any] = {}
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            self._journal = self._folder / "results.jsonl"
            if self._journal.is_file():
                self._read(self._journal.read_text(encoding="utf-8"))
        except OSError as error:
            raise AssetError(f"{folder}: cannot be used as a work folder ({error.strerror})") from error

    def _read(self, text: str) -> None:
        for line in text.splitlines():
            try:
                entry = json.loads(line)
                self._results[entry["key"]] = entry["value"]
            except (ValueError, KeyError, TypeError):
                continue  # the line that an interrupted run did not finish

    def cache(self, key: str, tokens: int, compute: Callable[[], torch.Tensor]) -> torch.Tensor:
        """A cache by its key: the one on disk, or else computed and put there.

        Args:
            key: names the tokens, see `kvabr.lab.bench.texts.token_key`.
            tokens: how many.
            compute: makes it, [layer, K/V, head, token, dim].

        Returns:
            The cache in the element type of the spec.
        """
        path = self._folder / f"{key}.safetensors"
        if path.is_file():
            try:
                found = load_file(path)["kv"]
            except (SafetensorError, OSError, KeyError):
                found = None  # half a file of an interrupted run
            if isinstance(found, torch.Tensor) and tuple(found.shape) == self.spec.shape(tokens):
                return found
        made = compute().to(self.spec.torch_dtype).contiguous()
        # A name of its own until it is whole.
        part = path.with_suffix(".part")
        save_file({"kv": made}, part)
        part.replace(path)
        return made

    def scratch(self, name: str) -> Path:
        """A file for what two programs hand each other."""
        return self._folder / name

    def known(self, key: str) -> Any:
        """A result by its key, as JSON keeps it; None if there is none yet."""
        return self._results.get(key)

    def keep(self, key: str, value: Any) -> Any:
        """Write a result down, and return it."""
        with self._journal.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"key": key, "value": value}) + "\n")
        self._results[key] = value
        return value
