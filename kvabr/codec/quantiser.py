"""The uniform quantiser of the AC tracks, and which depth refines which.

Steps of neighbouring layers are three times apart, so that the intervals of the finer one lie inside those of the
coarser: the index below says where to look, and a base and its layers cost no more than the finest quantiser would
alone.

From counted indices to the tables of the entropy coder: which rows share one, and how likely it makes each index.

Rows are put into classes by the length of their code: each goes to the class whose tables code it shortest, the tables
are counted anew, and so on (Lloyd's algorithm with code length as its distance). Flags have a probability per row.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from kvabr.codec.native.model import MOST_RADIUS, TOTAL, CoderModel, frequencies
from kvabr.types.errors import FormatError
from kvabr.types.naming import LAYERS

SINGLE = "AC-5x"
"""The track that stands alone."""
RATIO = 3
"""How much finer the step of a layer is than that of the layer below."""


def below(track: str) -> str | None:
    """The layer that a depth refines, or None."""
    place = LAYERS.index(track) if track in LAYERS else 0
    return LAYERS[place - 1] if place else None


def nested(steps: Mapping[str, float]) -> dict[str, str | None]:
    """Every depth with what it refines, each after that.

    Raises:
        FormatError: a depth without the one below, of an unknown name, or with a step that does not nest.
    """
    order = [track for track in (*LAYERS, SINGLE) if track in steps]
    if not order or len(order) != len(steps):
        raise FormatError(f"profile: depths {', '.join(map(str, steps))}; known are {', '.join((*LAYERS, SINGLE))}")
    out = {track: below(track) for track in order}
    for track, lower in out.items():
        if lower is not None and (lower not in steps or abs(steps[lower] / steps[track] - RATIO) > 1e-6):
            raise FormatError(f"profile: the step of {track} is not a third of that of {lower}")
    return out


def quantise(rows: torch.Tensor, step: float, dead: float = 0.0) -> torch.Tensor:
    """Indices of coefficients.

    Args:
        rows: [row, token] float32.
        step: the quantiser's.
        dead: how much further than to the middle a coefficient must reach to take the next index, in steps; what it
            costs in precision it saves twice over in bits while most indices are zero.

    Returns:
        Of the same shape, float32, whole numbers.
    """
    exact = rows / step
    if dead:
        exact -= exact.clamp(-dead, dead)
    return exact.round_()


_ROUNDS = 10
_TAIL = 0.01
"""Share of a table given to indices half as far out again: texts that a calibration never saw go further out."""
_FLOOR = 1e-3
"""How often an index that a table has a symbol for is taken as seen at least."""
_PRIOR_SYMBOLS = 8.0
"""Symbols' worth of belief that a class refines as all rows do: few classes see every index below."""
_STRAY = 1e-5
"""Share of a refinement's symbols that may do without one of their own: what float32 rounds out of its interval."""
_PRIOR_TILES = 6.0
"""Tiles' worth of belief that a row's flags are as those of its class."""

Counted = NDArray[Any]


@dataclass(eq=False)
class Counts:
    """What a calibration counts at one depth; it grows tile by tile."""

    symbols: Counted
    """[row, context, symbol] int32, of live tiles; symbol s is index s - `MOST_RADIUS`, the last one all others."""
    flags: Counted
    """[row, flag context, dead or live] int32: tiles."""

    @classmethod
    def nothing(cls, rows: int, *, refines: bool) -> Counts:
        """Nothing counted yet."""
        contexts = 3 if refines else 1
        return cls(
            np.zeros((rows, contexts, 2 * MOST_RADIUS + 2), np.int32),
            np.zeros((rows, 2 if refines else 1, 2), np.int32),
        )

    def add(self, index: NDArray[np.int32], below: NDArray[np.int32] | None = None) -> None:
        """Count one tile.

        Args:
            index: [row, token].
            below: the index one depth below, if this depth refines it.
        """
        rows, contexts, symbols = self.symbols.shape
        value = index if below is None else (index - 3 * below) * np.where(below < 0, -1, 1)
        live = (value != 0).any(axis=1)
        context = np.zeros_like(value) if below is None else np.minimum(np.abs(below), 2)
        symbol = np.where(np.abs(value) > MOST_RADIUS, symbols - 1, value + MOST_RADIUS)
        place = (np.arange(int(live.sum()))[:, None] * contexts + context[live]) * symbols + symbol[live]
        counted = np.bincount(place.reshape(-1), minlength=int(live.sum()) * contexts * symbols)
        self.symbols[live] += counted.reshape(-1, contexts, symbols).astype(np.int32)
        under = np.zeros(rows, np.intp) if below is None else below.any(axis=1).astype(np.intp)
        self.flags[np.arange(rows), under, live.astype(np.intp)] += 1


