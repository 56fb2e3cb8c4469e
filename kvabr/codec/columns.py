"""A state as the AC tracks see it: its columns in the place of tokens.

The rows of a state differ in scale and depend on each other: in a delta rule each row goes with one dimension of the
keys. So a column is coded as a token's latent vector is, with a row for each of its dimensions, and columns share
means, transforms and tables. Wide columns (the inputs of a short convolution, one for each channel) are cut into
pieces, which stand for heads.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvabr.types.errors import FormatError
from kvabr.types.kv import KVSpec

if TYPE_CHECKING:
    import torch

_WIDEST = 128
"""Maximum rows in a piece of a column: a transform's matrix has the square of that, in every layer and head."""


def coded_spec(part: KVSpec) -> KVSpec:
    """Return the spec of one layer class as it is coded: itself, or, of a state, that of its columns as latents.

    Raises `FormatError` if its columns make too many pieces.
    """
    only = part.only
    if only.kind != "state":
        return part
    pieces = _pieces(only.k_dim)
    return part.changed(kind="latent", heads=only.heads * pieces, k_dim=only.k_dim // pieces, v_dim=0, interval=None)


def has_ac(spec: KVSpec) -> bool:
    """Return whether there are AC tracks of all layer classes; states may be too wide."""
    try:
        return all(coded_spec(part) is not None for part in spec.parts)
    except FormatError:
        return False


def check_class(spec: KVSpec, track: str) -> None:
    """Raise a `FormatError` that names the tracks that work, unless `has_ac`."""
    if not has_ac(spec):
        raise FormatError(
            f"{track}: there is no AC for the states of {spec.model} ({spec.summary}), whose columns are too long; "
            "FP16, BF16, FP8, Int8, FP4 and Int4 work"
        )


def turned(kv: torch.Tensor, part: KVSpec) -> torch.Tensor:
    """Return the cache of a class as it is coded; of a state, [layer, 1, piece, column, row].

    A state may hold several snapshots, one behind the other in the axis of its rows; so do then the columns.
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
    """Return the cache of a class from what `turned` returned for it."""
    only = part.only
    if only.kind != "state":
        return columns
    layers, _, pieces, _, dim = columns.shape
    split = columns.reshape(layers, 1, only.heads, pieces // only.heads, -1, only.v_dim, dim)
    return split.permute(0, 1, 2, 4, 3, 6, 5).reshape(layers, 1, only.heads, -1, only.v_dim)


def _pieces(rows: int) -> int:
    return next(count for count in range(-(-rows // _WIDEST), rows + 1) if rows % count == 0)
