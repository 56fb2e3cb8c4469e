"""Groups that several threads ask for are decoded together, one batch at a time on each device, and checked.

The cache of a prompt is what a model goes by: a compiler's error must not show as words. So the first group of each
kind, and of each variant of the kernels, is decoded on the processor as well, and compared. What kernels cannot decode
(there is no compiler, or no memory), the processor does: that is right, but slower, and a warning says so once.
"""

from __future__ import annotations

import math
import struct
import threading
import warnings
from collections.abc import Hashable, Sequence
from dataclasses import replace
from functools import cache
from typing import NamedTuple

import numpy as np
import torch

from kvabr.codec.block_slots import BlockSlots
from kvabr.codec.native import coder
from kvabr.codec.native.coder_model import DecodeJob, derived
from kvabr.codec.native.reference import STREAMED
from kvabr.types.errors import FormatError, UsageError


class PlacedJob(NamedTuple):
    """A group, and where to."""

    job: DecodeJob
    blocks: BlockSlots | None
    """None: `DecodeJob.out`."""

    @property
    def device(self) -> torch.device:
        """Where the kernels run."""
        return self.job.out.device if self.blocks is None else self.blocks.device


def decode(tasks: Sequence[PlacedJob]) -> list[Exception | None]:
    """Decode groups on their devices, together with those that other threads ask for; return what is wrong with each.

    Errors of a group are `FormatError`.
    """
    errors: list[Exception | None] = [None] * len(tasks)
    by_device: dict[torch.device, list[int]] = {}
    for number, task in enumerate(tasks):
        by_device.setdefault(task.device, []).append(number)
    for device, own in by_device.items():
        for number, error in zip(own, _batches(device).decode([tasks[number] for number in own]), strict=True):
            errors[number] = error
    return errors


class _Asked:
    """What one thread asks for."""

    def __init__(self, tasks: Sequence[PlacedJob]) -> None:
        self.tasks = tasks
        self.done = False
        self.errors: list[Exception | None] = [None] * len(tasks)
        devices = {task.device for task in tasks if task.device.type == "cuda"}
        self._ready = [(device, torch.cuda.current_stream(device).record_event()) for device in devices]

    def await_memory(self) -> None:
        """Make this thread's streams wait for what the other thread's still do to the memory to write to."""
        for device, event in self._ready:
            torch.cuda.current_stream(device).wait_event(event)


class Batches:
    """Decodes what several threads ask for on one device. The thread that finds nobody at work does it for all."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._waiting: list[_Asked] = []
        self._working = False

    def decode(self, tasks: Sequence[PlacedJob]) -> list[Exception | None]:
        """Return when these groups are decoded, what is wrong with each, whatever becomes of other threads'."""
        own, asked = _Asked(tasks), list[_Asked]()
        try:
            with self._changed:
                self._waiting.append(own)
                self._changed.wait_for(lambda: own.done or not self._working)
                if not own.done:
                    asked, self._waiting = self._waiting, []
                    self._working = True
            self._run(asked)
        finally:  # Ctrl-C, perhaps: nobody waits for what does not come, and nothing is done for who is gone
            with self._changed:
                for each in asked:
                    if not each.done:
                        each.errors = [FormatError("decoding was interrupted")] * len(each.tasks)
                        each.done = True
                if own in self._waiting:
                    self._waiting.remove(own)
                if asked:
                    self._working = False
                    self._changed.notify_all()
        return own.errors

    def _run(self, asked: Sequence[_Asked]) -> None:
        for each in asked:
            each.await_memory()
        whole = [task for each in asked for task in each.tasks]
        if len(whole) > 1 and _failed(whole) is None:
            for each in asked:
                each.done = True
        for each in asked:  # which group was it?
            if not each.done:
                each.errors, each.done = [_failed([task]) for task in each.tasks], True


@cache
def _batches(device: torch.device) -> Batches:
    """Return the batches of a device."""
    del device
    return Batches()


def _failed(tasks: Sequence[PlacedJob]) -> Exception | None:
    """Decode groups, a single one on the processor if the device cannot; return what is wrong with them."""
    crowded = _crowded(tasks)
    try:
        if any(_checked(task.job).get((_kind(task), crowded)) is False for task in tasks):
            raise UsageError("its kernels gave other numbers than the processor")  # noqa: TRY301  # see below
        _by_kernels(tasks)
        for task in {(id(task.job.transform), _kind(task)): task for task in tasks}.values():
            _compare(task, crowded)
    except FormatError as error:
        return error
    except Exception as error:  # noqa: BLE001  # no memory, or no compiler: whatever it is, the processor can
        if len(tasks) > 1:
            return error
        _warn(f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else 'no reason given'}")
        try:
            _by_processor(tasks[0])
        except FormatError as wrong:
            return wrong
    return None


