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
from kvabr.codec.gpu.staging import Staging, scratch_bytes
from kvabr.codec.native.coder_model import BUCKETS, CoderModel, Quantiser, derived, usual_streams
from kvabr.codec.native.references import LANES, TILE, References
from kvabr.codec.native.streams import payload_heads, rows_of_streams
from kvabr.types.errors import FormatError

_ROWS = 16
_CHUNKS = 4


@dataclass(frozen=True, eq=False)
class EncodeJob:
    """Coefficients of a group to quantise and code at one depth; see `kvabr.codec.native.coder`."""

    model: CoderModel
    rows: torch.Tensor
    """[row, token] float32, finite; tokens contiguous."""
    own: Quantiser
    lower: Quantiser | None
    keep: NDArray[np.bool_]
    """[token]: False for tokens that are not coded."""
    references: References | None = None
    streams: int | None = None
    """Number of streams; None: `usual_streams`."""

    def __post_init__(self) -> None:
        rows = self.rows
        if rows.dim() != 2 or rows.shape[0] != self.model.rows or rows.dtype != torch.float32 or rows.stride(1) != 1:
            raise FormatError(
                f"coefficients must be float32 [{self.model.rows}, tokens], got {rows.dtype} {tuple(rows.shape)}"
            )
        tokens = rows.shape[1]
        places = tokens if self.references is None else len(self.references.place)
        if not tokens or self.keep.shape != (tokens,) or places != tokens:
            raise FormatError(
                f"keep and references must have an entry for each of the {tokens} tokens of the group, at least 1"
            )
        if self.model.refines != (self.lower is not None):
            raise FormatError("this depth " + ("needs" if self.model.refines else "takes no") + " depth below")


def encode_many(jobs: Sequence[EncodeJob]) -> list[memoryview]:
    """Quantise and code groups on the current stream; results equal those of `coder.encode_rows`.

    The returned payloads share memory, so copy any that you keep. Raise `FormatError` if an index is out of range.
    """
    out: dict[int, memoryview] = {}
    batches: dict[Hashable, list[int]] = {}
    for number, job in enumerate(jobs):
        batches.setdefault(_alike(job), []).append(number)
    for batch in batches.values():
        left = iter(batch)
        while some := list(islice(left, _at_once(jobs[batch[0]]))):
            out.update(zip(some, _encode([jobs[number] for number in some]), strict=True))
    return [out[number] for number in range(len(jobs))]


def _alike(job: EncodeJob) -> Hashable:
    return id(job.model), job.own, job.lower, job.rows.device, job.rows.stride(0), _stride(job), _streams(job)


def _streams(job: EncodeJob) -> int:
    return job.streams or usual_streams(job.model, job.rows.shape[1])


