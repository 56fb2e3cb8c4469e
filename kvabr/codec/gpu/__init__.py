"""AC on CUDA devices: copies payloads there and decodes them to 16- or 32-bit elements; encodes caches there.

Requires Triton (the extra ``gpu``); without it, a GPU's cache is coded on the processor, which is slower. Results are
bit-identical to `kvabr.codec.native.coder`: tests verify this in Triton's interpreter, ``tools/bench-gpu`` on a GPU.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import cache
from importlib.util import find_spec
from typing import TYPE_CHECKING

import torch

from kvabr.codec.gpu import together
from kvabr.codec.gpu.level_job import LevelJob
from kvabr.codec.native import coder
from kvabr.codec.native.coder_model import DecodeJob
from kvabr.types.installing import WHERE, extra

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from kvabr.codec.block_slots import BlockSlots
    from kvabr.codec.gpu import encoder
    from kvabr.codec.transform import Transform


@cache
def available() -> bool:
    """Return True if Triton is installed; warn once if not."""
    if find_spec("triton") is not None:
        return True
    warnings.warn(
        "caches on a GPU are copied to the processor and coded there; the extra gpu codes AC tracks on the GPU: "
        f"{extra('gpu')} ({WHERE})",
        RuntimeWarning,
        stacklevel=3,
    )
    return False


def runs_on(device: torch.device) -> bool:
    """Return True if the kernels run on tensors of this device."""
    return device.type == "cuda" and available()


def decode_to_blocks(jobs: Sequence[DecodeJob | LevelJob], blocks: Sequence[BlockSlots]) -> list[Exception | None]:
    """Decode groups directly into the blocks of a paged cache; return each group's error, or None.

    Of each job's ``out``, only the shape is used. An error may leave blocks partly written. The device must satisfy
    `runs_on`.
    """
    return together.decode([together.PlacedJob(job, there) for job, there in zip(jobs, blocks, strict=True)])


def trying(device: torch.device) -> AbstractContextManager[None]:
    """Compile and verify kernels in this thread; see `kvabr.codec.gpu.together.trying`."""
    return together.trying(device)


def pin(address: int, size: int) -> Callable[[], object] | None:
    """Pin memory for all devices; see `kvabr.store.buffers.Pin`."""
    from kvabr.codec.gpu import staging  # noqa: PLC0415  # which knows codecs, which know this package

    return staging.pin(address, size)


def analyse(
    transform: Transform,
    inverses: encoder.Inverses,
    scale: NDArray[np.float32],
    group: torch.Tensor,
    first_token: int | None,
) -> encoder.Analysed:
    """Transform a group on its device; see `encoder.analyse`. The device must satisfy `runs_on`."""
    from kvabr.codec.gpu import encoder  # noqa: PLC0415  # needs Triton

    return encoder.analyse(transform, inverses, scale, group, first_token)


def expand(job: LevelJob) -> None:
    """Expand a group of a cast or integer level. The device must satisfy `runs_on`."""
    (error,) = together.decode([together.PlacedJob(job, None)])
    if error is not None:
        raise error


def decode_many(jobs: Sequence[DecodeJob]) -> None:
    """Decode groups in parallel like `coder.decode_many`, in batches with other threads' groups.

    A single group does not fill a GPU, so groups that arrive during a batch form the next batch. The first group of
    each kind is compared with the processor's result (`kvabr.codec.gpu.together`).
    """
    if not available():
        coder.decode_many(jobs)
        return
    for error in together.decode([together.PlacedJob(job, None) for job in jobs]):
        if error is not None:
            raise error
