"""Builds all sessions: for real plays, prefix plays of engines, upgrades and replays."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from kvabr.abr.cache_first import CachedGroups, cache_first
from kvabr.abr.estimator import Estimator
from kvabr.abr.ladder import Ladder
from kvabr.abr.plugins import load_estimator, load_policy
from kvabr.abr.tail import TailOffer
from kvabr.abr.view import Future
from kvabr.player.decode_queue import DecodeRates, SharedDecodeRate
from kvabr.player.policy_guard import PolicyCalls
from kvabr.player.session import Session
from kvabr.player.session_types import WHOLE, Goal, PlayerConfig, PrefixGoal, UpgradeGoal
from kvabr.player.sources import Offer
from kvabr.types.cost import PrefillCost
from kvabr.types.engine import EngineMode
from kvabr.types.errors import UsageError
from kvabr.types.events import Log, PlayStarted


def new_estimator(policy: str, estimator: str | None = None) -> Estimator:
    """Return a fresh estimator, named or preferred by the policy; see `load_estimator`."""
    return load_estimator(estimator or load_policy(policy)().estimator)()


def opening(
    ladder: Ladder,
    *,
    trace: str,
    policy: str,
    estimator: str,
    deadline_s: float,
    mode: EngineMode,
    rtt_s: float | None,
    start_s: float = 0.0,
    lookup_s: float | None = None,
    tail_s: float = 0.0,
) -> PlayStarted:
    """Return the first event of a play's log; see `PlayStarted` for the fields."""
    catalog = ladder.catalog
    tracks = sorted(catalog.tracks, key=lambda track: track.total_bytes)
    return PlayStarted(
        0.0,
        trace=trace,
        start_s=start_s,
        policy=policy,
        estimator=estimator,
        deadline_s=deadline_s,
        engine_mode=mode,
        groups=catalog.groups,
        asset=f"{catalog.namespace.model}/{catalog.namespace.prompt}",
        tracks=tuple(track.name for track in tracks),
        track_bytes=tuple(track.total_bytes for track in tracks),
        worth_playing=ladder.names,
        fp16_bytes=catalog.fp16_bytes,
        rtt_s=rtt_s,
        lookup_s=lookup_s,
        tail=catalog.tail,
        tail_s=tail_s,
    )


def choose_tail(policy: str, offers: Sequence[TailOffer], costs: Sequence[float]) -> TailOffer:
    """Return the offer that a separate instance of a policy takes before the play, given the `tail_costs`.

    Raises `PolicyError` if there is no such policy, or it raises, or takes none of them.
    """
    if len(offers) == 1:
        return offers[0]
    return PolicyCalls(load_policy(policy)()).choose_tail(offers, costs)


def new_session(
    ladder: Ladder,
    deadline_s: float,
    policy: str,
    estimator: Estimator | Sequence[Estimator],
    *,
    goal: Goal = WHOLE,
    cost: PrefillCost | None = None,
    mode: EngineMode = "hole",
    config: PlayerConfig | None = None,
    patience_s: float | None = None,
    cached_groups: CachedGroups | None = None,
    oracle: Future | None = None,
    decode_rates: DecodeRates | SharedDecodeRate | None = None,
    expected_s: Sequence[float] | None = None,
    log: Log | None = None,
    offers: Sequence[Offer] | None = None,
    round_trips: Sequence[float | None] = (),
) -> Session:
    """Build the session of one play.

    The catalog of the ``ladder`` may be a suffix of a published asset (`Catalog.suffix`). ``round_trips`` are in
    seconds.

    Args:
        ladder: the tracks.
        deadline_s: seconds from `Session.start`; for upgrades, the planning horizon.
        policy: see `load_policy`.
        estimator: a fresh one, see `new_estimator`, or one per source.
        goal: purpose of the play.
        cost: of the engine's prefill, counted from the prompt's first token; None for no engine.
        mode: groups that the engine can recompute. Always ``suffix`` for prefix plays, several layer classes or
            windows, since their groups cannot be computed one by one.
        config: limits and timeouts.
        patience_s: seconds from `Session.start` until an incomplete play is given up; None: see ``config``.
        cached_groups: returns a track's groups, as published, that need not cross the network.
        oracle: the future of a simulated link, for policies that use it.
        decode_rates: corrected by the session; None: from the catalog, uncorrected.
        expected_s: when each group of a live asset should be published, see `LiveEdge`.
        log: receives every event.
        offers: each source's tracks; more may be added during the play.
        round_trips: to each source, if known.

    Raises:
        PolicyError: there is no such policy.
        UsageError: invalid arguments, or a policy that does not fit the goal.
    """
    config, catalog = config or PlayerConfig(), ladder.catalog
    if not catalog.every_token:
        mode = "suffix"
    if patience_s is not None:
        config = replace(config, give_up_after=max(1.0, patience_s / deadline_s))
    player = load_policy(policy)()
    if isinstance(goal, PrefixGoal):
        mode = "suffix"
        if player.computes:
            raise UsageError(
                f"policy {policy} needs an engine that computes from the front, but this one does not; choose another "
                "policy"
            )
    if cached_groups is not None:
        player = cache_first(player, catalog, cached_groups)
    upgrades = isinstance(goal, UpgradeGoal)
    if expected_s is not None and upgrades:
        raise UsageError("upgrades need a complete cache, but this one is still being prefilled")
    if expected_s is not None and len(expected_s) != catalog.groups:
        raise UsageError(f"expected_s must have a time for each of {catalog.groups} groups, got {len(expected_s)}")
    return Session(
        ladder,
        deadline_s,
        player,
        estimator,
        goal=goal,
        cost=None if cost is None or upgrades else cost.after(catalog.first_token),
        mode=mode,
        config=config,
        oracle=oracle,
        decode_rates=decode_rates,
        expected_s=expected_s,
        log=log,
        offers=offers,
        round_trips=round_trips,
    )
