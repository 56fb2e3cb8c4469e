"""The host's part of decoding on a CUDA device.

Each decoding step is one launch for groups of any tracks; only entropy decoding takes one launch per table of a layer.
Inputs of a step are checked and copied while the device runs an earlier step. Errors are checked at the end.
"""

from __future__ import annotations

import threading
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
from kvabr.codec.gpu.destinations import WriteTarget, check_blocks
from kvabr.codec.gpu.staging import Staged, Staging, await_streams, lie_apart, scratch_bytes, sent_apart, settled
from kvabr.codec.gpu.tables import (
    COARSE,
    COMPONENTS,
    OUTPUTS,
    coder_tables,
    common,
    divisible,
    on_device,
    transform_tables,
)
from kvabr.codec.native import coder
from kvabr.codec.native.coder_model import DTYPES, PROBABILITY_BITS, CoderModel, DecodeJob, Shift
from kvabr.codec.native.references import TILE
from kvabr.codec.native.streams import gathered_places, rows_of_streams
from kvabr.codec.rope import rope_first, rope_shape, rope_tables
from kvabr.codec.transform import Transform
from kvabr.types.errors import FormatError
from kvabr.types.kv import RopeSpec
from kvabr.types.naming import LAYERS


class _Tile(NamedTuple):
    rows: int
    tokens: int
    warps: int
    stages: int = 3


_PREPARE, _UNSTACK, _FINISH = _Tile(64, 64, 4), _Tile(OUTPUTS, 128, 4, 4), _Tile(64, 64, 4)
DEPTHS = len(LAYERS)
_MIN_COARSE_STREAMS = 512
_MAX_WORDS = (1 << 31) - 1
_WGMMA_ROWS = 64
"""Rows of the smallest tile that Triton multiplies with wgmma, using four warps."""
_MAX_POSITIONS = 1 << 17
"""Maximum number of positions with rotary tables cached on the device."""


class _Task(NamedTuple):
    job: DecodeJob
    into: WriteTarget


def decode_many(jobs: Sequence[DecodeJob]) -> None:
    """Decode groups on the current stream, see `coder.decode_many`; return once all are verified."""
    tasks, copies = [], []
    for job in jobs:
        out = job.out.detach()
        if out.dtype not in DTYPES:
            out = torch.empty(out.shape, dtype=torch.float32, device=out.device)
            copies.append((job.out.detach(), out))
        tasks.append(_Task(job, WriteTarget.of_tensor(out)))
    _decode_all(tasks)
    for whole, out in copies:
        whole.copy_(out)
    await_streams(whole.device for whole, _ in copies)


def decode_to_blocks(jobs: Sequence[DecodeJob], blocks: Sequence[BlockSlots]) -> None:
    """Decode groups into the blocks of a paged cache on the current stream; return once all are verified.

    An error may leave blocks partly written. Of `DecodeJob.out`, only the shape is used; it may be on device ``meta``.
    """
    for job, there in zip(jobs, blocks, strict=True):
        check_blocks(job.out.shape, there)
    _decode_all([_Task(job, WriteTarget.of_blocks(there)) for job, there in zip(jobs, blocks, strict=True)])


def _decode_all(tasks: Sequence[_Task]) -> None:
    batches: dict[Hashable, list[_Task]] = {}
    for task in tasks:
        batches.setdefault(_alike(task), []).append(task)
    with settled(task.into.device for task in tasks):
        begun = []
        for batch in batches.values():
            left = iter(batch)
            while some := list(islice(left, _at_once(batch))):
                begun.append((_decode(some), some))
        for verdicts, some in begun:
            _judge(verdicts, some)


def _judge(verdicts: Sequence[_Verdict], tasks: Sequence[_Task]) -> None:
    found = [verdict.status for verdict in verdicts]
    status = (torch.cat(found) if len(found) > 1 else found[0]).cpu().numpy()
    bad = np.concatenate([verdict.groups for verdict in verdicts])[status != 0]
    if len(bad):
        raise FormatError(
            f"entropy coded part of the group from token {tasks[bad[0]].job.first_token} on: it has the wrong length; "
            "corrupt, or of another profile"
        )


