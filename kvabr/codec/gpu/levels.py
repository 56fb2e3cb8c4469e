"""The host's part of expanding the cast and integer levels on a CUDA device.

Payloads are copied unchanged. While some payloads are expanded, the next are copied, and those after them are gathered
in pinned memory.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass

import numpy as np
import torch

from kvabr.codec.block_slots import BlockSlots
from kvabr.codec.builtin import head_blocks
from kvabr.codec.gpu import level_kernels as kernels
from kvabr.codec.gpu.destinations import WriteTarget, check_blocks
from kvabr.codec.gpu.level_job import LEVELS, LevelJob
from kvabr.codec.gpu.staging import Staging, await_streams, lie_apart, sent_apart, settled
from kvabr.codec.gpu.tables import common, divisible
from kvabr.codec.native import coder
from kvabr.codec.native.coder_model import DTYPES
from kvabr.codec.native.streams import gathered_places
from kvabr.types.errors import FormatError

_FIRST_BYTES, _MAX_BYTES = 16 << 20, 128 << 20
"""Bytes of payloads in the first copy, which is small to start soon, and the maximum in a later one."""
_TOKENS, _WARPS = 16, 4


@dataclass(frozen=True, eq=False)
class _Task:
    job: LevelJob
    into: WriteTarget


def expand_many(jobs: Sequence[LevelJob]) -> None:
    """Expand groups on the current stream; return once all are verified.

    Raises:
        FormatError: a payload has a wrong length, or a number that is not finite. Groups may be partly written.
    """
    copies = [(job, torch.empty_like(job.out, dtype=torch.float32)) for job in jobs if job.out.dtype not in DTYPES]
    other = {id(job): out for job, out in copies}
    _run([_Task(job, WriteTarget.of_tensor(other.get(id(job), job.out.detach()))) for job in jobs])
    for job, out in copies:
        job.out.copy_(out)
    await_streams(out.device for _, out in copies)


def expand_to_blocks(jobs: Sequence[LevelJob], blocks: Sequence[BlockSlots]) -> None:
    """Expand groups directly into the blocks of a paged cache; see `expand_many`.

    Of `LevelJob.out`, only the shape is used; it may be on device ``meta``.
    """
    for job, there in zip(jobs, blocks, strict=True):
        check_blocks(job.out.shape, there)
    _run([_Task(job, WriteTarget.of_blocks(there)) for job, there in zip(jobs, blocks, strict=True)])


def _run(tasks: Sequence[_Task]) -> None:
    batches: dict[Hashable, list[_Task]] = {}
    sizes: dict[Hashable, int] = {}
    for task in tasks:
        job = task.job
        kind = job.level, id(job.spec), job.out.shape[3]
        if kind not in sizes:
            sizes[kind] = job.layout.payload_bytes
        job.check(sizes[kind])
        batches.setdefault(_alike(task), []).append(task)
    with settled(task.into.device for task in tasks):
        by_device: dict[torch.device, list[tuple[torch.Tensor, list[_Task]]]] = {}
        for batch in batches.values():
            begun = by_device.setdefault(batch[0].into.device, [])
            begun += [(_expand(some), some) for some in _pieces(batch)]
        for begun in by_device.values():
            _judge([status for status, _ in begun], [task for _, some in begun for task in some])


def _judge(found: Sequence[torch.Tensor], tasks: Sequence[_Task]) -> None:
    bad = np.flatnonzero((torch.cat(list(found)) if len(found) > 1 else found[0]).cpu().numpy())
    if len(bad):
        level = tasks[bad[0]].job.level
        raise FormatError(f"{level}: contains a number that is not finite; the payload is corrupt")


def _alike(task: _Task) -> Hashable:
    spec, into = task.job.spec, task.into
    shape = spec.layers, spec.only.halves, spec.kv_heads, spec.only.split
    return task.job.level, shape, into.device, into.dtype, into.strides


def _pieces(batch: Sequence[_Task]) -> Iterator[list[_Task]]:
    some, size, most = list[_Task](), 0, _FIRST_BYTES
    for task in batch:
        if some and size + len(task.job.payload) > most:
            yield some
            some, size, most = [], 0, min(2 * most, _MAX_BYTES)
        some.append(task)
        size += len(task.job.payload)
    yield some


def _expand(tasks: Sequence[_Task]) -> torch.Tensor:
    """Start expanding groups in one launch; return a status per group on the device, int32 [group], 0 if valid."""
    job, into = tasks[0].job, tasks[0].into
    spec, layout, device = job.spec, job.layout, into.device
    tokens = np.array([task.job.out.shape[3] for task in tasks], np.int32)
    stride, (keys, values) = int(tokens.max()), spec.only.split
    with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
        payloads = [task.job.payload for task in tasks]
        places = gathered_places(payloads)
        outs = np.stack([task.into.address + task.into.addresses for task in tasks])
        offsets = np.full((len(tasks), stride), -1, np.int64)
        for own, task in zip(offsets, tasks, strict=True):
            own[: len(task.into.offsets)] = task.into.offsets
        staging = Staging(device)
        pieces = [staging.add(each) for each in (np.array(places[:-1], np.int64), tokens, outs, offsets)]
        if lie_apart(payloads):
            data = sent_apart(payloads, places, device)
            staging.send()
        else:
            staged = staging.reserve(places[-1])
            coder.copy(payloads, staging.here(staged))
            staging.send()
            data = staging.view(staged)
        status = torch.zeros(len(tasks), dtype=torch.int32, device=device)
        blocks = max(1, head_blocks(spec.kv_heads, values))
        parts = 2 if keys and values else 0 if keys else 1
        dims = max(keys, values)
        wide = 1 << (dims - 1).bit_length()
        steps = (*into.strides, math.gcd(8, dims)) if into.strides[1] == 1 else (1,)
        run = common(*steps, divisible(outs // into.dtype.itemsize), divisible(offsets[offsets >= 0]))
        kernels.expand[(-(-stride // _TOKENS), spec.layers * (2 if parts == 2 else 1) * spec.kv_heads, len(tasks))](
            data,
            *map(staging.view, pieces),
            status,
            *into.strides,
            stride,
            spec.layers,
            spec.kv_heads,
            keys,
            values,
            layout.head_bytes,
            layout.unit_tokens,
            layout.unit_bytes,
            spec.kv_heads // blocks,
            HALVES=spec.only.halves,
            LEVEL=LEVELS[job.level],
            KIND=DTYPES[into.dtype],
            PARTS=parts,
            TOKENS=_TOKENS,
            DIMS=wide,
            RUN=run,
            WHOLE=keys in (0, wide) and values in (0, wide),
            num_warps=_WARPS,
            enable_fp_fusion=False,  # rounds each product and sum separately
        )
    return status
