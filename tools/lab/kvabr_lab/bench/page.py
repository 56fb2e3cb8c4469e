"""The self-contained page of a rate-distortion bench, with an SVG plot: no library, no script.

Both axes are logarithmic, because rates and losses differ by factors. Every curve has its own colour and its own mark;
either is sufficient to distinguish it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

Row = dict[str, Any]

_STYLE = """
:root { --ground: #fbfbf9; --ink: #1c2027; --muted: #646c79; --hair: #e3e3dd; color-scheme: light dark; }
@media (prefers-color-scheme: dark) { :root { --ground: #14171c; --ink: #e7e9ed; --muted: #98a1af; --hair: #2c323c; } }
body { margin: 0 auto; padding: 28px clamp(14px, 3vw, 40px) 64px; max-width: 1120px;
  background: var(--ground); color: var(--ink); font-variant-numeric: tabular-nums;
  font: 14px/1.45 system-ui, -apple-system, "Segoe UI", Roboto, "DejaVu Sans", sans-serif; }
.mark { margin: 0; color: var(--muted); font-weight: 650; }
h1 { font-size: 22px; font-weight: 550; margin: 6px 0 18px; max-width: 60ch; }
h2 { font-size: 17px; margin: 36px 0 10px; }
.muted { color: var(--muted); font-size: 12px; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; }
th, td { padding: 4px 14px 4px 0; border-bottom: 1px solid var(--hair); text-align: right; white-space: nowrap; }
th { font-weight: 400; font-size: 12px; color: var(--muted); }
th:first-child, td:first-child { text-align: left; }
svg { width: 100%; height: auto; }
"""


def page(title: str, sentence: str, rows: Sequence[Row], exact: Row | None, tables: Sequence[tuple[str, Table]]) -> str:
    """Return the page: a sentence with the outcome, the plot of ``rows`` (`drawing`), and tables with titles."""
    parts = [f"<h2>{escape(name)}</h2>{_table(table)}" for name, table in tables]
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">"
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{_STYLE}</style></head><body>"
        f'<p class="mark">kvabr bench rd</p><h1>{escape(sentence)}</h1><p class="muted">{escape(title)}</p>'
        f"{drawing(rows, exact)}{''.join(parts)}</body></html>\n"
    )


Table = tuple[Sequence[str], Sequence[Sequence[str]]]
"""Names of columns, and rows of cells as text."""


def _table(table: Table) -> str:
    names, lines = table
    head = "".join(f"<th>{escape(name)}</th>" for name in names)
    body = "".join(f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in line)}</tr>" for line in lines)
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


WIDTH, HEIGHT = 520, 380
_LEFT, _RIGHT, _TOP, _BOTTOM = 62, 16, 34, 46

STYLE = """
.rd { --ground: #ffffff; --ink: #1c2027; --muted: #646c79; --hair: #e3e3dd;
  --f0: #1d2763; --f1: #c04e7d; --f2: #12877a; --f3: #b8860b;
  --f4: #523093; --f5: #646c79; --f6: #b3261e; --f7: #3a7d34; }
@media (prefers-color-scheme: dark) {
  .rd { --ground: #1a1e25; --ink: #e7e9ed; --muted: #98a1af; --hair: #2c323c;
    --f0: #79aef5; --f1: #f28aa8; --f2: #3cc4ae; --f3: #ffe08a;
    --f4: #b553b0; --f5: #98a1af; --f6: #ff8a80; --f7: #8fd18a; } }
.rd text { font: 12px system-ui, -apple-system, "Segoe UI", Roboto, "DejaVu Sans", sans-serif; fill: var(--ink); }
.rd .ground { fill: var(--ground); } .rd .title { font-weight: 650; font-size: 13px; }
.rd .tick, .rd .axis { fill: var(--muted); font-size: 11px; } .rd .name { font-size: 11px; }
.rd .grid { stroke: var(--hair); } .rd .line { fill: none; stroke-width: 1.8; }
.rd .spread { stroke-width: 1; stroke-opacity: .6; } .rd .exact { stroke: var(--muted); stroke-dasharray: 4 3; }
.rd .mark { stroke: var(--ground); stroke-width: .8; }
"""

SHAPES = (
    # SVG paths around (0, 0), one mark for each curve.
    "M-5 0a5 5 0 1 0 10 0a5 5 0 1 0 -10 0z",
    "M-4.5 -4.5h9v9h-9z",
    "M0 -5.8l5.4 9.6h-10.8z",
    "M0 -6l6 6l-6 6l-6 -6z",
    "M0 5.8l5.4 -9.6h-10.8z",
    "M-2 -5.5h4v3.5h3.5v4h-3.5v3.5h-4v-3.5h-3.5v-4h3.5z",
    "M-5.5 -2.5h11v5h-11z",
    "M-2.5 -5.5h5v11h-5z",
)


@dataclass(frozen=True, slots=True)
class Axis:
    """The vertical axis of one panel."""

    title: str
    key: str
    label: str
    floor: float
    spread: str = ""
    sign: float = 1.0
    offset: float = 0.0

    def value(self, row: Row) -> float | None:
        """Return the value to draw; lower is better."""
        number = row.get(self.key)
        return None if number is None else max(self.floor, self.sign * number + self.offset)

    def interval(self, row: Row) -> tuple[float, float] | None:
        """Return the interval to draw, lower end first, or None."""
        ends = row.get(self.spread) if self.spread else None
        if not ends:
            return None
        low, high = sorted(max(self.floor, self.sign * end + self.offset) for end in ends)
        return low, high


_CURVES = ("AC", "CacheGen", "KIVI")
"""First part of the names of families that form a curve; other families are separate points."""

PANELS = (
    Axis("Loss of the continuation", "kl", "mean KL to the exact cache, nats per token", 1e-5, "kl_ci95"),
    Axis("Most likely token changed", "top1", "share of tokens", 1e-3, sign=-1.0, offset=1.0),
    Axis("Planted codes: surprise", "logprob", "nats per digit", 1e-3, "logprob_ci95", sign=-1.0),
    Axis("Planted codes: not reproduced in full", "whole", "share of cases", 1e-2, sign=-1.0, offset=1.0),
)


def drawing(rows: Sequence[Row], exact: Row | None = None) -> str:
    """Return all panels of `kvabr_lab.bench.summary.scheme_rows` in one SVG, two per line, with a legend."""
    drawn = [row for row in rows if row.get("bits")]
    panels = [axis for axis in PANELS if any(axis.value(row) is not None for row in drawn)]
    families = _families(drawn)
    columns = min(2, len(panels)) or 1
    lines = -(-len(panels) // columns)
    legend = 26 * -(-len(families) // (4 * columns))
    width, height = columns * WIDTH, lines * HEIGHT + legend
    parts = [_panel(axis, drawn, families, exact, n % columns, n // columns) for n, axis in enumerate(panels)]
    parts += [_entry(name, n, n % (4 * columns), n // (4 * columns), lines * HEIGHT) for n, name in enumerate(families)]
    return (
        f'<svg class="rd" xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img" '
        f'aria-label="Rate against quality of {len(drawn)} ways to code a KV cache"><style>{STYLE}</style>'
        f'<rect class="ground" width="{width}" height="{height}"/>{"".join(parts)}</svg>\n'
    )


def _families(rows: Sequence[Row]) -> list[str]:
    count: dict[str, int] = {}
    for row in rows:
        count[row["family"]] = count.get(row["family"], 0) + 1
    return sorted(count, key=lambda name: (name != "AC", -count[name]))


def _panel(axis: Axis, rows: Sequence[Row], families: list[str], exact: Row | None, column: int, line: int) -> str:
    shown = [row for row in rows if axis.value(row) is not None]
    across = LogScale([row["bits"] for row in shown], _LEFT, WIDTH - _RIGHT)
    values = [value for row in shown for value in (axis.value(row), *(axis.interval(row) or ())) if value is not None]
    up = LogScale(values, HEIGHT - _BOTTOM, _TOP)
    base, middle = HEIGHT - _BOTTOM, (_TOP + HEIGHT - _BOTTOM) / 2
    out = [f'<g transform="translate({column * WIDTH} {line * HEIGHT})">', label(_LEFT, 20, axis.title, "title")]
    for tick in across.powers(2):
        x = across(tick)
        out += [stroke(x, _TOP, x, base, "grid"), label(x, base + 16, f"{tick:g}", "tick", "middle")]
    for tick in up.powers(10):
        y = up(tick)
        out += [stroke(_LEFT, y, WIDTH - _RIGHT, y, "grid"), label(_LEFT - 6, y + 4, f"{tick:g}", "tick", "end")]
    out.append(label(WIDTH / 2, HEIGHT - 12, "bits per element", "axis", "middle"))
    out.append(f'<g transform="translate(14 {middle}) rotate(-90)">{label(0, 0, axis.label, "axis", "middle")}</g>')
    reached = None if exact is None or axis.key not in exact else axis.value(exact)
    if reached is not None and up.low <= reached <= up.high:
        y = up(reached)
        out += [stroke(_LEFT, y, WIDTH - _RIGHT, y, "exact"), label(_LEFT + 4, y - 4, "exact cache", "tick")]
    names = _Names()
    for index, family in enumerate(families):
        own = sorted((row for row in shown if row["family"] == family), key=lambda row: row["bits"])
        out.append(_curve(axis, own, across, up, index, names))
    return "".join(out) + "</g>"


class _Names:
    """Places names in a panel. If a name would overlap another, only the mark's tooltip has it."""

    def __init__(self) -> None:
        self._taken: list[tuple[float, float, float]] = []

    def place(self, x: float, y: float, name: str) -> str:
        """Return the SVG of a name next to its mark; empty if there is no space."""
        width = 6.4 * len(name)
        for left, down in ((x + 8, y - 6), (x + 8, y + 14), (x - 8 - width, y - 6), (x - 8 - width, y + 14)):
            inside = left >= _LEFT and left + width <= WIDTH and _TOP <= down <= HEIGHT - _BOTTOM
            free = all(left >= b or left + width <= a or abs(down - c) > 11 for a, b, c in self._taken)
            if inside and free:
                self._taken.append((left, left + width, down))
                return label(left, down, name, "name")
        return ""


def _curve(axis: Axis, rows: Sequence[Row], across: LogScale, up: LogScale, index: int, names: _Names) -> str:
    colour, out = f"var(--f{index % 8})", []
    points = [(across(row["bits"]), up(axis.value(row) or axis.floor), row) for row in rows]
    if len(points) > 1 and rows[0]["family"].startswith(_CURVES):
        path = " ".join(f"{x},{y}" for x, y, _ in points)
        out.append(f'<polyline class="line" stroke="{colour}" points="{path}"/>')
    for x, y, row in points:
        ends = axis.interval(row)
        if ends:
            out.append(stroke(x, up(ends[0]), x, up(ends[1]), "spread", colour))
        said = f"{row['scheme']}: {row['bits']:.3g} bits, {axis.value(row):.3g}"
        out.append(_mark(x, y, index, said))
        out.append(names.place(x, y, row["scheme"]))
    return "".join(out)


def _entry(name: str, index: int, column: int, line: int, top: int) -> str:
    x, y = _LEFT + column * 118, top + 14 + line * 24
    return _mark(x, y, index, name) + label(x + 12, y + 4, name, "name")


def label(x: float, y: float, text: str, kind: str, anchor: str = "start") -> str:
    """Return the SVG of a text of class ``kind``."""
    return f'<text class="{kind}" x="{x:g}" y="{y:g}" text-anchor="{anchor}">{escape(text)}</text>'


def stroke(x1: float, y1: float, x2: float, y2: float, kind: str, colour: str = "") -> str:
    """Return the SVG of a straight line of class ``kind``."""
    drawn = f' stroke="{colour}"' if colour else ""
    return f'<line class="{kind}"{drawn} x1="{x1:g}" x2="{x2:g}" y1="{y1:g}" y2="{y2:g}"/>'


def _mark(x: float, y: float, index: int, said: str) -> str:
    shape, place = SHAPES[index % len(SHAPES)], f"translate({x:g} {y:g})"
    title = f"<title>{escape(said)}</title>"
    return f'<path class="mark" fill="var(--f{index % 8})" d="{shape}" transform="{place}">{title}</path>'


class LogScale:
    """A logarithmic scale for some values, with a margin."""

    def __init__(self, values: Sequence[float], begin: float, end: float) -> None:
        """Map positive ``values`` to pixels from ``begin`` to ``end``."""
        self.low, self.high = min(values) / 1.15, max(values) * 1.15
        self._begin, self._end = begin, end

    def __call__(self, value: float) -> float:
        share = math.log(value / self.low) / math.log(self.high / self.low)
        return round(self._begin + share * (self._end - self._begin), 1)

    def powers(self, base: float) -> list[float]:
        """Return the powers of ``base`` that are on the scale."""
        first, last = math.ceil(math.log(self.low, base)), math.floor(math.log(self.high, base))
        return [float(f"{base**power:.6g}") for power in range(first, last + 1)]
