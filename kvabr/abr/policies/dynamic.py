"""``dynamic``: the default rule of dash.js (Spiteri, Sitaraman and Sparacio, MMSys 2018).

Throughput at a low buffer, BOLA at a high one, and InsufficientBuffer next to both; the lower choice counts. BOLA turns
on at the stable buffer time and off below half of it.

Adapted as `kvabr.abr.policies.bola_e`. The stable buffer time is four fifths of the level at which BOLA chooses the
best track, as in dash.js with six tracks (18 s and 22 s).
"""

from __future__ import annotations

from typing import ClassVar

from kvabr.abr.policies.bola_e import BolaE
from kvabr.abr.view import View

_STABLE = 0.8
"""Share of BOLA's target level at which BOLA turns on; below half of that it turns off."""


class Dynamic(BolaE):
    """Throughput rule at a low buffer, BOLA at a high one, as in dash.js."""

    name: ClassVar[str] = "dynamic"

    def start(self, view: View) -> None:
        """Start by throughput."""
        super().start(view)
        self._on = False

    def _choose(self, view: View, level_s: float) -> tuple[int, str]:
        self._on = level_s >= _STABLE * self._target_s * (0.5 if self._on else 1.0)
        throughput = self._line.carried(self._safety * view.rate)
        if self._on:
            return self._by_buffer(level_s, throughput)
        return throughput, f"throughput: {view.rate / 125e3:.1f} Mbit/s, {level_s:.2f} s ahead"
