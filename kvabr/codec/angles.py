"""Powers, cosines and sines that are the same on every machine.

Those of a library depend on the processor: with AVX-512, NumPy computes them otherwise than with AVX2, and C libraries
differ from each other. Here all steps are additions and multiplications of doubles, or decimal arithmetic, which are
defined to the bit. The results are as precise as those of any library.
"""

from __future__ import annotations

from decimal import Decimal, localcontext

import numpy as np
from numpy.typing import NDArray

Doubles = NDArray[np.float64]

_PIECES = tuple(map(float.fromhex, ("0x1.921fb5p+0", "0x1.110b46p-26", "0x1.1a62633145c07p-54")))
"""A quarter of a turn, in pieces of which the first two have 26 bits."""
_FARTHEST = 2.0**27
"""Largest angle for which a piece times the number of quarters is exact."""
_SIN = (
    *(-1.66666666666666324348e-01, 8.33333333332248946124e-03, -1.98412698298579493134e-04),
    *(2.75573137070700676789e-06, -2.50507602534068634195e-08, 1.58969099521155010221e-10),
)
_COS = (
    *(4.16666666666666019037e-02, -1.38888888888741095749e-03, 2.48015872894767294178e-05),
    *(-2.75573143513906633035e-07, 2.08757232129817482790e-09, -1.13596475577881948265e-11),
)
"""Polynomials for angles of up to an eighth of a turn, by Sun Microsystems (fdlibm)."""


def powers(base: float, exponents: Doubles) -> Doubles:
    """Return a positive number to the power of each exponent, correctly rounded."""
    with localcontext() as context:
        context.prec = 40
        logarithm = Decimal(base).ln()
        return np.array([float((logarithm * Decimal(each)).exp()) for each in exponents.tolist()])


def cos_sin(angles: Doubles) -> tuple[Doubles, Doubles]:
    """Return cosines and sines of angles in radians; of those beyond 2**27 as NumPy has them."""
    if not angles.size or not float(np.abs(angles).max()) < _FARTHEST:
        return np.cos(angles), np.sin(angles)
    quarters = np.rint(angles * (2 / np.pi))
    far = angles - quarters * _PIECES[0]
    second, third = quarters * _PIECES[1], quarters * _PIECES[2]
    near = far - second
    rest = (far - near) - second
    left = near - third
    rest += (near - left) - third
    square = left * left
    sin = left + (left * square * _polynomial(_SIN, square) + rest * (1 - square / 2))
    half = 0.5 * square
    most = 1 - half
    cos = most + (((1 - most) - half) + (square * square * _polynomial(_COS, square) - left * rest))
    whole = quarters.astype(np.int64)
    odd = (whole & 1).astype(bool)
    cos, sin = np.where(odd, sin, cos), np.where(odd, cos, sin)
    np.negative(cos, out=cos, where=((whole + 1) & 2).astype(bool))
    np.negative(sin, out=sin, where=(whole & 2).astype(bool))
    return cos, sin


def _polynomial(factors: tuple[float, ...], square: Doubles) -> Doubles:
    out = np.full_like(square, factors[-1])
    for factor in factors[-2::-1]:
        out *= square
        out += factor
    return out
