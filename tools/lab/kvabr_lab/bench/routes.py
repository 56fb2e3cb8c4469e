"""The chart of `kvabr route --day` as SVG: every rule's mean time to the first token over the link's rate.

The left panel shows seconds; the right panel shows the extra time compared with the oracle, or with the best rule.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape
from itertools import pairwise
from typing import Any

from kvabr.types.errors import FormatError
from kvabr_lab.bench.page import SHAPES, LogScale, label, stroke
from kvabr_lab.bench.speeds import rate_name

DAY_SCHEMA = "kvabr.route.day/1"
_FIRST = "kvabr"
_ORACLE = "oracle"
_WIDTH, _LEFT, _RIGHT, _TOP, _HEIGHT, _FOOT = 460, 58, 24, 46, 280, 40
_COLUMN = 150
_HUES = 9
_STYLE = """
.rt { --ground: #ffffff; --ink: #1c2027; --muted: #646c79; --hair: #e3e3dd;
  --f0: #1f5fbf; --f1: #12877a; --f2: #8b94a3; --f3: #b8860b; --f4: #523093; --f5: #c04e7d; --f6: #b3261e;
  --f7: #3a7d34; --f8: #7a4a1e; }
@media (prefers-color-scheme: dark) {
  .rt { --ground: #14171c; --ink: #e7e9ed; --muted: #98a1af; --hair: #2c323c;
    --f0: #79aef5; --f1: #3cc4ae; --f2: #8b94a3; --f3: #ffe08a; --f4: #c49bff; --f5: #f28aa8; --f6: #ff8a80;
    --f7: #8fd18a; --f8: #d8a878; } }
.rt text { font: 12px system-ui, sans-serif; fill: var(--ink); }
.rt .ground { fill: var(--ground); } .rt .title { font-weight: 650; font-size: 13px; }
.rt .tick, .rt .axis { fill: var(--muted); font-size: 11px; }
.rt .grid { stroke: var(--hair); } .rt .way { stroke-width: 1.6; } .rt .first { stroke-width: 3; }
.rt .mark { stroke: var(--ground); stroke-width: 0.8; }
"""

Curve = list[tuple[float, float]]


def chart(result: Mapping[str, Any]) -> str:
    """Return the chart of the results of `kvabr route --day --json`.

    Raises:
        FormatError: The results are empty, or of another kind.
    """
    curves = _curves(result)
    names = sorted(curves, key=lambda name: (name != _FIRST, name == _ORACLE))
    least = {
        mbps: curves[_ORACLE][index][1] if _ORACLE in curves else min(curve[index][1] for curve in curves.values())
        for index, (mbps, _) in enumerate(next(iter(curves.values())))
    }
    over = {name: [(mbps, mean / least[mbps]) for mbps, mean in curve] for name, curve in curves.items()}
    width = 2 * _WIDTH
    columns = (width - _LEFT) // _COLUMN
    top = _TOP + _HEIGHT + _FOOT
    height = top + 22 * -(-len(names) // columns) + 8
    against = "the oracle's" if _ORACLE in curves else "that of the best rule"
    parts = [
        _panel("Mean time to the first token, seconds", curves, names, 0),
        _panel(f"The same over {against}", {name: over[name] for name in names if name != _ORACLE}, names, 1),
    ]
    for index, name in enumerate(names):
        x, y = _LEFT + index % columns * _COLUMN, top + index // columns * 22
        parts.append(_mark(x, y, index, name) + label(x + 14, y + 4, name, "name"))
    return (
        f'<svg class="rt" xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img" '
        f'aria-label="Mean time to the first token of {len(names)} rules that decide where to prefill, over the rate '
        f'of the link"><style>{_STYLE}</style><rect class="ground" width="{width}" height="{height}" rx="6"/>'
        f"{''.join(parts)}</svg>\n"
    )


def _curves(result: Mapping[str, Any]) -> dict[str, Curve]:
    if result.get("schema") != DAY_SCHEMA:
        raise FormatError(f"not results of `kvabr route --day` (schema {DAY_SCHEMA})")
    curves: dict[str, Curve] = {}
    try:
        for day in sorted(result["days"], key=lambda day: float(day["mbps"])):
            for rule in day["rules"]:
                curves.setdefault(str(rule["rule"]), []).append((float(day["mbps"]), float(rule["ttft_mean_s"])))
    except (KeyError, TypeError, ValueError) as error:
        raise FormatError(f"the results of a day are damaged: {error!r}") from error
    if len({len(curve) for curve in curves.values()}) != 1:
        raise FormatError("the results have no days, or their days have different rules; run `kvabr route --day` again")
    return curves


def _panel(title: str, curves: Mapping[str, Curve], names: Sequence[str], column: int) -> str:
    low = _TOP + _HEIGHT
    across = LogScale([mbps for curve in curves.values() for mbps, _ in curve], _LEFT, _WIDTH - _RIGHT)
    up = LogScale([value for curve in curves.values() for _, value in curve], low, _TOP)
    out = [f'<g transform="translate({column * _WIDTH} 0)">', label(_LEFT, 22, title, "title")]
    for tick in sorted({mbps for curve in curves.values() for mbps, _ in curve}):
        out += [stroke(across(tick), _TOP, across(tick), low, "grid")]
        out.append(label(across(tick), low + 16, rate_name(tick), "tick", "middle"))
    ticks = [step * power for power in up.powers(10) for step in (0.5, 1, 2) if up.low <= step * power <= up.high]
    # Nearly equal rules may lie between two round numbers.
    for tick in ticks if len(ticks) > 1 else (up.low, math.sqrt(up.low * up.high), up.high):
        out.append(stroke(_LEFT, up(tick), _WIDTH - _RIGHT, up(tick), "grid"))
        out.append(label(_LEFT - 6, up(tick) + 4, f"{tick:.3g}", "tick", "end"))
    for name in reversed(names):
        if name in curves:
            out.append(_curve(curves[name], name, names.index(name), across, up))
    return "".join(out) + "</g>"


def _curve(curve: Curve, name: str, number: int, across: LogScale, up: LogScale) -> str:
    kind, out = "way first" if number == 0 else "way", []
    for (x1, y1), (x2, y2) in pairwise(curve):
        out.append(stroke(across(x1), up(y1), across(x2), up(y2), kind, f"var(--f{number % _HUES})"))
    out += [_mark(across(x), up(y), number, f"{name}, {rate_name(x)}: {y:.3g}") for x, y in curve]
    return "".join(out)


def _mark(x: float, y: float, number: int, said: str) -> str:
    place = f"translate({x:g} {y:g}) scale(0.8)"
    title = f"<title>{escape(said)}</title>"
    shape = SHAPES[number % len(SHAPES)]
    return f'<path class="mark" fill="var(--f{number % _HUES})" d="{shape}" transform="{place}">{title}</path>'
