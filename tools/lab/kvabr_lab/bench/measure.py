"""Passes caches through schemes and measures their loss with the model; keeps caches and results between runs."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from kvabr.engines.transformers.model_loader import LoadedModel
from kvabr.publish.encoder import compute_cache
from kvabr.publish.reference import Reference
from kvabr.store.files import PRIVATE_FOLDER
from kvabr.types.errors import AssetError
from kvabr.types.kv import KVSpec
from kvabr_lab.bench.contexts import Context, Needle, recall, token_key
from kvabr_lab.bench.schemes import Coded, Scheme


class CacheStore:
    """A work folder of caches and results. Files that were deleted are computed again."""

    def __init__(self, folder: Path, spec: KVSpec) -> None:
        """Open or create the model's folder in ``folder``.

        Raises:
            AssetError: The folder cannot be created or read.
        """
        self.spec = spec
        # Schemes choose the group size, so it is not part of the folder's name.
        self._folder = folder / f"{spec.model.replace('/', '-')}-{spec.digest().hex()[:8]}"
        self._results: dict[str, Any] = {}
        try:
            self._folder.mkdir(mode=PRIVATE_FOLDER, parents=True, exist_ok=True)
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
                continue  # an interrupted run left an unfinished line

    def cache(self, key: str, tokens: int, compute: Callable[[], torch.Tensor]) -> torch.Tensor:
        """Return a cache from disk by its `kvabr_lab.bench.contexts.token_key`, or compute and store it.

        The cache is [layer, K/V, head, token, dim] in the dtype of the spec.
        """
        path = self._folder / f"{key}.safetensors"
        if path.is_file():
            try:
                found = load_file(path)["kv"]
            except (SafetensorError, OSError, KeyError):
                found = None  # an interrupted run left an unfinished file
            if isinstance(found, torch.Tensor) and tuple(found.shape) == self.spec.shape(tokens):
                return found
        made = compute().to(self.spec.torch_dtype).contiguous()
        part = path.with_suffix(".part")
        save_file({"kv": made}, part)
        part.replace(path)
        return made

    @property
    def folder(self) -> Path:
        """This model's folder."""
        return self._folder

    def scratch(self, name: str) -> Path:
        """Return the path of a file for exchanging data between two programs."""
        return self._folder / name

    def known(self, key: str) -> Any:
        """Return a stored result as plain JSON values; None if there is none."""
        return self._results.get(key)

    def keep(self, key: str, value: Any) -> Any:
        """Store a result and return it."""
        with self._journal.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"key": key, "value": value}) + "\n")
        self._results[key] = value
        return value


Progress = Callable[[str, int, int], None]
"""Called after every step with the stage, the finished steps, and their total."""

STAGES = {
    "kvtc": "KVTC's transforms (contexts)",
    "prefill": "prefill (contexts)",
    "quality": "loss (contexts x schemes)",
    "size": "other group sizes",
    "recall": "retrieval (cases x schemes)",
}

EXACT = "exact"

Row = dict[str, Any]


@dataclass
class Findings:
    """Results by scheme, then by context or case."""

    quality: dict[str, dict[str, Row]] = field(default_factory=dict)
    """Size ``nbytes``, ``bits`` per element, and the fields of `kvabr.types.catalog.Quality`, by context."""
    texts: dict[str, Row] = field(default_factory=dict)
    """``nll`` and ``entropy`` of the continuations, see `kvabr.publish.quality.Reference.calibration`."""
    recall: dict[str, dict[str, Row]] = field(default_factory=dict)
    """``digits``, ``whole`` and ``logprob`` by case. One of the schemes is `EXACT`."""
    sizes: dict[int, dict[str, dict[str, Row]]] = field(default_factory=dict)
    """``nbytes`` and ``bits`` for other group sizes, by group size, scheme and context."""


