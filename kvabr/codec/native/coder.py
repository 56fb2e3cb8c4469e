"""The coder on the fastest path of this machine: the functions of `reference`, and multithreaded decoding.

The environment variable KVABR_CODER selects another path: ``reference``, ``portable``, ``avx2`` or ``avx512``. All
produce the same bits.
"""

from __future__ import annotations

import os
import threading
import warnings
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from numpy.typing import NDArray

from kvabr.codec.native import reference
from kvabr.codec.native.model import (
    CoderModel,
    Index,
    Quantiser,
    SynthesisModel,
    check_below,
    check_chain,
    check_indices,
    check_rows,
)
from kvabr.codec.rope import rope_tables
from kvabr.types.errors import FormatError, UsageError

_kvcoder: Any
try:
    from kvabr.codec.native import _kvcoder  # type: ignore[attr-defined,no-redef]
except ImportError:
    _kvcoder = None

MOST_DEPTHS = 16
VARIABLE = "KVABR_CODER"
_DTYPES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}
_NONE = np.empty(0, dtype=np.float32)

_lock = threading.Lock()
_handles: WeakKeyDictionary[object, dict[str, Any]] = WeakKeyDictionary()
_warned = False


@dataclass(frozen=True, eq=False)
class DecodeJob:
    """Arguments of one call of `decode`."""

    models: Sequence[CoderModel]
    payloads: Sequence[bytes | memoryview]
    synthesis: SynthesisModel
    step: float
    first_token: int
    out: torch.Tensor


def available_paths() -> tuple[str, ...]:
    """Return the names of the paths that work here, fastest first; ``reference`` always works."""
    return (*(_kvcoder.paths() if _kvcoder is not None else ()), "reference")


def active_path() -> str:
    """Return the path that calls take now.

    Raises:
        UsageError: KVABR_CODER names a path that this machine does not have.
    """
    global _warned  # noqa: PLW0603  # once per process
    paths = available_paths()
    wanted = os.environ.get(VARIABLE) or paths[0]
    if wanted not in paths:
        raise UsageError(f"{VARIABLE} is {wanted!r}, but this machine supports only {', '.join(paths)}")
    if _kvcoder is None and VARIABLE not in os.environ and not _warned:
        _warned = True
        warnings.warn(
            "kvabr's native coder is missing: no C compiler was found when kvabr was installed. "
            "AC tracks are coded and decoded hundreds of times slower; install a compiler and reinstall kvabr",
            RuntimeWarning,
            stacklevel=3,
        )
    return wanted


def encode_indices(model: CoderModel, index: NDArray[Any], below: NDArray[Any] | None = None) -> bytes:
    """Code the indices of one group; see `reference.encode_indices`."""
    path = active_path()
    if path == "reference":
        return reference.encode_indices(model, index, below)
    index, base = check_indices(model, index, below)
    try:
        payload: bytes = _kvcoder.encode(path, _depth(model), index, base, index.shape[1])
    except ValueError as error:
        raise FormatError(f"indices: {error}") from error
    return payload


def encode_rows(
    model: CoderModel,
    rows: NDArray[np.float32],
    own: Quantiser,
    lower: Quantiser | None,
    keep: NDArray[np.bool_],
) -> bytes:
    """Quantise the coefficients of one group and code the indices; see `reference.encode_rows`."""
    path = active_path()
    if path == "reference":
        return reference.encode_rows(model, rows, own, lower, keep)
    rows, mask = check_rows(model, rows, lower, keep)
    base = lower or own
    quantisers = (own.step, own.dead), (base.step, base.dead)
    try:
        payload: bytes = _kvcoder.encode_rows(path, _depth(model), rows, *quantisers, mask, rows.shape[1])
    except ValueError as error:
        raise FormatError(f"coefficients: {error}") from error
    return payload


def decode_indices(
    model: CoderModel, data: bytes | memoryview, tokens: int, below: NDArray[Any] | None = None
) -> Index:
    """Decode the output of `encode_indices`; see `reference.decode_indices`."""
    path = active_path()
    if path == "reference":
        return reference.decode_indices(model, data, tokens, below)
    base = check_below(model, tokens, below)
    index = np.zeros((model.rows, tokens), dtype=np.int16) if base is None else base.copy()
    _guarded(lambda: _kvcoder.decode_indices(path, _depth(model), data, index, tokens))
    return index


def synthesise(
    synthesis: SynthesisModel, z: NDArray[np.int16], step: float, first_token: int, out: torch.Tensor
) -> None:
    """Turn coefficients into a cache; see `reference.synthesise`."""
    path = active_path()
    _check_out(synthesis, out)
    if z.shape != (synthesis.rows, out.shape[3]) or z.dtype != np.int16:
        raise FormatError(f"coefficients: {z.dtype} of {z.shape}, must be int16 of {(synthesis.rows, out.shape[3])}")
    if path == "reference":
        reference.synthesise(synthesis, z, step, first_token, out)
        return

    def work(target: torch.Tensor) -> None:
        aim = _target(synthesis, step, first_token, target)
        _kvcoder.synthesise(path, _transform(synthesis, path), np.ascontiguousarray(z), aim)

    _into(out, work)


