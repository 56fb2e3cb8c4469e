"""A transformed group and operations on its rows, with equal results on the processor and on a GPU.

On a GPU, rows stay there: only coded data and a few rows for decisions are copied.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from numpy.typing import NDArray

from kvabr.codec import gpu
from kvabr.codec.native import coder
from kvabr.codec.native.coder_model import CoderModel, Quantiser
from kvabr.codec.native.references import References
from kvabr.codec.quantiser import quantise
from kvabr.types.errors import FormatError


@dataclass(frozen=True, eq=False)
class Coefficients:
    """A transformed group. Only `rows` may be on a GPU; the other tensors are on the processor."""

    rows: torch.Tensor
    """[row, token] float32, in units of the norm. Indices are rows divided by a step and rounded."""
    reach: torch.Tensor
    """[token] float32: smallest step for which the coefficients fit a decoder's integers."""
    largest: torch.Tensor
    outlying: torch.Tensor
    """[token] bool: True for tokens to store separately, see `Transform.threshold`."""

    held: dict[bytes, torch.Tensor] = field(default_factory=dict)

    def here(self) -> Coefficients:
        """Return a copy with rows in the processor's memory."""
        return replace(self, rows=self.rows.cpu())

    def some(self, which: NDArray[np.intp]) -> torch.Tensor:
        """Return some rows, [row, token], in the processor's memory."""
        if self.rows.device.type == "cpu":
            return self.rows[torch.from_numpy(which)]
        if which.tobytes() not in self.held:
            hold([self], which)
        return self.held[which.tobytes()]


def hold(groups: Sequence[Coefficients], which: NDArray[np.intp]) -> None:
    """Copy some rows of several groups from a GPU in one transfer, for `Coefficients.some`."""
    there = torch.from_numpy(which).to(groups[0].rows.device)
    shapes = [(len(which), group.rows.shape[1]) for group in groups]
    whole = torch.cat([group.rows[there].reshape(-1) for group in groups]).cpu()
    parts = torch.split(whole, [rows * tokens for rows, tokens in shapes])
    for group, part, shape in zip(groups, parts, shapes, strict=True):
        group.held[which.tobytes()] = part.view(shape)


def encode_rows(
    model: CoderModel,
    groups: Sequence[tuple[torch.Tensor, NDArray[np.bool_], References | None]],
    own: Quantiser,
    lower: Quantiser | None,
) -> list[bytes | Exception]:
    """Quantise and code each group's rows, given its mask of tokens to keep; see `coder.encode_rows`."""
    if groups and gpu.runs_on(groups[0][0].device):
        from kvabr.codec.gpu import encoding, writer  # noqa: PLC0415  # need Triton

        return encoding.encode([writer.EncodeJob(model, rows, own, lower, keep, refs) for rows, keep, refs in groups])
    made: list[bytes | Exception] = []
    for rows, keep, references in groups:
        try:
            made.append(coder.encode_rows(model, rows.numpy(), own, lower, keep, references))
        except FormatError as error:
            made.append(error)
    return made


def indices(rows: torch.Tensor, quantiser: Quantiser) -> NDArray[np.int16]:
    """Return the quantised indices of rows."""
    out: NDArray[np.int16] = quantise(rows.cpu(), quantiser.step, quantiser.dead).to(torch.int16).numpy()
    return out


def error_sums(
    groups: Sequence[tuple[torch.Tensor, NDArray[np.bool_]]],
    which: NDArray[np.intp],
    gains: NDArray[np.float32],
    quantiser: Quantiser,
) -> list[NDArray[np.int64]]:
    """Return each group's decoding errors in some rows, summed over coded tokens; see `coder.error_sums`."""
    if groups and gpu.runs_on(groups[0][0].device):
        from kvabr.codec.gpu import encoding  # noqa: PLC0415  # needs Triton

        return encoding.error_sums(groups, which, gains, quantiser)
    return [coder.error_sums(rows.numpy(), which, gains, quantiser, coded) for rows, coded in groups]
