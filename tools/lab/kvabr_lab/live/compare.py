"""Compares real plays with simulated ones, play by play and in total."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from kvabr.replay.summary import percentile

Run = Mapping[str, Any]


def comparison(live: Sequence[Run], simulated: Sequence[Run], sizes: Sequence[float]) -> dict[str, Any]:
    """Return a report's ``live_comparison``: totals over all and network-limited plays, by family and by policy.

    Both lists have the same plays in the same order; ``sizes`` are relative sizes of groups.
    """
    plays = [_play(index, one, other, sizes) for index, (one, other) in enumerate(zip(live, simulated, strict=True))]
    return {
        "all": _totals(plays),
        "network": _totals([play for play in plays if play["limit"] == "network"]),
        "families": _by(plays, "family"),
        "policies": _by(plays, "policy"),
        "plays": plays,
    }


def _play(index: int, live: Run, simulated: Run, sizes: Sequence[float]) -> dict[str, Any]:
    took, expected = live["ttft_s"], simulated["ttft_s"]
    same = 0.0
    for size, one, other in zip(sizes, live["groups"], simulated["groups"], strict=True):
        if one["track"] is not None and one["track"] == other["track"]:
            same += size
    return {
        "run": index,
        "trace": live["trace"],
        "family": live["trace_family"],
        "start_s": live["start_s"],
        "policy": live["policy"],
        "ttft_live_s": took,
        "ttft_simulated_s": expected,
        "ttft_error": None if took is None or expected is None else float(f"{expected / took - 1:.6g}"),
        "track_agreement": same / sum(sizes),
        "met_live": live["met"],
        "met_simulated": simulated["met"],
        "regret_live": live["regret"],
        "regret_simulated": simulated["regret"],
        "limit": live["transport"]["limit"],
    }


def _by(plays: Sequence[dict[str, Any]], key: str) -> dict[str, Any]:
    names = dict.fromkeys(str(play[key]) for play in plays)
    return {name: _totals([play for play in plays if play[key] == name]) for name in names}


def _totals(plays: Sequence[dict[str, Any]]) -> dict[str, Any]:
    errors = [play["ttft_error"] for play in plays if play["ttft_error"] is not None]
    sizes = [abs(error) for error in errors]
    both = ((play["regret_live"], play["regret_simulated"]) for play in plays)
    regrets = [pair for pair in both if None not in pair]
    return {
        "plays": len(plays),
        "compared": len(errors),
        "ttft_error_median": _rounded(statistics.median(sizes) if sizes else None),
        "ttft_error_p90": _rounded(percentile(sizes, 0.9)),
        "ttft_bias": _rounded(statistics.median(errors) if errors else None),
        "track_agreement": _rounded(_mean(play["track_agreement"] for play in plays)),
        "met_agreement": _rounded(_mean(play["met_live"] == play["met_simulated"] for play in plays)),
        "regret_live": _rounded(_mean(live for live, _ in regrets)),
        "regret_simulated": _rounded(_mean(simulated for _, simulated in regrets)),
    }


def _mean(values: Iterable[float]) -> float | None:
    listed = list(values)
    return sum(listed) / len(listed) if listed else None


def _rounded(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.6g}")
