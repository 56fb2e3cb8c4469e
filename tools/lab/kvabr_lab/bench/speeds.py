"""The chart of tools/bench-speeds as SVG: time to the first token, and KL, over the rate of the link.

Each cache has a column; all axes are logarithmic. Filled marks are real plays; hollow marks are simulated with measured
rates. A line is dashed if one end is simulated.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from itertools import pairwise
from typing import Any, Self, TypedDict

from kvabr.types.errors import FormatError
from kvabr_lab.bench.page import SHAPES, LogScale, label, stroke

SCHEMA = "kvabr.speeds/1"

_WIDTH, _LEFT, _RIGHT = 400, 58, 30
_TOP, _TTFT, _GAP, _KL = 46, 250, 34, 110
_FOOT = 44
_MIN_KL = 1e-5
_COLUMN = 170

_NOTE = "Filled marks: real plays over a shaped link. Hollow marks, dashed: simulated with rates measured here."

_STYLE = """
.sp { --ground: #ffffff; --ink: #1c2027; --muted: #646c79; --hair: #e3e3dd;
  --f0: #1f5fbf; --f1: #12877a; --f2: #8b94a3; --f3: #b8860b; --f4: #523093; --f5: #c04e7d; --f6: #b3261e; }
@media (prefers-color-scheme: dark) {
  .sp { --ground: #14171c; --ink: #e7e9ed; --muted: #98a1af; --hair: #2c323c;
    --f0: #79aef5; --f1: #3cc4ae; --f2: #8b94a3; --f3: #ffe08a; --f4: #c49bff; --f5: #f28aa8; --f6: #ff8a80; } }
.sp text { font: 14px system-ui, sans-serif; fill: var(--ink); }
.sp .ground { fill: var(--ground); } .sp .title { font-weight: 650; font-size: 13px; }
.sp .tick, .sp .axis { fill: var(--muted); font-size: 13px; }
.sp .grid { stroke: var(--hair); } .sp .way { stroke-width: 1.6; } .sp .first { stroke-width: 3; }
.sp .dashed { stroke-width: 1.4; stroke-dasharray: 5 3; } .sp .first.dashed { stroke-width: 2.6; }
.sp .cold { stroke: var(--muted); stroke-dasharray: 2 3; stroke-width: 1.6; } .sp .mark { stroke-width: 1.4; }
"""


@dataclass(frozen=True, slots=True)
class Point:
    """One way to get one cache over one link."""

    shape: str
    mbit: float
    way: str
    live: bool
    """True if played over a shaped link, False if simulated with measured rates."""
    ttft_s: float
    kl: float
    """Mean KL divergence from the exact cache, nats per token."""
    bytes: int

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Self:
        """Read a point.

        Raises:
            FormatError: A field is missing, unknown or out of range.
        """
        try:
            made = cls(**data)
            sound = 0 < made.mbit < math.inf and 0 < made.ttft_s < math.inf and 0 <= made.kl < math.inf
        except TypeError as error:
            raise FormatError(f"a point of the results is damaged: {error}") from error
        if not sound:
            raise FormatError(f"a point of the results is out of range: {data}")
        return made


class ShapeEntry(TypedDict):
    """A cache of the results."""

    title: str
    cold_s: float | None
    """Seconds of the prompt's prefill on this machine; None if not measured."""
    kl: str
    """``measured`` or ``expected``."""


def chart(shapes: Sequence[ShapeEntry], points: Sequence[Point], note: str = _NOTE) -> str:
    """Return the chart with one column per cache, the first way drawn boldly, and a note below.

    Raises:
        FormatError: There are no points.
    """
    drawn = [entry for entry in shapes if any(point.shape == entry["title"] for point in points)]
    if not drawn:
        raise FormatError("the results have no points; run the measurement again")
    ways = list(dict.fromkeys(point.way for point in points))
    width = _WIDTH * len(drawn)
    entries = [*ways, "cold prefill"] if any(entry["cold_s"] for entry in drawn) else ways
    columns = max(1, (width - _LEFT) // _COLUMN)
    top = _TOP + _TTFT + _GAP + _KL + _FOOT
    height = top + 22 * -(-len(entries) // columns) + 26
    parts = [_column(entry, points, ways, index) for index, entry in enumerate(drawn)]
    for index, name in enumerate(entries):
        parts.append(_entry(name, index, _LEFT + index % columns * _COLUMN, top + index // columns * 22))
    parts.append(label(_LEFT, height - 10, note, "axis"))
    return (
        f'<svg class="sp" xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img" '
        f'aria-label="Time to the first token and KL divergence over the rate of the link, for {len(ways)} ways to '
        f'fetch a KV cache"><style>{_STYLE}</style>'
        f'<rect class="ground" width="{width}" height="{height}" rx="6"/>{"".join(parts)}</svg>\n'
    )


def rate_name(mbit: float) -> str:
    """Format a rate as text: ``300 Mbit/s``, ``3 Gbit/s``."""
    return f"{mbit / 1000:g} Gbit/s" if mbit >= 1000 else f"{mbit:g} Mbit/s"


def _column(entry: ShapeEntry, points: Sequence[Point], ways: Sequence[str], index: int) -> str:
    mine = [point for point in points if point.shape == entry["title"]]
    across = LogScale([point.mbit for point in mine], _LEFT, _WIDTH - _RIGHT)
    cold_s = entry["cold_s"]
    times = [point.ttft_s for point in mine] + ([cold_s] if cold_s else [])
    up = LogScale(times, _TOP + _TTFT, _TOP)
    losses = [max(_MIN_KL, point.kl) for point in mine]
    low = _TOP + _TTFT + _GAP
    down = LogScale([*losses, _MIN_KL], low + _KL, low)
    out = [f'<g transform="translate({index * _WIDTH} 0)">', label(_LEFT, 20, entry["title"], "title")]
    out.append(label(_LEFT, 37, "time to the first token, seconds", "axis"))
    out.append(label(_LEFT, low - 8, f"KL, nats per token ({entry['kl']})", "axis"))
    for scale, top, bottom in ((up, _TOP, _TOP + _TTFT), (down, low, low + _KL)):
        out += [stroke(across(tick), top, across(tick), bottom, "grid") for tick in across.powers(10)]
        for tick in scale.powers(10):
            out.append(stroke(_LEFT, scale(tick), _WIDTH - _RIGHT, scale(tick), "grid"))
            out.append(label(_LEFT - 6, scale(tick) + 4, f"{tick:g}", "tick", "end"))
    out += [label(across(tick), low + _KL + 16, rate_name(tick), "tick", "middle") for tick in across.powers(10)]
    if cold_s:
        out.append(stroke(_LEFT, up(cold_s), _WIDTH - _RIGHT, up(cold_s), "cold"))
    # Draw the first way last, on top of the others.
    for number in reversed(range(len(ways))):
        own = sorted((point for point in mine if point.way == ways[number]), key=lambda point: point.mbit)
        out.append(_curve([(across(point.mbit), up(point.ttft_s), point) for point in own], number))
        out.append(_curve([(across(point.mbit), down(max(_MIN_KL, point.kl)), point) for point in own], number))
    return "".join(out) + "</g>"


def _curve(places: Sequence[tuple[float, float, Point]], number: int) -> str:
    colour, out = f"var(--f{number % 7})", []
    for (x1, y1, one), (x2, y2, other) in pairwise(places):
        kinds = ["way", *(["first"] if number == 0 else []), *([] if one.live and other.live else ["dashed"])]
        out.append(stroke(x1, y1, x2, y2, " ".join(kinds), colour))
    for x, y, point in places:
        how = "live" if point.live else "simulated"
        said = f"{point.way}, {rate_name(point.mbit)}, {how}: {point.ttft_s:.3g} s, KL {point.kl:.2g}"
        out.append(_mark(x, y, number, said, hollow=not point.live))
    return "".join(out)


def _mark(x: float, y: float, number: int, said: str, *, hollow: bool) -> str:
    colour = f"var(--f{number % 7})"
    fill = "var(--ground)" if hollow else colour
    place = f"translate({x:g} {y:g}) scale(0.7)"
    title = f"<title>{escape(said)}</title>"
    shape = SHAPES[number % len(SHAPES)]
    return f'<path class="mark" fill="{fill}" stroke="{colour}" d="{shape}" transform="{place}">{title}</path>'


def _entry(name: str, number: int, x: float, y: float) -> str:
    if name == "cold prefill":
        return stroke(x - 8, y, x + 8, y, "cold") + label(x + 14, y + 4, name, "name")
    return _mark(x, y, number, name, hollow=False) + label(x + 14, y + 4, name, "name")
