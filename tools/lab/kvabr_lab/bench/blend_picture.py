"""The chart of `kvabr bench blend` as SVG: loss over work by kind of prompt, and the share of codes not found."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from kvabr.types.errors import FormatError
from kvabr_lab.bench.blend import EXACT_TRACK, FULL
from kvabr_lab.bench.page import SHAPES, STYLE, LogScale, label, stroke

Row = Mapping[str, Any]
_WIDTH, _HEIGHT, _LEFT, _RIGHT, _TOP, _BOTTOM = 440, 360, 62, 16, 34, 46
_MIN_WORK, _MIN_VALUE = 0.01, 1e-3
_TITLES = {"text": "Going on with a text", "facts": "One entry of five manuals", "codes": "One of five codes"}


def picture(result: Mapping[str, Any]) -> str:
    """Return the chart of a bench's results, for uncoded caches only.

    Raises:
        FormatError: No results to draw.
    """
    drawn = [row for row in result["recipes"] if row["track"] == EXACT_TRACK and ", chosen on" not in row["recipe"]]
    if not drawn:
        raise FormatError("no results of `kvabr bench blend` to draw")
    curves = sorted({_curve(row) for row in drawn})
    panels = [(kind, "kl") for kind in dict.fromkeys(row["kind"] for row in drawn)]
    if any("found" in row for row in drawn):
        panels.append(("codes", "missed"))
    height = _HEIGHT + 24 * -(-len(curves) // 5) + 10
    parts = [_panel(kind, key, drawn, result, curves, place) for place, (kind, key) in enumerate(panels)]
    for index, name in enumerate(curves):
        x, y = _LEFT + index % 5 * 200, _HEIGHT + 14 + index // 5 * 24
        parts.append(_mark(x, y, index, name) + label(x + 12, y + 4, name, "name"))
    width = max(len(panels) * _WIDTH, _LEFT + min(5, len(curves)) * 200)
    return (
        f'<svg class="rd" xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img" '
        f'aria-label="Loss of prompts joined from passages over the work of recomputing some of their tokens"><style>'
        f'{STYLE}</style><rect class="ground" width="{width}" height="{height}"/>{"".join(parts)}</svg>\n'
    )


def _curve(row: Row) -> str:
    return f"{row['base']}, {row['selector']}" if row["selector"] else f"{row['base']}, none"


def _value(row: Row, key: str) -> float:
    value = row["kl"] if key == "kl" else 1 - row["found"] / row["prompts"]
    return max(_MIN_VALUE, float(value))


def _panel(
    kind: str, key: str, rows: Sequence[Row], result: Mapping[str, Any], curves: Sequence[str], place: int
) -> str:
    shown = [row for row in rows if row["kind"] == kind and (key == "kl" or "found" in row)]
    across = LogScale([max(_MIN_WORK, row["work"]) for row in shown], _LEFT, _WIDTH - _RIGHT)
    full = [row for row in result["recipes"] if row["recipe"] == FULL and row["kind"] == kind]
    exact = [_value(row, key) for row in full] if key == "missed" else []
    up = LogScale([*(_value(row, key) for row in shown), *exact], _HEIGHT - _BOTTOM, _TOP)
    base = _HEIGHT - _BOTTOM
    what = "KL to the full prefill, nats per token" if key == "kl" else "share of codes not found"
    out = [f'<g transform="translate({place * _WIDTH} 0)">', label(_LEFT, 20, _TITLES[kind], "title")]
    for tick in (0.01, 0.03, 0.1, 0.3):
        if across.low <= tick <= across.high:
            x = across(tick)
            out += [stroke(x, _TOP, x, base, "grid"), label(x, base + 16, f"{tick:g}", "tick", "middle")]
    for power in up.powers(10):
        for step in (0.2, 0.5, 1):
            tick = step * power
            if up.low <= tick <= up.high:
                y = up(tick)
                out += [
                    stroke(_LEFT, y, _WIDTH - _RIGHT, y, "grid"),
                    label(_LEFT - 6, y + 4, f"{tick:g}", "tick", "end"),
                ]
    out.append(label(_WIDTH / 2, _HEIGHT - 12, "work, share of a full prefill", "axis", "middle"))
    turned = f"translate(14 {(_TOP + base) / 2}) rotate(-90)"
    out.append(f'<g transform="{turned}">{label(0, 0, what, "axis", "middle")}</g>')
    for value in exact:
        out += [
            stroke(_LEFT, up(value), _WIDTH - _RIGHT, up(value), "exact"),
            label(_LEFT + 4, up(value) - 4, FULL, "tick"),
        ]
    for index, name in enumerate(curves):
        own = sorted((row for row in shown if _curve(row) == name), key=lambda row: float(row["work"]))
        points = [(across(max(_MIN_WORK, row["work"])), up(_value(row, key)), row) for row in own]
        if len(points) > 1:
            path = " ".join(f"{x},{y}" for x, y, _ in points)
            out.append(f'<polyline class="line" stroke="var(--f{index % 8})" points="{path}"/>')
        out += [
            _mark(x, y, index, f"{row['recipe']}: work {row['work']:.3f}, {_value(row, key):.3g}")
            for x, y, row in points
        ]
    return "".join(out) + "</g>"


def _mark(x: float, y: float, index: int, said: str) -> str:
    shape, place = SHAPES[index % len(SHAPES)], f"translate({x:g} {y:g})"
    return f'<path class="mark" fill="var(--f{index % 8})" d="{shape}" transform="{place}"><title>{said}</title></path>'
