"""Encodes many groups at once; their coefficients are on a device.

The first group of each depth is compared with the processor's result. If kernels fail, the processor takes over, with
one warning.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from contextlib import suppress

import numpy as np
import torch
from numpy.typing import NDArray

from kvabr.codec.gpu import writer
from kvabr.codec.gpu.batches import warn_of
from kvabr.codec.gpu.writer import EncodeJob
from kvabr.codec.native import coder
from kvabr.codec.native.coder_model import Quantiser, derived
from kvabr.types.errors import FormatError, UsageError


def encode(jobs: Sequence[EncodeJob]) -> list[bytes | Exception]:
    """Return each group's `coder.encode_rows`, or a `FormatError` if an index is out of range."""
    with suppress(Exception):
        return list(map(bytes, _by_kernels(jobs)))
    return [_alone(job) for job in jobs]


def _alone(job: EncodeJob) -> bytes | Exception:
    try:
        return bytes(_by_kernels([job])[0])
    except FormatError as error:
        return error
    except Exception as error:  # noqa: BLE001  # no memory, or no compiler: whatever it is, the processor can
        warn_of("encoded", error)
    try:
        return _by_processor(job)
    except Exception as error:  # noqa: BLE001  # raised here, it would end the other groups of the batch, too
        return error


def _by_kernels(jobs: Sequence[EncodeJob]) -> list[memoryview]:
    kinds = {_kind(job): job for job in jobs}
    if any(_checked(job).get(kind) is False for kind, job in kinds.items()):
        raise UsageError("the kernels of this GPU gave other bytes than the processor")
    made = writer.encode_many(jobs)
    for kind, job in kinds.items():
        checked = _checked(job)
        if kind not in checked:
            checked[kind] = made[jobs.index(job)] == _by_processor(job)
            if not checked[kind]:
                raise UsageError("the kernels of this GPU gave other bytes than the processor")
    return made


def _by_processor(job: EncodeJob) -> bytes:
    return coder.encode_rows(job.model, job.rows.cpu().numpy(), job.own, job.lower, job.keep, job.references)


def _checked(job: EncodeJob) -> dict[Hashable, bool]:
    """Return the depths compared so far, by `_kind`: True if their bytes equal the processor's."""
    return derived(job.model, "checked", dict)


def _kind(job: EncodeJob) -> Hashable:
    return id(job.model), job.references is None, job.rows.device


def error_sums(
    groups: Sequence[tuple[torch.Tensor, NDArray[np.bool_]]],
    which: NDArray[np.intp],
    gains: NDArray[np.float32],
    quantiser: Quantiser,
) -> list[NDArray[np.int64]]:
    """Return the sums of `kvabr.codec.native.coder.error_sums` for each group."""
    device = groups[0][0].device
    at, factor = (torch.from_numpy(each).to(device) for each in (which, gains))
    # If the divisor is a Python number, torch multiplies by its inverse, which rounds differently.
    step, sums = torch.tensor(quantiser.step, device=device), []
    every = torch.from_numpy(np.concatenate([coded for _, coded in groups])).to(device)
    for (rows, _), coded in zip(groups, torch.split(every, [len(coded) for _, coded in groups]), strict=True):
        exact = (rows[at] / step).clamp_(-32767, 32767)
        index = (exact - exact.clamp(-quantiser.dead, quantiser.dead)).round_()
        error = exact.sub_(index.mul_(factor[:, None])).clamp_(-float(coder.MAX_ERROR), float(coder.MAX_ERROR))
        sums.append((error.mul_(coder.ERROR_UNIT).round_() * coded).to(torch.int64).sum(dim=1))
    return list(torch.stack(sums).cpu().numpy())
