"""``mpc``: RobustMPC on the deadline budget (Yin et al., SIGCOMM 2015; Puffer's and Pensieve's form of the bound).

Where a video player plans five chunks ahead against its buffer, this plans five groups ahead against their share of the
time left, at the harmonic mean of the recent rates over one plus the largest recent error.
"""

from __future__ import annotations

from typing import ClassVar

from kvabr.abr.policies.budget import Budget


class Mpc(Budget):
    """Plan five groups, send one, plan again."""

    name: ClassVar[str] = "mpc"
    estimator: ClassVar[str] = "harmonic"
    horizon: ClassVar[int | None] = 5
