"""The host's part of decoding on a CUDA device.

It checks the payloads' heads as on the processor, copies the payloads of many groups in one transfer, starts a kernel
for each step of the format, and synchronises once at the end to check for errors.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import islice
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from kvabr.codec.block_slots import BlockSlots
from kvabr.codec.gpu import kernels
from kvabr.codec.gpu.destinations import Destination, check_blocks
from kvabr.codec.native.coder_model import BUCKETS, DTYPES, PROBABILITY_BITS, CoderModel, DecodeJob, derived
from kvabr.codec.native.reference import HEAD, head, lookup
from kvabr.codec.native.references import LANES, TILE
from kvabr.codec.rope import rope_first, rope_shape, rope_tables
from kvabr.codec.transform import NO_MATRIX, Transform
from kvabr.types.errors import FormatError

SCRATCH_BYTES = 4 << 30
"""Maximum scratch memory for groups that are decoded at once, further limited to a quarter of the free device memory.
One group is always allowed."""
_ALIGN = 16
_ESCAPED = 255
"""Escape mark in the low byte of a table's entry; other symbols are their value plus 128."""
_ROWS, _OUTPUTS, _PAIRS, _TOKENS, _COMPONENTS = 16, 64, 32, 64, 64
"""Tile sizes of the kernels. Tokens must divide `TILE`, and a tensor core takes at least 16 by 32 by 16."""
_WARPS = 8
"""For the synthesis kernels: with 4 warps they run out of registers (according to ptxas for sm_80 to sm_100)."""


class _Task(NamedTuple):
    """A group to decode, and where to."""

    job: DecodeJob
    into: Destination


def decode_many(jobs: Sequence[DecodeJob]) -> None:
    """Decode groups on the current stream, see `coder.decode_many`; return when all are verified."""
    tasks, copies = [], []
    for job in jobs:
        out = job.out.detach()
        if out.dtype not in DTYPES:
            out = torch.empty(out.shape, dtype=torch.float32, device=out.device)
            copies.append((job.out.detach(), out))
        tasks.append(_Task(job, Destination.of_tensor(out)))
    _run(tasks)
    for whole, out in copies:
        whole.copy_(out)


def decode_to_blocks(jobs: Sequence[DecodeJob], blocks: Sequence[BlockSlots]) -> None:
    """Decode groups straight to the blocks of a paged cache, on the current stream; return when all are verified.

    They are written completely, or partly on error. Of `DecodeJob.out` only the shape counts: it may be a tensor of the
    device ``meta``.
    """
    for job, there in zip(jobs, blocks, strict=True):
        check_blocks(job, there)
    _run([_Task(job, Destination.of_blocks(there)) for job, there in zip(jobs, blocks, strict=True)])


def _run(tasks: Sequence[_Task]) -> None:
    verdicts = []
    batches: dict[Hashable, list[_Task]] = {}
    for task in tasks:
        batches.setdefault(_alike(task), []).append(task)
    for batch in batches.values():
        left = iter(batch)
        while some := list(islice(left, _at_once(batch))):
            verdicts.append(_decode(some))
    for verdict in verdicts:
        if bool(verdict.any()):
            raise FormatError("entropy coded part: it does not end where it should; corrupt, or of another profile")


def _alike(task: _Task) -> Hashable:
    """Return the key by which groups share a launch."""
    job, into = task
    models = tuple(id(model) for model in job.models)
    where = into.device, into.dtype, into.strides
    return models, id(job.transform), job.step, job.gains, where, _stride(job)


