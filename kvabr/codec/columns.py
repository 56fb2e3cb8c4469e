"""States in the AC tracks: a state's columns are coded like tokens.

The rows of a state differ in scale and depend on each other: in a delta rule each row is one dimension of the keys. So
a column is coded like a token's latent vector. Wide columns (inputs of a short convolution, one per channel) are cut
into pieces, which are coded like heads.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvabr.types.errors import FormatError
from kvabr.types.kv import KVSpec

if TYPE_CHECKING:
    import torch

_MAX_ROWS = 128
"""Maximum rows in a piece: the size of a transform's matrix, per layer and head, is the square of this."""


def coded_spec(part: KVSpec) -> KVSpec:
    """Return the spec that a layer class is coded with; for a state, its columns count as latents.

    Raise `FormatError` if columns have too many pieces.
    """
    only = part.only
    if only.kind != "state":
        return part
    pieces = _pieces(only.k_dim)
    return part.changed(kind="latent", heads=only.heads * pieces, k_dim=only.k_dim // pieces, v_dim=0, interval=None)


def has_ac(spec: KVSpec) -> bool:
    """Return True if AC can code all layer classes; states may be too wide."""
    try:
        return all(coded_spec(part) is not None for part in spec.parts)
    except FormatError:
        return False


def check_class(spec: KVSpec, track: str) -> None:
    """Raise `FormatError` with the usable tracks if the spec does not have AC tracks (`has_ac`)."""
    if not has_ac(spec):
        raise FormatError(
            f"{track}: AC cannot code the states of {spec.model} ({spec.summary}): their columns are too long; use "
            "FP16, BF16, FP8, Int8, FP4 or Int4"
        )


def turned(kv: torch.Tensor, part: KVSpec) -> torch.Tensor:
    """Return a class's cache in the form that is coded; for a state, [layer, 1, piece, column, row].

    Snapshots are concatenated along the axis of rows in ``kv``, and along the axis of columns in the result.
    """
    only = part.only
    if only.kind != "state":
        return kv
    count = _pieces(only.k_dim)
    layers, _, heads, rows, columns = kv.shape
    split = kv.reshape(layers, 1, heads, -1, count, only.k_dim // count, columns)  # [..., snapshot, piece, row, column]
    pieces, wide = heads * count, rows // only.k_dim * columns
    return split.permute(0, 1, 2, 4, 3, 6, 5).reshape(layers, 1, pieces, wide, only.k_dim // count)


def turned_back(columns: torch.Tensor, part: KVSpec) -> torch.Tensor:
    """Invert `turned`."""
    only = part.only
    if only.kind != "state":
        return columns
    layers, _, pieces, _, dim = columns.shape
    split = columns.reshape(layers, 1, only.heads, pieces // only.heads, -1, only.v_dim, dim)
    return split.permute(0, 1, 2, 4, 3, 6, 5).reshape(layers, 1, only.heads, -1, only.v_dim)


def _pieces(rows: int) -> int:
    return next(count for count in range(-(-rows // _MAX_ROWS), rows + 1) if rows % count == 0)
