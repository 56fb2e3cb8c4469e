"""The host's part of quantising and entropy coding on a CUDA device."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import islice
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from kvabr.codec.gpu import writer_kernels as kernels
from kvabr.codec.native.coder_model import BUCKETS, CoderModel, Quantiser, derived
from kvabr.codec.native.reference import HEAD
from kvabr.codec.native.references import LANES, TILE, References
from kvabr.types.errors import FormatError

SCRATCH_BYTES = 4 << 30
"""Maximum scratch memory for groups that are encoded at once, further limited to a quarter of the free device memory.
One group is always allowed."""
_ROWS = 16
"""Rows of a tile that a program quantises."""


@dataclass(frozen=True, eq=False)
class EncodeJob:
    """The coefficients of a group, to be quantised and coded at one depth; see `kvabr.codec.native.reference`."""

    model: CoderModel
    rows: torch.Tensor
    """[row, token] float32, finite; neighbouring tokens are neighbours in memory."""
    own: Quantiser
    lower: Quantiser | None
    """Of the depth below, if the model refines one."""
    keep: NDArray[np.bool_]
    """[token]: False for tokens that are not coded."""
    references: References | None = None

    def __post_init__(self) -> None:
        rows = self.rows
        if rows.dim() != 2 or rows.shape[0] != self.model.rows or rows.dtype != torch.float32 or rows.stride(1) != 1:
            raise FormatError(
                f"coefficients {tuple(rows.shape)} {rows.dtype}, must be [{self.model.rows}, tokens] float32"
            )
        tokens = rows.shape[1]
        places = tokens if self.references is None else len(self.references.place)
        if not tokens or self.keep.shape != (tokens,) or places != tokens:
            raise FormatError(f"tokens to code, or references, of another group than one of {tokens} tokens")
        if self.model.refines != (self.lower is not None):
            raise FormatError("this depth " + ("needs" if self.model.refines else "takes no") + " depth below")


def encode_many(jobs: Sequence[EncodeJob]) -> list[bytes]:
    """Quantise and code groups on the current stream, many at a time; return what `coder.encode_rows` does for each.

    A group is one program, which codes row after row: few groups do not fill a GPU. Raises `FormatError` if an index is
    out of reach.
    """
    out: dict[int, bytes] = {}
    batches: dict[Hashable, list[int]] = {}
    for number, job in enumerate(jobs):
        batches.setdefault(_alike(job), []).append(number)
    for batch in batches.values():
        left = iter(batch)
        while some := list(islice(left, _at_once(jobs[batch[0]]))):
            out.update(zip(some, _encode([jobs[number] for number in some]), strict=True))
    return [out[number] for number in range(len(jobs))]


def _alike(job: EncodeJob) -> Hashable:
    return id(job.model), job.own, job.lower, job.rows.device, job.rows.stride(0), _stride(job)


def _stride(job: EncodeJob) -> int:
    return -(-job.rows.shape[1] // TILE) * TILE


def _at_once(job: EncodeJob) -> int:
    # Indices, those below, words and escapes, flags and lists.
    each = job.model.rows * (8 * _stride(job) + 16)
    room = SCRATCH_BYTES
    if job.rows.device.type == "cuda":
        room = min(room, torch.cuda.mem_get_info(job.rows.device)[0] // 4)
    return max(1, min(room // each, 1 << 15))


def _encode(jobs: Sequence[EncodeJob]) -> list[bytes]:
    """Encode groups that share a launch."""
    model, count, stride = jobs[0].model, len(jobs), _stride(jobs[0])
    rows, tiles, device = model.rows, stride // TILE, jobs[0].rows.device
    keep, order = np.zeros((count, stride), np.int8), np.full((count, stride), -1, np.int32)
    lanes = np.zeros((count, stride), np.uint8)
    for group, job in enumerate(jobs):
        tokens = len(job.keep)
        keep[group, :tokens], order[group, :tokens] = job.keep, np.arange(tokens)
        if job.references is not None:
            order[group, :tokens], lanes[group, :tokens] = job.references.order, job.references.lane
    refers = [job.references is not None for job in jobs]
    quantisers = [jobs[0].own, jobs[0].lower or jobs[0].own]
    steps = [number for each in quantisers for number in (each.step, each.dead)]
    # In Triton's interpreter, tensors are on the CPU.
    with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
        tables = _tables(model, device)
        index = torch.empty((count, rows, stride), dtype=torch.int16, device=device)
        below = torch.empty_like(index) if model.refines else index
        marks = torch.empty((count, tiles, rows), dtype=torch.int8, device=device)
        wrong = torch.empty_like(marks)
        kernels.quantise[(-(-rows // _ROWS), tiles, count)](
            torch.tensor([job.rows.data_ptr() for job in jobs], dtype=torch.int64, device=device),
            torch.from_numpy(keep).to(device),
            torch.from_numpy(order).to(device),
            torch.tensor(steps, dtype=torch.float32, device=device),
            index,
            below,
            marks,
            wrong,
            rows,
            jobs[0].rows.stride(0),
            stride,
            REFINES=model.refines,
            ROWS=_ROWS,
            num_warps=4,
            enable_fp_fusion=False,
        )
        # At most a word and an escape for each symbol, and a word for each flag.
        most = rows * (stride + tiles)
        words, escapes = (torch.empty((count, most), dtype=torch.int16, device=device) for _ in range(2))
        states = torch.empty((count, LANES), dtype=torch.int32, device=device)
        ends = torch.empty((count, 2), dtype=torch.int64, device=device)
        kernels.write_rows[(count,)](
            index,
            below,
            marks,
            torch.tensor([len(job.keep) for job in jobs], dtype=torch.int32, device=device),
            tables.coding_order,
            tables.chances,
            tables.radius,
            tables.entries,
            tables.bucket,
            torch.tensor(refers, dtype=torch.int32, device=device),
            torch.from_numpy(lanes).to(device),
            torch.empty((count, rows), dtype=torch.int32, device=device),
            words,
            escapes,
            states,
            ends,
            rows,
            stride,
            model.freqs.shape[2],
            most,
            model.freqs.size,
            1 if model.near is None else model.near.freqs.shape[1],
            REFINES=model.refines,
            NEAR=any(refers) and model.near is not None,
            num_warps=1,  # a scan within a warp needs no barriers
            num_stages=1,
            enable_fp_fusion=False,
        )
        if bool(wrong.any()):
            raise FormatError("an index is beyond 16 bits, or cannot be reached from the one below")
        begins, first = ends.cpu().numpy(), states.cpu().numpy()
        out = []
        for group in range(count):
            word, escape = begins[group].tolist()
            parts = [part.cpu().numpy().tobytes() for part in (words[group, word:], escapes[group, escape:])]
            out.append(HEAD.pack(most - word, most - escape) + first[group].astype("<i4").tobytes() + b"".join(parts))
    return out


class _Tables(NamedTuple):
    """The tables of one depth, on the device; see `writer_kernels.write_rows`."""

    coding_order: torch.Tensor
    chances: torch.Tensor
    radius: torch.Tensor
    entries: torch.Tensor
    bucket: torch.Tensor


def _tables(model: CoderModel, device: torch.device) -> _Tables:
    def make() -> _Tables:
        order, near = model.order.astype(np.int64), model.near
        entries = [_entries(model, model.freqs), *([] if near is None else [_entries(model, near.freqs)])]
        bucket = np.zeros((model.contexts, BUCKETS), np.uint8) if near is None else near.bucket
        numbers = (
            order | model.row_class[order].astype(np.int64) << 22,
            model.flag_freq[:, order],
            model.radius,
            np.concatenate(entries),
            bucket,
        )
        return _Tables(*(torch.from_numpy(each.astype(np.int32, order="C")).to(device) for each in numbers))

    return derived(model, ("writer", device), make)


def _entries(model: CoderModel, freqs: NDArray[np.uint16]) -> NDArray[np.int64]:
    """Return what the kernel pushes for each symbol, flattened: symbols without a frequency are escaped."""
    wide = freqs.astype(np.int64)
    entries = (np.cumsum(wide, axis=2) - wide) | wide << 12
    last = np.broadcast_to(2 * model.radius.astype(np.intp)[:, None, None] + 1, (*freqs.shape[:2], 1))
    escape = np.take_along_axis(entries, last, axis=2) | 1 << 24
    escaped = (wide == 0) | (np.arange(freqs.shape[2]) == last)
    out: NDArray[np.int64] = np.where(escaped, escape, entries).reshape(-1)
    return out
