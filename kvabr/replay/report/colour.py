"""The colours of tracks: one ordered ramp from cheap (warm, light) to exact (deep), for page and terminal alike.

Lightness falls strictly along the ramp, so that the order survives colour blindness and a grey print; neighbours stay
apart under simulated deuteranopia, protanopia and tritanopia.
"""

from __future__ import annotations

from collections.abc import Sequence

LIGHT = ("#f6cf5e", "#f0a158", "#df745f", "#c04e7d", "#943f9f", "#523093", "#1d2763")
"""Ramp for light backgrounds."""
DARK = ("#ffe999", "#fdbb68", "#f28a62", "#d9648c", "#b553b0", "#7f45c4", "#3f40b8")
"""Ramp for dark backgrounds, and for terminals, of which one does not know."""
RECOMPUTED_LIGHT = "#12877a"
RECOMPUTED_DARK = "#3cc4ae"


def ramp(count: int, anchors: Sequence[str] = LIGHT) -> list[str]:
    """``count`` colours ``#rrggbb`` evenly along ``anchors``, the first and the last included."""
    if count <= 1:
        return list(anchors[:count])
    colours = []
    for index in range(count):
        place = index * (len(anchors) - 1) / (count - 1)
        below = min(int(place), len(anchors) - 2)
        share = place - below
        pairs = zip(_channels(anchors[below]), _channels(anchors[below + 1]), strict=True)
        colours.append("#" + "".join(f"{round(a + (b - a) * share):02x}" for a, b in pairs))
    return colours


def _channels(colour: str) -> tuple[int, int, int]:
    return int(colour[1:3], 16), int(colour[3:5], 16), int(colour[5:7], 16)
