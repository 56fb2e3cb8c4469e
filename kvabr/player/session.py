"""The state machine of one play.

A group is requested, arrives and is decoded into place, or the engine computes it; after a failure it falls back
(`kvabr.player.groups.Stage`). Layers of one group can be requested together, and are decoded together (`DecodeQueue`).
The rules:

1. After every event and tick, the session plans the engine's work again, cancels transfers that would be late, takes
   decisions from the policy until enough requests are in flight, and lets its goal end the play.
2. The policy sees a group as missing if it is absent and not assigned to the engine. It sees a group as settled if it
   has arrived or is in place, with no request in flight.
3. The goal (`kvabr.player.goals`) ends the play. A whole cache is delivered, never with a hole, when every group is in
   place and the policy is done or the deadline has passed. Otherwise the play is given up when its patience ends, which
   is extended for an engine (`ENGINE_PATIENCE`).
4. Unpublished groups of a live asset are absent but not missing. The play does not end while they could arrive before
   the deadline, unless they are computed, nor while layers that are worth the wait are due.
5. The session reads no clock: every event carries ``now``, and the driver calls `timer` at the time of `next_timer`.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import replace
from itertools import chain, groupby

from kvabr.abr.estimators import Estimator
from kvabr.abr.ladder import Ladder
from kvabr.abr.policy import Decision, Policy
from kvabr.abr.view import Future, Transfer, View
from kvabr.player.compute_queue import ComputeQueue
from kvabr.player.goals.blend import BlendAim
from kvabr.player.goals.live import NO_CHANGES, EdgeChanges, LivePlay
from kvabr.player.goals.prefix import PrefixAim
from kvabr.player.goals.upgrade import UpgradeAim
from kvabr.player.goals.whole import WholeAim
from kvabr.player.groups import DecodeQueue, DecodeRates, Groups, SharedDecodeRate
from kvabr.player.play_policy import CachedGroups, PolicyGuard, policy_of
from kvabr.player.requests import (
    MIN_SILENCE_S,
    RequestPriorities,
    RetryTracker,
    StallDetector,
    choose_collapsed,
    choose_hopeless,
    choose_late,
)
from kvabr.player.session_types import (
    MAX_REQUESTS,
    MAX_TICK_S,
    WHOLE,
    Action,
    BlendGoal,
    Cancel,
    Decode,
    Deliver,
    EventLog,
    FetchGroup,
    GiveUp,
    Goal,
    GroupRecords,
    PlayerConfig,
    PlayRecord,
    PrefixGoal,
    Recompute,
    UpgradeGoal,
)
from kvabr.player.sources import Offer, Sources, SourceSamplers
from kvabr.types.catalog import RECOMPUTED
from kvabr.types.cost import PrefillCost
from kvabr.types.engine import EngineMode
from kvabr.types.errors import UsageError
from kvabr.types.events import (
    FirstByteReceived,
    GroupDecoded,
    Limit,
    Log,
    RecomputeDone,
    RecomputeFailed,
    RecomputeStarted,
    RequestCancelled,
    RequestDone,
    RequestFailed,
    RequestSent,
)

_MIN_PLAN_SHARE = 0.1
"""Fraction of the deadline before which the engine gets no groups, since every link looks slow in slow start."""
_SILENT_SHARE = 0.5
"""The same for policies that divide the work themselves, while the link delivers nothing; otherwise they are not
overruled before the deadline."""
_MAX_PLAY = 4.0
"""Maximum length of a play in full prefills, for its ticks and samples."""
_MAX_DECISIONS = 64
"""Maximum decisions before pending events are handled."""
_ABANDONED = 64
_MARGIN_TICKS = 1.5
"""`View.margin_s` in ticks."""


class Session:
    """One play: takes events through its methods and returns `actions`."""

    def __init__(
        self,
        ladder: Ladder,
        deadline_s: float,
        policy: Policy | str,
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
    ) -> None:
        """Prepare a play.

        The catalog of the ``ladder`` may be a suffix of a published asset (`Catalog.suffix`).

        Args:
            ladder: the tracks.
            deadline_s: seconds from `Session.start`; for upgrades, the planning horizon.
            policy: a name, see `load_policy`, or a new object.
            estimator: a new one, see `new_estimator`, or one per source.
            goal: purpose of the play.
            cost: of the engine's prefill, counted from the prompt's first token; None: no engine.
            mode: which groups the engine can compute. Always ``suffix`` for prefix plays, and for caches with several
                layer classes or windows, since their groups cannot be computed one by one.
            config: limits and timeouts.
            patience_s: seconds from `Session.start` after which an incomplete play is given up; None: see ``config``.
            cached_groups: returns the groups of a track, numbered as published, that need not cross the network.
            oracle: the future of a simulated link, for policies that use it.
            decode_rates: decode rates, which the session corrects; None: those of the catalog, uncorrected.
            expected_s: when each group of a live asset should be published, see `LiveEdge`.
            log: receives every event.
            offers: tracks of each source; more may be added during the play.
            round_trips: seconds to each source, if known.

        Raises:
            PolicyError: there is no such policy.
            UsageError: invalid arguments, or a policy that does not fit the goal.
        """
        if not 0 < deadline_s < math.inf:
            raise UsageError(f"the deadline must be a positive number of seconds, got {deadline_s}")
        self.catalog = catalog = ladder.catalog
        config = config or PlayerConfig()
        patience = config.give_up_after if patience_s is None else max(1.0, patience_s / deadline_s)
        self.config = config = replace(config, give_up_after=patience)
        prefix = isinstance(goal, PrefixGoal)
        mode = "suffix" if prefix or not catalog.every_token else mode
        cost = None if cost is None or isinstance(goal, UpgradeGoal) else cost.after(catalog.first_token)
        self.retries = RetryTracker(ladder, config.attempts)
        self.view = View(
            ladder,
            deadline_s,
            cost=cost,
            front_first=cost is not None and mode == "suffix",
            gpu_price=config.gpu_price,
            time_price=config.time_price,
            max_loss=config.max_loss,
            decoders=config.decoders,
            oracle=oracle,
            decode_seconds=None if decode_rates is None else decode_rates.seconds,
            decode_latency=None if decode_rates is None else decode_rates.latency,
            decodes_last=config.decodes_last,
            unavailable=self.retries.unavailable,
        )
        records = GroupRecords(catalog.groups)
        self.record = PlayRecord(records)
        self.groups = Groups(self.view, records)
        self.events = EventLog(log, self.view)
        self.guard = PolicyGuard(policy_of(policy, catalog, cached_groups, prefix=prefix), self.view)
        horizon_s = deadline_s
        if cost is not None and config.time_price > 0:  # such plays end well before a long deadline
            horizon_s = min(deadline_s, _MAX_PLAY * cost.seconds(0, catalog.tokens))
        self.tick_s = self.next_tick_s = min(horizon_s / config.ticks, MAX_TICK_S)
        self.view.margin_s = _MARGIN_TICKS * self.tick_s
        estimators = (estimator,) if isinstance(estimator, Estimator) else estimator
        self._sampler = SourceSamplers(estimators, horizon_s, self.events.limited, chunked=config.chunked)
        self.view.prior_rate, self.view.prior_own = self._sampler.prior_rate, self._sampler.prior_own
        self._best_rate = 0.0
        self._computes_all = False
        self.sources = Sources(self._sampler, self.view, offers, round_trips)
        self._decode_rates = decode_rates
        self.engine = None if cost is None else ComputeQueue(cost, mode, self.view, self.tick_s)
        self.groups.engine = self.engine
        self.alone_s = None if cost is None else cost.seconds(0, self.catalog.tokens)
        self._engine_s = 0.0
        self._stalls = None if config.stalled_after is None else StallDetector(config.stalled_after * deadline_s)
        self._decoders = DecodeQueue(self.view, self.groups, config.decode_ahead_s, together=config.together)
        self._actions: list[Action] = []
        self.last_received_s = self._store_s = 0.0
        """Time of the last received bytes: of any source, and from the local store."""
        self._requests = self._computed_on = 0
        self._pushed: set[int] = set()
        self._priorities = RequestPriorities(self.catalog.groups)
        self.content = False
        """True if the policy needs no further request for now."""
        self._engine_due = True
        self._more_s = math.inf
        """When `_MAX_DECISIONS` was last reached, with decisions left to take; else infinite."""
        self.over = self.closed = False
        """True after the play; `closed` is True as soon as groups arrive too late for the cache."""
        self._live = None if expected_s is None else LivePlay(self, expected_s)
        self.aim = self._aim(goal, mode)

    def _aim(self, goal: Goal, mode: EngineMode) -> WholeAim:
        match goal:
            case PrefixGoal():
                self.view.prefix = True
                return PrefixAim(self, mode)
            case UpgradeGoal():
                if self._live is not None:
                    raise UsageError("upgrades need a complete cache, but this one is still being prefilled")
                return UpgradeAim(self, goal)
            case BlendGoal():
                return BlendAim(self, goal)
        return WholeAim(self)

    # ------------------------------------------------------------------ events

    def start(self, now: float = 0.0) -> None:
        """Start the play.

        Like every event, raises `PolicyError` if the policy refuses the play, raises, or decides something invalid.
        """
        if not self.aim.start(now):
            return
        self.view.now = now
        self._leave_out(self.catalog.computed)
        self.guard.start()
        self.advance(now)

    def published(self, edge: int, now: float, changes: EdgeChanges = NO_CHANGES) -> None:
        """Handle newly published groups of a live asset; their base layers are pushed.

        Args:
            edge: the number of groups published so far.
            now: when the player learned of it.
            changes: missing and newly available tracks, and groups to request instead of waiting for a push.
        """
        if not self.over and self._live is not None:
            self._live.published(edge, now, changes)

    def producer_stopped(self, reason: str, now: float) -> None:
        """Handle an early end of a live asset's producer."""
        if not self.over and self._live is not None:
            self._live.stopped(reason, now)

    def first_byte(self, request: int, now: float, limit: Limit = "network") -> None:
        """Handle the first byte of a request; ``limit`` names what limited its rate."""
        transfer = self.view.in_flight.get(request)
        if transfer is not None and transfer.first_byte_s is None:
            self.view.in_flight.begun(transfer, now)
            if limit != "kept":
                if transfer.local:  # removed from the local store meanwhile
                    self._not_local(transfer)
                self._sampler[transfer.source].first_byte(
                    None if request in self._pushed else now - transfer.requested_s, now
                )
            self.events.emit(FirstByteReceived, now, request)

    def progress(self, request: int, received: int, now: float, limit: Limit = "network") -> None:
        """Handle progress: ``received`` is the request's total in bytes, ``limit`` names what limited the new bytes."""
        transfer = self.view.in_flight.get(request)
        if transfer is None:
            return
        more = min(received, transfer.bytes) - transfer.received
        if more > 0:
            if transfer.first_byte_s is None:
                self.first_byte(request, now, limit)
            before = transfer.remaining
            self.view.in_flight.received(transfer, more)
            self.view.outstanding_bytes -= before - transfer.remaining
            self.record.bytes_fetched += more
            if limit != "network":
                self.record.bytes_held_up[limit] = self.record.bytes_held_up.get(limit, 0) + more
            self.last_received_s = now
            if limit == "kept":
                self._store_s = now
            else:
                self.sources.received(transfer.source, now)
            if self._stalls is not None:
                self._stalls.received(transfer, now)
            self._sampler[transfer.source].received(more, now, limit)

    def done(self, request: int, now: float, limit: Limit = "network") -> None:
        """Handle a completed request; ``limit`` names what limited its last bytes."""
        transfer = self.view.in_flight.get(request)
        if transfer is None:
            return
        self.progress(request, transfer.bytes, now, limit)
        del self.view.in_flight[request]
        group, progress = transfer.group, self.groups[transfer.group]
        transfer.done_s = now
        progress.land(transfer)
        progress.arrived += (transfer,)
        self.groups.restage((group,))
        self._settle(transfer.source, now)
        self.events.emit(RequestDone, now, request, group, transfer.track, transfer.bytes)
        self._count_decoding(group)
        self.groups.settle(group)
        self.advance(now)

    def failed(self, request: int, reason: str, now: float, *, busy: bool = False, lost: bool = False) -> None:
        """Handle a failed request: reset, refused, or of the wrong length.

        ``busy``: the publisher is overloaded, so the failure does not count as an attempt; ``lost``: the source is
        unreachable.
        """
        transfer = self.view.in_flight.pop(request, None)
        if transfer is not None:
            self.groups[transfer.group].land(transfer)
            self.view.outstanding_bytes -= transfer.remaining
            self._settle(transfer.source, now)
            self.record.failed += not busy
            elsewhere = self.sources.failed(transfer, lost=lost)
            self._lost(transfer, RequestFailed, reason, now, counts=not busy and not elsewhere)
            self.advance(now)

    def decoded(self, request: int, now: float, seconds: float | None = None) -> None:
        """Handle a batch that was decoded into place in ``seconds`` of one thread."""
        batch = self._end_decoding(request)
        better = bool(batch) and self.record.groups[batch[0].group].ready_s is not None
        for transfer in batch:
            self._place(transfer, now, better=better)
            self.events.emit(GroupDecoded, now, transfer.request, transfer.group, transfer.track)
        if batch:
            self.groups.restage((batch[0].group,))
            if self._decode_rates is not None and seconds is not None:
                self._decode_rates.observe(batch[-1].track, self.catalog.share(batch[-1].group), seconds)
                self._decoders.reckon()
            progress = self.groups[batch[-1].group]
            for useless in progress.superseded(batch[-1]):
                self._drop(useless)
            self._count_decoding(batch[-1].group)
            self.groups.rest(batch[-1].group)
            self.advance(now)

    def refused(self, request: int, reason: str, now: float) -> None:
        """Handle a corrupt, truncated or foreign frame; no layer of its batch is in place."""
        if not (batch := self._end_decoding(request)):
            return
        number = next(number for number, transfer in enumerate(batch) if transfer.request == request)
        others, group = (*batch[:number], *batch[number + 1 :]), batch[0].group
        if self.record.groups[group].track == RECOMPUTED:  # the engine was faster
            for transfer in others:
                self._drop(transfer)
        else:
            self.groups[group].arrived += others
        elsewhere = self.sources.drop(batch[number])
        self._lost(batch[number], RequestFailed, reason, now, counts=not elsewhere)
        self.advance(now)

    def computed(self, first: int, last: int, now: float) -> None:
        """Handle groups ``first`` to ``last`` - 1, computed and in place."""
        queue = self.engine
        if self.over or queue is None or queue.computing != (first, last):
            return
        tail = queue.tail
        self.engine_done(queue.finish(now), now)
        if self.alone_s is not None and self.view.cost is not None:
            self.alone_s = max(self.alone_s, self.view.cost.seconds(0, self.catalog.tokens))
        self.record.tokens_recomputed += self.catalog.tokens_before(last) - self.catalog.tokens_before(first)
        if self.closed:
            return
        # The result does not depend on groups placed meanwhile, and replaces those in its range.
        since = self.record.steps[self._computed_on :]
        since = [step for step in since if not first <= step[1] < last]
        self.record.steps[self._computed_on :] = [("compute", first, last), *since]
        for group in range(first, last):
            record = self.record.groups[group]
            if record.ready_s is None:
                self.groups.in_place += 1
            self.record.bytes_wasted += record.bytes
            record.track, record.bytes, record.source = RECOMPUTED, 0, "recomputed"
            record.requested_s, record.first_byte_s, record.done_s, record.ready_s = queue.started_s, None, None, now
            for transfer in self.groups[group].arrived:
                self._drop(transfer)
            self._count_decoding(group)
            # The computed group replaces any frame decoded meanwhile.
            self.view.track_of[group] = RECOMPUTED
            self.view.settled.discard(group)
        self.groups.restage((*range(first, last), *_between(tail, queue.tail)))
        self.events.emit(RecomputeDone, now, first, last)
        self.advance(now)

    def compute_failed(self, reason: str, now: float) -> None:
        """Handle a failure of the engine, which is then not used again."""
        queue = self.engine
        if self.closed or queue is None or queue.computing is None:
            return
        first, last = queue.computing
        left = {*range(first, last), *queue.chosen}
        self.engine_done(queue.finish(now, failed=True), now)
        self.events.emit(RecomputeFailed, now, first, last, reason)
        self.retries.engine_failed(reason)
        self.engine = self.groups.engine = self.view.cost = None
        self.view.engine_backlog_s = 0.0
        for group in left:
            self.groups.fall_back(group)
            self._decoders.moved(group)
        self.groups.restage(range(self.catalog.groups))
        self.advance(now)

    def waited(self, now: float) -> None:
        """Restart the clocks after other plays used the shared link."""
        self.last_received_s = now
        self._sampler.waited(now)
        self.sources.waited(now)
        if self._stalls is not None:
            self._stalls.waited(self.view.in_flight.values(), now)

    def timer(self, now: float) -> None:
        """Handle the tick at the time of `next_timer`."""
        if self.over or self.aim.timer(now) or self.aim.ended(now):
            return
        if self._more_s < math.inf and now < self.next_tick_s:
            self.advance(now)
            return
        # A play that lasts longer than expected is checked less often.
        self.tick_s = max(self.tick_s, min(now / self.config.ticks, MAX_TICK_S))
        self.view.margin_s = _MARGIN_TICKS * self.tick_s
        if self.engine is not None:
            self.engine.tick_s = self.tick_s
        self.next_tick_s = now + self.tick_s
        self._sampler.tick(now, self.view.in_flight)
        if now - self._store_s >= MIN_SILENCE_S:  # an engine may be faster than a slow store
            for transfer in [one for one in self.view.in_flight.values() if one.local]:
                if now - transfer.requested_s >= MIN_SILENCE_S:
                    self._not_local(transfer)
        self.look(now)
        if self.guard.policy.abandons and not self.record.late_for_loss:
            self._abandon(now)
        self._move(now)
        if self._stalls is not None:
            view = self.view
            drain_s = view.outstanding_bytes / view.rate if view.rate > 0 else 0.0
            for transfer, proven in self._stalls.stalled(view.in_flight, view.ttfb_s, now, drain_s=drain_s):
                self.cancel(transfer, "it has stalled", now, failed=proven)
        self.events.progress(now, self.record.bytes_fetched)
        self.advance(now)

    def _move(self, now: float) -> None:
        for transfer, reason in self.sources.misplaced(now):
            self.cancel(transfer, reason, now)
            if self.sources.trying and transfer.upgrade and self.view.track_of[transfer.group] is not None:
                # A policy that assumes a dead link would not repeat the request, so a recovery would go unnoticed.
                again = Decision.upgrade(transfer.group, transfer.track, reason)
                self._fetch(transfer.group, transfer.track, again, now)

    def stop(self, now: float, reason: str) -> None:
        """End the play at its owner's request: deliver a shorter prefix, or give up an incomplete cache."""
        if not self.over:
            self.aim.stop(now, reason)

    def unreachable(self, reason: str, now: float) -> None:
        """Deliver a complete cache that needs nothing more, since no source can be reached."""
        if not self.closed and self.groups.complete and self.aim.suffices(now):
            self.aim.stop(now, reason)

    def cut_off(self, reason: str, now: float) -> None:
        """Handle the loss of all sources: the engine computes the missing groups.

        Without an engine, the play waits for a source to return.
        """
        if self.closed or self.engine is None:
            return
        for transfer in list(self.view.in_flight.values()):
            if not transfer.local:
                self.cancel(transfer, reason, now, failed=True)
        for _, run in groupby(enumerate(sorted(self.view.missing)), lambda each: each[1] - each[0]):
            groups = [group for _, group in run]
            if not self.closed:
                self._leave_to_engine(range(groups[0], groups[-1] + 1), now)
        self.advance(now)

    # ----------------------------------------------------------------- outputs

    def actions(self) -> list[Action]:
        """Return the driver's next actions in order, and clear them."""
        out, self._actions = self._actions, []
        return out

    def next_timer(self) -> float | None:
        """Return when to call `timer`, in seconds since the play began; None after the play."""
        if self.over:
            return None
        soonest_s = self._more_s
        if soonest_s == math.inf:
            look_s = math.inf if self._live is None else self._live.look_s
            ends = (self.view.deadline_s, self.aim.patience_s(), self.next_tick_s, look_s)
            soonest_s = min(end for end in ends if end > self.view.now or end == self.next_tick_s)
        return self.aim.next_timer(soonest_s)

    def time_left(self, now: float) -> float:
        """Return the seconds to the deadline; after it, to the end of patience."""
        end_s = self.view.deadline_s
        return (end_s if now < end_s else self.aim.patience_s()) - now

    # ------------------------------------------------------------ for its goal

    @property
    def stopped(self) -> str | None:
        """Why the producer stopped early, or None."""
        return None if self._live is None else self._live.edge.ended

    def lacking(self) -> str:
        """Describe the missing groups in words."""
        left = self.catalog.groups - self.groups.in_place
        lacking = f"{left} of {self.catalog.groups} groups are still not in place"
        if undecoded := self.undecoded():
            lacking += f" ({undecoded} received and still to be decoded)"
        return lacking if self._live is None else lacking + self._live.lacking()

    def layers_pay(self, now: float) -> bool:
        """Return True if layers that are being encoded are worth the wait."""
        return self._live is not None and self._live.layers_pay(now)

    def requests_made(self) -> int:
        """Return the number of requests so far."""
        return self._requests

    def act(self, action: Action) -> None:
        """Queue an action for the driver."""
        self._actions.append(action)

    def waiting(self) -> bool:
        """Return True if groups are in flight, being decoded or waiting to be decoded."""
        return bool(self.view.in_flight or self._decoders.decoding or self._decoders)

    def decoding(self) -> bool:
        """Return True if groups are being decoded."""
        return bool(self._decoders.decoding)

    def undecoded(self) -> int:
        """Return the number of layers being decoded, plus that of groups waiting to be decoded."""
        return len(self._decoders.decoding) + len(self._decoders)

    def silent(self, now: float) -> bool:
        """Return True if no bytes arrive, and no group is being decoded or computed."""
        share = self.config.silent_after
        if share is None or self.undecoded() or (self.engine is not None and self.engine.busy):
            return False
        return now - self.last_received_s >= max(share * self.view.deadline_s, 3 * self.view.ttfb_s, MIN_SILENCE_S)

    def look(self, now: float) -> None:
        """Update the view for the current time."""
        view = self.view
        view.now = now
        view.rate, view.lower_bound, view.ttfb_s = self._sampler.estimates()
        view.growing = self._sampler.growing
        if self._live is not None:
            self._live.look(now)
        if self.engine is not None:
            view.engine_backlog_s = self.engine.backlog_s(now)
        self.aim.look(now)

    def advance(self, now: float) -> None:
        """Continue after an event."""
        if self.closed or self.aim.ended(now):
            return
        self.look(now)
        complete = self.groups.complete
        if not self.aim.go_on(now):
            return
        if self.engine is not None:
            self._use_engine(self.engine, now)
        if self.over:
            return
        self.content, decisions, self._more_s = False, 0, math.inf
        while not self.content:
            self.view.full = not self.may_request() and not (decisions == 0 and self._all_idle())
            if self.view.full and (decisions > 0 or not self._engine_idles()):
                break
            if decisions == _MAX_DECISIONS:
                self._more_s = now
                break
            decisions += 1
            decision = self.guard.next_decision()
            division = self.guard.division()
            self._engine_due = division is None or division.first < division.last
            self.events.divided(division, self.record, now)
            if self.view.full and decision.kind != "recompute":
                break  # the policy was called only for work of the engine
            self.obey(decision, now)
        self.decode(now)
        self.aim.conclude(now, complete=complete)
        self.aim.advanced(now)

    def obey(self, decision: Decision, now: float) -> None:
        """Carry out a decision of the policy."""
        kind, group = decision.kind, decision.group
        if kind in {"wait", "finish", "deliver"}:
            self.content = True
            self.events.decision(decision, now)
            if kind == "deliver":
                for transfer in list(self.view.in_flight.values()):
                    self.cancel(transfer, "not worth the wait", now)
                self.content = not self.view.missing
        elif kind == "recompute" and group is not None:
            self.events.decision(decision, now)
            end = group + 1 if decision.last is None else decision.last
            self._leave_to_engine(range(group, end), now, by_policy=True)
        elif group is not None and decision.track is not None:
            self._fetch(group, decision.track, decision, now)

    def _fetch(self, group: int, track: str, decision: Decision, now: float) -> None:
        view = self.view
        layers = view.layers(track, view.track_of[group])
        unavailable = next((n for n, layer in enumerate(layers) if (group, layer) in view.unavailable), len(layers))
        if decision.kind == "upgrade":
            if unavailable:
                self.request(group, layers[:unavailable], decision, now, upgrade=True)
            else:
                view.settled.discard(group)  # the track is unavailable: the group stays on its current one
        elif usable := self.retries.usable(group, layers[0], engine=self.engine is not None):
            same = layers[:unavailable] if usable == layers[0] else (usable,)
            self.request(group, same, decision, now, upgrade=False)
        elif self.engine is None:
            self.give_up(
                now, f"{self.catalog.title(group)} failed on every track, and there is no engine to compute it"
            )
        else:
            self._leave_to_engine(range(group, group + 1), now)

    def request(
        self, group: int, layers: Sequence[str], decision: Decision, now: float, *, upgrade: bool, pushed: bool = False
    ) -> None:
        """Request a group's layers, lowest first; ``pushed``: they arrive without a request."""
        view = self.view
        if upgrade:
            saved = view.loss(group, view.track_of[group] or layers[0]) - view.loss(group, layers[-1])
            nbytes = sum(view.bytes(group, track) for track in layers)
            priority = self._priorities.upgrade(self._requests + len(layers) - 1, saved, nbytes, view.in_flight)
            view.settled.discard(group)
        else:
            dearer = not view.front_first and layers[-1] != view.ladder.cheapest
            priority = self._priorities.required(group, dearer=dearer)
        for track in layers:
            request = self._requests
            self._requests += 1
            if pushed:
                self._pushed.add(request)
            size = self.catalog.by_name[track].bytes[group]
            source = 0 if pushed or decision.local else self.sources.choose(group, track, size, now)
            transfer = Transfer(
                request, group, track, size, upgrade or track != layers[0], now, priority=priority, source=source,
                local=decision.local,
            )  # fmt: skip
            view.in_flight[request] = transfer
            self.groups[group].flying += (transfer,)
            if self._stalls is not None:
                self._stalls.requested(transfer)
            view.outstanding_bytes += transfer.remaining
            self._actions.append(FetchGroup(request, group, track, size, priority, pushed, source))
            kind = "upgrade" if transfer.upgrade else "fetch"
            self.events.decision(decision, now, request=request, kind=kind, track=track)
            self.events.emit(RequestSent, now, request, group, track, size, source)
        view.track_of[group] = layers[-1]
        self.groups.restage((group,))
        self._decoders.moved(group)

    def _not_local(self, transfer: Transfer) -> None:
        self.view.in_flight.not_local(transfer)
        self.view.outstanding_bytes += transfer.remaining

    def _leave_to_engine(self, groups: range, now: float, *, by_policy: bool = False) -> None:
        queue = self.engine
        if queue is not None:
            tail = queue.tail
            queue.choose(groups, by_policy=by_policy)
            for group in groups:
                self.view.settled.discard(group)
            self.groups.restage((*groups, *_between(tail, queue.tail)))
            self._use_engine(queue, now)
            self.view.engine_backlog_s = queue.backlog_s(now)

    def _use_engine(self, queue: ComputeQueue, now: float) -> None:
        alone = self.guard.policy.computes
        after = 1.0 if alone else _MIN_PLAN_SHARE
        if self.guard.policy.divides and math.isfinite(self.config.gpu_price):
            after = max(after, 1.0 if self.view.rate > 0 else _SILENT_SHARE)
        dead = not alone and self._dead(now)
        if dead or now >= after * self.view.deadline_s:
            dead = dead or queue.overdue(now, self.groups.absent)
            changed, found = queue.replan(now, dead=dead)
            if changed:
                what = "nothing" if found is None else f"groups {found.first} to {found.last - 1}"
                reason = "the network should deliver the rest in time" if found is None else found.reason
                self.events.decision(Decision.wait(f"recompute {what}: {reason}"), now, kind="plan")
                self.groups.restage(changed)
        # After the producer stops, its unpublished groups will never arrive.
        at_once = alone or self.stopped is not None
        if (ready := queue.ready(now, self.groups.absent, at_once=at_once)) is None:
            return
        first, last = ready
        if not self.aim.computes(now, first, last, self.lacking() if at_once and not alone else None):
            return
        flying = [transfer for group in range(first, last) for transfer in self.groups[group].flying]
        for transfer in sorted(flying, key=lambda one: one.request):
            self.cancel(transfer, "the engine computes this group", now)
        queue.start(first, last, now)
        self._computed_on = len(self.record.steps)
        self.groups.restage(range(first, last))
        for group in range(first, last):
            self.view.track_of[group] = RECOMPUTED
            self.view.settled.discard(group)
        self._actions.append(Recompute(first, last))
        self.events.emit(RecomputeStarted, now, first, last)

    def _leave_out(self, groups: Collection[int]) -> None:
        if groups:
            every = self.catalog.by_name
            self.retries.unavailable.update((group, track) for group in groups for track in every)
            if self.engine is not None:
                self.engine.choose(groups)
            self.groups.restage(range(self.catalog.groups))

    def _settle(self, source: int, now: float) -> None:
        self._sampler[source].settle(now, idle=source not in self.view.in_flight.receiving)

    def _dead(self, now: float) -> bool:
        share, view = self.config.stalled_after, self.view
        if share is None or not view.in_flight or self.undecoded():
            return False
        return now - self.last_received_s >= max(share * view.deadline_s, 4 * view.ttfb_s, MIN_SILENCE_S)

    def _engine_idles(self) -> bool:
        """Return True if the policy may give the engine work now."""
        return self.engine is not None and self.view.engine_backlog_s <= 0 and self.guard.policy.divides

    def _all_idle(self) -> bool:
        """Return True if engine and link are idle; the policy may then decide despite requests in flight."""
        return self._engine_idles() and (self.view.rate <= 0 or not self.record.bytes_fetched)

    def may_request(self) -> bool:
        """Return True if more requests may be sent now."""
        view, config = self.view, self.config
        if len(view.in_flight) >= MAX_REQUESTS or not self.aim.may_request() or self.sources.waiting_for_first:
            return False
        if self.guard.policy.paces:
            if view.rate <= 0 < self._best_rate and view.missing_groups:
                return True  # during an outage, the future rate is unknown
            most = config.ahead * view.rate * (view.ttfb_s + self.tick_s)
            return view.outstanding_bytes < max(config.min_ahead_bytes, most)
        if len(view.in_flight) < (config.min_requests if view.rate > 0 else config.first_requests):
            return True
        # Requests in flight must suffice for a round trip and a tick, or the link idles.
        return view.outstanding_bytes < view.rate * (1.5 * view.ttfb_s + self.tick_s)

    def _count_decoding(self, group: int) -> None:
        self._decoders.update(group, self.record.groups[group].track)

    def decode(self, now: float) -> None:
        """Hand groups to the decoders until they are busy."""
        queue, view = self._decoders, self.view
        while not (queue.busy or self.over):
            urgent = now + view.decode_backlog_s + view.margin_s >= view.deadline_s
            engine = self.engine is not None and self._engine_due
            group = queue.next(now, urgent=urgent, engine=engine, will_replace=self.guard.will_replace)
            if group is None:
                break
            *below, top = queue.begin(group, self.record.groups[group].track)
            self._actions.append(Decode(top.request, group, top.track, tuple(one.request for one in below)))

    def compute_all(self, now: float) -> bool:
        """Assign all groups to the engine, once; return False if that is impossible."""
        if self.engine is None or self._computes_all:
            return False
        self._computes_all = True
        self._leave_to_engine(range(self.catalog.groups), now, by_policy=True)
        return True

    def engine_done(self, begun_s: float, now: float) -> None:
        """Count engine time since ``begun_s``; computations run one after another."""
        self.record.recompute_s += now - max(begun_s, self._engine_s)
        self._engine_s = now

    def _end_decoding(self, request: int) -> tuple[Transfer, ...]:
        if self.closed:
            return ()  # too late: cache and record are final
        return self._decoders.end(request)

    def _place(self, transfer: Transfer, now: float, *, better: bool) -> None:
        """Record that a group is in place; ``better``: it replaces another track."""
        record = self.record.groups[transfer.group]
        if record.track == RECOMPUTED:
            self.record.bytes_wasted += transfer.bytes
            return
        layered = self.catalog.by_name[transfer.track].refines is not None
        if record.ready_s is None:
            self.groups.in_place += 1
        elif not layered:
            self.record.bytes_wasted += record.bytes
        record.bytes = transfer.bytes + (record.bytes if layered else 0)
        record.requested_s, record.first_byte_s = transfer.requested_s, transfer.first_byte_s
        record.done_s, record.ready_s = transfer.done_s, now
        record.source = "upgraded" if better else "fetched"
        record.track = transfer.track
        self.record.steps.append(("fetch", transfer.group, transfer.track))

    def _lost(
        self,
        transfer: Transfer,
        event: type[RequestFailed | RequestCancelled],
        reason: str,
        now: float,
        *,
        counts: bool = True,
    ) -> None:
        """Let a group fall back after a failed or cancelled transfer; see `RetryTracker.failed`."""
        group = transfer.group
        progress = self.groups[group]
        self.record.bytes_wasted += transfer.received
        self.events.emit(event, now, transfer.request, group, transfer.track, transfer.received, reason)
        if event is RequestFailed:
            self.retries.failed(group, transfer.track, reason, upgrade=transfer.upgrade, counts=counts)
        for other in progress.above(transfer.track):
            if other in progress.flying:
                self.cancel(other, f"{transfer.track} below it is lost", now)
            else:
                self._drop(other)
        self._count_decoding(group)
        self.groups.fall_back(group)

    def _drop(self, transfer: Transfer) -> None:
        self.groups[transfer.group].drop(transfer)
        self.record.bytes_wasted += transfer.bytes
        self._actions.append(Cancel(transfer.request))

    def _abandon(self, now: float) -> None:
        """Cancel transfers that will be late, if cheaper ones would arrive in time."""
        view, begun = self.view, 0
        self._best_rate = max(self._best_rate, view.rate)
        if self.guard.policy.paces:  # it requests better tracks if the groups arrive after all
            found = choose_collapsed(view, self._best_rate, self.retries.cheapest_left, self.groups.here)
            for transfer, track in found:
                group, why = transfer.group, f"the link has collapsed: {track} comes first"
                self.record.abandoned += 1
                self.cancel(transfer, why, now)
                if group in view.missing_groups:
                    self._fetch(group, track, Decision.fetch(group, track, why), now)
                elif group in view.settled:
                    self._fetch(group, track, Decision.upgrade(group, track, why), now)
        while begun < _ABANDONED:
            late = choose_late(view, self.retries.cheapest_left, begun=begun > 0)
            if late is None:
                break
            begun += 1
            self.record.abandoned += 1
            if not late[0].upgrade:
                self.retries.abandoned(late[0].group)
            self.cancel(*late, now)
        if not begun and self.aim.drops_upgrades and (hopeless := choose_hopeless(view, self.groups.here)) is not None:
            self.record.abandoned += 1
            self.retries.dropped(hopeless[0].group, hopeless[0].track)
            self.cancel(*hopeless, now)

    def cancel(self, transfer: Transfer, reason: str, now: float, *, failed: bool = False) -> None:
        """Cancel a transfer in flight, and others that need it."""
        if self.view.in_flight.pop(transfer.request, None) is None:
            return
        self.groups[transfer.group].land(transfer)
        self._decoders.moved(transfer.group)
        self.view.outstanding_bytes -= transfer.remaining
        self._actions.append(Cancel(transfer.request))
        self._settle(transfer.source, now)
        self._lost(transfer, RequestFailed if failed else RequestCancelled, reason, now)

    def _end(self, reason: str, now: float) -> None:
        for transfer in self.view.in_flight.values():  # the play ends, so groups need not fall back
            self._actions.append(Cancel(transfer.request))
            self.record.bytes_wasted += transfer.received
            self.events.emit(
                RequestCancelled, now, transfer.request, transfer.group, transfer.track, transfer.received, reason
            )
            progress = self.groups[transfer.group]
            for other in progress.above(transfer.track) if progress.arrived else ():
                if other in progress.arrived:
                    self._drop(other)
        self.view.in_flight.clear()
        self.view.outstanding_bytes = 0
        left = (progress.arrived for progress in self.groups.values())
        undecoded = sum(one.bytes for one in (*self._decoders.decoding.values(), *chain.from_iterable(left)))
        self.record.bytes_undecoded += undecoded
        self.record.bytes_wasted += undecoded
        self.over = self.closed = self.content = True

    def hand_over(self, now: float, cut: str | None = None) -> None:
        """End the play and deliver the cache; ``cut``: why only a part of it, or None."""
        self._end("the cache is delivered", now)
        self.record.delivered_s = now
        self.record.met = now <= self.view.deadline_s
        self.record.cut = cut
        self._actions.append(Deliver(now, self.record.met, cut))

    def give_up(self, now: float, reason: str) -> None:
        """End the play with groups missing."""
        self._end("the play is given up", now)
        reason = "; ".join((reason, *self.retries.last_faults))
        self.record.gave_up, self.record.gave_up_late = reason, now >= self.view.deadline_s
        self._actions.append(GiveUp(now, reason))


def _between(first: int, last: int) -> range:
    return range(min(first, last), max(first, last))
