"""The state of a play: each group's progress, transfers in flight, wasted bytes, the log. `Session` decides."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence
from itertools import chain
from typing import ParamSpec

from kvabr.abr.estimator import Estimator
from kvabr.abr.group_set import GroupSet
from kvabr.abr.ladder import Ladder
from kvabr.abr.policy import Policy
from kvabr.abr.view import Future, Transfer, View
from kvabr.player import abandon
from kvabr.player.abandon import LEAST_SILENCE_S, StallDetector
from kvabr.player.compute_queue import ComputeQueue
from kvabr.player.decode_queue import DecodeQueue
from kvabr.player.decode_rates import DecodeRates
from kvabr.player.event_log import EventLog
from kvabr.player.group_progress import ProgressByGroup
from kvabr.player.live_edge import LiveEdge
from kvabr.player.policy_guard import CallLimit, PolicyGuard, at_once
from kvabr.player.priorities import RequestPriorities
from kvabr.player.retry_tracker import RetryTracker
from kvabr.player.session_types import (
    ENGINE_PATIENCE,
    MAX_TICK_S,
    WHOLE,
    Action,
    Cancel,
    Decode,
    Deliver,
    GiveUp,
    Goal,
    GroupRecords,
    LiveRecord,
    PlayerConfig,
    PlayRecord,
    PrefixGoal,
)
from kvabr.player.throughput_sampler import ChunkedThroughputSampler, ThroughputSampler
from kvabr.types.catalog import RECOMPUTED
from kvabr.types.cost import PrefillCost
from kvabr.types.engine import EngineMode
from kvabr.types.errors import UsageError
from kvabr.types.events import (
    GroupsPublished,
    Log,
    RequestCancelled,
    RequestFailed,
    SoonerAlone,
)

P = ParamSpec("P")

_ABANDONED = 64
"""Most transfers that are abandoned at one tick."""
_LEAST_LOOK_S = 0.01
"""Least seconds after which a play that waits for layers considers again whether they are worth it."""
_HURRY_TICKS = 1.5
"""Ticks before the last moment at which decoding must begin to be in time."""


class PlayState:
    """What a play knows about its groups, and the operations that change it."""

    _drops_upgrades = True
    """Whether an upgrade that cannot end in time is given up for a smaller one."""
    _engine_s = 0.0
    """When the engine last finished something."""
    _look_s = math.inf
    """When to consider again whether layers that are to follow are worth the wait."""
    _looked_for = 0
    """For how many more events what was found then holds, see `View.keeps`."""
    _more_s = math.inf
    """When the policy was not asked for all that it wants; infinite if it was."""

    def __init__(
        self,
        ladder: Ladder,
        deadline_s: float,
        policy: Policy,
        estimator: Estimator,
        *,
        goal: Goal = WHOLE,
        cost: PrefillCost | None = None,
        mode: EngineMode = "hole",
        config: PlayerConfig | None = None,
        oracle: Future | None = None,
        decode_rates: DecodeRates | None = None,
        expected_s: Sequence[float] | None = None,
        log: Log | None = None,
        limited: CallLimit = at_once,
    ) -> None:
        """Begin with every group absent; arguments and errors are those of `kvabr.player.builder.new_session`."""
        if not 0 < deadline_s < float("inf"):
            raise UsageError(f"the deadline is {deadline_s} s; it must be a positive number of seconds")
        self._prefix = isinstance(goal, PrefixGoal)
        if self._prefix and (cost is None or mode != "suffix"):
            raise UsageError("to play a prefix, say what a prefill costs the engine, in mode 'suffix'")
        self._config = config = config or PlayerConfig()
        self._retries = RetryTracker(ladder, config.attempts)
        self.view = View(
            ladder,
            deadline_s,
            cost=cost,
            front_first=cost is not None and mode == "suffix",
            gpu_price=config.gpu_price,
            time_price=config.time_price,
            decoders=config.decoders,
            oracle=oracle,
            decode_seconds=None if decode_rates is None else decode_rates.seconds,
            decode_latency=None if decode_rates is None else decode_rates.latency,
            decodes_last=config.decodes_last,
            unavailable=self._retries.unavailable,
        )
        self._decode_rates = decode_rates
        self._catalog = ladder.catalog
        self._live = None if expected_s is None else LiveEdge(expected_s)
        self._pushed: set[int] = set()
        """Requests for what the publisher sends unasked."""
        self._tick_s = self._next_tick_s = min(deadline_s / config.ticks, MAX_TICK_S)
        self._events = EventLog(log, self.view)
        self._guard = PolicyGuard(policy, self.view, limited)
        meter = ChunkedThroughputSampler if config.chunked else ThroughputSampler
        self._sampler = meter(estimator, deadline_s, self._events.limited)
        self._compute = None if cost is None else ComputeQueue(cost, mode, self.view, self._tick_s)
        self._alone_s = None if cost is None else cost.seconds(0, ladder.catalog.tokens)
        """Seconds that the engine would take for everything; None if there is none."""
        self._stalls = None if config.stalled_after is None else StallDetector(config.stalled_after * deadline_s)
        groups = self._catalog.groups
        self.record = PlayRecord(GroupRecords(groups))
        if self._live is not None:
            self.record.live = LiveRecord()
            self.view.edge, self.view.missing_groups = 0, GroupSet(groups, ())
        self._absent = GroupSet(groups)
        """Groups that have not arrived and are not being computed; includes those in flight."""
        self._in_place = 0
        self._groups = ProgressByGroup(ladder.stacks)
        self._undecoded = DecodeQueue(self.view, self._groups, config.decode_ahead_s, together=config.together)
        """Groups of which something has arrived and is not being decoded."""
        self._decoding: dict[int, Transfer] = {}
        """What is being decoded, by request."""
        self._actions: list[Action] = []
        self._heard_s = 0.0
        """When the last bytes came."""
        self._requests = 0
        self._priorities = RequestPriorities(groups)
        self._content = False
        """Whether the policy wanted nothing more when it was last asked."""
        self.over = self._closed = False
        """True once the play has been delivered or given up; and once groups come too late to get into the cache."""
        self._begin(goal)

    def actions(self) -> list[Action]:
        """Return what the driver must do now, in order; each action is returned once."""
        out, self._actions = self._actions, []
        return out

    def _leave_out(self, groups: Collection[int]) -> None:
        """Leave groups that no asset has to the engine from the beginning."""
        if groups:
            every = self._catalog.by_name
            self._retries.unavailable.update((group, track) for group in groups for track in every)
            if self._compute is not None:
                self._compute.choose(groups)
            self._sync_missing(range(self._catalog.groups))

    def _begin(self, goal: Goal) -> None:
        """Prepare for a goal that is not a fresh cache."""

    def _idle(self) -> bool:
        """Return whether no request is receiving bytes."""
        return not self.view.in_flight.receiving

    def _patience_s(self) -> float:
        """Return when an incomplete play ends, seconds since it began."""
        engine_s = 0.0 if self._compute is None else ENGINE_PATIENCE * (self._alone_s or 0.0)
        return self._config.give_up_after * self.view.deadline_s + engine_s

    def _lacking(self) -> str:
        lacking = f"{self._catalog.groups - self._in_place} of {self._catalog.groups} groups are still not in place"
        if self._live is None or self._live.edge == self._catalog.groups:
            return lacking
        stopped = self._live.ended
        why = "no more so far" if stopped is None else f"then it stopped: {stopped}"
        return f"{lacking}; the producer has published {self._live.edge or 'none'}, {why}"

    def _note_published(self, live: LiveEdge, now: float) -> None:
        """Record how far the producer is, and say so if the engine would have been sooner alone."""
        record = self.record.live = self.record.live or LiveRecord()
        ends_s, began = live.ends_s(now), record.published == 0
        record.published = live.edge
        if live.edge == self._catalog.groups:
            record.complete_s = now
        self._events.emit(GroupsPublished, now, live.edge, ends_s)
        if began and self._alone_s is not None and now + self._alone_s < ends_s:
            record.sooner_alone_s = ends_s - now - self._alone_s
            self._events.emit(SoonerAlone, now, self._alone_s, ends_s)

    def _layers_pay(self, now: float) -> bool:
        """Return whether the layers that a producer is still encoding save more than waiting for them costs."""
        live, view, saved, soonest_s = self._live, self.view, 0.0, math.inf
        if live is None or not live.coming:
            self._look_s = math.inf
            return False
        if self._looked_for > 0 and now < self._look_s:
            self._looked_for -= 1
            return self._look_s < math.inf
        self._looked_for, self._look_s = view.keeps, math.inf
        for group in live.coming:
            current, rest_s = view.track_of[group], live.rest_s(group, now)
            if rest_s is None or current is None or current == RECOMPUTED:
                continue
            soonest_s, best = min(soonest_s, rest_s), 0.0
            for track in view.ladder.stacks:
                layers = view.layers(track, current)
                if not layers or (group, layers[0]) not in view.unavailable:
                    continue
                nbytes = sum(view.bytes(group, layer) for layer in layers)
                carried_s = nbytes / view.rate if view.rate > 0 else 0.0
                if now + rest_s + view.ttfb_s + carried_s + view.last_decode_s(track) < view.deadline_s:
                    gain = view.loss(group, current) - view.loss(group, track)
                    best = max(best, gain - view.time_price * carried_s)
            saved += best
        if saved > 0.0 and saved > view.time_price * (soonest_s + view.ttfb_s):
            self._look_s = now + max(soonest_s, _LEAST_LOOK_S)
            return True
        return False

    def _refresh(self, now: float) -> None:
        view = self.view
        view.now = now
        view.rate, view.lower_bound, view.ttfb_s = self._sampler.estimates()
        view.growing = self._sampler.growing
        if (live := self._live) is not None:
            view.ends_s, view.late_s = live.ends_s(now), live.late_s(now)
            view.ready_s = lambda group: live.ready_s(group, now)
        if self._compute is not None:
            view.engine_backlog_s = self._compute.backlog_s(now)

    def _silent(self, now: float) -> bool:
        """Return whether nothing arrives and nothing is being decoded or computed, so that waiting is pointless."""
        share, lane = self._config.silent_after, self._compute
        if (
            share is None
            or self._decoding
            or self._undecoded
            or (lane is not None and (lane.computing is not None or lane.waiting()))
        ):
            return False
        return now - self._heard_s >= max(share * self.view.deadline_s, 3 * self.view.ttfb_s, LEAST_SILENCE_S)

    def _dead(self, now: float) -> bool:
        """Return whether requests have brought nothing for so long that the engine should start."""
        share, view = self._config.stalled_after, self.view
        if share is None or not view.in_flight or self._decoding or self._undecoded:
            return False
        return now - self._heard_s >= max(share * view.deadline_s, 4 * view.ttfb_s, LEAST_SILENCE_S)

    def _has_room(self) -> bool:
        view, config = self.view, self._config
        if len(view.in_flight) >= config.most_requests:
            return False
        if self._guard.policy.paces:
            most = config.ahead * view.rate * (view.ttfb_s + self._tick_s)
            return view.outstanding_bytes < max(config.least_ahead_bytes, most)
        if len(view.in_flight) < (config.min_requests if view.rate > 0 else config.first_requests):
            return True
        # What is in flight must last for a round trip and a tick, or the link runs dry.
        return view.outstanding_bytes < view.rate * (1.5 * view.ttfb_s + self._tick_s)

    def _anything_pending(self) -> bool:
        lane = self._compute
        engine = lane is not None and (lane.computing is not None or lane.waiting())
        return bool(self.view.in_flight or self._decoding or self._undecoded) or engine

    def _observe_decoding(self, top: Transfer, seconds: float | None) -> None:
        """Correct the decode rates by the seconds that a thread took for a group."""
        if self._decode_rates is not None and seconds is not None:
            self._decode_rates.observe(top.track, self._catalog.share(top.group), seconds)
            self._undecoded.reckon()

    def _count_decoding(self, group: int) -> None:
        """Work out anew what is to be decoded of a group."""
        self._undecoded.update(group, self.record.groups[group].track)

    def _next_to_decode(self, now: float) -> int | None:
        """Return the group to decode next, or None; see `DecodeQueue`."""
        view = self.view
        hurry = now + view.decode_backlog_s + _HURRY_TICKS * self._tick_s >= view.deadline_s
        engine = self._compute is not None
        return self._undecoded.next(now, hurry=hurry, engine=engine, will_replace=self._guard.will_replace)

    def _decode(self, now: float) -> None:
        """Give the decoders as much as they can do at once."""
        queue = self._undecoded
        while not queue.busy and (group := self._next_to_decode(now)) is not None:
            batch = self._groups[group].begin_decoding(self.record.groups[group].track)
            queue.begin(batch[-1])
            self._decoding.update((transfer.request, transfer) for transfer in batch)
            top = batch[-1]
            below = tuple(transfer.request for transfer in batch[:-1])
            self._actions.append(Decode(top.request, group, top.track, below))

    def _engine_done(self, begun_s: float, now: float) -> None:
        """Count what the engine has done since then. It does one thing after the other, whatever it was asked when."""
        self.record.recompute_s += now - max(begun_s, self._engine_s)
        self._engine_s = now

    def _end_decoding(self, request: int) -> tuple[Transfer, ...]:
        """Take the batch with this request from the decoders; empty if it is no longer wanted."""
        if self._closed or (transfer := self._decoding.get(request)) is None:
            return ()  # too late: the cache is as it will be handed over, and so is the record
        progress = self._groups[transfer.group]
        batch = progress.end_decoding()
        for one in batch:
            del self._decoding[one.request]
        self._undecoded.end(batch[-1])
        return batch

    def _place(self, transfer: Transfer, now: float, *, better: bool) -> None:
        """Record that a group is in place on the track of a transfer; ``better``: it was on another one before."""
        record = self.record.groups[transfer.group]
        if record.track == RECOMPUTED:
            self.record.bytes_wasted += transfer.bytes
            return
        layered = self._catalog.by_name[transfer.track].refines is not None
        if record.ready_s is None:
            self._in_place += 1
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
        """Return a group whose transfer failed or was cancelled to its previous state; see `RetryTracker.failed`."""
        group = transfer.group
        progress = self._groups[group]
        self.record.bytes_wasted += transfer.received
        self._events.emit(event, now, transfer.request, group, transfer.track, transfer.received, reason)
        if event is RequestFailed:
            self._retries.failed(group, transfer.track, reason, upgrade=transfer.upgrade, counts=counts)
        for other in progress.above(transfer.track):
            if other in progress.flying:
                self._cancel(other, f"{transfer.track} below it is lost", now)
            else:
                self._drop(other)
        self._count_decoding(group)
        self._resettle(group)
        self._sync_missing((group,))

    def _drop(self, transfer: Transfer) -> None:
        """Forget a transfer that has arrived and is of no use any more."""
        self._groups[transfer.group].drop(transfer)
        self.record.bytes_wasted += transfer.bytes
        self._actions.append(Cancel(transfer.request))

    def _resettle(self, group: int) -> None:
        """Tell the policy what a group has now: nothing, or the best that is in place or has arrived."""
        view, progress, placed = self.view, self._groups[group], self.record.groups[group].track
        if placed == RECOMPUTED:
            view.track_of[group] = RECOMPUTED
            return
        top = view.track_of[group] = progress.top() or placed
        if self._here(group) is None:
            self._set_absent(group, absent=True)
            for transfer in progress.flying:
                if transfer.upgrade and self._catalog.by_name[transfer.track].refines is None:
                    view.in_flight.require(transfer)
        elif top is not None and not progress.flying:
            view.settled.add(group)

    def _take_back(self, groups: Iterable[int]) -> None:
        """Return groups that were left to an engine that failed to their previous state."""
        for group in groups:
            self._resettle(group)
            self._undecoded.moved(group)
        self._sync_missing(range(self._catalog.groups))

    def _set_absent(self, group: int, *, absent: bool) -> None:
        """Note that a group is absent, or no longer."""
        (self._absent.add if absent else self._absent.discard)(group)
        if self._compute is not None:
            self._compute.absent(group, absent=absent)

    def _sync_engine(self, lane: ComputeQueue, before: int) -> None:
        """Take in which tail is left to the engine for good now; it was the one from ``before`` on."""
        if lane.tail != before:
            self._sync_missing(range(min(before, lane.tail), max(before, lane.tail)))

    def _sync_missing(self, groups: Iterable[int]) -> None:
        """Work out anew which of these groups the policy sees as missing."""
        view, lane, absent, flying = self.view, self._compute, self._absent, self.view.in_flight.groups
        for group in groups:
            missing = group in absent and group < view.edge and group not in flying
            if missing and (lane is None or not lane.takes(group)):
                view.missing_groups.add(group)
            else:
                view.missing_groups.discard(group)

    def _abandon(self, now: float) -> None:
        """Cancel what will be late while something cheaper is not."""
        view, begun = self.view, 0
        while begun < _ABANDONED:
            found = abandon.choose(view, self._retries.cheapest_left, begun=begun > 0)
            if found is None:
                break
            begun += 1
            self.record.abandoned += 1
            if not found[0].upgrade:
                self._retries.abandoned(found[0].group)
            self._cancel(*found, now)
        if not begun and self._drops_upgrades and (hopeless := abandon.hopeless(view, self._here)) is not None:
            self.record.abandoned += 1
            self._retries.dropped(hopeless[0].group, hopeless[0].track)
            self._cancel(*hopeless, now)

    def _here(self, group: int) -> str | None:
        """Return the track on which a group has arrived or is in place."""
        return self._groups[group].here() or self.record.groups[group].track

    def _cancel(self, transfer: Transfer, reason: str, now: float, *, failed: bool = False) -> None:
        """Cancel a transfer, and those that need it, unless it is no longer in flight."""
        if self.view.in_flight.pop(transfer.request, None) is None:
            return
        self._groups[transfer.group].land(transfer)
        self._undecoded.moved(transfer.group)
        self.view.outstanding_bytes -= transfer.remaining
        self._actions.append(Cancel(transfer.request))
        self._sampler.settle(now, idle=self._idle())
        self._lost(transfer, RequestFailed if failed else RequestCancelled, reason, now)

    def _end(self, reason: str, now: float) -> None:
        for transfer in self.view.in_flight.values():  # they leave no groups that anybody would ask for
            self._actions.append(Cancel(transfer.request))
            self.record.bytes_wasted += transfer.received
            self._events.emit(
                RequestCancelled, now, transfer.request, transfer.group, transfer.track, transfer.received, reason
            )
            progress = self._groups[transfer.group]
            for other in progress.above(transfer.track) if progress.arrived else ():
                if other in progress.arrived:
                    self._drop(other)
        self.view.in_flight.clear()
        self.view.outstanding_bytes = 0
        left = (progress.arrived for progress in self._groups.values())
        undecoded = sum(one.bytes for one in (*self._decoding.values(), *chain.from_iterable(left)))
        self.record.bytes_undecoded += undecoded
        self.record.bytes_wasted += undecoded
        self.over = self._closed = self._content = True

    def _deliver(self, now: float, *, cut: str | None = None) -> None:
        self._end("the cache is delivered", now)
        self.record.delivered_s = now
        self.record.met = now <= self.view.deadline_s
        self.record.cut = cut
        self._actions.append(Deliver(now, self.record.met, cut))

    def _give_up(self, now: float, reason: str) -> None:
        self._end("the play is given up", now)
        reason = "; ".join((reason, *self._retries.last_words))
        self.record.gave_up = reason
        self._actions.append(GiveUp(now, reason))