def _stride(job: EncodeJob) -> int:
    return -(-job.rows.shape[1] // TILE) * TILE


def _at_once(job: EncodeJob) -> int:
    # Bytes per group: indices, indices below, words and escapes, flags and lists.
    each = job.model.rows * (8 * _stride(job) + 16)
    return max(1, min(scratch_bytes(job.rows.device) // each, 1 << 15))


def _encode(jobs: Sequence[EncodeJob]) -> list[memoryview]:
    model, count, stride, streams = jobs[0].model, len(jobs), _stride(jobs[0]), _streams(jobs[0])
    rows, tiles, device = model.rows, stride // TILE, jobs[0].rows.device
    keep, order = np.zeros((count, stride), np.int8), np.full((count, stride), -1, np.int32)
    lanes = np.zeros((count, stride), np.uint8)
    for group, job in enumerate(jobs):
        tokens = len(job.keep)
        keep[group, :tokens], order[group, :tokens] = job.keep, np.arange(tokens)
        if job.references is not None:
            order[group, :tokens], lanes[group, :tokens] = job.references.order, job.references.lane
    refers = np.array([job.references is not None for job in jobs], np.int32)
    quantisers = [jobs[0].own, jobs[0].lower or jobs[0].own]
    steps = [number for each in quantisers for number in (each.step, each.dead)]
    with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
        tables, staging = _tables(model, device), Staging(device)
        pieces = [
            staging.add(np.array([job.rows.data_ptr() for job in jobs], np.int64)),
            staging.add(keep),
            staging.add(order),
            staging.add(np.array(steps, np.float32)),
            staging.add(np.array([len(job.keep) for job in jobs], np.int32)),
            staging.add(refers),
            staging.add(lanes),
        ]
        staging.send()
        rows_of, keep_of, token_of, steps_there, tokens_of, refers_there, lane_of = map(staging.view, pieces)
        index = torch.empty((count, rows, stride), dtype=torch.int16, device=device)
        below = torch.empty_like(index) if model.refines else index
        marks = torch.empty((count, tiles, rows), dtype=torch.int8, device=device)
        wrong = torch.empty_like(marks)
        kernels.quantise[(-(-rows // _ROWS), tiles, count)](
            rows_of,
            keep_of,
            token_of,
            steps_there,
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
        # Per stream: at most a word and an escape per symbol, and a word per flag.
        own = int(rows_of_streams(rows, streams)[0]) + LANES - 1 & -LANES
        most = own * (stride + tiles)
        words, escapes = (torch.empty((count * streams, most), dtype=torch.int16, device=device) for _ in range(2))
        states = torch.empty((count * streams, LANES), dtype=torch.int32, device=device)
        ends = torch.empty((count * streams, 2), dtype=torch.int64, device=device)
        kernels.write_rows[(count * streams,)](
            index,
            below,
            marks,
            tokens_of,
            tables.coding_order,
            tables.chances,
            tables.radius,
            tables.entries,
            tables.bucket,
            refers_there,
            lane_of,
            torch.empty((count * streams, own), dtype=torch.int32, device=device),
            words,
            escapes,
            states,
            ends,
            streams,
            rows,
            own,
            stride,
            model.freqs.shape[2],
            most,
            model.freqs.size,
            1 if model.near is None else model.near.freqs.shape[1],
            REFINES=model.refines,
            NEAR=bool(refers.any()) and model.near is not None,
            VOTES=device.type == "cuda",
            num_warps=1,  # votes of one warp need no barriers
            num_stages=1,
            enable_fp_fusion=False,
        )
        if bool(wrong.any()):
            raise FormatError("an index exceeds 16 bits, or cannot refine the index below")
        return _collected(words, escapes, states, ends.cpu().numpy(), streams)


def _collected(
    words: torch.Tensor, escapes: torch.Tensor, states: torch.Tensor, ends: NDArray[np.int64], streams: int
) -> list[memoryview]:
    device, groups = words.device, len(ends) // streams
    sizes = words.shape[1] - ends
    heads = payload_heads(sizes.reshape(groups, streams, 2))
    bodies = 2 * LANES + sizes.sum(axis=1).reshape(groups, streams)
    each = heads.shape[1] // 2 + bodies.sum(axis=1)  # in units of 16 bits
    begins = np.cumsum(each) - each
    places = begins[:, None] + heads.shape[1] // 2 + np.cumsum(bodies, axis=1) - bodies
    staging = Staging(device)
    pieces = staging.add(np.column_stack((places.reshape(-1), ends))), staging.add(begins), staging.add(heads)
    staging.send()
    out = torch.empty(int(each.sum()), dtype=torch.int16, device=device)
    kernels.collect[(len(ends), _CHUNKS)](
        words,
        escapes,
        states,
        staging.view(pieces[0]),
        staging.view(pieces[1]),
        staging.view(pieces[2]),
        out,
        words.shape[1],
        streams,
        heads.shape[1],
        CHUNKS=_CHUNKS,
        HEAD=1 << (heads.shape[1] - 1).bit_length(),
        num_warps=4,
    )
    here = torch.empty(2 * len(out), dtype=torch.uint8, pin_memory=device.type == "cuda")
    here.copy_(out.view(torch.uint8))
    whole = here.numpy().data
    return [whole[2 * at : 2 * (at + size)] for at, size in zip(begins.tolist(), each.tolist(), strict=True)]


class _Tables(NamedTuple):
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
    """Return the kernel's entry per symbol, flattened."""
    wide = freqs.astype(np.int64)
    entries = (np.cumsum(wide, axis=2) - wide) | wide << 12
    last = np.broadcast_to(2 * model.radius.astype(np.intp)[:, None, None] + 1, (*freqs.shape[:2], 1))
    escape = np.take_along_axis(entries, last, axis=2) | 1 << 24
    escaped = (wide == 0) | (np.arange(freqs.shape[2]) == last)
    out: NDArray[np.int64] = np.where(escaped, escape, entries).reshape(-1)
    return out
