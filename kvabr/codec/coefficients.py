"""A transformed group, and what an encoder asks of its rows, wherever they are: in the processor's memory or a GPU's.

On a GPU, rows stay there: only what is coded of them is copied to the processor, and the few rows that choices are made
by. Results are the same, to the byte.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray

from kvabr.codec import gpu
from kvabr.codec.native import coder
from kvabr.codec.native.coder_model import CoderModel, Quantiser
from kvabr.codec.native.references import References
from kvabr.codec.quantiser import quantise


@dataclass(frozen=True, eq=False)
class Coefficients:
    """A transformed group. All but the rows are in the processor's memory."""

    rows: torch.Tensor
    """[row, token] float32, in units of the norm; divided by a step they are indices. On any device."""
    reach: torch.Tensor
    """[token] float32: smallest step at which a decoder's integers can hold the token."""
    largest: torch.Tensor
    """[token] float32: magnitude of the token's largest coefficient."""
    outlying: torch.Tensor
    """[token] bool: tokens to store separately, see `Transform.threshold`."""

    def here(self) -> Coefficients:
        """Return the same with the rows in the processor's memory."""
        return replace(self, rows=self.rows.cpu())


def encode_rows(
    model: CoderModel,
    rows: torch.Tensor,
    own: Quantiser,
    lower: Quantiser | None,
    keep: NDArray[np.bool_],
    references: References | None = None,
) -> bytes:
    """Quantise and code; see `coder.encode_rows`."""
    if gpu.runs_on(rows.device):
        from kvabr.codec.gpu import encoding, writer  # noqa: PLC0415  # need Triton

        return encoding.encode(writer.EncodeJob(model, rows, own, lower, keep, references))
    return coder.encode_rows(model, rows.numpy(), own, lower, keep, references)


def indices(rows: torch.Tensor, quantiser: Quantiser) -> NDArray[np.int16]:
    """Return the indices of rows."""
    out: NDArray[np.int16] = quantise(rows.cpu(), quantiser.step, quantiser.dead).to(torch.int16).numpy()
    return out


def similarity(
    rows: torch.Tensor, which: NDArray[np.intp], tokens: NDArray[np.intp], step: float, most: int = 0
) -> NDArray[np.int32]:
    """Return how alike tokens are in some rows; see `coder.similarity`."""
    if gpu.runs_on(rows.device):
        there = (torch.from_numpy(each).to(rows.device) for each in (which[:, None], tokens))
        rows, which, tokens = rows[tuple(there)].cpu(), np.arange(len(which)), np.arange(len(tokens))
    return coder.similarity(rows.numpy(), which, tokens, step, most)


def error_sums(
    rows: torch.Tensor,
    which: NDArray[np.intp],
    gains: NDArray[np.float32],
    quantiser: Quantiser,
    coded: NDArray[np.bool_],
) -> NDArray[np.int64]:
    """Add up what decoding takes from some rows; see `coder.error_sums`."""
    if gpu.runs_on(rows.device):
        from kvabr.codec.gpu import encoding  # noqa: PLC0415  # needs Triton

        return encoding.error_sums(rows, which, gains, quantiser, coded)
    return coder.error_sums(rows.numpy(), which, gains, quantiser, coded)
