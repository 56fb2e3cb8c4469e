"""AC decoding on CUDA devices: the payloads travel to the device, and nothing but 16- or 32-bit elements comes of them.

An extra (``kvabr[gpu]``), for it needs Triton. Without that a cache on a GPU is decoded on the processor and copied,
which is right but slow. Bit for bit what `kvabr.codec.native.reference` gives; the tests show that in Triton's
interpreter, and compile the kernels for GPUs. On a GPU none of this has been run or timed yet: ``tools/bench-gpu`` does
both where there is one.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from functools import cache
from importlib.util import find_spec

import torch

from kvabr.codec.native import coder
from kvabr.codec.native.coder import DecodeJob
from kvabr.codec.native.model import CoderModel, SynthesisModel

__all__ = ["available", "decode", "decode_many"]


@cache
def available() -> bool:
    """Whether Triton is installed; warns, once, if not."""
    if find_spec("triton") is not None:
        return True
    warnings.warn(
        "caches on a GPU are decoded on the processor and copied: install kvabr[gpu] to decode AC tracks on the GPU",
        RuntimeWarning,
        stacklevel=3,
    )
    return False


def decode(
    models: Sequence[CoderModel],
    payloads: Sequence[bytes | memoryview],
    synthesis: SynthesisModel,
    step: float,
    first_token: int,
    out: torch.Tensor,
) -> None:
    """`kvabr.codec.native.coder.decode` on the device of ``out``, which is a CUDA device.

    Raises:
        FormatError: as there.
    """
    decode_many([DecodeJob(models, payloads, synthesis, step, first_token, out)])


def decode_many(jobs: Sequence[DecodeJob]) -> None:
    """Decode groups side by side: a group alone fills a hundredth of a GPU.

    Args:
        jobs: their tensors must not overlap.

    Raises:
        FormatError: one of them cannot be decoded; the others may or may not have been.
    """
    if not available():
        coder.decode_many(jobs)
        return
    from kvabr.codec.gpu import decoder  # noqa: PLC0415  # needs Triton

    decoder.decode_many(jobs)
