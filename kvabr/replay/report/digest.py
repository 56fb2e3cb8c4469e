"""The data of the report page: numbers are rounded, lines thinned, and names replaced by indices.

Rows are short lists, since a page holds thousands; `FIELDS` names their columns.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvabr.abr.policies import DEFAULT
from kvabr.replay.report.exports import finite
from kvabr.replay.report.queries import (
    ORACLE,
    RECOMPUTED,
    Result,
    Run,
    Timeline,
    asset_name,
    families,
    feasible,
    mean_regret,
    number,
    play_key,
    ranked,
    set_apart,
    track_facts,
)
from kvabr.replay.report.timeline import (
    achieved,
    capacity,
    computations,
    end_of,
    estimates,
    published,
    requests,
    significant,
    start_of,
    stopped,
)
from kvabr.types.events import DecisionMade, PlayEvent, PlayStarted

FIELDS = {
    "groups": ("track", "bytes", "requested", "first_byte", "done", "ready", "source"),
    "requests": (
        *("id", "group", "track", "bytes", "sent", "first_byte", "end", "outcome", "received", "reason", "decoded"),
    ),
    "decisions": (
        *("t", "kind", "group", "track", "request", "reason", "rate", "lower", "ttfb", "slack", "alternatives"),
    ),
    "computed": ("start", "end", "first", "last", "tokens"),
    "published": ("t", "edge"),
}
"""Columns of a play's lists. A track index of -1 means ``recomputed``, and None means no track."""

MAX_DECISIONS = 4000
"""Maximum number of decisions per play; waits are dropped first, then the last decisions."""
_HISTOGRAM = 30
"""Number of bins of TTFT from 0 to 1.5 deadlines; the last bin includes later times."""
_NO_ACTION = {"wait", "finish"}


def digest(result: Result, timelines: list[Timeline], tracks: list[str]) -> dict[str, Any]:
    """Return the page's data as JSON values without NaN; ``tracks`` has all track names, cheapest first."""
    places = {name: index for index, name in enumerate(tracks)}
    places[RECOMPUTED] = -1
    runs = result.get("runs", [])
    policies = ranked(result)
    asset = asset_name(result)
    known = track_facts(result)
    losses = {name: loss for name, (_, loss) in known.items()}
    start = start_of(timelines[0]["log"]) if timelines else None
    data = {
        "title": f"{asset} \u00b7 kvabr replay" if asset else "kvabr replay",
        "asset": asset,
        "tracks": tracks,
        "track_bytes": [significant(known.get(name, (None, None))[0], 4) for name in tracks],
        "track_loss": [significant(known.get(name, (None, None))[1], 3) for name in tracks],
        "worth": _worth(start, tracks),
        "fields": FIELDS,
        "units": next((units for run in runs if (units := _units(run))), []),
        "facts": {
            "runs": len(runs),
            "plays": len({play_key(run) for run in runs}),
            "traces": len({str(run.get("trace")) for run in runs}),
            "apart": set_apart(result),
            "deadlines": sorted({value for run in runs if (value := number(run.get("deadline_s"))) is not None}),
            "groups": None if start is None else start.groups,
            "fp16_bytes": None if start is None else start.fp16_bytes,
            "engine_mode": None if start is None else start.engine_mode,
        },
        "policies": [_policy(result, name, places) for name in policies],
        "families": _families(result, policies),
        "opening": _opening([str(runs[item["run"]].get("policy")) for item in timelines], policies),
        "plays": [_play(runs[item["run"]], item, places, losses) for item in timelines],
    }
    return dict(finite(data))


def _worth(start: PlayStarted | None, tracks: list[str]) -> list[int]:
    front = None if start is None else start.worth_playing
    return [index for index, track in enumerate(tracks) if not front or track in front]


def _opening(played: list[str], policies: list[str]) -> int:
    fair = [policy for policy in policies if not policy.endswith(ORACLE)]
    wanted = next((policy for policy in (DEFAULT, *fair, *policies) if policy in played), None)
    return 0 if wanted is None else played.index(wanted)


def _policy(result: Result, name: str, places: dict[str, int]) -> dict[str, Any]:
    line = result["summary"][name]
    share = [0.0] * len(places)
    for track, part in (line.get("track_share") or {}).items():
        place = places.get(str(track))
        if place is not None:
            share[place] += number(part) or 0.0
    histogram = [0] * _HISTOGRAM
    for run in result.get("runs", ()):
        if run.get("policy") == name and feasible(run):
            ttft, deadline = number(run.get("ttft_s")), number(run.get("deadline_s"))
            part = 1.5 if ttft is None or not deadline else ttft / deadline
            # Delivery exactly at the deadline meets it, so it counts in the bin below.
            histogram[min(_HISTOGRAM - 1, max(0, int(part * _HISTOGRAM / 1.5 - 1e-9)))] += 1
    numbers = {key: significant(number(value)) for key, value in line.items() if not isinstance(value, dict | list)}
    interval = line.get("hit_ratio_ci95") or (None, None)
    ends = [significant(number(end), 4) for end in interval]
    counted = (number(line.get("runs")) or 0) - (number(line.get("infeasible")) or 0)
    shares = [significant(part, 4) for part in share]
    return {"name": name, **numbers, "counted": int(counted), "ci": ends, "share": shares, "ttft": histogram}


def _families(result: Result, policies: list[str]) -> list[dict[str, Any]]:
    found = []
    for family, runs in families(result).items():
        regret = [mean_regret(run for run in runs if run["policy"] == policy) for policy in policies]
        plays = len({play_key(run) for run in runs if feasible(run)})
        found.append({"name": family, "plays": plays, "regret": [significant(value, 4) for value in regret]})
    return found


