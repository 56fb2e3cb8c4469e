"""Tables of refinements: asymmetric above a nonzero index, and usable in contexts that a class never saw."""

from __future__ import annotations

import numpy as np
import pytest

from kvabr.codec.native.coder_model import MOST_RADIUS, TOTAL, Quantiser
from kvabr.codec.native.references import TILE
from kvabr.codec.quantiser import SymbolCounts, coder_model, count
from tests.codec.native import oracle

TOKENS = 128


def counted(scale, rows=24, tiles=40, seed=5):
    """Return the counts of Gaussian coefficients of growing power, at a step and at a third of it."""
    random = np.random.default_rng(seed)
    counts = SymbolCounts.nothing(rows, refines=True)
    single = SymbolCounts.nothing(rows, refines=False)
    power = scale * np.linspace(0.2, 1, rows)[:, None]
    for _ in range(tiles):
        exact = random.normal(size=(rows, TOKENS)) * power
        below, index = np.rint(exact).astype(np.int32), np.rint(3 * exact).astype(np.int32)
        oracle.add(counts, index, below)
        oracle.add(single, index)
    return counts, single


def bits(counts, model):
    """Return the ideal code length of the counts, without flags."""
    total = 0.0
    for row, symbols in enumerate(counts.symbols):
        which = model.row_class[row]
        radius = int(model.radius[which])
        for context, seen in enumerate(symbols):
            table = model.freqs[which, context, : 2 * radius + 2].astype(float) / TOTAL
            inner = seen[126 - radius : 127 + radius]
            total -= (inner[inner > 0] * np.log2(table[:-1][inner > 0])).sum()
            total -= (seen.sum() - inner.sum()) * np.log2(table[-1] / 2**16)
    return total


def test_an_index_below_leans_towards_zero():
    counts, _ = counted(1.5)
    model = coder_model(counts, 4)
    assert (model.radius == 1).all()
    towards, away = model.freqs[:, 1:, 0].astype(int), model.freqs[:, 1:, 2].astype(int)
    assert (towards > 1.1 * away).all()
    on_zero = model.freqs[:, 0].astype(int)
    assert (abs(on_zero[:, 0] - on_zero[:, 2]) <= 1).all()


def test_a_base_and_its_refinement_take_what_the_finer_quantiser_takes():
    counts, single = counted(1.5)
    base = SymbolCounts.nothing(24, refines=False)
    random = np.random.default_rng(5)
    power = 1.5 * np.linspace(0.2, 1, 24)[:, None]
    for _ in range(40):
        oracle.add(base, np.rint(random.normal(size=(24, TOKENS)) * power).astype(np.int32))
    nested = bits(base, coder_model(base, 8)) + bits(counts, coder_model(counts, 8))
    assert nested < 1.005 * bits(single, coder_model(single, 8))


def test_a_context_that_a_class_never_saw_is_coded_as_elsewhere():
    """One loud row among quiet ones: on another text the quiet ones may be as loud."""
    counts, _ = counted(1.5, rows=4)
    quiet = SymbolCounts.nothing(8, refines=True)
    quiet.symbols[:4], quiet.flags[:4] = counts.symbols, counts.flags
    quiet.symbols[4:, 0, 126], quiet.flags[4:, 0, 0] = 1000, 40
    model = coder_model(quiet, 8)
    which = model.row_class[7]
    assert quiet.symbols[7, 2].sum() == 0
    assert (model.freqs[which, 2, :3] > TOTAL / 8).all()
    assert model.freqs[which, 2, 3] < TOTAL / 100


@pytest.mark.parametrize("refines", [False, True])
def test_many_tiles_are_counted_as_one_after_the_other(refines):
    dice = np.random.default_rng(3)
    tokens, rows = 3 * TILE + 20, 1300
    wide = np.exp(dice.uniform(-4, 5, size=(rows, 1)))
    index = (dice.normal(size=(rows, tokens)) * wide).round().astype(np.int32)
    index[:, TILE : 2 * TILE] *= dice.random((rows, 1)) < 0.5
    below = np.round(index / 3).astype(np.int32) if refines else None
    whole, tiles = (SymbolCounts.nothing(rows, refines=refines) for _ in range(2))
    oracle.add(whole, index, below)
    for first in range(0, tokens, TILE):
        part = slice(first, first + TILE)
        oracle.add(tiles, index[:, part], None if below is None else below[:, part])
    assert np.array_equal(whole.symbols, tiles.symbols)
    assert np.array_equal(whole.flags, tiles.flags)
    assert int(whole.flags.sum()) == 4 * rows
    assert 0 < int(whole.flags[:, :, 1].sum()) < 4 * rows
    # Every token of every live tile counts once; the last tile is shorter.
    last = SymbolCounts.nothing(rows, refines=refines)
    oracle.add(last, index[:, -20:], None if below is None else below[:, -20:])
    assert np.array_equal(last.symbols.sum(axis=(1, 2)), 20 * last.flags[:, :, 1].sum(axis=1))
    if not refines:
        row = int(np.argmin(np.abs(np.abs(index).max(axis=1) - 5)))
        assert int(whole.symbols[row, 0, 2 + MOST_RADIUS]) == int((index[row] == 2).sum())


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
        # Values that are counted apart from those near zero, and those that have no symbol.
        assert every[-1]["AC-5x"].symbols[:, :, MOST_RADIUS + 33 : -1].any()
        assert every[-1]["AC-5x"].symbols[:, :, -1].any()