def _alike(task: _Task) -> Hashable:
    job, into = task
    return id(job.transform), into.device, into.dtype, into.strides, _stride(job)


def _stride(job: DecodeJob) -> int:
    return -(-job.out.shape[3] // TILE) * TILE


def _at_once(batch: Sequence[_Task]) -> int:
    if len(batch) == 1:
        return 1
    job, into = batch[0]
    stride, tables = _stride(job), transform_tables(job.transform, into.device)
    rows = job.transform.structure.rows
    # Bytes per group: int16 indices, three planes, lists of rows, flags.
    each = stride * (2 * rows + 3 * tables.width) + rows * (4 + stride // TILE)
    return max(1, min(scratch_bytes(into.device) // each, 1 << 15))


class _Verdict(NamedTuple):
    status: torch.Tensor
    """int32 [stream] on the device: 0 if the stream is valid."""
    groups: NDArray[np.int64]


def _decode(tasks: Sequence[_Task]) -> list[_Verdict]:
    job, into = tasks[0]
    rows, stride, count, device = job.transform.structure.rows, _stride(job), len(tasks), into.device
    if rows * stride >= 1 << 31:
        raise FormatError(f"a group of {rows} x {job.out.shape[3]} coefficients is too large for the kernels")
    depths = max(len(task.job.models) for task in tasks)
    # Triton's interpreter has tensors on the CPU.
    with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
        index = torch.empty((count, rows, stride), dtype=torch.int16, device=device)
        levels = torch.empty((count, stride // TILE, rows), dtype=torch.int8, device=device)
        verdicts: list[_Verdict] = []
        order: _Order | None = None
        for depth in range(depths):
            level = _Level.load(tasks, depth, order)
            order = level.order
            for each in level.readings:
                verdicts += [_Verdict(_read(order, each, depth, index, levels), each.groups)]
        assert order is not None  # noqa: S101  # there is a depth
        _synthesise(_Batch.load(tasks), order.tokens, index, levels, into)
    return verdicts


class _Order(NamedTuple):
    tokens: torch.Tensor
    refers: torch.Tensor
    lanes: torch.Tensor
    """uint8 [group, place]: `References.lane` of each group."""
    any_refers: bool


def _order_of(tasks: Sequence[_Task]) -> tuple[NDArray[np.int32], NDArray[np.int32], NDArray[np.uint8]]:
    jobs = [task.job for task in tasks]
    lanes = np.zeros((len(jobs), _stride(jobs[0])), np.uint8)
    for own, job in zip(lanes, jobs, strict=True):
        if job.references is not None:
            own[: len(job.references.lane)] = job.references.lane
    refers = np.array([job.references is not None for job in jobs], np.int32)
    return np.array([job.out.shape[3] for job in jobs], np.int32), refers, lanes


class _Reading(NamedTuple):
    model: CoderModel
    data: torch.Tensor
    parts: torch.Tensor
    """int64 [stream, 8]: see `kernels.read_rows`."""
    groups: NDArray[np.int64]
    most: int


class _Level(NamedTuple):
    readings: list[_Reading]
    order: _Order

    @classmethod
    def load(cls, tasks: Sequence[_Task], depth: int, order: _Order | None) -> _Level:
        """Check the payloads' heads, and start to copy payloads; also copy the coding order if ``order`` is None."""
        device, rows = tasks[0].into.device, tasks[0].job.transform.structure.rows
        by_model: dict[int, list[int]] = {}
        for group, task in enumerate(tasks):
            if depth < len(task.job.models):
                by_model.setdefault(id(task.job.models[depth]), []).append(group)
        staging = Staging(device)
        ordered = [] if order is not None else [staging.add(each) for each in _order_of(tasks)]
        loaded = []
        for some in by_model.values():
            gathered = _Gathered([tasks[group].job for group in some], depth, some, rows)
            loaded.append((gathered, staging.add(gathered.parts), gathered.reserve(staging)))
        for gathered, _, staged in loaded:
            if staged is not None:
                gathered.copy(staging.here(staged))
        staging.send(first=order is None)
        if order is None:
            tokens, refers, lanes = map(staging.view, ordered)
            order = _Order(tokens, refers, lanes, any(task.job.references is not None for task in tasks))
        readings = [
            gathered.reading(gathered.apart(device) if staged is None else staging.view(staged), staging.view(parts))
            for gathered, parts, staged in loaded
        ]
        return cls(readings, order)


class _Gathered:
    def __init__(self, jobs: Sequence[DecodeJob], depth: int, groups: Sequence[int], rows: int) -> None:
        self._model, self._rows = jobs[0].models[depth], rows
        self._payloads = [job.payloads[depth] for job in jobs]
        self._tokens, self._groups = [job.out.shape[3] for job in jobs], groups
        self._places = gathered_places(self._payloads)
        self.parts = coder.gather(self._payloads, self._tokens, groups, rows, None)
        if int(self.parts[:, 4:6].max()) > _MAX_WORDS:
            raise FormatError("entropy coded part: more words than a group can have; the payload is corrupt")

    def reserve(self, staging: Staging) -> Staged | None:
        """Reserve memory to gather the payloads in; None if they should be copied directly."""
        return None if lie_apart(self._payloads) else staging.reserve(self._places[-1])

    def copy(self, here: NDArray[np.uint8]) -> None:
        coder.gather(self._payloads, self._tokens, self._groups, self._rows, here)

    def apart(self, device: torch.device) -> torch.Tensor:
        """Start to copy the payloads directly."""
        return sent_apart(self._payloads, self._places, device)

    def reading(self, data: torch.Tensor, parts: torch.Tensor) -> _Reading:
        most = int(rows_of_streams(self._rows, int(self.parts[:, 7].min()))[0])
        return _Reading(self._model, data.view(torch.int16), parts, self.parts[:, 0], most)


@dataclass(frozen=True, eq=False)
class _Batch:
    transform: Transform
    stride: int
    depth_of: torch.Tensor
    """int32 [group]: number of the highest depth, from 0."""
    track_of: torch.Tensor
    """int32 [group]: row in `delta` and `scale`."""
    delta: torch.Tensor
    """int8 [track, row]."""
    scale: torch.Tensor
    """float32 [track, layer, K/V]."""
    mean_of: torch.Tensor
    """int32 [group]: row in `mean`."""
    mean: torch.Tensor
    """float32 [mean, layer, K/V, head, dim]."""
    outs: torch.Tensor
    offsets: torch.Tensor
    """int64 [group, place]: see `WriteTarget.offsets`."""
    apart: int
    """A power of two that divides all addresses, in elements, and all offsets."""
    positions: torch.Tensor
    """int32 [group, place]: row in `rotations`; -1: not rotated."""
    rotations: tuple[torch.Tensor, torch.Tensor]
    """float32 [position, pair]: cosines and sines; empty without a rotary embedding."""

    @property
    def groups(self) -> int:
        return len(self.track_of)

    @classmethod
    def load(cls, tasks: Sequence[_Task]) -> _Batch:
        jobs, device = [task.job for task in tasks], tasks[0].into.device
        transform, stride = jobs[0].transform, _stride(jobs[0])
        staging = Staging(device)
        offsets, positions, rotations = _places(tasks, stride, device)
        keys = [(id(job.models[-1]), job.step, job.gains) for job in jobs]
        tracks = dict(zip(keys, jobs, strict=True))
        numbers = {key: number for number, key in enumerate(tracks)}
        track_of = np.array([numbers[key] for key in keys], np.int32)
        deltas = [coder_tables(job.models[-1], device).delta for job in tracks.values()]
        scale = [transform.scale(job.step, job.gains) for job in tracks.values()]
        outs = np.stack([task.into.address + task.into.addresses for task in tasks])
        means, mean_of = _means(jobs, device)
        pieces = {
            "depth_of": staging.add(np.array([len(job.models) - 1 for job in jobs], np.int32)),
            "track_of": staging.add(track_of),
            "scale": staging.add(np.stack(scale)),
            "mean_of": staging.add(mean_of),
            "outs": staging.add(outs),
            "offsets": staging.add(offsets),
            "positions": staging.add(positions),
        }
        staging.send()
        return cls(
            transform=transform,
            stride=stride,
            delta=deltas[0][None] if len(deltas) == 1 else torch.stack(deltas),
            mean=means,
            rotations=rotations,
            apart=common(divisible(outs // tasks[0].into.dtype.itemsize), divisible(offsets[offsets >= 0])),
            **{name: staging.view(piece) for name, piece in pieces.items()},
        )


def _means(jobs: Sequence[DecodeJob], device: torch.device) -> tuple[torch.Tensor, NDArray[np.int32]]:
    transform, staging = jobs[0].transform, Staging(device)
    mean_of, means = np.zeros(len(jobs), np.int32), [transform_tables(transform, device).mean[None]]
    own = [number for number, job in enumerate(jobs) if isinstance(job.mean, np.ndarray)]
    if own:
        mean_of[own] = 1 + np.arange(len(own))
        given = staging.add(np.stack([np.asarray(jobs[number].mean) for number in own]))
        staging.send()
        means.append(staging.view(given))
    by_step: dict[float, list[int]] = {}
    for number, job in enumerate(jobs):
        if isinstance(job.mean, Shift):
            by_step.setdefault(job.step, []).append(number)
    for step, some in by_step.items():
        mean_of[some] = sum(map(len, means)) + np.arange(len(some))
        shifts = [jobs[number].mean for number in some]
        means.append(_shifted(transform, step, [shift for shift in shifts if isinstance(shift, Shift)], device))
    return means[0] if len(means) == 1 else torch.cat(means), mean_of


def _shifted(transform: Transform, step: float, shifts: Sequence[Shift], device: torch.device) -> torch.Tensor:
    """Return channel means of groups, [group, layer, K/V, head, dim], from shifts decoded like tokens."""
    structure, count = transform.structure, len(shifts)
    stride = -(-count // TILE) * TILE
    layers, halves, heads, _, dim = structure.coded.shape(1)
    out = torch.empty((count, layers, halves, heads, dim), device=device)
    into = WriteTarget.of_tensor(out.permute(1, 2, 3, 0, 4))
    outs, offsets = (into.address + into.addresses)[None], np.full((1, stride), -1, np.int64)
    offsets[0, :count] = into.offsets
    staging = Staging(device)
    tokens, nothing = staging.add(np.array([count], np.int32)), staging.add(np.zeros(1, np.int32))
    scale, there = staging.add(transform.scale(step, ())[None]), staging.add(outs)
    placed, turned = staging.add(offsets), staging.add(np.full((1, stride), -1, np.int32))
    at = staging.add(np.concatenate([shift.rows * stride + group for group, shift in enumerate(shifts)]))
    amounts = staging.add(np.concatenate([shift.amounts for shift in shifts]))
    staging.send()
    index = torch.zeros((1, structure.rows, stride), dtype=torch.int16, device=device)
    index.view(-1)[staging.view(at)] = staging.view(amounts)
    batch = _Batch(
        transform=transform,
        stride=stride,
        depth_of=staging.view(nothing),
        track_of=staging.view(nothing),
        delta=torch.empty((1, 1), dtype=torch.int8, device=device),
        scale=staging.view(scale),
        mean_of=staging.view(nothing),
        mean=transform_tables(transform, device).mean[None],
        outs=staging.view(there),
        offsets=staging.view(placed),
        apart=common(divisible(outs // out.element_size()), divisible(into.offsets)),
        positions=staging.view(turned),
        rotations=_rotations(structure.coded.rope, 0, device),
    )
    _synthesise(batch, staging.view(tokens), index, None, into)
    return out


_Rotations = tuple[torch.Tensor, torch.Tensor]


def _places(
    tasks: Sequence[_Task], stride: int, device: torch.device
) -> tuple[NDArray[np.int64], NDArray[np.int32], _Rotations]:
    offsets, positions = np.full((len(tasks), stride), -1, np.int64), np.full((len(tasks), stride), -1, np.int32)
    rope = tasks[0].job.transform.structure.coded.rope
    ends = [0 if job.first_token is None else job.first_token + job.out.shape[3] for job, _ in tasks]
    near = max(ends) <= _MAX_POSITIONS
    far, rows = [], 0
    for group, (job, into) in enumerate(tasks):
        tokens = job.out.shape[3]
        token = np.arange(tokens) if job.references is None else job.references.order
        offsets[group, :tokens] = into.offsets[token]
        if job.first_token is not None:
            positions[group, :tokens] = token + (job.first_token if near else rows)
            if not near:
                far.append(rope_tables(rope, job.first_token, tokens))
                rows += tokens
    if near or rope is None:
        return offsets, positions, _rotations(rope, max(ends), device)
    cos, sin = (on_device(np.concatenate(tables), device) for tables in zip(*far, strict=True))
    return offsets, positions, (cos, sin)


_turned: dict[tuple[RopeSpec | None, torch.device], _Rotations] = {}
_turning = threading.Lock()


def _rotations(rope: RopeSpec | None, positions: int, device: torch.device) -> _Rotations:
    with _turning:
        known = _turned.get((rope, device))
        have = 0 if known is None else len(known[0])
        if known is None or have < positions:
            more = rope_tables(rope, have, max(TILE, 1 << (positions - 1).bit_length()) - have)
            cos, sin = (on_device(table, device) for table in more)
            known = (cos, sin) if known is None else (torch.cat((known[0], cos)), torch.cat((known[1], sin)))
            if device.type == "cuda":
                torch.cuda.current_stream(device).synchronize()  # other streams use them too
            _turned[rope, device] = known
        return known


def _read(order: _Order, reading: _Reading, depth: int, index: torch.Tensor, levels: torch.Tensor) -> torch.Tensor:
    """Decode the streams of one depth, given the depths below; return int32 [stream], 0 for valid streams."""
    model, device = reading.model, index.device
    tables, streams = coder_tables(model, device), len(reading.parts)
    status = torch.empty(streams, dtype=torch.int32, device=device)
    coarse = COARSE if streams >= _MIN_COARSE_STREAMS else 0
    kernels.read_rows[(streams,)](
        reading.data,
        reading.parts,
        order.tokens,
        tables.coding_order,
        tables.chances,
        tables.entries,
        tables.coarse,
        tables.bucket,
        order.refers,
        order.lanes,
        levels,
        index,
        torch.empty((streams, reading.most), dtype=torch.int32, device=device),
        status,
        model.rows,
        reading.most,
        depth,
        index.shape[2],
        model.classes * model.contexts << PROBABILITY_BITS,
        1 if model.near is None else model.near.freqs.shape[1],
        REFINES=model.refines,
        NEAR=order.any_refers and model.near is not None,
        VOTES=device.type == "cuda",
        COARSE=coarse,
        num_warps=1,  # votes of one warp need no barriers
        num_stages=1,
        enable_fp_fusion=False,
    )
    return status


def _channels_together(dim: int, rope: RopeSpec | None, pairs: int, into: WriteTarget, apart: int) -> int:
    """Return the number of consecutive channels that, like their rotation partners, are adjacent in memory."""
    rotary, interleaved = rope_shape(rope)
    if interleaved or dim % 2 or into.strides[1] != 1:
        return 1
    return common(dim // 2, rotary // 2, rope_first(rope), pairs, into.strides[0], apart)


def _wraps(device: torch.device, outputs: int) -> bool:
    """Return True if a tile of ``outputs`` rows uses wgmma, which wraps sums; mma saturates."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == 9 and outputs >= _WGMMA_ROWS


def _tokens(tile: _Tile, *, wraps: bool) -> int:
    """Return the number of tokens in a tile of products; half as many if sums do not wrap."""
    return tile.tokens if wraps else tile.tokens // 2


def _synthesise(
    batch: _Batch, tokens_of: torch.Tensor, index: torch.Tensor, levels: torch.Tensor | None, into: WriteTarget
) -> None:
    """Convert indices (coefficients if ``levels`` is None) to elements; ``tokens_of`` is int32 [group]."""
    device, structure = index.device, batch.transform.structure
    spec, rows, stride = structure.coded, structure.rows, batch.stride
    rotary, interleaved = rope_shape(spec.rope)
    tables = transform_tables(batch.transform, device)
    planes = torch.empty((3, batch.groups, stride, tables.width), dtype=torch.int8, device=device)
    plane = planes[0].numel()
    kernels.prepare[(-(-rows // _PREPARE.rows), stride // _PREPARE.tokens, batch.groups)](
        index,
        index if levels is None else levels,
        batch.depth_of,
        batch.delta,
        batch.track_of,
        tables.row_gain,
        tables.row_place,
        planes,
        plane,
        tokens_of,
        rows,
        stride,
        tables.width,
        ROWS=_PREPARE.rows,
        TOKENS=_PREPARE.tokens,
        RUN=tables.run,
        WHOLE=levels is not None,
        DEPTHS=DEPTHS,
        num_warps=_PREPARE.warps,
        enable_fp_fusion=False,
    )
    if len(tables.tiles):
        wraps = _wraps(device, OUTPUTS)
        tokens = _tokens(_UNSTACK, wraps=wraps)
        kernels.unstack[(len(tables.tiles), stride // tokens, batch.groups)](
            planes,
            plane,
            tables.tiles,
            tables.stack_mantissa,
            tables.output_gain,
            tables.output_place,
            tokens_of,
            stride,
            tables.width,
            OUTPUTS=OUTPUTS,
            RUN=tables.run,
            TOKENS=tokens,
            COMPONENTS=COMPONENTS,
            WRAPS=wraps,
            num_warps=_UNSTACK.warps,
            num_stages=min(_UNSTACK.stages, tables.max_tiles),
            enable_fp_fusion=False,
        )
    pairs = min(_FINISH.rows, max(32, 1 << (-(-structure.dim // 2) - 1).bit_length()))
    pair_tiles = -(-structure.dim // (2 * pairs))
    wraps = _wraps(device, pairs)
    tokens = _tokens(_FINISH, wraps=wraps)
    jobs = spec.layers * structure.halves * spec.kv_heads * pair_tiles * (stride // tokens)
    kernels.finish[(jobs, batch.groups)](
        planes,
        plane,
        tables.first_place,
        tables.mantissa,
        batch.scale,
        batch.track_of,
        batch.mean,
        batch.mean_of,
        *batch.rotations,
        batch.positions,
        batch.outs,
        batch.offsets,
        tokens_of,
        *into.strides,
        stride,
        tables.width,
        batch.outs.shape[1],
        spec.kv_heads,
        structure.dim,
        structure.block_heads,
        tables.padded,
        rotary // 2,
        rope_first(spec.rope),
        HALVES=structure.halves,
        KIND=DTYPES[into.dtype],
        BLOCKS=batch.transform.block is not None,
        INTERLEAVED=bool(interleaved),
        PAIRS=pairs,
        WHOLE=structure.dim == 2 * pairs * pair_tiles,
        RUN=_channels_together(structure.dim, spec.rope, pairs, into, batch.apart),
        TOKENS=tokens,
        COMPONENTS=COMPONENTS,
        WRAPS=wraps,
        num_warps=_FINISH.warps,
        num_stages=min(_FINISH.stages, tables.padded // COMPONENTS),
        enable_fp_fusion=False,  # rounds each product and sum separately
    )
