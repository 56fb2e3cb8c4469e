"""Expands received groups directly into their destination: a tensor, layers, or blocks of a paged cache.

On a CUDA device with Triton, kernels write each number to its destination, and groups of any tracks and depths share
launches. For other codecs and destinations, groups are first decoded to scratch memory on the device, with identical
bits. On a processor each group takes a thread.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import NamedTuple, Protocol, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from kvabr.codec import gpu
from kvabr.codec.ac import Ac, ParsedPayload
from kvabr.codec.base import GroupContext, codec
from kvabr.codec.block_slots import BlockSlots, Place, TensorPlace
from kvabr.codec.gpu.level_job import LevelJob
from kvabr.codec.group import decode_payload, has_kernel
from kvabr.codec.native.coder_model import DTYPES, DecodeJob
from kvabr.types.errors import FormatError

_Item = TypeVar("_Item")
_Result = TypeVar("_Result")

_SCRATCH_BYTES = 256 << 20


class CodedGroup(NamedTuple):
    """A compressed group from checked frames."""

    payload: memoryview
    track: str
    context: GroupContext
    below: Sequence[memoryview] = ()
    """Payloads of the tracks below, base first; untrusted."""
    number: int = 0
    """Number of the group in its track, for error messages."""

    @property
    def nbytes(self) -> int:
        """Total bytes of the payloads."""
        return self.payload.nbytes + sum(each.nbytes for each in self.below)


class _Each(Protocol):
    def __call__(self, work: Callable[[_Item], _Result], items: Iterable[_Item], /) -> Iterable[_Result]: ...


def expand(groups: Sequence[CodedGroup], places: Sequence[Place], each: _Each = map) -> list[Exception | None]:
    """Decode groups of any tracks and depths into their places; return each group's error, or None.

    A group with an error is written partly or not at all. A `FormatError` means that its payload is invalid, see
    `kvabr.codec.group.decode_payload`; other errors are those of the machine. ``each``, called like `map`, runs the
    work on the processor.
    """
    errors: dict[int, Exception | None] = {}
    kernels: list[_Kernel] = []
    for number, (group, place) in enumerate(zip(groups, places, strict=True)):
        try:
            job = _job(group, place)
        except Exception as error:  # noqa: BLE001  # whatever a codec raises, it is this group's
            errors[number] = error
        else:
            if job is not None:
                kernels.append(_Kernel(number, *job, place.direct))
    direct = [kernel for kernel in kernels if kernel.slots is not None]
    for some in (direct, *_portions([kernel for kernel in kernels if kernel.slots is None])):
        try:
            errors |= _by_kernels(groups, places, some)
        except Exception as error:  # noqa: BLE001  # no memory for scratch, say: as of each group
            errors |= dict.fromkeys((kernel.number for kernel in some), error)

    spare: list[torch.Tensor] = []

    def decoded(number: int) -> Exception | None:
        try:
            _decode(groups[number], places[number], spare)
        except Exception as error:  # noqa: BLE001  # as above
            return error
        return None

    rest = [number for number in range(len(groups)) if number not in errors]
    host = [number for number in rest if places[number].device.type == "cpu"]
    elsewhere = [number for number in rest if places[number].device.type != "cpu"]
    errors |= zip(elsewhere, map(decoded, elsewhere), strict=True)
    errors |= zip(host, each(decoded, host), strict=True)
    return [errors[number] for number in range(len(groups))]


class _Kernel(NamedTuple):
    number: int
    job: DecodeJob | LevelJob
    parts: list[ParsedPayload]
    slots: BlockSlots | None


def _job(group: CodedGroup, place: Place) -> tuple[DecodeJob | LevelJob, list[ParsedPayload]] | None:
    shape = group.context.spec.shape(group.context.tokens)
    if not place.fits(shape):
        raise FormatError(f"the place must have the shape {shape} of the group")
    made, context = codec(group.track), group.context
    if place.dtype not in DTYPES or not gpu.runs_on(place.device):
        return None
    out = torch.empty(shape, dtype=place.dtype, device="meta")
    if isinstance(made, Ac):
        return made.job(group.payload, context, out, group.below)
    if has_kernel(made, place.device) and not (context.free and context.at is not None):
        return LevelJob(group.track, group.payload, context.spec, out, partial(made.decode, group.payload, context)), []
    return None


def _portions(kernels: Sequence[_Kernel]) -> Iterator[list[_Kernel]]:
    some: list[_Kernel] = []
    for kernel in kernels:
        if some and sum(one.job.out.nbytes for one in some) + kernel.job.out.nbytes > _SCRATCH_BYTES:
            yield some
            some = []
        some.append(kernel)
    yield some


def _by_kernels(
    groups: Sequence[CodedGroup], places: Sequence[Place], kernels: Sequence[_Kernel]
) -> dict[int, Exception | None]:
    scratch = {
        kernel.number: TensorPlace(torch.empty_like(kernel.job.out, device=places[kernel.number].device))
        for kernel in kernels
        if kernel.slots is None
    }
    slots = [kernel.slots or scratch[kernel.number].direct for kernel in kernels]
    errors = gpu.decode_to_blocks([kernel.job for kernel in kernels], slots) if kernels else []
    stored = _Stored()
    for kernel, into, error in zip(kernels, slots, errors, strict=True):
        made = scratch.get(kernel.number, places[kernel.number])
        if error is None:
            for part in kernel.parts:
                stored.add(part, groups[kernel.number].context, made.whole, into)
    stored.place()
    for kernel, error in zip(kernels, errors, strict=True):
        if error is None and kernel.slots is None:
            places[kernel.number].write(scratch[kernel.number].whole)
    return {kernel.number: error for kernel, error in zip(kernels, errors, strict=True)}


class _Stored:
    """Collects the separately stored tokens of all groups of a paged cache, to write them in one call."""

    def __init__(self) -> None:
        self._found: dict[int, tuple[BlockSlots, list[NDArray[np.int64]], list[torch.Tensor]]] = {}

    def add(self, part: ParsedPayload, context: GroupContext, whole: torch.Tensor | None, into: BlockSlots) -> None:
        if not len(part.tokens):
            return
        if whole is not None:
            part.place(whole, context)
            return
        _, slots, values = self._found.setdefault(id(into.checked), (into, [], []))
        slots.append(into.slots[part.tokens])
        values.append(part.stored(context, into.dtype, torch.device("cpu")))

    def place(self) -> None:
        for into, slots, values in self._found.values():
            # The same slots may occur twice, if a group was decoded twice.
            every, first = np.unique(np.concatenate(slots), return_index=True)
            BlockSlots(into.checked, every).write(torch.cat(values, dim=3)[:, :, :, torch.from_numpy(first)])


def _decode(group: CodedGroup, place: Place, spare: list[torch.Tensor]) -> None:
    context, out = group.context, place.whole
    if out is not None:
        decode_payload(group.payload, group.track, context, group.number, out, group.below)
        return
    shape = context.spec.shape(context.tokens)
    need = torch.Size(shape).numel() * place.dtype.itemsize
    # Reuse scratch memory: the system would clear new memory page by page for every group.
    try:
        held = spare.pop()
    except IndexError:
        held = torch.empty(0, dtype=torch.uint8)
    if len(held) < need or held.device != place.device:
        held = torch.empty(need, dtype=torch.uint8, device=place.device)
    out = held[:need].view(place.dtype).view(shape)
    decode_payload(group.payload, group.track, context, group.number, out, group.below)
    place.write(out)
    spare.append(held)