def coder_model(counts: Counts, classes: int, *, small: bool = False) -> CoderModel:
    """The tables that code what was counted shortest, in at most so many classes.

    Args:
        counts: what was counted.
        classes: at most 256.
        small: the rows of a class share the chance of their flags, so that a file of the tables is small.
    """
    symbols = counts.symbols.astype(np.float64)
    # A transform's columns have no sign of their own; but on top of an index below values point to zero, or away.
    inner = symbols[:, 0, :-1]
    inner += inner[:, ::-1].copy()
    inner /= 2
    of_row = _sorted(symbols, classes)
    summed = _summed(of_row, symbols)
    radius = _radius(summed)
    widest = int(radius.max())
    tables = np.zeros((*summed.shape[:2], 2 * widest + 2))
    for one, (reach, table) in enumerate(zip(radius, _smooth(summed), strict=True)):
        middle = table[:, MOST_RADIUS - reach : MOST_RADIUS + reach + 1]
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
        # Indices stand for the middle of their intervals. Where coefficients really are in the mean is nearer to zero,
        # but errors that all point inwards add up in the model: the loss of the whole cache was 1.4 times larger.
        delta=np.zeros(len(radius), np.uint8),
    )


def _sorted(symbols: Counted, classes: int) -> NDArray[np.intp]:
    """The class of every row."""
    rows = len(symbols)
    values = np.abs(np.arange(symbols.shape[2]) - MOST_RADIUS)
    seen = symbols.sum(axis=(1, 2))
    spread = symbols.sum(axis=1) @ values / np.maximum(seen, 1)
    rank = np.argsort(np.argsort(spread, kind="stable"), kind="stable")
    of_row = rank * min(classes, rows) // rows
    used = np.flatnonzero(symbols.sum(axis=0).reshape(-1))
    flat = symbols.reshape(rows, -1)[:, used]
    for _ in range(_ROUNDS):
        of_row = np.unique(of_row, return_inverse=True)[1]
        table = _smooth(_summed(of_row, symbols))
        share = table / table.sum(axis=2, keepdims=True)
        lengths = flat @ -np.log2(share.reshape(len(share), -1)[:, used]).T
        lengths[np.arange(rows), of_row] -= 1e-9  # a row that does not care stays
        nearest = lengths.argmin(axis=1)
        if (nearest == of_row).all():
            break
        of_row = nearest
    return np.unique(of_row, return_inverse=True)[1]


def _summed(of_row: NDArray[np.intp], symbols: Counted) -> Counted:
    """[class, context, symbol]."""
    member = np.zeros((int(of_row.max()) + 1, len(of_row)))
    member[of_row, np.arange(len(of_row))] = 1
    out: Counted = (member @ symbols.reshape(len(of_row), -1)).reshape(-1, *symbols.shape[1:])
    return out


def _smooth(summed: Counted) -> Counted:
    """Counts as they will be on texts that a calibration never saw, [class, context, symbol]."""
    if summed.shape[1] > 1:
        # A refinement stays inside the interval below, on any text.
        usual = summed.sum(axis=0)
        prior = _PRIOR_SYMBOLS * usual / np.maximum(usual.sum(axis=1, keepdims=True), 1)
        return np.asarray(summed + prior + 1e-9)  # so that no symbol's code is infinitely long
    values = np.arange(-MOST_RADIUS, MOST_RADIUS + 1)
    further = np.sign(values) * (-(-3 * np.abs(values) // 2))
    further = np.where(np.abs(further) > MOST_RADIUS, 2 * MOST_RADIUS + 1, further + MOST_RADIUS)
    move = np.zeros((len(values) + 1, len(values) + 1))
    move[np.append(np.arange(len(values)), len(values)), np.append(further, len(values))] = 1
    out: Counted = summed + _TAIL * (summed @ move) + _FLOOR
    return out


def _radius(summed: Counted) -> NDArray[np.intp]:
    """The largest index of each class that has a symbol: what was seen, and of a single layer a quarter more."""
    values = np.abs(np.arange(summed.shape[2] - 1) - MOST_RADIUS)
    seen = summed[:, :, :-1].sum(axis=1)
    if summed.shape[1] > 1:
        seen = np.where(seen > _STRAY * seen.sum(axis=1, keepdims=True), seen, 0)
    largest = np.where(seen > 0, values, 0).max(axis=1)
    if summed.shape[1] == 1:
        largest = -(-5 * largest // 4)
    out: NDArray[np.intp] = np.clip(largest, 1, MOST_RADIUS)
    return out


def _flags(of_row: NDArray[np.intp], flags: Counted, belief: float) -> NDArray[np.uint16]:
    """[flag context, row]: how likely a row is live, of `TOTAL`."""
    classes = np.zeros((int(of_row.max()) + 1, *flags.shape[1:]))
    np.add.at(classes, of_row, flags)
    prior = (classes[..., 1] + 0.5) / (classes.sum(axis=2) + 1)
    weight = 1.0 if belief == np.inf else belief / (flags.sum(axis=2) + belief)
    own = flags[..., 1] / np.maximum(1, flags.sum(axis=2))
    share = own + weight * (prior[of_row] - own)
    out: NDArray[np.uint16] = np.clip(np.round(share.T * TOTAL), 1, TOTAL - 1).astype(np.uint16)
    return out
