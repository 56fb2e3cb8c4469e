"""Queries on a replay's result shared by all reports, and track colours.

A result is the JSON of ``kvabr replay --json``; a timeline is the log and the link of one of its runs. The colours form
a ramp from cheap (warm, light) to exact (deep). Lightness decreases strictly, so the order remains visible with colour
blindness and in grey prints; neighbours stay distinct under simulated deuteranopia, protanopia and tritanopia.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from kvabr.types.events import PlayStarted
from kvabr.types.naming import LEVELS

RECOMPUTED = "recomputed"
NOTHING = "none"
FIXED = "fixed:"
"""Prefix of policies that play a single track."""
ORACLE = "oracle"
"""Suffix of policies that know the future of the link."""

DASH = "\u2013"

Result = dict[str, Any]
Run = dict[str, Any]
Timeline = dict[str, Any]


def number(value: Any) -> float | None:
    """Return ``value`` as a finite float; None for NaN, infinity, text and None."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return float(value)


def feasible(run: Run) -> bool:
    """Return True if some schedule could have met this run's deadline."""
    return run.get("feasible") is not False


def ranked(result: Result) -> list[str]:
    """Return policies by ascending mean regret, then those without regret; equal ones keep the result's order."""
    summary = result.get("summary", {})

    def regret(policy: str) -> float:
        value = number(summary[policy].get("regret_mean"))
        return math.inf if value is None else value

    return sorted(summary, key=regret)


def track_order(result: Result, timelines: Iterable[Timeline] = ()) -> list[str]:
    """Return all tracks except ``recomputed``, cheapest first, from asset, timelines, or bytes of groups."""
    listed = [line for line in _asset(result).get("tracks") or () if isinstance(line, dict) and "track" in line]
    listed.sort(key=lambda line: number(line.get("bytes")) or 0.0)
    names = dict.fromkeys(str(line["track"]) for line in listed)
    for timeline in timelines:
        start = next((event for event in timeline["log"] if isinstance(event, PlayStarted)), None)
        names.update(dict.fromkeys(() if start is None else start.tracks))
    sizes: dict[str, list[int]] = {}
    for group in () if names else groups_of(result):
        track = group.get("track")
        if track and track != RECOMPUTED:
            sizes.setdefault(str(track), []).append(int(group.get("bytes") or 0))
    for line in result.get("summary", {}).values():
        for track in line.get("track_share") or ():
            if track not in {RECOMPUTED, NOTHING}:
                sizes.setdefault(str(track), [])

    def cost(track: str) -> tuple[bool, float, int]:
        known = sizes[track]
        level = LEVELS.index(track) if track in LEVELS else -1
        return (not known, sum(known) / len(known) if known else 0.0, -level)

    names.update(dict.fromkeys(sorted((t for t in sizes if t not in names), key=cost)))
    return list(names)


def _asset(result: Result) -> dict[str, Any]:
    asset = result.get("asset")
    return asset if isinstance(asset, dict) else {}


def asset_name(result: Result) -> str | None:
    """Return a description of the asset, if known."""
    model, tokens = _asset(result).get("model"), number(_asset(result).get("tokens"))
    if model is None:
        return None
    return f"{model}, {tokens:,.0f} tokens" if tokens else str(model)


def track_facts(result: Result) -> dict[str, tuple[float | None, float | None]]:
    """Return bytes and expected loss (nats per token) of every track of the result's asset."""
    return {
        str(line["track"]): (number(line.get("bytes")), number(line.get("loss")))
        for line in _asset(result).get("tracks") or ()
        if isinstance(line, dict) and "track" in line
    }


def groups_of(result: Result) -> Iterator[dict[str, Any]]:
    """Yield every group of every run."""
    for run in result.get("runs", ()):
        yield from run.get("groups") or ()


def families(result: Result) -> dict[str, list[Run]]:
    """Return the runs by trace family, in order of first appearance."""
    found: dict[str, list[Run]] = {}
    for run in result.get("runs", ()):
        family = str(run.get("trace_family") or "")
        if family:
            found.setdefault(family, []).append(run)
    return found


def mean_regret(runs: Iterable[Run]) -> float | None:
    """Return the mean regret of the feasible ``runs``; None if there are none."""
    known = [value for run in runs if feasible(run) and (value := number(run.get("regret"))) is not None]
    return sum(known) / len(known) if known else None


def play_key(run: Run) -> tuple[str, float, float]:
    """Return trace, start and deadline (in seconds), which plays of different policies have in common."""
    return (str(run.get("trace")), number(run.get("start_s")) or 0.0, number(run.get("deadline_s")) or 0.0)


def set_apart(result: Result) -> int:
    """Return the number of plays (trace x start) that no schedule could have delivered in time."""
    return len({play_key(run) for run in result.get("runs", ()) if not feasible(run)})


def why_apart(result: Result) -> str:
    """Return the reason why plays are set apart."""
    max_loss = number(result.get("options", {}).get("max_loss"))
    if max_loss is None:
        return "even the cheapest tracks could not arrive in time"
    return f"no cache within max_loss ({max_loss:g} nats per token) could arrive in time"


def nats(value: float | None, digits: int = 2) -> str:
    """Format a loss in nats per token with ``digits`` significant digits, if possible without an exponent."""
    if value is None:
        return DASH
    if value == 0:
        return "0"
    if abs(value) < 1e-6:
        return f"{value:.0e}"
    decimals = max(0, digits - 1 - math.floor(math.log10(abs(value))))
    return f"{value:.{decimals}f}"


LIGHT = ("#f6cf5e", "#f0a158", "#df745f", "#c04e7d", "#943f9f", "#4247ad", "#0b2440")
DARK = ("#ffe999", "#fdbb68", "#f28a62", "#d9648c", "#b553b0", "#7f45c4", "#3f40b8")
"""Colours for dark backgrounds, and for terminals with unknown background."""
RECOMPUTED_LIGHT = "#12877a"
RECOMPUTED_DARK = "#3cc4ae"


def ramp(count: int, anchors: Sequence[str] = LIGHT) -> list[str]:
    """Return ``count`` colours ``#rrggbb``, evenly spaced along ``anchors``, including the first and the last."""
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
