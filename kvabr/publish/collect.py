"""First half of a calibration: caches of texts and their gradients, in temporary files of 16-bit elements.

Memory holds one context at a time (four with two threads), or one layer of a context with a `LayerEngine`.
"""

from __future__ import annotations

import math
import shutil
import tempfile
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack
from itertools import pairwise
from typing import IO

import torch

from kvabr.codec.parallel_map import parallel_map
from kvabr.codec.payload import raw
from kvabr.codec.quantised import all_finite
from kvabr.publish.model import CalibrationEngine, LayerEngine
from kvabr.publish.reference import Reference
from kvabr.publish.target import HeldOutText
from kvabr.types.engine import prefill_classes
from kvabr.types.errors import AssetError, ModelError
from kvabr.types.kv import KVSpec

_SCORED_SHARE, _MEASURED_SHARE = 8, 4
"""Gradients are scored on the last eighth of a context: a quarter takes longer with equal results, and a sixteenth
loses more. Losses are measured on the last quarter, for precision.
"""
_SNAPSHOTS = 8
"""Number of parts of a context; states are snapshotted at the ends of all parts but the first."""
_GRADIENT_DTYPE = torch.bfloat16

Cache = tuple[torch.Tensor, ...]


class Spool:
    """Caches of one layer class in a file."""

    def __init__(self, file: IO[bytes], spec: KVSpec, dtype: torch.dtype) -> None:
        self._file, self._spec, self._dtype = file, spec, dtype
        self._tokens: list[int] = []
        self._starts = [0]

    def add(self, cache: torch.Tensor) -> None:
        """Append a cache, [layer, K/V, head, token, dim]."""
        start = self._starts[-1]
        self.reserve(cache.shape[3])
        self._write(start, cache)

    def reserve(self, tokens: int) -> None:
        """Reserve space for a cache that `put` fills."""
        self._tokens.append(tokens)
        self._starts.append(self._starts[-1] + math.prod(self._spec.shape(tokens)) * self._dtype.itemsize)

    def put(self, number: int, place: int, part: torch.Tensor) -> None:
        """Store one layer of a cache, [K/V, head, token, dim]."""
        self._write(self._place(number, place), part)

    def get(self, number: int, place: int) -> torch.Tensor:
        """Return one layer of a cache."""
        return self._read(self._place(number, place), self._spec.shape(self._tokens[number])[1:])

    def read(self) -> Iterator[torch.Tensor]:
        """Yield all caches."""
        for tokens, start in zip(self._tokens, self._starts, strict=False):
            yield self._read(start, self._spec.shape(tokens))

    def _place(self, number: int, place: int) -> int:
        size = self._starts[number + 1] - self._starts[number]
        return self._starts[number] + place * (size // self._spec.layers)

    def _write(self, start: int, part: torch.Tensor) -> None:
        self._file.seek(start)
        self._file.write(raw(part.to(self._dtype)))

    def _read(self, start: int, shape: Sequence[int]) -> torch.Tensor:
        self._file.seek(start)
        data = bytearray(math.prod(shape) * self._dtype.itemsize)
        self._file.readinto(data)  # type: ignore[attr-defined]  # every binary file has it
        return torch.frombuffer(data, dtype=self._dtype).reshape(tuple(shape))


class ClassFiles:
    """A layer class with its caches and gradients."""

    def __init__(self, spec: KVSpec, files: ExitStack) -> None:
        self.spec, self.name = spec, "" if spec.part_of is None else spec.part_of[1]
        self.caches, self.gradients = (
            Spool(_file(files), spec, dtype) for dtype in (spec.torch_dtype, _GRADIENT_DTYPE)
        )


def _file(files: ExitStack) -> IO[bytes]:
    return files.enter_context(tempfile.TemporaryFile(prefix="kvabr-calibrate-"))


def collect(
    engine: CalibrationEngine,
    cuts: Sequence[Sequence[int]],
    held: Collection[int],
    files: ExitStack,
    progress: Callable[[str, int, int], None],
) -> tuple[list[ClassFiles], list[HeldOutText]]:
    """Compute all caches; return files of caches and gradients, and the held-out contexts.

    ``cuts`` are token ids, ``held`` the indices of held-out contexts. Raise `ModelError` if weights, caches or outputs
    are NaN, `AssetError` if the disk is too small.
    """
    engine.check_weights()
    _check_disk_space(engine, [ids for number, ids in enumerate(cuts) if number not in held])
    classes = [ClassFiles(part, files) for part in engine.spec.parts]
    samples: list[HeldOutText] = []
    seed = 0
    if isinstance(engine, LayerEngine):
        fitted = [ids for number, ids in enumerate(cuts) if number not in held]
        engine.by_layer(fitted, [_scored(len(ids)) for ids in fitted], _Sink(engine, fitted, classes), progress)
    left: list[tuple[int, int]] = []
    for number in range(len(cuts)):
        if number in held or not isinstance(engine, LayerEngine):
            left.append((number, seed))
            seed += number not in held

    def computed(each: tuple[int, int]) -> HeldOutText | tuple[Cache, Cache]:
        number, seed = each
        ids = cuts[number]
        if number not in held:
            return _differentiated(engine, ids, len(ids) - _scored(len(ids)), seed)
        end = len(ids) - len(ids) // _MEASURED_SHARE
        kept = caches_of(engine, ids, end)[1]
        return HeldOutText(kept, Reference(engine, kept, ids[end:]))

    both = parallel_map if engine.concurrent else map
    for (number, _), found in zip(left, both(computed, left), strict=True):
        if isinstance(found, HeldOutText):
            samples.append(found)
        else:
            for each, part, slope in zip(classes, *found, strict=True):
                each.caches.add(part)
                each.gradients.add(slope)
        progress("prefill", number + 1, len(cuts))
    return classes, samples


def collecting_stages(*, search: bool, by_layer: bool) -> tuple[str, ...]:
    """Return the stages of `collect`; ``search`` holds out contexts."""
    return ("forward", "backward", *(["prefill"] if search else [])) if by_layer else ("prefill",)


def _scored(length: int) -> int:
    return -(-length // _SCORED_SHARE)


def _check_disk_space(engine: CalibrationEngine, cuts: Sequence[Sequence[int]]) -> None:
    wanted = disk_bytes_needed(engine, [len(ids) for ids in cuts])
    folder = tempfile.gettempdir()
    free = shutil.disk_usage(folder).free
    if wanted > free:
        raise AssetError(
            f"{folder}: {free / 1e6:,.0f} MB are free, but the caches of {len(cuts)} contexts take {wanted / 1e6:,.0f} "
            "MB there; set TMPDIR to a folder with more space, or give fewer --contexts"
        )


def disk_bytes_needed(engine: CalibrationEngine, lengths: Sequence[int]) -> int:
    """Return the bytes of the temporary files for contexts of these lengths, without states."""
    total = 0
    for part in engine.spec.parts:
        if part.only.kind != "state":
            every = sum(lengths) * part.torch_dtype.itemsize
            scored = sum(length - _scored(length) for length in lengths) * _GRADIENT_DTYPE.itemsize
            total += part.elements_per_token * (every + scored)
    if isinstance(engine, LayerEngine):
        total += engine.layer_bytes * sum(map(_scored, lengths))
    return total


def _differentiated(engine: CalibrationEngine, ids: Sequence[int], end: int, seed: int) -> tuple[Cache, Cache]:
    parts = engine.spec.parts
    if any(part.only.kind == "state" for part in parts):
        cache, kept = caches_of(engine, ids, end)
        return cache, engine.gradient_classes(kept, ids[end:], seed)
    first, kept = caches_of(engine, ids[:end], end)
    last, gradients = engine.continue_classes(kept, ids[end:], seed)
    _check(last, parts)
    return tuple(torch.cat(pair, dim=3) for pair in zip(first, last, strict=True)), gradients


def caches_of(engine: CalibrationEngine, ids: Sequence[int], end: int) -> tuple[Cache, Cache]:
    """Return a context's cache, with snapshots of states, and the cache of the context's first ``end`` tokens."""
    parts, total = engine.spec.parts, len(ids)
    states = [part.only.kind == "state" for part in parts]
    marks = {end, *(total * step // _SNAPSHOTS for step in range(2, _SNAPSHOTS))} if any(states) else ()
    pieces: list[Cache] = []
    whole: Cache | None = None
    for first, last in pairwise(sorted({0, *marks, total})):
        pieces.append(prefill_classes(engine, ids[first:last], whole))
        before = pieces[-1] if whole is None else whole
        whole = tuple(
            piece if whole is None or state else torch.cat((one, piece), dim=3)
            for one, piece, state in zip(before, pieces[-1], states, strict=True)
        )
        if last == end or not marks:
            kept = whole
    cache = tuple(torch.cat(part, dim=3) for part in zip(*pieces, strict=True))
    _check(cache, parts)
    return cache, tuple(one if state else one[:, :, :, :end] for one, state in zip(kept, states, strict=True))


def _check(cache: Cache, parts: Sequence[KVSpec]) -> None:
    for kv, part in zip(cache, parts, strict=True):
        for place, layer in enumerate(part.only.layers):
            _check_layer(kv[place], layer)


def _check_layer(kv: torch.Tensor, layer: int) -> None:
    if not all_finite(kv):
        raise ModelError(
            f"the cache of layer {layer} has NaN or infinity: this layer or an earlier one is damaged, or the model "
            "needs another element type (--dtype float32)"
        )


class _Sink:
    def __init__(self, engine: LayerEngine, cuts: Sequence[Sequence[int]], classes: Sequence[ClassFiles]) -> None:
        self._places, self._classes = engine.places(), classes
        self._ends = [len(ids) - _scored(len(ids)) for ids in cuts]
        for each in classes:
            for ids, end in zip(cuts, self._ends, strict=True):
                each.caches.reserve(len(ids))
                each.gradients.reserve(end)

    def put_cache(self, context: int, layer: int, kv: torch.Tensor) -> None:
        _check_layer(kv, layer)
        number, place = self._places[layer]
        self._classes[number].caches.put(context, place, kv)

    def kept(self, context: int, layer: int) -> torch.Tensor:
        number, place = self._places[layer]
        each = self._classes[number]
        return each.caches.get(context, place)[:, :, : self._ends[context]]

    def put_gradient(self, context: int, layer: int, gradient: torch.Tensor) -> None:
        number, place = self._places[layer]
        self._classes[number].gradients.put(context, place, gradient)