def _stride(job: DecodeJob) -> int:
    """Return the number of tokens, rounded up to whole tiles."""
    return -(-job.out.shape[3] // TILE) * TILE


def _at_once(batch: Sequence[_Task]) -> int:
    """Return the number of groups that fit the scratch memory."""
    job, into = batch[0]
    stride, structure = _stride(job), job.transform.structure
    # int16 indices and stack outputs, lists of rows, flags, rotary tables.
    each = structure.rows * (4 * stride + 4 + stride // TILE) + 8 * stride * structure.dim
    room = SCRATCH_BYTES
    if into.device.type == "cuda":
        room = min(room, torch.cuda.mem_get_info(into.device)[0] // 4)
    return max(1, min(room // each, 1 << 15))


def _decode(tasks: Sequence[_Task]) -> torch.Tensor:
    """Start decoding groups that share a launch; return [depth, group] int32 on the device, 0 for a valid payload."""
    job, into = tasks[0]
    models, transform, device = job.models, job.transform, into.device
    rows = transform.structure.rows
    # In Triton's interpreter, tensors are on the CPU.
    with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
        batch = _Batch.load(tasks)
        verdict = torch.zeros((len(models), len(tasks)), dtype=torch.int32, device=device)
        index = torch.zeros((len(tasks), rows, batch.stride), dtype=torch.int16, device=device)
        listed = torch.empty((len(tasks), rows), dtype=torch.int32, device=device)
        live = torch.empty((len(tasks), batch.stride // TILE, rows), dtype=torch.int8, device=device)
        for depth, model in enumerate(models):
            _read(batch, model, depth, index, live, listed, verdict[depth])
        delta = _coder_tables(models[-1], device).delta
        _synthesise(batch, transform, transform.scale(job.step, job.gains), delta, index, into)
    return verdict


@dataclass(frozen=True, eq=False)
class _Batch:
    """What differs between groups that share a launch, on the device."""

    groups: int
    stride: int
    data: torch.Tensor
    """int16: the payloads."""
    parts: torch.Tensor
    """int64 [depth, group, 5]: offsets of states and words, number of words, offset of escapes, number of escapes."""
    tokens: torch.Tensor
    """int32 [group]."""
    refers: torch.Tensor
    """int32 [group]: whether tokens refer to others."""
    lanes: torch.Tensor
    """uint8 [group, place]: see `References.lane`. Tokens are in the order of their places."""
    any_refers: bool
    outs: torch.Tensor
    """int64 [group, layer and K/V]: addresses."""
    offsets: torch.Tensor
    """int64 [group, place]: see `Destination.offsets`."""
    means: torch.Tensor | None
    """float32 [group, layer, K/V, head, dim]; None: those of the transform, for every group."""
    cos: torch.Tensor
    """float32 [group, place, pair]; empty without a rotary embedding."""
    sin: torch.Tensor

    @classmethod
    def load(cls, tasks: Sequence[_Task]) -> _Batch:
        """Check the payloads' heads, and copy everything to the device."""
        jobs, device = [task.job for task in tasks], tasks[0].into.device
        data, parts = _joined(jobs)
        rope, stride = jobs[0].transform.structure.coded.rope, _stride(jobs[0])
        turns = torch.zeros((2, len(jobs), stride, rope_shape(rope)[0] // 2))
        offsets = np.full((len(jobs), stride), -1, np.int64)
        lanes = np.zeros((len(jobs), stride), np.uint8)
        for group, (job, into) in enumerate(tasks):
            tokens = job.out.shape[3]
            order = np.arange(tokens)
            if job.references is not None:
                order, lanes[group, :tokens] = job.references.order, job.references.lane
            offsets[group, :tokens] = into.offsets[order]
            tables = np.array(rope_tables(rope, job.first_token, tokens))
            turns[:, group, :tokens] = torch.from_numpy(tables[:, order])
        own = jobs[0].transform.mean.astype(np.float32)
        biased = any(job.mean is not None for job in jobs)
        means = np.stack([own if job.mean is None else job.mean for job in jobs]) if biased else None
        refers = [job.references is not None for job in jobs]
        return cls(
            len(jobs),
            stride,
            torch.from_numpy(data).to(device),
            torch.from_numpy(parts).to(device),
            torch.tensor([job.out.shape[3] for job in jobs], dtype=torch.int32, device=device),
            torch.tensor(refers, dtype=torch.int32, device=device),
            torch.from_numpy(lanes).to(device),
            any(refers),
            torch.from_numpy(np.stack([task.into.addresses for task in tasks])).to(device),
            torch.from_numpy(offsets).to(device),
            None if means is None else torch.from_numpy(means).to(device),
            *turns.to(device),
        )


def _joined(jobs: Sequence[DecodeJob]) -> tuple[NDArray[np.int16], NDArray[np.int64]]:
    """Check the payloads' heads; return all payloads in one array, and `_Batch.parts`."""
    rows = jobs[0].transform.structure.rows
    parts = np.zeros((len(jobs[0].models), len(jobs), 5), dtype=np.int64)
    size = 0
    for group, job in enumerate(jobs):
        for depth, payload in enumerate(job.payloads):
            words, escapes = head(payload, rows * job.out.shape[3])
            states = (size + HEAD.size) // 2
            parts[depth, group] = states, states + 2 * LANES, words, states + 2 * LANES + words, escapes
            size += -(-memoryview(payload).nbytes // _ALIGN) * _ALIGN
    data = np.zeros(size, dtype=np.uint8)
    for group, job in enumerate(jobs):
        for depth, payload in enumerate(job.payloads):
            begin = int(parts[depth, group, 0]) * 2 - HEAD.size
            piece = np.frombuffer(payload, dtype=np.uint8)
            data[begin : begin + len(piece)] = piece
    return data.view(np.int16), parts


def _read(
    batch: _Batch,
    model: CoderModel,
    depth: int,
    index: torch.Tensor,
    live: torch.Tensor,
    listed: torch.Tensor,
    verdict: torch.Tensor,
) -> None:
    """Entropy decode one depth on top of those below."""
    rows, tables = model.rows, _coder_tables(model, index.device)
    if depth:
        grid = (-(-rows // _ROWS), batch.stride // TILE, batch.groups)
        kernels.triple[grid](index, live, rows, batch.stride, ROWS=_ROWS, num_warps=4, enable_fp_fusion=False)
    kernels.read_rows[(batch.groups,)](
        batch.data,
        batch.parts[depth],
        batch.tokens,
        tables.coding_order,
        tables.chances,
        tables.entries,
        tables.bucket,
        batch.refers,
        batch.lanes,
        live,
        index,
        listed,
        verdict,
        rows,
        batch.stride,
        model.classes * model.contexts << PROBABILITY_BITS,
        1 if model.near is None else model.near.freqs.shape[1],
        REFINES=model.refines,
        NEAR=batch.any_refers and model.near is not None,
        num_warps=1,  # a scan within a warp needs no barriers
        num_stages=1,
        enable_fp_fusion=False,
    )


def _synthesise(
    batch: _Batch,
    transform: Transform,
    scale: NDArray[np.float32],
    delta: torch.Tensor,
    index: torch.Tensor,
    into: Destination,
) -> None:
    """Turn indices into elements."""
    device, structure, spec = index.device, transform.structure, transform.structure.coded
    rotary, interleaved = rope_shape(spec.rope)
    tables = _transform_tables(transform, device)
    made = torch.empty((batch.groups, tables.outputs, batch.stride), dtype=torch.int16, device=device)
    for mantissa, gain, first_row, first_output in tables.stacks:
        size = len(gain)
        kernels.unstack[(-(-size // _OUTPUTS), batch.stride // _TOKENS, batch.groups)](
            index,
            delta,
            mantissa,
            gain,
            made,
            batch.tokens,
            first_row,
            first_output,
            size,
            structure.rows,
            tables.outputs,
            batch.stride,
            OUTPUTS=_OUTPUTS,
            TOKENS=_TOKENS,
            COMPONENTS=_COMPONENTS,
            num_warps=_WARPS,
            enable_fp_fusion=False,
        )
    pair_tiles = -(-structure.dim // (2 * _PAIRS))
    jobs = spec.layers * structure.halves * spec.kv_heads * pair_tiles * (batch.stride // _TOKENS)
    kernels.finish[(jobs, batch.groups)](
        index,
        delta,
        made,
        tables.places,
        tables.mantissa,
        tables.gain,
        torch.from_numpy(scale).to(device),
        tables.mean if batch.means is None else batch.means,
        0 if batch.means is None else tables.mean.numel(),
        batch.cos,
        batch.sin,
        batch.outs,
        batch.offsets,
        batch.tokens,
        *into.strides,
        structure.rows,
        tables.outputs,
        batch.stride,
        batch.outs.shape[1],
        spec.kv_heads,
        structure.dim,
        structure.block_heads,
        rotary // 2,
        rope_first(spec.rope),
        HALVES=structure.halves,
        KIND=DTYPES[into.dtype],
        BLOCKS=transform.block is not None,
        INTERLEAVED=bool(interleaved),
        PAIRS=_PAIRS,
        TOKENS=_TOKENS,
        COMPONENTS=_COMPONENTS,
        num_warps=_WARPS,
        enable_fp_fusion=False,  # each product and sum is rounded by itself
    )


class _CoderTables(NamedTuple):
    """The tables of one depth, on the device."""

    coding_order: torch.Tensor
    """int32 [row]: row | class << 22, in coding order."""
    chances: torch.Tensor
    """int32 [1 or 2, row]: probability of a set flag out of 4,096, in coding order."""
    entries: torch.Tensor
    """int32 [class, context, slot]: symbol, frequency << 8, the slot's position in the symbol << 20; then those of
    `NearTables`."""
    bucket: torch.Tensor
    """int32 [1 or 3, 16]: see `NearTables.bucket`; zeros without."""
    delta: torch.Tensor
    """int8 [row]: the class's delta."""


def _coder_tables(model: CoderModel, device: torch.device) -> _CoderTables:
    def make() -> _CoderTables:
        order = model.order.astype(np.int64)
        packed = order | model.row_class[order].astype(np.int64) << 22
        near = model.near
        entries = [_entries(model, model.freqs), *([] if near is None else [_entries(model, near.freqs)])]
        bucket = np.zeros((model.contexts, BUCKETS), np.uint8) if near is None else near.bucket
        return _CoderTables(
            _there(packed.astype(np.int32), device),
            _there(model.flag_freq[:, order].astype(np.int32), device),
            _there(np.concatenate(entries), device),
            _there(bucket.astype(np.int32), device),
            _there(model.delta[model.row_class].astype(np.int8), device),
        )

    return derived(model, device, make)


def _entries(model: CoderModel, freqs: NDArray[np.uint16]) -> NDArray[np.int32]:
    """Return tables [class, context, symbol] as `_CoderTables.entries`, flattened."""
    out = []
    for reach, (symbol, freq, place) in zip(model.radius.astype(np.int64), lookup(freqs), strict=True):
        value = np.where(symbol == 2 * reach + 1, _ESCAPED, symbol - reach + 128)
        out.append((value | freq << 8 | place << 20).astype(np.uint32).view(np.int32))
    return np.stack(out).reshape(-1)


class _TransformTables(NamedTuple):
    """The arrays of a transform, on the device."""

    stacks: list[tuple[torch.Tensor, torch.Tensor, int, int]]
    """Of every stack with a transform: mantissa int8 [output, component], gain uint8 [component], first row of its
    coefficients, and its first output among those of all stacks."""
    outputs: int
    """Number of outputs of all stacks."""
    places: torch.Tensor
    """int32 [layer, K/V, 3]: first row of the first block's untransformed components, its first stack output, and the
    number of components in the stack."""
    mantissa: torch.Tensor
    """int8 [block, channel, component]; empty without block transforms."""
    gain: torch.Tensor
    """uint8 [block, component]."""
    mean: torch.Tensor
    """float32 [layer, K/V, head, dim]."""


def _transform_tables(transform: Transform, device: torch.device) -> _TransformTables:
    def make() -> _TransformTables:
        structure = transform.structure
        places = np.zeros((structure.coded.layers, structure.halves, 3), dtype=np.int32)
        stacks, outputs = [], 0
        for number, (stack, matrix) in enumerate(zip(structure.stacks, transform.stack, strict=True)):
            trailing = structure.trailing_rows(number).start
            for index, layer in enumerate(stack.layers):
                before = index * structure.per_layer
                row = trailing + before * (structure.width - stack.kept)
                places[layer, stack.kind] = row, outputs + before * stack.kept, stack.kept
            if stack.kept:
                mantissa, gain = (_there(part, device) for part in matrix)
                stacks.append((mantissa, gain, structure.first_rows[number], outputs))
            outputs += structure.width_of(stack)
        mantissa, gain = (_there(part, device) for part in transform.block or NO_MATRIX)
        mean = _there(transform.mean.astype(np.float32), device)
        return _TransformTables(stacks, outputs, _there(places, device), mantissa, gain, mean)

    return derived(transform, device, make)


def _there(array: NDArray[np.generic], device: torch.device) -> torch.Tensor:
    # Copy: torch rejects read-only arrays.
    return torch.from_numpy(np.array(array, order="C")).to(device)