def _play(run: Run, timeline: Timeline, places: dict[str, int], losses: Mapping[str, float | None]) -> dict[str, Any]:
    log: list[PlayEvent] = timeline["log"]
    start = start_of(log)
    deadline = number(run.get("deadline_s")) or 0.0
    ttft = number(run.get("ttft_s"))
    until = 1.03 * max(end_of(log), ttft or 0.0, deadline)
    flights = requests(log)
    decisions, left_out = _decisions(log, places)
    numbers = {
        key: significant(number(run.get(key)))
        for key in (
            *("start_s", "deadline_s", "ttft_s", "loss", "clairvoyant_loss", "regret", "bytes_fetched"),
            *("objective", "clairvoyant_objective", "clairvoyant_ttft_s"),
            *("bytes_wasted", "tokens_recomputed", "recompute_s"),
        )
    }
    return {
        "run": timeline["run"],
        "trace": str(run.get("trace")),
        "family": str(run.get("trace_family") or ""),
        "policy": str(run.get("policy")),
        "met": bool(run.get("met")),
        "feasible": feasible(run),
        **numbers,
        "division": run.get("division"),
        "measured": run.get("measured"),
        "gave_up": run.get("gave_up"),
        "wrapped": bool(run.get("wrapped")),
        "estimator": None if start is None else start.estimator,
        "rtt_s": None if start is None else significant(start.rtt_s),
        "tail": 0 if start is None else start.tail,
        "groups_total": len(run.get("groups") or ()) if start is None else start.groups,
        "until": _time(until),
        "groups": _groups(run, places),
        "link": capacity(timeline.get("link") or (), until),
        "achieved": achieved(log, until),
        "belief": estimates(log),
        "losses": [[_time(t), significant(loss, 3)] for t, loss in timeline.get("losses") or ()],
        "requests": [
            [
                *(item.request, item.group, places.get(item.track), item.bytes, _time(item.sent_s)),
                *(_time(item.first_byte_s), _time(item.end_s), item.outcome, item.received, item.reason),
                _time(item.decoded_s),
            ]
            for item in flights
        ],
        "computed": [[_time(c.start_s), _time(c.end_s), c.first, c.last, c.tokens] for c in computations(log)],
        "published": [[_time(t), edge] for t, edge in published(log)],
        "decisions": decisions,
        "left_out": left_out,
        "stopped": None if ttft is None or ttft >= deadline else _stop(stopped(log, flights), decisions, run, losses),
    }


def _stop(
    end: DecisionMade | None, decisions: list[list[Any]], run: Run, losses: Mapping[str, float | None]
) -> dict[str, Any] | None:
    """Return when and why a policy stopped although better tracks were available; None if it did not.

    ``end`` is the last decision; ``decision`` in the result is an index of ``decisions``.
    """
    least = min((loss for loss in losses.values() if loss is not None), default=0.0)
    chosen = [losses.get(str(group.get("track"))) for group in run.get("groups") or ()]
    left = sum(loss is not None and loss > least for loss in chosen)
    if end is None or not left:
        return None
    rows = (index for index, row in enumerate(decisions) if row[:2] == [_time(end.t), end.kind])
    return {"t": _time(end.t), "reason": end.reason, "decision": next(rows, None), "left": left}


def _groups(run: Run, places: dict[str, int]) -> list[list[Any]]:
    rows = []
    for group in sorted(run.get("groups") or (), key=lambda item: int(item["group"])):
        times = (_time(number(group.get(key))) for key in ("requested_s", "first_byte_s", "done_s", "ready_s"))
        source = group.get("source")
        track = -1 if source == RECOMPUTED else places.get(str(group.get("track")))
        rows.append([track, group.get("bytes") or 0, *times, source])
    return rows


def _units(run: Run) -> list[str]:
    groups = sorted(run.get("groups") or (), key=lambda item: int(item["group"]))
    return [str(group["unit"]) for group in groups if group.get("unit")]


def _decisions(log: list[PlayEvent], places: dict[str, int]) -> tuple[list[list[Any]], int]:
    rows: list[list[Any]] = []
    total = 0
    last_quiet = None
    for event in log:
        if not isinstance(event, DecisionMade):
            continue
        total += 1
        kind, reason = event.kind, event.reason
        if kind in _NO_ACTION:
            if (kind, reason) == last_quiet:
                continue
            last_quiet = (kind, reason)
        else:
            last_quiet = None
        numbers = (significant(value, 4) for value in (event.rate, event.lower, event.ttfb_s, event.slack_s))
        rows.append(
            [
                *(_time(event.t), kind, event.group, None if event.track is None else places.get(event.track)),
                *(event.request, reason, *numbers, _alternatives(event.alternatives, places)),
            ]
        )
    if len(rows) > MAX_DECISIONS:
        loud = [row for row in rows if row[1] not in _NO_ACTION]
        rows = loud[:MAX_DECISIONS]
    return rows, total - len(rows)


def _alternatives(found: Mapping[str, float] | None, places: dict[str, int]) -> list[float | int | None] | None:
    if not found:
        return None
    row: list[float | int | None] = [None] * len(places)
    for track, nbytes in found.items():
        place = places.get(track)
        if place is not None:
            row[place] = significant(nbytes)
    while row and row[-1] is None:
        row.pop()
    return row or None


def _time(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 5)
