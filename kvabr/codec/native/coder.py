"""The coder on the fastest path (implementation) of this machine, in one thread or several.

The environment variable KVABR_CODER selects a path, ``portable`` or ``avx2``; both give identical bits.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from kvabr.codec.native.coder_model import (
    DTYPES,
    CoderModel,
    DecodeJob,
    Index,
    Quantiser,
    Shift,
    check_below,
    check_cache,
    check_indices,
    check_rows,
    derived,
    usual_streams,
)
from kvabr.codec.native.references import References
from kvabr.codec.rope import rope_first, rope_shape, rope_tables
from kvabr.codec.threads import CORES, decoder_threads, encoder_threads
from kvabr.codec.transform import Transform
from kvabr.types.errors import FormatError, UsageError

_kvcoder: Any
try:
    from kvabr.codec.native import _kvcoder  # type: ignore[attr-defined,no-redef]
except ImportError:
    _kvcoder = None

MAX_DEPTHS = 16
_BYTES_PER_THREAD = 1 << 22
VARIABLE = "KVABR_CODER"
ERROR_UNIT = 1024
"""Errors are summed as integers, in units of a step divided by this."""
MAX_ERROR = np.float32(4095)


def built(module: Any) -> Any:
    """Return an extension module; raise `UsageError` if it is None, i.e. not built."""
    if module is None:
        raise UsageError(
            "kvabr's native coder is missing: it was not compiled when kvabr was installed. Install a wheel of kvabr, "
            "or a C compiler (Debian: apt install gcc python3-dev), and reinstall kvabr"
        )
    return module


def available_paths() -> tuple[str, ...]:
    """Return the paths, fastest first; raise `UsageError` if the coder is missing."""
    return tuple(built(_kvcoder).paths())


def active_path() -> str:
    """Return the current path; raise `UsageError` if the coder or the path in KVABR_CODER is missing."""
    paths = available_paths()
    wanted = os.environ.get(VARIABLE) or paths[0]
    if wanted not in paths:
        raise UsageError(f"{VARIABLE} is {wanted!r}, but this machine supports only {', '.join(paths)}")
    return wanted


@contextmanager
def taking(path: str) -> Iterator[None]:
    """Select a path for the whole process, like KVABR_CODER; an empty string selects the fastest."""
    before = os.environ.get(VARIABLE)
    os.environ[VARIABLE] = path
    try:
        yield
    finally:
        if before is None:
            del os.environ[VARIABLE]
        else:
            os.environ[VARIABLE] = before


def encode_indices(
    model: CoderModel,
    index: NDArray[Any],
    below: NDArray[Any] | None = None,
    references: References | None = None,
    streams: int | None = None,
    threads: int | None = None,
) -> bytes:
    """Code the indices of one group, [row, token], 16-bit integers.

    If the model refines a depth, ``below`` has that depth's indices, ``index`` must be within their range, and
    ``references`` must be those of that depth. ``streams`` is at most `max_streams` (None: `usual_streams`); for
    ``threads`` see `encode_rows`.
    """
    path = active_path()
    index, base = check_indices(model, index, below)
    parts = _parts(model, index.shape[1], streams, threads)
    with _errors("indices"):
        payload: bytes = _kvcoder.encode(path, _depth(model), index, base, index.shape[1], *parts, *_places(references))
    return payload


def _parts(model: CoderModel, tokens: int, streams: int | None, threads: int | None) -> tuple[int, int]:
    return streams or usual_streams(model, tokens), threads or encoder_threads() or torch.get_num_threads()


def encode_rows(
    model: CoderModel,
    rows: NDArray[np.float32],
    own: Quantiser,
    lower: Quantiser | None,
    keep: NDArray[np.bool_],
    references: References | None = None,
    streams: int | None = None,
    threads: int | None = None,
) -> bytes:
    """Quantise the coefficients of one group, [row, token] float32, finite, and code the indices.

    ``lower`` is the quantiser of the refined depth, if any; its payload must be from the same rows. ``keep``, [token],
    is False for tokens to code as indices of 0 at both depths. At most ``threads`` threads run (None: the limit of
    `encoding_on`, else one per core). Other arguments are as for `encode_indices`.
    """
    path = active_path()
    rows, mask = check_rows(model, rows, lower, keep)
    base = lower or own
    quantisers = (own.step, own.dead), (base.step, base.dead)
    with _errors("coefficients"):
        more = *_parts(model, rows.shape[1], streams, threads), *_places(references)
        payload: bytes = _kvcoder.encode_rows(path, _depth(model), rows, *quantisers, mask, rows.shape[1], *more)
    return payload


def error_sums(
    rows: NDArray[np.float32],
    which: NDArray[np.intp],
    gains: NDArray[np.float32],
    quantiser: Quantiser,
    coded: NDArray[np.bool_],
) -> NDArray[np.int64]:
    """Return the decoding errors of some rows, summed over tokens, in units of step / `ERROR_UNIT`.

    ``rows`` are coefficients, [row, token]. ``which`` are numbers of rows, ascending, and ``gains`` the factors of
    their decoded indices. ``coded``, [token], is False for tokens to ignore.
    """
    path = active_path()
    sums = np.zeros(len(which), np.int64)
    mask, at = -coded.astype(np.int32), np.ascontiguousarray(which, np.uint32)
    with _errors("coefficients"):
        steps = quantiser.step, quantiser.dead
        _kvcoder.error_sums(path, np.ascontiguousarray(rows, np.float32), at, gains, steps, mask, sums)
    return sums


def similarity(
    rows: NDArray[np.float32], which: NDArray[np.intp], tokens: NDArray[np.intp], step: float, limit: int = 0
) -> NDArray[np.int32]:
    """Return the similarity of each pair of tokens: the sum over rows of products of their numbers.

    ``rows`` are coefficients, [row, token] float32; ``which`` has fewer than 2^20 rows, ``tokens`` up to `TILE`.
    Numbers are indices clamped to ``limit``, at most 8. If ``limit`` is 0, they are rounding errors in sixteenths of
    ``step``. The result, [token, token], is the same on every path.
    """
    path = active_path()
    sums = np.zeros((len(tokens), len(tokens)), np.int32)
    places = np.ascontiguousarray(which, np.uint32), np.ascontiguousarray(tokens, np.uint32)
    _kvcoder.alike(path, np.ascontiguousarray(rows, np.float32), rows.shape[1], *places, step, limit, sums)
    return sums


def count_symbols(
    rows: NDArray[np.float32],
    boost: float,
    depths: Sequence[tuple[Quantiser, bool, NDArray[np.int32], NDArray[np.int32]]],
) -> None:
    """Add coefficients times ``boost`` to a calibration's counts, like `kvabr.codec.quantiser.count`.

    Each depth has a quantiser, a bool (True if it refines the previous depth), and counts of symbols and flags.
    """
    path = active_path()
    parts = tuple((own.step, own.dead, *rest) for own, *rest in depths)
    _kvcoder.count_symbols(path, np.ascontiguousarray(rows, np.float32), len(rows), boost, parts)


def count_near(
    model: CoderModel,
    bucket: NDArray[np.uint8],
    index: NDArray[np.int32],
    below: NDArray[np.int32] | None,
    references: References,
    counts: NDArray[np.int64],
) -> None:
    """Add the symbols of one tile's second step to a calibration's counts, [class, context, symbol].

    ``bucket`` is `NearTables.bucket`. ``index`` has the tile's indices, [row, token]; ``below`` those of the refined
    depth, if any.
    """
    path = active_path()
    under = None if below is None else np.ascontiguousarray(below, np.int32)
    tables = model.row_class, model.radius, bucket, counts.shape[1], counts
    own = np.ascontiguousarray(index, np.int32)
    _kvcoder.count_near(path, own, under, index.shape[1], *_places(references), *tables)


def decode_indices(
    model: CoderModel,
    data: bytes | memoryview,
    tokens: int,
    below: NDArray[Any] | None = None,
    references: References | None = None,
) -> Index:
    """Decode an untrusted result of `encode_indices` to [row, token] int16; ``below`` has indices one depth below."""
    path = active_path()
    base = check_below(model, tokens, below)
    index = np.zeros((model.rows, tokens), dtype=np.int16) if base is None else base.copy()
    if references is not None:
        index = np.take(index, references.order, axis=1)
    with _errors("entropy coded part"):
        _kvcoder.decode_indices(path, _depth(model), data, index, tokens, *_places(references))
    if references is not None:
        index[:, references.order] = index.copy()
    return index


def synthesise(
    transform: Transform,
    z: NDArray[np.int16],
    step: float,
    first_token: int | None,
    out: torch.Tensor,
    gains: tuple[float, ...] = (),
) -> None:
    """Convert coefficients, [row, token] int16 from `dequantise`, to a cache; see `DecodeJob`."""
    path = active_path()
    check_cache(transform, out)
    wanted = (transform.structure.rows, out.shape[3])
    if z.shape != wanted or z.dtype != np.int16:
        raise FormatError(f"coefficients must be int16 of {wanted}, got {z.dtype} of {z.shape}")
    with _target(transform, transform.scale(step, gains), first_token, out) as target:
        _kvcoder.synthesise(path, _transform(transform, path), np.ascontiguousarray(z), target)


def mean_of(job: DecodeJob) -> NDArray[np.float32] | None:
    """Return the channel means of a group, [layer, K/V, head, dim]; None if they are the transform's."""
    shift, structure = job.mean, job.transform.structure
    if not isinstance(shift, Shift):
        return shift
    z, out = np.zeros((structure.rows, 1), np.int16), torch.empty(structure.coded.shape(1))
    z[shift.rows, 0] = shift.amounts
    synthesise(job.transform, z, job.step, None, out)
    mean: NDArray[np.float32] = out[:, :, :, 0].contiguous().numpy()
    return mean


