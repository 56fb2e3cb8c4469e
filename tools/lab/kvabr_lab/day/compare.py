"""Plays a day under every rule, and compares TTFT, deadlines, GPU seconds and bytes."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any

from kvabr.types.errors import UsageError
from kvabr_lab.day.oracle import search
from kvabr_lab.day.requests import DayRequest
from kvabr_lab.day.rules import KVABR, RULES, play_day, rule_of
from kvabr_lab.day.world import DayOutcome, WorldShape
from kvabr_lab.route import PLACES

THRESHOLDS = (0, 250, 500, 1000, 2000, 3000, 4000, 6000, 8000, 12_000, 16_000, 24_000, 32_000, 48_000, 64_000, 96_000)
BEST = "best threshold"
ORACLE = "oracle"


@dataclass(frozen=True, slots=True)
class DayResult:
    """Results of one rule's day."""

    rule: str
    mean_s: float
    """Mean TTFT, seconds."""
    p50_s: float
    p95_s: float
    met: float
    local_s: float
    remote_s: float
    bytes: float
    shares: dict[str, float]
    note: str = ""
    elsewhere_s: float = 0.0
    """Mean time, in seconds per request of the day, that requests lose by being placed elsewhere than by the oracle.
    The other requests lose the rest of the difference from the oracle's mean by waiting.
    """

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON values."""
        return {
            "rule": self.rule,
            "ttft_mean_s": round(self.mean_s, 6),
            "ttft_p50_s": round(self.p50_s, 6),
            "ttft_p95_s": round(self.p95_s, 6),
            "met": round(self.met, 6),
            "local_gpu_s": round(self.local_s, 3),
            "remote_gpu_s": round(self.remote_s, 3),
            "bytes": round(self.bytes),
            "shares": {place: round(share, 6) for place, share in self.shares.items()},
            "note": self.note,
            "elsewhere_s": round(self.elsewhere_s, 6),
        }


def summary(rule: str, outcomes: Sequence[DayOutcome], deadline_s: float, note: str = "") -> DayResult:
    """Return the results of a day."""
    times = sorted(outcome.ttft_s for outcome in outcomes)
    count, places = len(times), Counter(outcome.place for outcome in outcomes)
    return DayResult(
        rule,
        fmean(times),
        times[(count - 1) // 2],
        times[min(count - 1, int(0.95 * count))],
        sum(time <= deadline_s for time in times) / count,
        sum(outcome.local_s for outcome in outcomes),
        sum(outcome.remote_s for outcome in outcomes),
        sum(outcome.bytes for outcome in outcomes),
        {place: places[place] / count for place in PLACES},
        note,
    )


def _elsewhere(mine: Sequence[DayOutcome], known: Sequence[DayOutcome]) -> float:
    pairs = zip(mine, known, strict=True)
    return math.fsum(one.ttft_s - best.ttft_s for one, best in pairs if one.place != best.place) / len(known)


def compare(
    requests: Sequence[DayRequest],
    shape: WorldShape,
    *,
    deadline_s: float,
    sweeps: int = 2,
    rules: Sequence[str] = RULES,
    played: Mapping[str, Sequence[DayOutcome]] | None = None,
    on_progress: Callable[[str, int, int], None] = lambda *_: None,
) -> list[DayResult]:
    """Play a day under every rule, the best fixed threshold and an oracle.

    Args:
        requests: The day.
        shape: Sites and link.
        deadline_s: Deadline; only used in the report, since the rules minimise time.
        sweeps: Number of sweeps of the oracle's search; 0: no oracle.
        rules: Names of rules, with or without `KNOWING`.
        played: Outcomes under further rules.
        on_progress: Called with a stage (``rules``, ``oracle``), the finished steps, and their total.

    Raises:
        UsageError: There are no requests, or a rule is unknown.
    """
    if not requests:
        raise UsageError("the day has no requests; give more requests, or another seed")
    if not deadline_s > 0:
        raise UsageError(f"the deadline must be a positive number of seconds, got {deadline_s}")
    names = [*rules, *(f"threshold:{tokens}" for tokens in THRESHOLDS)]
    days: dict[str, Sequence[DayOutcome]] = dict(played or {})
    others = list(days)
    for number, name in enumerate(names):
        days[name] = play_day(requests, shape, rule_of(name, shape))
        on_progress("rules", number + 1, len(names))
    means = {name: fmean(outcome.ttft_s for outcome in day) for name, day in days.items()}
    best = min((name for name in names if name.startswith("threshold:")), key=lambda name: means[name])
    found = [summary(name, days[name], deadline_s) for name in (*rules, *others) if name != KVABR]
    found.append(summary(BEST, days[best], deadline_s, f"{best.partition(':')[2]} tokens, chosen in hindsight"))
    if KVABR in rules:
        found.append(summary(KVABR, days[KVABR], deadline_s))
    if sweeps:
        start = days[min(means, key=lambda name: means[name])]
        steps = [0]

        def progress(more: int) -> None:
            steps[0] += more
            on_progress("oracle", steps[0], sweeps * len(requests))

        known = search(requests, [one.choice for one in start], shape, sweeps=sweeps, on_progress=progress)
        found = [
            replace(one, elsewhere_s=_elsewhere(days[one.rule], known)) if one.rule in days else one for one in found
        ]
        found.append(summary(ORACLE, known, deadline_s, "knows the link and all later requests"))
    return found
