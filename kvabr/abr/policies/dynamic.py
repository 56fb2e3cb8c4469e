"""``dynamic``: what dash.js does unless told otherwise (Spiteri, Sitaraman and Sparacio, MMSys 2018).

Throughput while the buffer is low, BOLA once it is long, and InsufficientBuffer beside both; the lower of two choices
counts. BOLA comes on at the stable buffer time, and goes off below half of it.

What was changed for a cache is what `kvabr.abr.policies.bola_e` changes. The stable buffer time is four fifths of the
level at which BOLA takes the best track, as in dash.js with six tracks (18 s and 22 s).
"""

from __future__ import annotations

from typing import ClassVar

from kvabr.abr.policies.bola_e import BolaE
from kvabr.abr.view import View

_STABLE = 0.8
"""Share of BOLA's target level at which BOLA comes on; below half of that it goes off."""


class Dynamic(BolaE):
    """Throughput rule at a low buffer, BOLA at a long one, as in dash.js."""

    name: ClassVar[str] = "dynamic"

    def start(self, view: View) -> None:
        """Begin by throughput."""
        super().start(view)
        self._on = False

    def _choose(self, view: View, level_s: float) -> tuple[int, str]:
        self._on = level_s >= _STABLE * self._target_s * (0.5 if self._on else 1.0)
        throughput = self._line.carried(self._safety * view.rate)
        if self._on:
            return self._by_buffer(level_s, throughput)
        return throughput, f"throughput: {view.rate / 125e3:.1f} Mbit/s, {level_s:.2f} s ahead"