def decode(job: DecodeJob, threads: int | None = None) -> None:
    """Decode a base and its enhancements into a cache, without the GIL.

    Decoding uses up to ``threads`` threads (None: this group's share of the cores). It takes little more memory than
    128 tokens, or the group if smaller, in 16-bit numbers.
    """
    path = active_path()
    if len(job.models) > MAX_DEPTHS:
        raise FormatError(f"there must be at most {MAX_DEPTHS} depths, got {len(job.models)}")
    depths, transform, mean = tuple(map(_depth, job.models)), _transform(job.transform, path), mean_of(job)
    with (
        _target(job.transform, job.transform.scale(job.step, job.gains), job.first_token, job.out) as target,
        CORES.share() as share,
        _errors("entropy coded part"),
    ):
        more = threads or share, *(_places(job.references) or (None, None)), mean
        _kvcoder.decode(path, transform, depths, tuple(job.payloads), target, *more)


def decode_many(jobs: Iterable[DecodeJob], threads: int | None = None) -> None:
    """Decode groups in parallel, by default on all cores. Their output tensors must not overlap.

    Raises:
        FormatError: a group cannot be decoded; other groups may have been.
    """
    jobs = list(jobs)
    threads = min(len(jobs), threads or os.cpu_count() or 1)
    if threads <= 1:
        for job in jobs:
            decode(job)
        return
    with ThreadPoolExecutor(threads, thread_name_prefix="kvabr-decode") as pool:
        list(pool.map(decode, jobs))