def decode(
    models: Sequence[CoderModel],
    payloads: Sequence[bytes | memoryview],
    synthesis: SynthesisModel,
    step: float,
    first_token: int,
    out: torch.Tensor,
) -> None:
    """Decode a base and the enhancements above it into a cache, in one call; see `reference.decode`.

    Releases the GIL. Needs memory for little more than the smaller of one group and 128 tokens, in 16-bit numbers.
    """
    path = active_path()
    _check_out(synthesis, out)
    check_chain(models, payloads, synthesis)
    if path == "reference":
        reference.decode(models, payloads, synthesis, step, first_token, out)
        return
    if len(models) > MOST_DEPTHS:
        raise FormatError(f"{len(models)} depths, at most {MOST_DEPTHS}")

    def work(target: torch.Tensor) -> None:
        aim = _target(synthesis, step, first_token, target)
        depths = tuple(_depth(model) for model in models)
        _guarded(lambda: _kvcoder.decode(path, _transform(synthesis, path), depths, tuple(payloads), aim))

    _into(out, work)


def decode_many(jobs: Iterable[DecodeJob], threads: int | None = None) -> None:
    """Decode groups in parallel.

    Args:
        jobs: their tensors must not overlap.
        threads: number of threads; by default the number of processors.

    Raises:
        FormatError: one of them cannot be decoded; the others may or may not have been.
    """
    jobs = list(jobs)
    threads = min(len(jobs), threads or os.cpu_count() or 1)
    if threads <= 1:
        for job in jobs:
            _run(job)
        return
    with ThreadPoolExecutor(threads, thread_name_prefix="kvabr-decode") as pool:
        for _ in pool.map(_run, jobs):
            pass


def _run(job: DecodeJob) -> None:
    decode(job.models, job.payloads, job.synthesis, job.step, job.first_token, job.out)


def _guarded(work: Callable[[], None]) -> None:
    try:
        work()
    except ValueError as error:
        raise FormatError(f"entropy coded part: {error}") from error


# ------------------------------------------------------------------ what the module is handed


def _check_out(synthesis: SynthesisModel, out: torch.Tensor) -> None:
    wanted = (synthesis.layers, 2, synthesis.kv_heads, out.shape[3] if out.ndim == 5 else 0, synthesis.head_dim)
    if tuple(out.shape) != wanted or not out.shape[3] or not out.is_floating_point():
        raise FormatError(f"{tuple(out.shape)} {out.dtype} cannot take a cache of {wanted}")


def _into(out: torch.Tensor, work: Callable[[torch.Tensor], None]) -> None:
    """Write to the tensor's own memory if possible, or else to a temporary tensor on the CPU."""
    if out.device.type == "cpu" and out.dtype in _DTYPES and out.layout == torch.strided:
        work(out.detach())
        return
    dtype = out.dtype if out.dtype in _DTYPES else torch.float32
    there = torch.empty(out.shape, dtype=dtype)
    work(there)
    out.copy_(there)


def _target(synthesis: SynthesisModel, step: float, first_token: int, out: torch.Tensor) -> tuple[Any, ...]:
    tokens = out.shape[3]
    cos, sin = (_NONE, _NONE) if synthesis.rope is None else rope_tables(synthesis.rope, first_token, tokens)
    return (out.data_ptr(), _DTYPES[out.dtype], out.stride(), tokens, synthesis.scale(step), cos, sin)


def _depth(model: CoderModel) -> Any:
    def make() -> Any:
        parts = (model.row_class, model.radius, model.freqs, model.flag_freq, model.delta, model.order)
        return _kvcoder.depth(*parts, model.contexts)

    return _handle(model, "depth", make)


def _transform(synthesis: SynthesisModel, path: str) -> Any:
    def make() -> Any:
        s, rope = synthesis, synthesis.rope
        stacks = tuple(
            (each.kv, each.kept, np.array(each.layers, dtype=np.uint32), each.mantissa, each.gain) for each in s.stacks
        )
        return _kvcoder.transform(
            path,
            (s.layers, s.kv_heads, s.head_dim, s.block_heads),
            0 if rope is None else rope.rotary_dim,
            0 if rope is None else int(rope.layout == "interleaved"),
            b"" if s.block_mantissa is None else s.block_mantissa,
            b"" if s.block_gain is None else s.block_gain,
            s.mean,
            stacks,
        )

    return _handle(synthesis, path, make)  # each path packs matrices its own way


def _handle(owner: object, name: str, make: Callable[[], Any]) -> Any:
    """Return the extension module's handle of a model, created once."""
    with _lock:
        handles = _handles.setdefault(owner, {})
        if name not in handles:
            handles[name] = make()
        return handles[name]