class QualityBench:
    """Measures schemes with one model; keeps caches and results in its work folder."""

    def __init__(
        self, loaded: LoadedModel, store: CacheStore, progress: Progress = lambda _stage, _done, _all: None
    ) -> None:
        self.loaded, self.store, self.progress = loaded, store, progress

    def prefill(self, contexts: Sequence[Context]) -> None:
        """Compute missing caches."""
        for index, context in enumerate(contexts):
            self.cache(context)
            self.progress("prefill", index + 1, len(contexts))

    def cache(self, context: Context) -> torch.Tensor:
        """Return a context's exact cache, in the dtype of the published cache."""
        key = token_key(context.tokens)
        return self.store.cache(key, len(context.tokens), lambda: compute_cache(self.loaded.engine, context.tokens)[0])

    def quality(self, schemes: Sequence[Scheme], contexts: Sequence[Context]) -> dict[str, dict[str, Row]]:
        """Return size and loss of every scheme on every context, relative to the exact cache as published."""
        out: dict[str, dict[str, Row]] = {scheme.name: {} for scheme in schemes}
        steps = self._steps("quality", len(schemes) * len(contexts))
        for context in contexts:
            exact: tuple[torch.Tensor, Reference] | None = None
            where = _where(context)
            for scheme in schemes:
                key = f"quality/2|{where}|{scheme.key}"
                row = self.store.known(key)
                if row is None:
                    if exact is None:
                        exact = self._reference(context)
                        self._text(context, exact[1])  # while its scores are in memory
                    row = self.store.keep(key, _cost(scheme, *exact))
                out[scheme.name][context.name] = row
                next(steps)
        return out

    def texts(self, contexts: Sequence[Context]) -> dict[str, Row]:
        """Return how well the model predicts each continuation with the exact cache."""
        return {context.name: self._text(context) for context in contexts}

    def _reference(self, context: Context) -> tuple[torch.Tensor, Reference]:
        cache = self.cache(context)
        return cache, Reference(self.loaded.engine, cache, context.continuation)

    def _text(self, context: Context, reference: Reference | None = None) -> Row:
        key = f"text|{_where(context)}"
        row: Row | None = self.store.known(key)
        if row is None:
            nll, entropy = (reference or self._reference(context)[1]).calibration()
            row = {"nll": nll, "entropy": entropy}
            self.store.keep(key, row)
        return row

    def sizes(self, schemes: Sequence[Scheme], contexts: Sequence[Context]) -> dict[str, dict[str, Row]]:
        """Return sizes only, for schemes with other group sizes."""
        out: dict[str, dict[str, Row]] = {scheme.name: {} for scheme in schemes}
        steps = self._steps("size", len(schemes) * len(contexts))
        for context in contexts:
            for scheme in schemes:
                key = f"size|{token_key(context.tokens)}|{scheme.key}"
                row = self.store.known(key)
                if row is None:
                    cache = self.cache(context)
                    row = self.store.keep(key, _size(scheme.code(cache, decode=False).nbytes, cache))
                out[scheme.name][context.name] = row
                next(steps)
        return out

    def recall(self, schemes: Sequence[Scheme], needles: Sequence[Needle]) -> dict[str, dict[str, Row]]:
        """Return the retrieval results of every scheme's cache, and of the exact cache."""
        wanted: dict[str, Scheme | None] = {EXACT: None} | {scheme.name: scheme for scheme in schemes}
        out: dict[str, dict[str, Row]] = {name: {} for name in wanted}
        steps = self._steps("recall", len(needles) * len(wanted))
        for needle in needles:
            cache: torch.Tensor | None = None
            where = f"{token_key(needle.tokens)}|{token_key(needle.question)}"
            for name, scheme in wanted.items():
                key = f"recall|{where}|{EXACT if scheme is None else scheme.key}"
                row = self.store.known(key)
                if row is None:
                    cache = self._planted(needle) if cache is None else cache
                    kv = cache if scheme is None else _decoded(scheme.code(cache))
                    row = self.store.keep(key, asdict(recall(self.loaded.engine, kv, needle)))
                out[name][needle.name] = row
                next(steps)
        return out

    def _steps(self, stage: str, total: int) -> Iterator[None]:
        for done in range(1, total + 1):
            self.progress(stage, done, total)
            yield

    def _planted(self, needle: Needle) -> torch.Tensor:
        def compute() -> torch.Tensor:
            before = self.cache(needle.context)[:, :, :, : needle.at]
            rest = self.loaded.engine.prefill(needle.tokens[needle.at :], before if needle.at else None)
            return torch.cat((before, rest.to(before.dtype)), dim=3)

        return self.store.cache(token_key(needle.tokens), len(needle.tokens), compute)


def _where(context: Context) -> str:
    return f"{token_key(context.tokens)}|{token_key(context.continuation)}"


def _decoded(coded: Coded) -> torch.Tensor:
    if coded.cache is None:
        raise AssertionError("a scheme that was asked for its cache gave none")
    return coded.cache


def _size(nbytes: int, cache: torch.Tensor) -> Row:
    return {"nbytes": nbytes, "bits": 8 * nbytes / cache.numel()}


def _cost(scheme: Scheme, cache: torch.Tensor, reference: Reference) -> Row:
    coded = scheme.code(cache)
    quality = reference.measure(_decoded(coded))
    return _size(coded.nbytes, cache) | asdict(quality) | {"loss": quality.loss}
