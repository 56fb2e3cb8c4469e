"""Totals of a replay: per policy, and per trace family and policy."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

_Z95 = 1.959963984540054
_ROUNDING = 1e-7


def summarise(runs: Sequence[dict[str, Any]], digits: int = 9) -> dict[str, Any]:
    """Return the ``summary`` of a replay report: one entry per policy, in order of first appearance.

    Hit ratio, TTFT, loss and regret are over the feasible plays, in which a clairvoyant player could have met the
    deadline. ``infeasible`` counts the other plays; ``infeasible_ttft_p50_s`` and ``infeasible_ttft_p95_s`` are their
    TTFT. ``below_bound`` counts plays that cost less than the bound, which indicates errors of the bound. The TTFT of
    an abandoned play counts as infinite; an infinite percentile is given as None. Numbers have ``digits`` significant
    digits.
    """
    by_policy: dict[str, list[dict[str, Any]]] = {}
    for run in runs:
        by_policy.setdefault(run["policy"], []).append(run)
    return {policy: _entry(lines, digits) for policy, lines in by_policy.items()}


def by_family(runs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return a summary per trace family: {family: {policy: entry}}."""
    families: dict[str, list[dict[str, Any]]] = {}
    for run in runs:
        families.setdefault(run["trace_family"], []).append(run)
    return {family: summarise(lines) for family, lines in sorted(families.items())}


def wilson(hits: int, runs: int) -> tuple[float, float]:
    """Return the 95 % confidence interval of a ratio (Wilson, 1927), accurate for few runs and near 0 and 1."""
    if not runs:
        return (0.0, 1.0)
    share = hits / runs
    middle = share + _Z95**2 / (2 * runs)
    spread = _Z95 * math.sqrt(share * (1 - share) / runs + _Z95**2 / (4 * runs**2))
    scale = 1 + _Z95**2 / runs
    return (max(0.0, (middle - spread) / scale), min(1.0, (middle + spread) / scale))


def percentile(values: Iterable[float], share: float) -> float | None:
    """Return a percentile by linear interpolation between the nearest ranks; None without values."""
    ranked = sorted(values)
    if not ranked:
        return None
    place = share * (len(ranked) - 1)
    low = math.floor(place)
    if place == low:
        return ranked[low]
    return ranked[low] + (place - low) * (ranked[low + 1] - ranked[low])


def mean(values: Iterable[float]) -> float | None:
    """Return the arithmetic mean; None without values."""
    listed = list(values)
    return math.fsum(listed) / len(listed) if listed else None


def _entry(runs: Sequence[dict[str, Any]], digits: int) -> dict[str, Any]:
    feasible = [run for run in runs if run["feasible"]]
    hits = sum(run["met"] for run in feasible)
    infeasible = [run for run in runs if not run["feasible"]]
    tokens: Counter[str] = Counter()
    for run in runs:
        tokens.update(run["track_tokens"])
    fetched = sum(run["bytes_fetched"] for run in runs)
    wasted = sum(run["bytes_wasted"] for run in runs)
    entry: dict[str, Any] = {
        "runs": len(runs),
        "infeasible": len(runs) - len(feasible),
        "gave_up": sum(run["gave_up"] is not None for run in runs),
        "hit_ratio": hits / len(feasible) if feasible else None,
        "hit_ratio_ci95": list(wilson(hits, len(feasible))) if feasible else None,
        "ttft_p50_s": _ttft(feasible, 0.50),
        "ttft_p95_s": _ttft(feasible, 0.95),
        "ttft_p99_s": _ttft(feasible, 0.99),
        "infeasible_ttft_p50_s": _ttft(infeasible, 0.50),
        "infeasible_ttft_p95_s": _ttft(infeasible, 0.95),
        "loss_mean": mean(run["loss"] for run in feasible),
        "loss_p95": percentile((run["loss"] for run in feasible), 0.95),
        "objective_mean": mean(run["objective"] for run in feasible),
        "clairvoyant_objective_mean": mean(run["clairvoyant_objective"] for run in feasible),
        "clairvoyant_loss_mean": mean(run["clairvoyant_loss"] for run in feasible),
        "regret_mean": mean(run["regret"] for run in feasible),
        "regret_p95": percentile((run["regret"] for run in feasible), 0.95),
        "regret_p99": percentile((run["regret"] for run in feasible), 0.99),
        "below_bound": sum(run["regret"] < -_ROUNDING for run in feasible),
        "tokens_recomputed_mean": mean(run["tokens_recomputed"] for run in runs),
        "recompute_s_mean": mean(run["recompute_s"] for run in runs),
        "bytes_wasted_share": wasted / fetched if fetched else 0.0,
        "abandoned_mean": mean(run["abandoned"] for run in runs),
        "track_share": {track: count / tokens.total() for track, count in sorted(tokens.items())},
    }
    return {key: _round(value, digits) for key, value in entry.items()}


def _ttft(runs: Sequence[dict[str, Any]], share: float) -> float | None:
    value = percentile((math.inf if run["ttft_s"] is None else run["ttft_s"] for run in runs), share)
    return None if value is None or not math.isfinite(value) else value


def _round(value: Any, digits: int) -> Any:
    if isinstance(value, float):
        return float(f"{value:.{digits}g}")
    if isinstance(value, list):
        return [_round(item, digits) for item in value]
    if isinstance(value, dict):
        return {key: _round(item, digits) for key, item in value.items()}
    return value
