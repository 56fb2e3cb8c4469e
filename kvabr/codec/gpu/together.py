"""Decodes the groups of several threads in batches, one at a time per device, and verifies the kernels.

A compiler bug must not corrupt a model's output. So the first group of each kind, and of each variant of the kernels,
is compared with the processor's result. If kernels fail (no compiler, or no memory), the processor takes over, with one
warning.

Compiling takes seconds. While one thread is `trying` a profile's kernels, the processor decodes other threads' groups
of unknown kinds.
"""

from __future__ import annotations

import math
import struct
import sys
import threading
from collections import Counter
from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch

from kvabr.codec.block_slots import BlockSlots
from kvabr.codec.gpu.batches import Batches, warn_of
from kvabr.codec.gpu.level_job import LevelJob
from kvabr.codec.native import coder
from kvabr.codec.native.coder_model import DecodeJob, derived
from kvabr.codec.native.streams import STREAMED
from kvabr.types.errors import FormatError, UsageError
from kvabr.types.once import once


class PlacedJob(NamedTuple):
    """A group and its destination."""

    job: DecodeJob | LevelJob
    blocks: BlockSlots | None

    @property
    def device(self) -> torch.device:
        """Device of the kernels."""
        return self.job.out.device if self.blocks is None else self.blocks.device


def decode(tasks: Sequence[PlacedJob]) -> list[Exception | None]:
    """Decode groups on their devices, batched with other threads' groups; return each group's error, or None.

    A `FormatError` means that a payload is invalid; other errors are those of the machine.
    """
    errors: list[Exception | None] = [None] * len(tasks)
    by_device: dict[torch.device, list[int]] = {}
    for number, task in enumerate(tasks):
        by_device.setdefault(task.device, []).append(number)
    for device, own in by_device.items():
        some = [tasks[number] for number in own]
        found = _decoded(some) if device in _devices_tried() else _batches(device).run(some)
        for number, error in zip(own, found, strict=True):
            errors[number] = error
    return errors


_SWITCH_S = 0.0002
_usual_s: list[float] = []
_lock = threading.Lock()
_tried: Counter[torch.device] = Counter()
_tried_here = threading.local()


def _devices_tried() -> frozenset[torch.device]:
    devices: frozenset[torch.device] = getattr(_tried_here, "devices", frozenset())
    return devices


@contextmanager
def trying(device: torch.device) -> Iterator[None]:
    """Let this thread compile and verify kernels; other threads do not wait for it."""
    before = _devices_tried()
    _tried_here.devices = before | {device}
    try:
        with _lock:
            _tried[device] += 1
            _yield_often(_tried.total())
        yield
    finally:
        _tried_here.devices = before
        with _lock:
            _tried[device] -= 1
            _yield_often(_tried.total())


def _yield_often(trying: int) -> None:
    """Shorten the GIL's switch interval while kernels compile, so that decoding threads get it sooner."""
    if trying and sys.getswitchinterval() > _SWITCH_S:
        _usual_s.append(sys.getswitchinterval())
        sys.setswitchinterval(_SWITCH_S)
    elif not trying and _usual_s:
        sys.setswitchinterval(_usual_s.pop())


@once
def _batches(device: torch.device) -> Batches[PlacedJob, None]:
    return Batches(device, _decoded)


def _decoded(tasks: Sequence[PlacedJob]) -> list[Exception | None]:
    if len(tasks) > 1 and _failed(tasks) is None:
        return [None] * len(tasks)
    return [_failed([task]) for task in tasks]


def _failed(tasks: Sequence[PlacedJob]) -> Exception | None:
    """Decode groups and return their error. If the device fails for a single group, decode it on the processor."""
    crowded = _crowded(tasks)
    try:
        if any(_checked(task.job).get((_kind(task), crowded)) is False for task in tasks):
            raise UsageError("the kernels of this GPU gave other numbers than the processor")  # noqa: TRY301  # see below
        if _is_tried_elsewhere(tasks[0].device) and not all(
            (_kind(task), crowded) in _checked(task.job) for task in tasks
        ):
            raise _NotYet  # noqa: TRY301  # see below
        _by_kernels(tasks)
        for task in {(id(_checked(task.job)), _kind(task)): task for task in tasks}.values():
            _compare(task, crowded)
    except FormatError as error:
        return error
    except Exception as error:  # noqa: BLE001  # no memory, or no compiler: whatever it is, the processor can
        if len(tasks) > 1:
            return error
        if not isinstance(error, _NotYet):
            warn_of("decoded", error)
        try:
            _by_processor(tasks[0])
        except Exception as wrong:  # noqa: BLE001  # raised here, it would end the other groups of the batch, too
            return wrong
    return None


class _NotYet(Exception):  # noqa: N818  # nothing is wrong
    pass