def _by_kernels(tasks: Sequence[PlacedJob]) -> None:
    from kvabr.codec.gpu import decoder  # noqa: PLC0415  # needs Triton

    if plain := [task.job for task in tasks if task.blocks is None]:
        decoder.decode_many(plain)
    if paged := [(task.job, task.blocks) for task in tasks if task.blocks is not None]:
        decoder.decode_to_blocks(*zip(*paged, strict=True))


def _by_processor(task: PlacedJob) -> None:
    if task.blocks is None:
        coder.decode_many([task.job])
        return
    task.blocks.write(_own(task))


def _own(task: PlacedJob) -> torch.Tensor:
    """Return what the processor makes of a group."""
    dtype = task.job.out.dtype if task.blocks is None else task.blocks.dtype
    job = replace(task.job, out=torch.empty(task.job.out.shape, dtype=dtype))
    coder.decode_many([job])
    return job.out


def _checked(job: DecodeJob) -> dict[Hashable, bool]:
    """Return whether a profile's groups, by `_kind` and `_crowded`, are decoded with the processor's result."""
    return derived(job.transform, "checked", dict)


def _kind(task: PlacedJob) -> Hashable:
    """Return what a device's compiler makes other code for, and which tables it uses."""
    job, blocks = task
    if blocks is None:
        dtype, strides = job.out.dtype, job.out.stride()
        apart = math.gcd(16, job.out.data_ptr() // job.out.element_size(), *strides[:2])
    else:
        dtype, strides = blocks.dtype, blocks.first.stride()
        apart = math.gcd(16, strides[0], int(np.bitwise_or.reduce(blocks.checked.addresses)) // dtype.itemsize)
    along = tuple((math.gcd(16, stride), stride == 1) for stride in strides[-3:])
    models = tuple(map(id, job.models))
    return models, job.references is None, dtype, along, apart, task.device, blocks is None


_FIRST = struct.Struct("<I")
CROWDED = 512
"""Streams of one depth from which on `decoder` runs another variant of a kernel."""


def _crowded(tasks: Sequence[PlacedJob]) -> bool:
    """Return whether so many streams are decoded at once that kernels are used which few streams do not use."""
    streams: dict[int, int] = {}
    for task in tasks:
        for model, payload in zip(task.job.models, task.job.payloads, strict=False):
            head = memoryview(payload)[: _FIRST.size]
            number = _FIRST.unpack(head)[0] if len(head) == _FIRST.size else 0
            streams[id(model)] = streams.get(id(model), 0) + max(1, number - STREAMED)
    return max(streams.values(), default=0) >= CROWDED


def _compare(task: PlacedJob, crowded: bool) -> None:  # a part of the key
    """Compare the first group of a kind with what the processor makes of it; raise a `UsageError` if they differ."""
    checked, kind = _checked(task.job), (_kind(task), crowded)
    if kind in checked:
        return
    out, own = task.job.out, _own(task)
    if task.blocks is not None:
        out, used = _read(task.blocks), torch.from_numpy(np.flatnonzero(task.blocks.slots >= 0))
        own = own[:, :, :, used]
    if not torch.equal(_bytes(out), _bytes(own)):
        checked[kind] = False
        raise UsageError("its kernels gave other numbers than the processor")
    checked[kind] = True


def _read(blocks: BlockSlots) -> torch.Tensor:
    """Return the tokens of a group that are in blocks, [layer, K/V, head, token, dim]."""
    at, size = torch.from_numpy(blocks.slots[blocks.slots >= 0]).to(blocks.device), blocks.first.shape[2]
    return torch.stack(
        [torch.stack([view[at // size, :, at % size].transpose(0, 1) for view in layer]) for layer in blocks.layers]
    )


def _bytes(out: torch.Tensor) -> torch.Tensor:
    """Return the bytes of a tensor on any device, in the order of its indices."""
    # Flat: a copy keeps the order of memory, and then the stride of a dimension of 1 need not be 1, which `view` wants.
    return out.cpu().reshape(-1).view(torch.uint8)


@cache
def _warn(reason: str) -> None:
    warnings.warn(
        f"a group was decoded on the processor, not on its GPU: right, but slower ({reason})",
        RuntimeWarning,
        stacklevel=2,
    )
