"""The quantiser of the AC tracks, and the tables of their entropy coder.

The quantiser is uniform. Steps of neighbouring layers differ by a factor of three, so finer intervals lie inside
coarser ones, and a base with its layers costs no more than the finest quantiser alone.

Tables are fitted to counted indices by Lloyd's algorithm with code length as distance: each row joins the class with
the shortest code, the tables are recomputed, and so on. Flags have a probability per row.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from kvabr.codec.native import coder
from kvabr.codec.native.coder_model import MAX_RADIUS, TOTAL, CoderModel, Quantiser, frequencies
from kvabr.types.errors import FormatError
from kvabr.types.naming import LAYERS

SINGLE = "AC-5x"
RATIO = 3


def below(track: str) -> str | None:
    """Return the layer that a depth refines, or None."""
    place = LAYERS.index(track) if track in LAYERS else 0
    return LAYERS[place - 1] if place else None


def nested(steps: Mapping[str, float]) -> dict[str, str | None]:
    """Return each depth and the depth that it refines, lower depths first; raise `FormatError` if steps do not nest."""
    order = [track for track in (*LAYERS, SINGLE) if track in steps]
    if not order or len(order) != len(steps):
        raise FormatError(
            f"profile: depths must be some of {', '.join((*LAYERS, SINGLE))}, got {', '.join(map(str, steps))}"
        )
    out = {track: below(track) for track in order}
    for track, lower in out.items():
        if lower is not None and (lower not in steps or abs(steps[lower] / steps[track] - RATIO) > 1e-6):
            raise FormatError(f"profile: the step of {track} must be a third of that of {lower}")
    return out


def quantise(rows: torch.Tensor, step: float, dead: float = 0.0) -> torch.Tensor:
    """Quantise coefficients [row, token] float32 to indices, integers stored as float32.

    ``dead`` is the dead zone: the distance, in steps, by which a coefficient must exceed the middle between two indices
    to get the larger one. If most indices are zero, it saves twice the bits that it costs in precision.
    """
    exact = rows / step
    if dead:
        exact -= exact.clamp(-dead, dead)
    return exact.round_()


_ROWS_AT_ONCE = 512
_ROUNDS = 10
_TAIL = 0.01
"""Fraction of a table reserved for indices up to 1.5 times the largest seen, since other texts exceed the
calibration's.
"""
_FLOOR = 1e-3
_PRIOR_SYMBOLS = 8.0
"""Weight, in symbols, of the prior that a class refines like the average of all rows."""
_MAX_STRAY_SHARE = 1e-5
"""Fraction of a refinement's symbols that have no table entry, since float32 rounding puts them outside the interval.
"""
_PRIOR_TILES = 6.0
"""Weight, in tiles, of the prior that a row has the flag probability of its class."""

Counted = NDArray[Any]


@dataclass(eq=False)
class SymbolCounts:
    """Statistics of one depth during calibration."""

    symbols: Counted
    """[row, context, symbol] int32, from live tiles. Symbol s is index s - `MAX_RADIUS`; the last symbol counts all
    other indices.
    """
    flags: Counted
    """[row, flag context, dead or live] int32: numbers of tiles."""

    @classmethod
    def nothing(cls, rows: int, *, refines: bool) -> SymbolCounts:
        """Return empty statistics."""
        contexts = 3 if refines else 1
        return cls(
            np.zeros((rows, contexts, 2 * MAX_RADIUS + 2), np.int32),
            np.zeros((rows, 2 if refines else 1, 2), np.int32),
        )

    def of(self, rows: slice) -> SymbolCounts:
        """Return a view of the statistics of some rows."""
        return SymbolCounts(self.symbols[rows], self.flags[rows])


def count(
    rows: NDArray[np.float32],
    boost: float,
    depths: Mapping[str, tuple[Quantiser, SymbolCounts]],
) -> None:
    """Quantise coefficients [row, token], multiplied by ``boost``, at every depth, and count the indices.

    ``depths`` has each track's quantiser and counts; quantisers must nest.
    """
    chain = nested({track: own.step for track, (own, _) in depths.items()})
    order = [(*depths[track], below is not None) for track, below in chain.items()]
    coder.count_symbols(rows, boost, [(own, refines, counts.symbols, counts.flags) for own, counts, refines in order])


def coder_model(counts: SymbolCounts, classes: int, *, small: bool = False) -> CoderModel:
    """Return the tables with the shortest code for the counted symbols, with at most ``classes`` (up to 256) classes.

    With ``small``, flag probabilities are shared within a class.
    """
    symbols = counts.symbols.astype(np.float64)
    # A transform's columns have arbitrary signs, so a base's tables are symmetric. Refinements lean towards zero.
    inner = symbols[:, 0, :-1]
    inner += inner[:, ::-1].copy()
    inner /= 2
    of_row, summed = _sorted(symbols, classes)
    radius = _radius(summed)
    widest = int(radius.max())
    tables = np.zeros((*summed.shape[:2], 2 * widest + 2))
    for one, (reach, table) in enumerate(zip(radius, _smooth(summed), strict=True)):
        middle = table[:, MAX_RADIUS - reach : MAX_RADIUS + reach + 1]
        tables[one, :, : 2 * reach + 1] = middle
        tables[one, :, 2 * reach + 1] = table.sum(axis=1) - middle.sum(axis=1)
    freqs = np.zeros(tables.shape, np.uint16)
    for one, reach in enumerate(radius):
        freqs[one, :, : 2 * reach + 2] = frequencies(tables[one, :, : 2 * reach + 2])
    return CoderModel(
        row_class=of_row.astype(np.uint8),
        radius=radius.astype(np.uint8),
        freqs=freqs,
        flag_freq=_flags(of_row, counts.flags, np.inf if small else _PRIOR_TILES),
        # Indices decode to the middle of their intervals. The mean coefficient is closer to zero, but errors that all
        # point inwards add up in the model: the loss of the whole cache was 1.4 times larger.
        delta=np.zeros(len(radius), np.uint8),
    )


def _sorted(symbols: Counted, classes: int) -> tuple[NDArray[np.intp], Counted]:
    rows = len(symbols)
    values = np.abs(np.arange(symbols.shape[2]) - MAX_RADIUS)
    seen = symbols.sum(axis=(1, 2))
    spread = symbols.sum(axis=1) @ values / np.maximum(seen, 1)
    rank = np.argsort(np.argsort(spread, kind="stable"), kind="stable")
    of_row = rank * min(classes, rows) // rows
    used = np.flatnonzero(symbols.sum(axis=0).reshape(-1))
    flat = symbols.reshape(rows, -1)[:, used]

    def summed() -> Counted:
        member = (of_row == np.arange(of_row.max() + 1)[:, None]).astype(np.float64)
        sums = np.zeros((len(member), symbols[0].size))
        sums[:, used] = member @ flat  # exact: multiples of 0.5 below 2**52
        return sums.reshape(-1, *symbols.shape[1:])

    for _ in range(_ROUNDS):
        of_row = np.unique(of_row, return_inverse=True)[1]
        table = _smooth(summed())
        share = table / table.sum(axis=2, keepdims=True)
        lengths = flat @ -np.log2(share.reshape(len(share), -1)[:, used]).T
        lengths[np.arange(rows), of_row] -= 1e-9  # on a tie, a row stays in its class
        nearest = lengths.argmin(axis=1)
        if (nearest == of_row).all():
            break
        of_row = nearest
    of_row = np.unique(of_row, return_inverse=True)[1]
    return of_row, summed()


def _smooth(summed: Counted) -> Counted:
    if summed.shape[1] > 1:
        # On any text, a refinement's index lies inside the interval below.
        usual = summed.sum(axis=0)
        prior = _PRIOR_SYMBOLS * usual / np.maximum(usual.sum(axis=1, keepdims=True), 1)
        return np.asarray(summed + prior + 1e-9)  # keeps every code length finite
    values = np.arange(-MAX_RADIUS, MAX_RADIUS + 1)
    further = np.sign(values) * (-(-3 * np.abs(values) // 2))
    further = np.where(np.abs(further) > MAX_RADIUS, 2 * MAX_RADIUS + 1, further + MAX_RADIUS)
    move = np.zeros((len(values) + 1, len(values) + 1))
    move[np.append(np.arange(len(values)), len(values)), np.append(further, len(values))] = 1
    out: Counted = summed + _TAIL * (summed @ move) + _FLOOR
    return out


def _radius(summed: Counted) -> NDArray[np.intp]:
    """Return the largest index with a symbol in each class: the largest seen, plus a quarter for a single layer."""
    values = np.abs(np.arange(summed.shape[2] - 1) - MAX_RADIUS)
    seen = summed[:, :, :-1].sum(axis=1)
    if summed.shape[1] > 1:
        seen = np.where(seen > _MAX_STRAY_SHARE * seen.sum(axis=1, keepdims=True), seen, 0)
    largest = np.where(seen > 0, values, 0).max(axis=1)
    if summed.shape[1] == 1:
        largest = -(-5 * largest // 4)
    out: NDArray[np.intp] = np.clip(largest, 1, MAX_RADIUS)
    return out


def _flags(of_row: NDArray[np.intp], flags: Counted, belief: float) -> NDArray[np.uint16]:
    classes = np.zeros((int(of_row.max()) + 1, *flags.shape[1:]))
    np.add.at(classes, of_row, flags)
    prior = (classes[..., 1] + 0.5) / (classes.sum(axis=2) + 1)
    weight = 1.0 if belief == np.inf else belief / (flags.sum(axis=2) + belief)
    own = flags[..., 1] / np.maximum(1, flags.sum(axis=2))
    share = own + weight * (prior[of_row] - own)
    out: NDArray[np.uint16] = np.clip(np.round(share.T * TOTAL), 1, TOTAL - 1).astype(np.uint16)
    return out