def _is_tried_elsewhere(device: torch.device) -> bool:
    return bool(_tried[device]) and device not in _devices_tried()


def _by_kernels(tasks: Sequence[PlacedJob]) -> None:
    from kvabr.codec.gpu import decoder, levels  # noqa: PLC0415  # need Triton

    plain = [task.job for task in tasks if task.blocks is None]
    paged = [(task.job, task.blocks) for task in tasks if task.blocks is not None]
    if jobs := [job for job in plain if isinstance(job, DecodeJob)]:
        decoder.decode_many(jobs)
    if levelled := [job for job in plain if isinstance(job, LevelJob)]:
        levels.expand_many(levelled)
    if placed := [(job, blocks) for job, blocks in paged if isinstance(job, DecodeJob)]:
        decoder.decode_to_blocks(*zip(*placed, strict=True))
    if there := [(job, blocks) for job, blocks in paged if isinstance(job, LevelJob)]:
        levels.expand_to_blocks(*zip(*there, strict=True))


def _by_processor(task: PlacedJob) -> None:
    if task.blocks is not None:
        task.blocks.write(_own(task))
    elif isinstance(task.job, DecodeJob):
        coder.decode_many([task.job])
    else:
        task.job.out.copy_(_own(task))
    if task.device.type == "cuda":  # its thread may use another stream
        torch.cuda.current_stream(task.device).synchronize()


def _own(task: PlacedJob) -> torch.Tensor:
    job = task.job
    out = torch.empty(job.out.shape, dtype=job.out.dtype if task.blocks is None else task.blocks.dtype)
    if isinstance(job, DecodeJob):
        coder.decode_many([replace(job, out=out)])
    else:
        job.decode(out)
    return out


_expanded: dict[Hashable, bool] = {}


def _checked(job: DecodeJob | LevelJob) -> dict[Hashable, bool]:
    """Return the kinds and crowds (`_kind`, `_crowded`) compared so far: True if equal to the processor's result."""
    return derived(job.transform, "checked", dict) if isinstance(job, DecodeJob) else _expanded


def _kind(task: PlacedJob) -> Hashable:
    job, blocks = task
    if blocks is None:
        dtype, strides = job.out.dtype, job.out.stride()
        apart = math.gcd(16, job.out.data_ptr() // job.out.element_size(), *strides[:2])
    else:
        dtype, strides = blocks.dtype, blocks.first.stride()
        apart = math.gcd(16, strides[0], int(np.bitwise_or.reduce(blocks.checked.addresses)) // dtype.itemsize)
    along = tuple((math.gcd(16, stride), stride == 1) for stride in strides[-3:])
    if isinstance(job, DecodeJob):
        own: tuple[Hashable, ...] = (*map(id, job.models), job.references is None, type(job.mean).__name__)
    else:
        own = (job.level, job.spec.only.halves, *job.spec.only.split)
    return own, dtype, along, apart, task.device, blocks is None


_FIRST = struct.Struct("<I")
CROWDED = 512


def _crowded(tasks: Sequence[PlacedJob]) -> bool:
    streams: dict[int, int] = {}
    for job in (task.job for task in tasks if isinstance(task.job, DecodeJob)):
        for model, payload in zip(job.models, job.payloads, strict=False):
            head = memoryview(payload)[: _FIRST.size]
            number = _FIRST.unpack(head)[0] if len(head) == _FIRST.size else 0
            streams[id(model)] = streams.get(id(model), 0) + max(1, number - STREAMED)
    return max(streams.values(), default=0) >= CROWDED


def _compare(task: PlacedJob, crowded: bool) -> None:  # crowded is part of the key
    """Compare the first group of a kind with the processor's result; raise `UsageError` if they differ."""
    checked, kind = _checked(task.job), (_kind(task), crowded)
    if kind in checked:
        return
    out, own = task.job.out, _own(task)
    if task.blocks is not None:
        out, used = _read(task.blocks), torch.from_numpy(np.flatnonzero(task.blocks.slots >= 0))
        own = own[:, :, :, used]
    if not torch.equal(_bytes(out), _bytes(own)):
        checked[kind] = False
        raise UsageError("the kernels of this GPU gave other numbers than the processor")
    checked[kind] = True


def _read(blocks: BlockSlots) -> torch.Tensor:
    used = BlockSlots(blocks.checked, blocks.slots[blocks.slots >= 0])
    _, heads, _, dim = used.first.shape
    out = used.first.new_empty((len(used.layers), len(used.layers[0]), heads, len(used.slots), dim))
    used.read(out)
    return out


def _bytes(out: torch.Tensor) -> torch.Tensor:
    # Flat: a copy keeps the order of memory; `view` rejects the stride that a dimension of 1 may have.
    return out.cpu().reshape(-1).view(torch.uint8)
