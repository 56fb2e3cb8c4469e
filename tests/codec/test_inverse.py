"""The encoder's matrices: the exact inverse, rounded, whatever computed it, and products that cannot overflow."""

from decimal import Decimal, localcontext

import numpy as np
import pytest
import torch

from kvabr.codec.inverse import Inverse, inverted
from kvabr.codec.rope import cos_sin, powers
from kvabr.codec.transform import ONE, Matrices, rounded
from kvabr.types.errors import FormatError
from tests.codec.native import oracle


def matrices(size: int, seed: int) -> Matrices:
    """Return a rotation with channels of different weight."""
    dice = torch.Generator().manual_seed(seed)
    rotation = torch.linalg.qr(torch.randn(size, size, generator=dice))[0]
    return rounded(rotation * torch.exp2(4 * torch.rand(size, 1, generator=dice) - 4))


def whole(it: Inverse) -> np.ndarray:
    return it.entries * it.rows[:, None].astype(np.float64) * it.columns


@pytest.mark.parametrize("size", [1, 2, 7, 64, 192])
def test_it_is_the_inverse(size):
    matrix = matrices(size, size)
    off = whole(inverted(matrix)) @ (matrix.expanded / ONE) - np.eye(size)
    assert np.abs(off).max() < 1e-3


def test_what_a_library_computes_it_with_does_not_show(monkeypatch):
    """Other libraries, and other numbers of threads, are off by a few units in the last place."""
    compute, dice = torch.linalg.inv_ex, torch.Generator().manual_seed(0)
    cases = [matrices(size, size + seed) for size in (7, 64, 192) for seed in range(3)]
    wanted = [inverted(matrix) for matrix in cases]

    def otherwise(square):
        inverse, failed = compute(square)
        return inverse * (1 + 1e-9 * torch.randn(inverse.shape, generator=dice, dtype=torch.float64)), failed

    monkeypatch.setattr(torch.linalg, "inv_ex", otherwise)
    for matrix, same in zip(cases, wanted, strict=True):
        found = inverted(matrix)
        assert np.array_equal(found.entries, same.entries)
        assert np.array_equal(found.rows, same.rows)
        assert np.array_equal(found.columns, same.columns)


def test_entries_are_the_nearest():
    """Of a matrix whose inverse is known, halves among its entries."""
    size = 4
    found = inverted(Matrices(np.diag([64, 64, 127, -3]).astype(np.int8), np.array([128, 255, 255, 1], np.uint8)))
    exact = ONE / np.array([64 * 128, 64 * 255, 127 * 255, -3])
    assert np.array_equal(np.diag(found.entries), np.rint(exact / found.rows / found.columns))
    assert not (found.entries[~np.eye(size, dtype=bool)]).any()


def worst(inverse: Inverse, dice: np.random.Generator) -> np.ndarray:
    """Return vectors along the rows: no others have larger products."""
    along = inverse.entries.T.astype(np.float32) / inverse.columns[:, None]
    noise = dice.normal(size=along.shape).astype(np.float32)
    return np.concatenate([along, np.sign(along), along + noise], axis=1)


@pytest.mark.parametrize("size", [1, 2, 3, 64, 192, 513])
@pytest.mark.parametrize("scale", [1.0, 2.0**-140, 2.0**50])
def test_products_fit_32_bits(size, scale):
    inverse = inverted(matrices(size, size))
    vectors = worst(inverse, np.random.default_rng(size))
    words, _ = oracle.words(inverse, vectors / np.abs(vectors).max(axis=0) * np.float32(scale))
    assert np.abs(words).max() <= 32767
    sums = inverse.entries.astype(np.int64) @ words.astype(np.int64)
    assert np.abs(sums).max() < 2**31
    if scale == 1.0 and size > 100:  # and not for want of precision
        assert np.abs(sums).max() > 2**28


def test_what_has_none_is_refused():
    with pytest.raises(FormatError, match="no inverse"):
        inverted(Matrices(np.ones((4, 4), np.int8), np.ones(4, np.uint8)))


def test_powers_are_the_nearest_doubles():
    exponents = -np.arange(64, dtype=np.float64) / 64
    found = powers(500_000.0, exponents)
    assert np.allclose(found, 500_000.0**exponents, rtol=4e-16, atol=0)
    with localcontext() as context:
        context.prec = 80
        exact = [(Decimal(500_000).ln() * Decimal(each)).exp() for each in exponents.tolist()]
        for one, wanted in zip(found.tolist(), exact, strict=True):
            others = [np.nextafter(one, 0), np.nextafter(one, 2)]
            assert all(abs(Decimal(one) - wanted) < abs(Decimal(float(other)) - wanted) for other in others)


@pytest.mark.parametrize("last", [1.0, 100.0, 1e5, 1e6, 2.0**27 - 1])
def test_cosines_and_sines_are_precise(last):
    angles = np.random.default_rng(0).uniform(-last, last, (100, 50))
    cos, sin = cos_sin(angles)
    assert np.abs(cos - np.cos(angles)).max() <= 2.3e-16
    assert np.abs(sin - np.sin(angles)).max() <= 2.3e-16


def test_near_a_quarter_of_a_turn_they_are_precise_too():
    """There a library that reduces angles carelessly has no correct digit."""
    angles = np.arange(1, 200_000, dtype=np.float64) * (np.pi / 2)
    cos, sin = cos_sin(angles)
    small = np.where(np.arange(1, 200_000) % 2 == 0, sin, cos)
    wanted = np.where(np.arange(1, 200_000) % 2 == 0, np.sin(angles), np.cos(angles))
    assert np.allclose(small, wanted, rtol=1e-11, atol=0)
