"""Fit the tables for tokens with references (`kvabr.codec.native.references`)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray

from kvabr.codec.coefficients import Coefficients
from kvabr.codec.native import coder
from kvabr.codec.native.coder_model import TOTAL, CoderModel, NearTables, frequencies
from kvabr.codec.native.references import LANES, TILE
from kvabr.codec.parallel_map import parallel_map
from kvabr.codec.profile import Depth
from kvabr.codec.quantiser import nested, quantise
from kvabr.codec.referring import choose_references, informative_rows
from kvabr.types.naming import LAYERS

_COARSE = (0, 1, 2, 3, 3, 4, 4, *[5] * 9)
_FINE = (0, 1, 1, 2, 2, 3, 3, 4, 4, 4, 5, 5, 5, 6, 6, 7)
_ABOVE = (
    (*[0] * 9, 1, *[2] * 6),
    (*[3] * 7, 4, *[5] * 8),
    (*[6] * 8, *[7] * 8),
)
"""Contexts for tables of layers, [1, 2 or more: index below][distance + 8]; the distance is from three times that index
to the referenced index.
"""
_PRIOR_SYMBOLS = 3.0
"""Weight, in symbols, of the prior that references make no difference."""
_TILE_STEP = 4
"""One in this many tiles is counted, as counting is slow."""
_ROWS_AT_ONCE = 256
_FARTHEST = 10_000
"""Limit of indices, so that multiplying by three does not overflow."""


def tiles_counted(number: int, tokens: int) -> list[slice]:
    """Return the tiles to count in a cache, starting at another tile for each cache; empty if it is short."""
    firsts = range(0, tokens - LANES, TILE)
    counted = firsts[number % min(_TILE_STEP, len(firsts) or 1) :: _TILE_STEP]
    return [slice(first, min(tokens, first + TILE)) for first in counted]


def add_references(
    depths: Mapping[str, Depth], tiles: Iterable[Coefficients], louder: Sequence[float]
) -> dict[str, Depth]:
    """Return depths with additional tables for tokens with references.

    ``tiles`` are the coefficients of `tiles_counted`, counted at the amplitudes ``louder``
    (`kvabr.codec.fit.FitConfig`).
    """
    chain = nested({track: depth.step for track, depth in depths.items()})
    coarsest = max(depths.values(), key=lambda depth: depth.step)
    buckets = {track: _buckets(track, depth.coder) for track, depth in depths.items()}
    counts = {track: _nothing(depth.coder, buckets[track]) for track, depth in depths.items()}

    def counted(tile: Coefficients) -> dict[str, NDArray[np.int64]]:
        keep = ~tile.outlying.numpy()
        rows = tile.rows.numpy() * keep
        chosen = choose_references(torch.from_numpy(rows[informative_rows(coarsest.coder)]), coarsest.step, keep)
        assert chosen is not None  # noqa: S101  # the tile has two steps
        found = {track: np.zeros_like(own) for track, own in counts.items()}
        for boost in louder:
            scaled = torch.from_numpy(rows) * boost
            made: dict[str, NDArray[np.int32]] = {}
            for track, below in chain.items():
                depth = depths[track]
                index = quantise(scaled, depth.step, depth.dead)
                made[track] = index.clamp_(-_FARTHEST, _FARTHEST).int().numpy()
                under = None if below is None else made[below]
                coder.count_near(depth.coder, buckets[track], made[track], under, chosen[0], found[track])
        return found

    for found in parallel_map(counted, tiles):
        for track, own in found.items():
            counts[track] += own
    return {
        track: replace(depth, coder=_with_near(depth.coder, buckets[track], counts[track]))
        for track, depth in depths.items()
    }


def _buckets(track: str, model: CoderModel) -> NDArray[np.uint8]:
    if model.refines:
        return np.array(_ABOVE, np.uint8)
    return np.array([_COARSE if track in LAYERS else _FINE], np.uint8)


def _nothing(model: CoderModel, bucket: NDArray[np.uint8]) -> NDArray[np.int64]:
    return np.zeros((model.classes, int(bucket.max()) + 1, model.freqs.shape[2]), np.int64)


def _with_near(model: CoderModel, bucket: NDArray[np.uint8], counts: NDArray[np.int64]) -> CoderModel:
    freqs = np.zeros(counts.shape, np.uint16)
    seen = counts.astype(np.float64)
    for which, radius in enumerate(model.radius.astype(np.int64).tolist()):
        symbols = 2 * radius + 2
        own = model.freqs[which].astype(np.float64) / TOTAL
        for context in range(counts.shape[1]):
            if len(bucket) == 1 and context == bucket[0, 0]:
                inside = seen[which, context, : symbols - 1]
                inside += inside[::-1].copy()
                inside /= 2
            prior = own[_above(bucket, context)]
            freqs[which, context, :symbols] = frequencies((seen[which, context] + _PRIOR_SYMBOLS * prior)[:symbols])
    return replace(model, near=NearTables(bucket, freqs))


def _above(bucket: NDArray[np.uint8], context: int) -> int:
    return int(np.flatnonzero((bucket == context).any(axis=1))[0])
