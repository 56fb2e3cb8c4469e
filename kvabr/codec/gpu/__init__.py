"""AC on CUDA devices: payloads are copied to the device, and decoded to 16- or 32-bit elements there.

Of the encoder, the transform runs there (`kvabr.codec.analysis`); its rows are quantised and entropy coded on the
processor.

Needs Triton (the extra ``kvabr[gpu]``). Without it, a cache on a GPU is copied, and coded on the processor, which is
correct but slow. The result is bit for bit that of `kvabr.codec.native.reference`: the tests verify it in Triton's
interpreter. None of this has run on a GPU yet; ``tools/bench-gpu`` verifies and times it on a machine that has one.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from functools import cache
from importlib.util import find_spec
from typing import TYPE_CHECKING

from kvabr.codec.native import coder
from kvabr.codec.native.coder_model import DecodeJob

if TYPE_CHECKING:
    import numpy as np
    import torch
    from numpy.typing import NDArray

    from kvabr.codec.block_slots import BlockSlots
    from kvabr.codec.gpu import encoder
    from kvabr.codec.transform import Transform


@cache
def available() -> bool:
    """Return whether Triton is installed; warn once if not."""
    if find_spec("triton") is not None:
        return True
    warnings.warn(
        "caches on a GPU are copied, and coded on the processor: install kvabr[gpu] to code AC tracks on the GPU",
        RuntimeWarning,
        stacklevel=3,
    )
    return False


def runs_on(device: torch.device) -> bool:
    """Return whether the kernels run where tensors of this device are."""
    return device.type == "cuda" and available()


def decode_to_blocks(jobs: Sequence[DecodeJob], blocks: Sequence[BlockSlots]) -> None:
    """Decode groups straight to the blocks of a paged cache; see `decoder.decode_to_blocks`, and `runs_on`."""
    if jobs:
        from kvabr.codec.gpu import decoder  # noqa: PLC0415  # needs Triton

        decoder.decode_to_blocks(jobs, blocks)


def analyse(
    transform: Transform,
    inverses: encoder.Inverses,
    scale: NDArray[np.float32],
    group: torch.Tensor,
    first_token: int | None,
) -> encoder.Analysed:
    """Transform a group on its own device; see `encoder.analyse`, and `runs_on`."""
    from kvabr.codec.gpu import encoder  # noqa: PLC0415  # needs Triton

    return encoder.analyse(transform, inverses, scale, group, first_token)


def decode_many(jobs: Sequence[DecodeJob]) -> None:
    """Decode groups in parallel, as `coder.decode_many` does: a single group fills a hundredth of a GPU."""
    if not available():
        coder.decode_many(jobs)
        return
    from kvabr.codec.gpu import decoder  # noqa: PLC0415  # needs Triton

    decoder.decode_many(jobs)
