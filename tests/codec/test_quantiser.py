"""Counts of a calibration: the same on every path."""

import numpy as np

from kvabr.codec.native.coder_model import MAX_RADIUS, Quantiser
from kvabr.codec.native.references import TILE
from kvabr.codec.quantiser import SymbolCounts, count
from tests.codec.native import oracle


def test_every_path_counts_the_same():
    dice = np.random.default_rng(4)
    rows, tokens = 70, 2 * TILE + 9
    values = dice.normal(size=(rows, tokens)) * 10.0 ** dice.integers(-3, 9, size=(rows, 1))
    values[::3] = (values[::3] * 4).round() / 4  # the middle of two indices, and dead zones' ends
    values[:, TILE : TILE + 40] *= dice.random((rows, 1)) < 0.5
    steps = {"AC-L0": 4.5, "AC-L1": 1.5, "AC-L2": 0.5, "AC-5x": 0.185}
    dead = {"AC-L0": 0.25, "AC-L2": 0.1}
    every = []
    for path in oracle.PATHS:
        counts = {track: SymbolCounts.nothing(rows, refines=track in ("AC-L1", "AC-L2")) for track in steps}
        depths = {track: (Quantiser(step, dead.get(track, 0.0)), counts[track]) for track, step in steps.items()}
        with oracle.taking(path):
            for loud in (1.0, 1.45):
                count(values.astype(np.float32), loud, depths)
        every.append(counts)
    for other in every[:-1]:
        for track, own in every[-1].items():
            assert np.array_equal(own.symbols, other[track].symbols)
            assert np.array_equal(own.flags, other[track].flags)
            assert int(own.flags.sum()) == 2 * 3 * rows  # loudnesses, tiles
        # Values that are counted apart from those near zero, and those that have no symbol.
        assert every[-1]["AC-5x"].symbols[:, :, MAX_RADIUS + 33 : -1].any()
        assert every[-1]["AC-5x"].symbols[:, :, -1].any()
