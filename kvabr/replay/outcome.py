"""The result of a play: loss, objective, and its line in the report."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from kvabr.player.blend_plan import delivered_loss
from kvabr.player.session_types import BlendRecord, GroupRecord, PlayerConfig, PlayRecord
from kvabr.replay.clairvoyant import Bound
from kvabr.replay.link import Capacity
from kvabr.replay.simulator import LinkUse
from kvabr.replay.trace import Trace
from kvabr.types.catalog import RECOMPUTED, Catalog
from kvabr.types.cost import PrefillCost, objective
from kvabr.types.events import PlayEvent

NO_CACHE_LOSS = 1.0
"""Loss of an abandoned play, nats per token: about that of answering without the prompt, measured on a real model."""


@dataclass(slots=True)
class PlayOutcome:
    """The result of a finished play."""

    run: dict[str, Any]
    record: PlayRecord
    log: list[PlayEvent] | None
    link: list[tuple[float, float]] | None
    catalog: Catalog
    use: LinkUse | None = None
    """Bytes of the link by use; None for a real play, and on a shared link."""


def shift(record: PlayRecord, lines: list[PlayEvent] | None, seconds: float) -> None:
    """Add ``seconds`` to all times of a play."""
    if record.delivered_s is not None:
        record.delivered_s += seconds
    for group in record.groups:
        for name in ("requested_s", "first_byte_s", "done_s", "ready_s"):
            if (value := getattr(group, name)) is not None:
                setattr(group, name, value + seconds)
    if record.division is not None:
        record.division = record.division._replace(at_s=record.division.at_s + seconds)
    if lines is not None:
        lines[1:] = [replace(line, t=line.t + seconds) for line in lines[1:]]


def computed_whole(record: PlayRecord, catalog: Catalog, cost: PrefillCost, now: float, deadline_s: float) -> None:
    """Record that the whole prompt of a joined play, abandoned at ``now``, was computed, as a client does."""
    seconds = cost.seconds(0, catalog.tokens)
    record.delivered_s = now + seconds
    record.met = record.delivered_s <= deadline_s
    record.gave_up = None
    record.groups = [
        GroupRecord(group, RECOMPUTED, requested_s=now, ready_s=record.delivered_s, source=RECOMPUTED)
        for group in range(catalog.groups)
    ]
    record.tokens_recomputed += catalog.tokens
    record.recompute_s += seconds
    record.bytes_wasted = record.bytes_fetched
    record.steps = [("compute", 0, catalog.groups)]
    record.blend = BlendRecord(fusion_loss=0.0)


def computed_rest(record: PlayRecord, catalog: Catalog, cost: PrefillCost, deadline_s: float) -> None:
    """Record that the engine computed the rest of a prompt after its delivered prefix."""
    here = min((*record.missing[:1], catalog.groups if record.used is None else record.used))
    if here == catalog.groups or record.delivered_s is None:
        return
    first = catalog.cut(here)
    begin, begins_s = catalog.tokens_before(first), record.delivered_s
    seconds = cost.seconds(begin, catalog.tokens - begin)
    record.delivered_s = begins_s + seconds
    record.met = record.delivered_s <= deadline_s
    record.bytes_wasted += sum(group.bytes for group in record.groups[first:])
    record.groups = [
        *record.groups[:first],
        *(
            GroupRecord(group, RECOMPUTED, requested_s=begins_s, ready_s=record.delivered_s, source=RECOMPUTED)
            for group in range(first, catalog.groups)
        ),
    ]
    record.tokens_recomputed += catalog.tokens - begin
    record.recompute_s += seconds
    record.steps = [step for step in record.steps if step[1] < first]
    record.steps.append(("compute", first, catalog.groups))


def valued(catalog: Catalog, config: PlayerConfig, deadline_s: float, record: PlayRecord) -> tuple[float, float]:
    """Return the loss and the objective of a finished play, nats per token."""
    ends_s, loss = record.delivered_s, NO_CACHE_LOSS
    if ends_s is None:
        ends_s = config.give_up_after * deadline_s
    else:
        loss = delivered_loss(catalog, record)
    return loss, objective(
        loss,
        ends_s,
        deadline_s,
        met=record.met,
        engine_s=record.recompute_s,
        time_price=config.time_price,
        gpu_price=config.gpu_price,
    )


def run_line(
    catalog: Catalog,
    config: PlayerConfig,
    deadline_s: float,
    trace: Trace,
    start_s: float,
    policy: str,
    record: PlayRecord,
    bound: Bound,
    capacity: Capacity,
    ghost_bytes: float,
) -> dict[str, Any]:
    """Return a finished play's line in the replay report; arguments as for `Experiment.outcome`."""
    ttft, titles = record.delivered_s, catalog.titles
    loss, value = valued(catalog, config, deadline_s, record)
    return {
        "trace": trace.name,
        "trace_family": trace.family,
        "start_s": rounded(start_s),
        "policy": policy,
        "deadline_s": deadline_s,
        "ttft_s": rounded(ttft),
        "met": record.met,
        "loss": rounded(loss),
        "objective": rounded(value),
        "bytes_fetched": record.bytes_fetched + int(ghost_bytes),
        "bytes_wasted": record.bytes_wasted + int(ghost_bytes),
        "tokens_recomputed": record.tokens_recomputed,
        "recompute_s": rounded(record.recompute_s),
        **({} if record.division is None else {"division": record.division.to_json()}),
        **({"tail_tokens": record.tail, "tail_s": rounded(record.tail_s)} if catalog.tail else {}),
        "abandoned": record.abandoned,
        **({} if record.blend is None else {"share": record.blend.share, "fusion_loss": record.blend.fusion_loss}),
        "clairvoyant_loss": rounded(bound.least_loss) if bound.feasible else None,
        "clairvoyant_objective": rounded(bound.objective) if bound.feasible else None,
        "clairvoyant_ttft_s": rounded(bound.end_s) if bound.feasible else None,
        "regret": rounded(value - bound.objective) if bound.feasible else None,
        "feasible": bound.feasible,
        "wrapped": capacity.wraps_within(ttft if ttft is not None else deadline_s),
        "gave_up": record.gave_up,
        "track_tokens": _track_tokens(catalog, record),
        "groups": [
            {
                "group": group.group,
                "track": group.track,
                "bytes": group.bytes,
                "requested_s": rounded(group.requested_s),
                "first_byte_s": rounded(group.first_byte_s),
                "done_s": rounded(group.done_s),
                "ready_s": rounded(group.ready_s),
                "source": group.source,
            }
            | ({"unit": titles[group.group]} if titles else {})
            for group in record.groups
        ],
    }


def _track_tokens(catalog: Catalog, record: PlayRecord) -> dict[str, int]:
    tokens: dict[str, int] = {}
    for group in record.groups:
        track = group.track or "none"
        tokens[track] = tokens.get(track, 0) + round(catalog.share(group.group) * catalog.spec.group_tokens)
    return tokens


def rounded(value: float | None) -> float | None:
    """Round a number to the precision of reports."""
    return None if value is None else float(f"{value:.9g}")
