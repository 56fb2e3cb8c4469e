"""Powers, cosines and sines: as precise as a library's, and made of nothing that depends on one."""

from __future__ import annotations

from decimal import Decimal, localcontext

import numpy as np
import pytest

from kvabr.codec.rope import cos_sin, powers


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
