"""The host's part of decoding on a CUDA device.

It checks the payloads' heads with the same parser as on the processor, copies the payloads of many groups in one
transfer, starts a kernel for each step of the format, and synchronises once at the end to check for errors.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import islice

import numpy as np
import torch

from kvabr.codec.gpu import kernels
from kvabr.codec.gpu.tables import CoderTables, SynthesisTables, coder_tables, synthesis_tables
from kvabr.codec.native.coder import DecodeJob
from kvabr.codec.native.model import LANES, TILE, CoderModel, SynthesisModel, check_chain
from kvabr.codec.native.reference import HEAD, head
from kvabr.codec.rope import rope_tables
from kvabr.types.errors import FormatError

SCRATCH_BYTES = 4 << 30
"""Maximum scratch memory for groups that are decoded at once, further limited to a quarter of the free device memory.
One group is always allowed."""
_KINDS = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}
_ALIGN = 16
_ROWS, _OUTPUTS, _PAIRS, _TOKENS, _COMPONENTS = 16, 64, 32, 64, 64
"""Tile sizes of the kernels. Tokens must divide `TILE`, and a tensor core takes at least 16 by 32 by 16."""
_WARPS = 8
"""For the synthesis kernels: with 4 warps they run out of registers (according to ptxas for sm_80 to sm_100)."""


def decode_many(jobs: Sequence[DecodeJob]) -> None:
    """Decode groups in parallel on the current stream; return when all are verified.

    Args:
        jobs: their tensors must not overlap, and must be on CUDA devices.

    Raises:
        FormatError: one of them cannot be decoded; the others may or may not have been.
    """
    verdicts = []
    batches: dict[Hashable, list[DecodeJob]] = {}
    for job in jobs:
        _check(job)
        batches.setdefault(_alike(job), []).append(job)
    for batch in batches.values():
        left = iter(batch)
        while some := list(islice(left, _at_once(batch))):
            verdicts.append(_decode(some))
    for verdict in verdicts:
        if bool(verdict.any()):
            raise FormatError("entropy coded part: it does not end where it should; corrupt, or of another profile")


def _check(job: DecodeJob) -> None:
    check_chain(job.models, job.payloads, job.synthesis)
    s, out = job.synthesis, job.out
    wanted = (s.layers, 2, s.kv_heads, out.shape[3] if out.ndim == 5 else 0, s.head_dim)
    if tuple(out.shape) != wanted or not out.shape[3] or not out.is_floating_point():
        raise FormatError(f"{tuple(out.shape)} {out.dtype} cannot take a cache of {wanted}")


def _alike(job: DecodeJob) -> Hashable:
    """Return the key by which groups share a launch."""
    models = tuple(id(model) for model in job.models)
    return models, id(job.synthesis), job.step, job.out.device, job.out.dtype, job.out.stride(), _stride(job)


def _stride(job: DecodeJob) -> int:
    """Return the number of tokens, rounded up to whole tiles."""
    return -(-job.out.shape[3] // TILE) * TILE


def _at_once(batch: Sequence[DecodeJob]) -> int:
    """Return the number of groups that fit the scratch memory."""
    job = batch[0]
    stride, rows = _stride(job), job.synthesis.rows
    # int16 indices and stack outputs, lists of rows, flags, rotary tables.
    each = rows * (4 * stride + 4 + stride // TILE) + 8 * stride * job.synthesis.head_dim
    room = SCRATCH_BYTES
    if job.out.device.type == "cuda":
        room = min(room, torch.cuda.mem_get_info(job.out.device)[0] // 4)
    return max(1, min(room // each, 1 << 15))


def _decode(jobs: Sequence[DecodeJob]) -> torch.Tensor:
    """Start decoding groups that share a launch.

    Returns:
        [depth, group] int32 on the device: 0 where a payload is valid.
    """
    models, synthesis, out = jobs[0].models, jobs[0].synthesis, jobs[0].out
    target = out.detach()
    dtype = target.dtype if target.dtype in _KINDS else torch.float32
    device = target.device
    # In Triton's interpreter, tensors are on the CPU.
    with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
        outs = [job.out.detach() for job in jobs]
        if dtype != target.dtype:
            outs = [torch.empty(each.shape, dtype=dtype, device=device) for each in outs]
        batch = _Batch.load(jobs, outs, device)
        verdict = torch.zeros((len(models), len(jobs)), dtype=torch.int32, device=device)
        tables = [coder_tables(model, device) for model in models]
        index = batch.zeros(synthesis.rows)
        listed = torch.empty((len(jobs), synthesis.rows), dtype=torch.int32, device=device)
        live = torch.empty((len(jobs), batch.stride // TILE, synthesis.rows), dtype=torch.int8, device=device)
        for depth, model in enumerate(models):
            _read(batch, model, tables[depth], depth, index, live, listed, verdict[depth])
        _synthesise(batch, synthesis, jobs[0].step, tables[-1].delta, index, outs)
        if dtype != target.dtype:
            for job, made in zip(jobs, outs, strict=True):
                job.out.detach().copy_(made)
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
    outs: torch.Tensor
    """int64 [group]: addresses."""
    cos: torch.Tensor
    """float32 [group, token, pair]; empty without a rotary embedding."""
    sin: torch.Tensor

    @classmethod
    def load(cls, jobs: Sequence[DecodeJob], outs: Sequence[torch.Tensor], device: torch.device) -> _Batch:
        """Check the payloads' heads, and copy everything to the device.

        Raises:
            FormatError: a head is invalid.
        """
        rows, stride = jobs[0].synthesis.rows, _stride(jobs[0])
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
        cos, sin = _turns(jobs, stride)
        return cls(
            len(jobs),
            stride,
            torch.from_numpy(data.view(np.int16)).to(device),
            torch.from_numpy(parts).to(device),
            torch.tensor([job.out.shape[3] for job in jobs], dtype=torch.int32, device=device),
            torch.tensor([out.data_ptr() for out in outs], dtype=torch.int64, device=device),
            cos.to(device),
            sin.to(device),
        )

    def zeros(self, rows: int) -> torch.Tensor:
        """Return int16 zeros [group, row, token]."""
        return torch.zeros((self.groups, rows, self.stride), dtype=torch.int16, device=self.data.device)


def _turns(jobs: Sequence[DecodeJob], stride: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the cosines and sines of each group's rotation."""
    rope = jobs[0].synthesis.rope
    both = torch.zeros((2, len(jobs), stride, 0 if rope is None else rope.rotary_dim // 2))
    if rope is not None:
        for group, job in enumerate(jobs):
            tokens = job.out.shape[3]
            for into, table in zip(both, rope_tables(rope, job.first_token, tokens), strict=True):
                into[group, :tokens] = torch.from_numpy(np.array(table))
    return both[0], both[1]


def _read(
    batch: _Batch,
    model: CoderModel,
    tables: CoderTables,
    depth: int,
    index: torch.Tensor,
    live: torch.Tensor,
    listed: torch.Tensor,
    verdict: torch.Tensor,
) -> None:
    """Entropy decode one depth on top of those below."""
    rows = model.rows
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
        live,
        index,
        listed,
        verdict,
        rows,
        batch.stride,
        REFINES=model.refines,
        num_warps=1,  # a scan within a warp needs no barriers
        num_stages=1,
        enable_fp_fusion=False,
    )


def _synthesise(
    batch: _Batch,
    model: SynthesisModel,
    step: float,
    delta: torch.Tensor,
    index: torch.Tensor,
    outs: Sequence[torch.Tensor],
) -> None:
    """Turn indices into elements."""
    device = index.device
    tables: SynthesisTables = synthesis_tables(model, device)
    made = torch.empty((batch.groups, tables.outputs, batch.stride), dtype=torch.int16, device=device)
    for stack in tables.stacks:
        size = len(stack.gain)
        kernels.unstack[(-(-size // _OUTPUTS), batch.stride // _TOKENS, batch.groups)](
            index,
            delta,
            stack.mantissa,
            stack.gain,
            made,
            batch.tokens,
            stack.first_row,
            stack.first_output,
            size,
            model.rows,
            tables.outputs,
            batch.stride,
            OUTPUTS=_OUTPUTS,
            TOKENS=_TOKENS,
            COMPONENTS=_COMPONENTS,
            num_warps=_WARPS,
            enable_fp_fusion=False,
        )
    pair_tiles = -(-model.head_dim // (2 * _PAIRS))
    jobs = model.layers * 2 * model.kv_heads * pair_tiles * (batch.stride // _TOKENS)
    kernels.finish[(jobs, batch.groups)](
        index,
        delta,
        made,
        tables.places,
        tables.mantissa,
        tables.gain,
        torch.from_numpy(model.scale(step)).to(device),
        tables.mean,
        batch.cos,
        batch.sin,
        batch.outs,
        batch.tokens,
        *outs[0].stride(),
        model.rows,
        tables.outputs,
        batch.stride,
        model.kv_heads,
        model.head_dim,
        model.block_heads,
        0 if model.rope is None else model.rope.rotary_dim // 2,
        KIND=_KINDS[outs[0].dtype],
        BLOCKS=model.block_mantissa is not None,
        INTERLEAVED=model.rope is not None and model.rope.layout == "interleaved",
        PAIRS=_PAIRS,
        TOKENS=_TOKENS,
        COMPONENTS=_COMPONENTS,
        num_warps=_WARPS,
        enable_fp_fusion=False,  # each product and sum is rounded by itself
    )