def gather(
    payloads: Sequence[bytes | memoryview],
    tokens: Sequence[int],
    groups: Sequence[int],
    rows: int,
    out: NDArray[np.uint8] | None,
) -> NDArray[np.int64]:
    """Copy untrusted payloads of one depth to a device's staging buffer, aligned to 16 bytes, without the GIL.

    ``tokens`` and ``groups`` have each payload's number of tokens and group number. ``rows`` is the number of rows.
    ``out`` has the size that `gathered_places` returns (None: only check). Raise `FormatError` if a payload does not
    hold the streams that it declares.

    Returns:
        [stream, 8]: group number; offsets in ``out`` of states, words and escapes, in units of 16 bits; numbers of
        words and of escapes; the stream's number in its group; the group's number of streams.
    """
    numbers = np.array(tokens, np.uint32), np.array(groups, np.int64)
    threads = 1 if out is None else _copying_threads(out)
    with _errors("entropy coded part"):
        parts = built(_kvcoder).gather(tuple(payloads), *numbers, rows, out, threads)
    return np.frombuffer(parts, np.int64).reshape(-1, 8)


def copy(payloads: Sequence[bytes | memoryview], out: NDArray[np.uint8]) -> None:
    """Copy payloads to a buffer, at the offsets of `streams.gathered_places`. Releases the GIL."""
    built(_kvcoder).copy(tuple(payloads), out, _copying_threads(out))


def _copying_threads(out: NDArray[np.uint8]) -> int:
    return min(decoder_threads(), 1 + len(out) // _BYTES_PER_THREAD)


@contextmanager
def _errors(what: str) -> Iterator[None]:
    try:
        yield
    except ValueError as error:
        raise FormatError(f"{what}: {error}") from error


@contextmanager
def _target(
    transform: Transform, scale: NDArray[np.float32], first_token: int | None, out: torch.Tensor
) -> Iterator[tuple[Any, ...]]:
    own = out.device.type == "cpu" and out.dtype in DTYPES and out.layout == torch.strided
    there = out.detach()
    if not own:
        there = torch.empty(out.shape, dtype=out.dtype if out.dtype in DTYPES else torch.float32)
    tokens = out.shape[3]
    turns = rope_tables(transform.structure.coded.rope, first_token, tokens)
    yield (there.data_ptr(), DTYPES[there.dtype], there.stride(), tokens, scale, *turns)
    if not own:
        out.copy_(there)


def _places(references: References | None) -> tuple[NDArray[np.uint8], ...]:
    return () if references is None else (references.place, references.lane)


def _depth(model: CoderModel) -> Any:
    parts = (model.row_class, model.radius, model.freqs, model.flag_freq, model.delta, model.order, model.contexts)
    near = () if model.near is None else (model.near.freqs, model.near.bucket, model.near.freqs.shape[1])
    return derived(model, "depth", lambda: _kvcoder.depth(*parts, *near))


def _transform(transform: Transform, path: str) -> Any:
    def make() -> Any:
        structure, block = transform.structure, transform.block
        spec = structure.coded
        turned = structure.halves, rope_first(spec.rope)
        return _kvcoder.transform(
            path,
            (spec.layers, spec.kv_heads, structure.dim, structure.block_heads, *turned),
            *rope_shape(spec.rope),
            *((b"", b"") if block is None else block),
            transform.mean.astype(np.float32),
            tuple(
                (stack.kind, stack.kept, np.array(stack.layers, dtype=np.uint32), *matrix)
                for stack, matrix in zip(structure.stacks, transform.stack, strict=True)
            ),
        )

    return derived(transform, path, make)  # packing depends on the path
