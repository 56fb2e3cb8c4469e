"""AC on CUDA devices: payloads are copied to the device, and decoded to 16- or 32-bit elements there.

The encoder transforms, quantises and codes there, too: what is copied to the processor are payloads.

Needs Triton (the extra ``kvabr[gpu]``). Without it, a cache on a GPU is copied, and coded on the processor, which is
correct but slow. The result is bit for bit that of `kvabr.codec.native.reference`: the tests verify it in Triton's
interpreter, and ``tools/bench-gpu`` on a GPU, which it times as well.
"""

from __future__ import annotations

import math
import threading
import warnings
from collections.abc import Hashable, Sequence
from dataclasses import replace
from functools import cache
from importlib.util import find_spec
from typing import TYPE_CHECKING

import torch

from kvabr.codec.native import coder
from kvabr.codec.native.coder_model import DecodeJob, derived
from kvabr.types.errors import FormatError, UsageError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from kvabr.codec.block_slots import BlockSlots
    from kvabr.codec.gpu import encoder
    from kvabr.codec.native.coder_model import CoderModel, Quantiser
    from kvabr.codec.native.references import References
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


def encode_rows(
    model: CoderModel,
    rows: torch.Tensor,
    own: Quantiser,
    lower: Quantiser | None,
    keep: NDArray[np.bool_],
    references: References | None,
) -> bytes:
    """Quantise and code a group's coefficients on their device, with those of other threads; see `runs_on`.

    Arguments and errors are those of `coder.encode_rows`.
    """
    from kvabr.codec.gpu import encoding, writer  # noqa: PLC0415  # need Triton

    return encoding.encode(writer.EncodeJob(model, rows, own, lower, keep, references))


def error_sums(
    rows: torch.Tensor,
    which: NDArray[np.intp],
    gains: NDArray[np.float32],
    quantiser: Quantiser,
    coded: NDArray[np.bool_],
) -> NDArray[np.int64]:
    """Add up what decoding takes from some rows, on their device; see `kvabr.codec.native.reference.error_sums`."""
    from kvabr.codec.gpu import encoding  # noqa: PLC0415  # needs Triton

    return encoding.error_sums(rows, which, gains, quantiser, coded)


def decode_many(jobs: Sequence[DecodeJob]) -> None:
    """Decode groups in parallel, as `coder.decode_many` does, together with those that other threads ask for.

    A single group fills a small part of a GPU. So what comes while groups are being decoded is decoded together, next.
    The first group of each kind is decoded on the processor as well, and compared.
    """
    if available():
        _TOGETHER.decode(jobs)
    else:
        coder.decode_many(jobs)


class _Asked:
    """What one thread asks for."""

    def __init__(self, jobs: Sequence[DecodeJob]) -> None:
        self.jobs = jobs
        self.done = False
        self.error: Exception | None = None
        devices = {job.out.device for job in jobs if job.out.device.type == "cuda"}
        self._ready = [(device, torch.cuda.current_stream(device).record_event()) for device in devices]

    def await_memory(self) -> None:
        """Make this thread's streams wait for what the other thread's still do to the memory to write to."""
        for device, event in self._ready:
            torch.cuda.current_stream(device).wait_event(event)


class _Together:
    """Decodes what several threads ask for. The thread that finds nobody at work does it for all."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._waiting: list[_Asked] = []
        self._working = False

    def decode(self, jobs: Sequence[DecodeJob]) -> None:
        """Return when these groups are decoded; raise what decoding them raises, whatever becomes of other threads'."""
        own, asked = _Asked(jobs), list[_Asked]()
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
                        each.error, each.done = FormatError("decoding was interrupted"), True
                if own in self._waiting:
                    self._waiting.remove(own)
                if asked:
                    self._working = False
                    self._changed.notify_all()
        if own.error is not None:
            raise own.error

    def _run(self, asked: Sequence[_Asked]) -> None:
        for each in asked:
            each.await_memory()
        whole = [job for each in asked for job in each.jobs]
        if len(whole) > 1 and _failed(whole) is None:
            for each in asked:
                each.done = True
        for each in asked:  # which group was it?
            if not each.done:
                errors = [_failed([job]) for job in each.jobs]
                each.error, each.done = next(filter(None, errors), None), True


def _failed(jobs: Sequence[DecodeJob]) -> Exception | None:
    """Decode groups, a single one on the processor if the device cannot; return what is wrong with them."""
    try:
        if any(_checked(job).get(_kind(job)) is False for job in jobs):
            raise UsageError("its kernels gave other numbers than the processor")  # noqa: TRY301  # see below
        from kvabr.codec.gpu import decoder  # noqa: PLC0415  # needs Triton

        decoder.decode_many(jobs)
        for job in {(id(job.transform), _kind(job)): job for job in jobs}.values():
            _compare(job)
    except FormatError as error:
        return error
    except Exception as error:  # noqa: BLE001  # no memory, or no compiler: whatever it is, the processor can
        if len(jobs) > 1:
            return error
        _warn(f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else 'no reason given'}")
        try:
            coder.decode_many(jobs)
        except FormatError as wrong:
            return wrong
    return None


def _checked(job: DecodeJob) -> dict[Hashable, bool]:
    """Return whether a profile's groups, by `_kind`, are decoded with the same result as on the processor."""
    return derived(job.transform, "checked", dict)


def _kind(job: DecodeJob) -> Hashable:
    """Return what a device's compiler makes other code for, and which tables it uses."""
    strides = tuple((math.gcd(16, stride), stride == 1) for stride in job.out.stride()[2:])
    apart = math.gcd(16, job.out.data_ptr() // job.out.element_size(), *job.out.stride()[:2])
    return tuple(map(id, job.models)), job.references is None, job.out.dtype, strides, apart, job.out.device


def _compare(job: DecodeJob) -> None:
    """Compare the first group of a kind with what the processor makes of it; raise a `UsageError` if they differ.

    The cache of a prompt is what a model goes by: a compiler's error must not show as words.
    """
    checked, kind = _checked(job), _kind(job)
    if kind in checked:
        return
    own = replace(job, out=torch.empty(job.out.shape, dtype=job.out.dtype))
    coder.decode_many([own])
    if not torch.equal(_bytes(job.out), _bytes(own.out)):
        checked[kind] = False
        raise UsageError("its kernels gave other numbers than the processor")
    checked[kind] = True


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


_TOGETHER = _Together()
