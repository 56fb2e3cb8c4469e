"""Charts as inline SVG: plain text, no library, no script. Colours are CSS variables of ``lab.css``."""

from __future__ import annotations

import html
import math
from collections.abc import Mapping, Sequence

from kvabr_lab.causes import CAUSES
from kvabr_lab.tables import cause_title, short

COLOURS = 10
"""Number of colours; further policies reuse them with dashed lines."""
_FLOOR = 1e-5
"""Smaller regrets are drawn at this value, as a logarithmic axis has no zero."""
_CHARACTER = 6.8
"""Upper bound of the width of a character in a policy's name, pixels."""
_NUMBER = 72
_MIN_PLOT = 150
"""Minimum width of the plot in pixels; on narrower screens the chart scrolls."""


def escape(text: object) -> str:
    """Return text escaped for HTML."""
    return html.escape(str(text))


def line_class(index: int) -> str:
    """Return the CSS class of a policy's line."""
    return f"l{index % COLOURS}" + (" dashed" if index >= COLOURS else "")


class LogAxis:
    """A logarithmic axis of whole decades that covers all values from `_FLOOR` on."""

    def __init__(self, values: Sequence[float], left: float, right: float, unit: str = "") -> None:
        """Map ``values`` to positions from ``left`` to ``right``, in pixels or in ``unit``."""
        known = [max(_FLOOR, value) for value in values] or [_FLOOR, 1.0]
        self._low = math.floor(math.log10(min(known)) + 1e-9)
        self._high = max(self._low + 1, math.ceil(math.log10(max(known)) - 1e-9))
        self._left, self._width, self._unit = left, right - left, unit

    def x(self, value: float) -> float:
        """Return the position of a value."""
        share = (math.log10(max(_FLOOR, value)) - self._low) / (self._high - self._low)
        return self._left + min(1.0, max(0.0, share)) * self._width

    def at(self, value: float) -> str:
        """Return the position as an SVG length."""
        return f"{self.x(value):.2f}{self._unit}"

    def grid(self, top: float, bottom: float) -> str:
        """Return a line and a label for every decade."""
        parts = []
        for power in range(self._low, self._high + 1):
            x, text = self.at(10.0**power), f"{10.0**power:g}"
            if power <= math.log10(_FLOOR) + 1e-9:
                text = f"≤{text}"
            # On narrow screens, only every second decade has a label.
            spare = ' class="spare"' if self._unit and (self._high - power) % 2 else ""
            parts.append(f'<line class="rule" x1="{x}" x2="{x}" y1="{top}" y2="{bottom}"/>')
            parts.append(f'<text x="{x}" y="{bottom + 13}" text-anchor="middle"{spare}>{text}</text>')
        return "".join(parts)


def ranking(rows: Sequence[Mapping[str, object]], regrets: Mapping[str, tuple[float, float, float]]) -> str:
    """Draw every policy's mean regret, given as (mean, low end, high end), best on top."""
    step, top = 22, 8
    bottom = top + step * len(rows)
    axis = LogAxis([value for ends in regrets.values() for value in ends], 0.0, 100.0, "%")
    parts = [axis.grid(top, bottom)]
    for index, row in enumerate(rows):
        policy, y = str(row["policy"]), top + step * (index + 0.5)
        mean, low, high = regrets[policy]
        said = f"{policy}: {short(mean)} ({short(low)} to {short(high)})"
        parts.append(
            f'<g><title>{escape(said)}</title>{_name(policy, y + 4)}<line class="interval" x1="{axis.at(low)}" '
            f'x2="{axis.at(high)}" y1="{y}" y2="{y}"/><circle class="dot" cx="{axis.at(mean)}" cy="{y}" r="4"/>'
            f"{_value(mean, y + 4)}</g>"
        )
    return _wide(list(regrets), bottom + 20, "Mean regret of every policy", "".join(parts))


def causes(rows: Sequence[tuple[str, Mapping[str, float]]]) -> str:
    """Draw the causes of each policy's regret as a bar with parts."""
    step, top = 22, 6
    parts = []
    for index, (policy, parted) in enumerate(rows):
        y, x = top + step * index, 0.0
        whole = sum(max(0.0, parted[cause]) for cause in CAUSES)
        parts.append(_name(policy, y + 14))
        for cause in CAUSES:
            part = 100 * max(0.0, parted[cause]) / whole if whole > 0 else 0.0
            if part > 0.03:
                said = f"{policy}, {cause_title(cause)}: {short(parted[cause])}"
                parts.append(
                    f'<rect class="cause-{cause}" x="{x:.2f}%" y="{y + 2}" width="{part:.2f}%" height="{step - 5}">'
                    f"<title>{escape(said)}</title></rect>"
                )
            x += part
        parts.append(_value(sum(parted.values()), y + 14))
    return _wide([policy for policy, _ in rows], top + step * len(rows) + 4, "Regret by cause", "".join(parts))


def distribution(values: Mapping[str, Sequence[float]], order: Sequence[str], title: str) -> str:
    """Draw, for every policy, the fraction of plays with at most a given regret."""
    width, height, left, top = 410, 200, 34, 8
    bottom = height - 22
    axis = LogAxis([value for line in values.values() for value in _ends(line)], left, width - 12)
    parts = [axis.grid(top, bottom)]
    for share in (0.0, 0.25, 0.5, 0.75, 1.0):
        y = bottom - share * (bottom - top)
        parts.append(f'<line class="rule" x1="{left}" x2="{width - 12}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text x="{left - 4}" y="{y + 4:.1f}" text-anchor="end">{100 * share:g}</text>')
    for index, policy in enumerate(order):
        ranked = sorted(values.get(policy, ()))
        if not ranked:
            continue
        points = []
        for number in range(101):
            share = number / 100
            value = ranked[min(len(ranked) - 1, max(0, math.ceil(share * len(ranked)) - 1))]
            points.append(f"{axis.x(value):.1f},{bottom - share * (bottom - top):.1f}")
        parts.append(
            f'<polyline class="curve {line_class(index)}" points="{" ".join(points)}">'
            f"<title>{escape(policy)}</title></polyline>"
        )
    return (
        f'<svg class="chart" viewBox="0 0 {width} {height}" width="{width}" height="{height}" role="img" '
        f'aria-label="{escape(title)}">{"".join(parts)}</svg>'
    )


def _ends(line: Sequence[float]) -> tuple[float, ...]:
    return (min(line), max(line)) if line else ()


def _cut(policy: str) -> str:
    return policy if len(policy) <= 28 else "…" + policy[-27:]


def _name(policy: str, y: float) -> str:
    return f'<text x="-10" y="{y}" text-anchor="end" class="name">{escape(_cut(policy))}</text>'


def _value(value: float, y: float) -> str:
    return f'<text x="100%" dx="10" y="{y}">{escape(short(value))}</text>'


def _wide(names: Sequence[str], height: float, title: str, plot: str) -> str:
    """Return a chart as wide as the page; names and numbers are in its margins, and x goes from 0 to 100 %."""
    left = round(14 + _CHARACTER * max(len(_cut(name)) for name in names))
    size = f"margin:0 {_NUMBER}px 0 {left}px;width:calc(100% - {left + _NUMBER}px);height:{height}px"
    return (
        f'<div class="scroll"><svg class="chart wide" style="{size};min-width:{_MIN_PLOT}px" role="img" '
        f'aria-label="{escape(title)}">{plot}</svg></div>'
    )
