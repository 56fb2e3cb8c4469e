"""The state machine of one play.

Theory of operation. Every group is in one of these states::

    absent -> in flight -> arrived -> decoding -> in place
       |          |           |          |
       |          +-----------+----------+--> (cancelled, failed, refused: back to absent)
       +-> left to the engine -> computing -> in place

and a group that has arrived or is in place may have an upgrade in flight. A request may be for several layers at once;
layers that have arrived are decoded together (`PlayState._next_to_decode`). The rules:

1. After every event and at every tick, the session re-plans what the engine must compute, abandons what will be late,
   asks the policy for requests until enough are in flight, and delivers when everything is in place.
2. A policy sees a group as missing while it is absent and not left to the engine, and as settled while it has arrived
   or is in place, with nothing in flight.
3. The cache is delivered when every group is in place and either the policy wants no more or the deadline has come.
   A hole is never delivered: a play whose patience has ended with groups missing is given up, whatever is still being
   decoded. An engine may complete it beyond that, for as long as `ENGINE_PATIENCE` says.
4. The groups of a live asset are absent until they are published, and not missing; a play does not end while some may
   still come before the deadline, unless the engine has computed them. Nor does it while layers are about to be
   published that are worth the wait.
5. A play for a prefix (`PrefixGoal`) never starts the engine. It is cut when the engine would start, when only the
   engine could bring another group, and at the deadline; the record says why.
6. The session reads no clock: every event carries ``now``, and the driver calls `timer` at the time of `next_timer`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from kvabr.abr.policy import Decision
from kvabr.abr.view import Transfer
from kvabr.player.compute_queue import ComputeQueue
from kvabr.player.live_edge import NO_CHANGES, EdgeChanges
from kvabr.player.play_state import PlayState
from kvabr.player.session_types import FetchGroup, Recompute
from kvabr.types.catalog import RECOMPUTED
from kvabr.types.events import (
    FirstByteReceived,
    GroupDecoded,
    Limit,
    ProducerStopped,
    RecomputeDone,
    RecomputeFailed,
    RecomputeStarted,
    RequestDone,
    RequestFailed,
    RequestSent,
)

_ASKED = 64
"""Decisions at one event; the policy is asked again at once, but what has happened meanwhile comes first."""


class Session(PlayState):
    """One play. Events go in through the methods below, actions come out of `actions`."""

    # ------------------------------------------------------------------ events

    def start(self, now: float = 0.0) -> None:
        """Begin the play.

        Raises:
            PolicyError: the policy refuses this play, raises, or makes an invalid decision. Every event may raise it.
        """
        self.view.now = now
        self._leave_out(self._catalog.computed)
        self._guard.start()
        self._advance(now)

    def published(self, edge: int, now: float, changes: EdgeChanges = NO_CHANGES) -> None:
        """Take that the first ``edge`` groups of a live asset exist; their base, which is pushed, is on its way.

        Args:
            edge: the number of groups.
            now: when they were first known to exist.
            changes: tracks that are missing, and those that were and exist now. The base of groups that were not asked
                for before is requested as any group is.
        """
        live, view, lane = self._live, self.view, self._compute
        if self.over or live is None:
            return
        new = range(live.edge, max(live.edge, min(edge, view.groups)))
        if not new and not changes.added and not changes.coming:
            return
        live.expect(changes.coming, now)
        self._retries.unavailable.update(changes.left_out)
        for group, track in changes.added:
            self._retries.added(group, track)
            if group in view.settled:
                view.settled.add(group)
        view.added += bool(changes.added)
        if new:
            live.reach(new.stop, now)
            view.edge = new.stop
            self._note_published(live, now)
        base = view.ladder.cheapest
        for group in new:
            engine = group not in self._absent or (lane is not None and group in lane.chosen)
            if (group, base) in view.unavailable or engine:
                continue
            decision = Decision.fetch(group, base, "the publisher pushes the base of what it publishes")
            if changes.pushed is None or group in changes.pushed:
                self._pushed.add(self._requests)
            self._request(group, (base,), decision, now, upgrade=False)
        self._sync_missing(new)
        self._advance(now)

    def producer_stopped(self, reason: str, now: float) -> None:
        """Take that nothing more of a live asset will be published, and why."""
        live, lane = self._live, self._compute
        if self.over or live is None or live.ended is not None:
            return
        live.coming.clear()
        if live.edge == self.view.groups:
            self._advance(now)
            return
        live.ended = reason
        if self.record.live is not None:
            self.record.live.stopped = reason
        self._events.emit(ProducerStopped, now, live.edge, reason)
        if lane is not None:
            lane.choose([group for group in self._absent if group >= live.edge])
            self._sync_missing(range(self.view.groups))
        self._advance(now)

    def first_byte(self, request: int, now: float, limit: Limit = "network") -> None:
        """Take the first byte of a request; ``limit`` says what limited it."""
        transfer = self.view.in_flight.get(request)
        if transfer is not None and transfer.first_byte_s is None:
            self.view.in_flight.begun(transfer, now)
            if limit != "kept":
                self._sampler.first_byte(None if request in self._pushed else now - transfer.requested_s, now)
            self._events.emit(FirstByteReceived, now, request)

    def progress(self, request: int, received: int, now: float, limit: Limit = "network") -> None:
        """Take progress: ``received`` bytes of a request in all; ``limit`` says what limited the new ones."""
        transfer = self.view.in_flight.get(request)
        if transfer is None:
            return
        more = min(received, transfer.bytes) - transfer.received
        if more > 0:
            if transfer.first_byte_s is None:
                self.first_byte(request, now, limit)
            self.view.in_flight.received(transfer, more)
            self.view.outstanding_bytes -= more
            self.record.bytes_fetched += more
            if limit != "network":
                self.record.bytes_held_up[limit] = self.record.bytes_held_up.get(limit, 0) + more
            self._heard_s = now
            if self._stalls is not None:
                self._stalls.heard(transfer, now)
            self._sampler.received(more, now, limit)

    def done(self, request: int, now: float, limit: Limit = "network") -> None:
        """Take the end of a request: all its bytes are here; ``limit`` says what limited the new ones."""
        transfer = self.view.in_flight.get(request)
        if transfer is None:
            return
        self.progress(request, transfer.bytes, now, limit)
        del self.view.in_flight[request]
        group, progress = transfer.group, self._groups[transfer.group]
        transfer.done_s = now
        progress.land(transfer)
        progress.arrived += (transfer,)
        if self._catalog.by_name[transfer.track].refines is None:
            self._set_absent(group, absent=False)
        self._sampler.settle(now, idle=self._idle())
        self._events.emit(RequestDone, now, request, group, transfer.track, transfer.bytes)
        self._count_decoding(group)
        if not progress.flying and self.view.track_of[group] != RECOMPUTED:
            self.view.settled.add(group)
        self._advance(now)

    def failed(self, request: int, reason: str, now: float, *, busy: bool = False) -> None:
        """Take the failure of a request: reset, refused, or the wrong length.

        ``busy``: the publisher has too much to do. That says nothing against the group, which may be requested again.
        """
        transfer = self.view.in_flight.pop(request, None)
        if transfer is not None:
            self._groups[transfer.group].land(transfer)
            self.view.outstanding_bytes -= transfer.remaining
            self._sampler.settle(now, idle=self._idle())
            self._lost(transfer, RequestFailed, reason, now, counts=not busy)
            self._advance(now)

    def decoded(self, request: int, now: float, seconds: float | None = None) -> None:
        """Take a group that is decoded and in place, with the layers that were decoded together with it.

        ``seconds`` says how long a thread was at it.
        """
        batch = self._end_decoding(request)
        better = bool(batch) and self.record.groups[batch[0].group].ready_s is not None
        for transfer in batch:
            self._place(transfer, now, better=better)
            self._events.emit(GroupDecoded, now, transfer.request, transfer.group, transfer.track)
        if batch:
            self._observe_decoding(batch[-1], seconds)
            progress = self._groups[batch[-1].group]
            for useless in progress.superseded(batch[-1]):
                self._drop(useless)
            self._count_decoding(batch[-1].group)
            self._groups.rest(batch[-1].group)
            self._advance(now)

    def refused(self, request: int, reason: str, now: float) -> None:
        """Take a frame that could not be decoded: corrupt, truncated, or foreign. Nothing is in place of its batch."""
        if not (batch := self._end_decoding(request)):
            return
        number = next(number for number, transfer in enumerate(batch) if transfer.request == request)
        self._groups[batch[0].group].arrived += (*batch[:number], *batch[number + 1 :])
        self._lost(batch[number], RequestFailed, reason, now)
        self._advance(now)

    def computed(self, first: int, last: int, now: float) -> None:
        """Take groups ``first`` to ``last`` - 1, which the engine has computed and which are in place."""
        lane = self._compute
        if self.over or lane is None or lane.computing != (first, last):
            return
        tail = lane.tail
        self._engine_done(lane.finish(), now)
        self.record.tokens_recomputed += self._catalog.tokens_before(last) - self._catalog.tokens_before(first)
        if self._closed:
            return
        self.record.steps.append(("compute", first, last))
        for group in range(first, last):
            record = self.record.groups[group]
            if record.ready_s is None:
                self._in_place += 1
            self.record.bytes_wasted += record.bytes
            record.track, record.bytes, record.source = RECOMPUTED, 0, "recomputed"
            record.requested_s, record.first_byte_s, record.done_s, record.ready_s = lane.started_s, None, None, now
            for transfer in self._groups[group].arrived:
                self._drop(transfer)
            self._count_decoding(group)
            # A frame of this group may have been decoded meanwhile; the computed group replaces it.
            self.view.track_of[group] = RECOMPUTED
            self.view.settled.discard(group)
            self._set_absent(group, absent=False)
        self._sync_engine(lane, tail)
        self._events.emit(RecomputeDone, now, first, last)
        self._advance(now)

    def compute_failed(self, reason: str, now: float) -> None:
        """Take a failure of the engine. The session does not use it again: the network must bring the rest."""
        lane = self._compute
        if self._closed or lane is None or lane.computing is None:
            return
        first, last = lane.computing
        left = {*range(first, last), *lane.chosen}
        self._engine_done(lane.finish(), now)
        self._events.emit(RecomputeFailed, now, first, last, reason)
        self._retries.engine_failed(reason)
        self._compute = self.view.cost = None
        self.view.engine_backlog_s = 0.0
        self._take_back(left)
        self._advance(now)

    def waited(self, now: float) -> None:
        """Note that nothing could come until now, because other plays used the shared link."""
        self._heard_s = now
        self._sampler.waited(now)
        if self._stalls is not None:
            self._stalls.waited(self.view.in_flight.values(), now)

    def timer(self, now: float) -> None:
        """Take the tick that `next_timer` asked for."""
        if self._closed or self._ended(now):
            return
        if self._more_s < math.inf and now < self._next_tick_s:
            self._advance(now)
            return
        self._next_tick_s = now + self._tick_s
        self._sampler.tick(now, waiting=bool(self.view.in_flight), idle=self._idle())
        self._refresh(now)
        if self._guard.policy.abandons:
            self._abandon(now)
        if self._stalls is not None:
            view = self.view
            drain_s = view.outstanding_bytes / view.rate if view.rate > 0 else 0.0
            for transfer, proven in self._stalls.stalled(view.in_flight, view.ttfb_s, now, drain_s=drain_s):
                self._cancel(transfer, "it has stalled", now, failed=proven)
        self._events.progress(now, self.record.bytes_fetched)
        self._advance(now)

    def stop(self, now: float, reason: str) -> None:
        """End the play: its owner wants nothing more. A prefix is cut, an incomplete cache is given up."""
        if self.over:
            return
        if self._in_place == self._catalog.groups:
            self._deliver(now)
        elif self._prefix:
            self._deliver(now, cut=reason)
        else:
            self._give_up(now, reason)

    # ----------------------------------------------------------------- outputs

    def next_timer(self) -> float | None:
        """Return when the driver must call `timer`, seconds since the play began; None once the play is over."""
        if self.over:
            return None
        if self._more_s < math.inf:
            return self._more_s
        ends = (self.view.deadline_s, self._patience_s(), self._next_tick_s, self._look_s)
        return min(end for end in ends if end > self.view.now or end == self._next_tick_s)

    def time_left(self, now: float) -> float:
        """Return the seconds until the deadline; once it has passed, until the play ends at the latest."""
        end_s = self.view.deadline_s
        return (end_s if now < end_s else self._patience_s()) - now

    # ---------------------------------------------------------------- internals

    def _ended(self, now: float) -> bool:
        """End the play if its time is up. That takes no decision, and waits for nothing that is being decoded."""
        complete = self._in_place == self._catalog.groups
        if now >= self.view.deadline_s and (complete or self._prefix):
            self._refresh(now)
            self._deliver(now, cut=None if complete else "the deadline has come")
        elif not complete and now >= self._patience_s():
            self._refresh(now)
            self._give_up(now, self._lacking())
        return self._closed

    def _advance(self, now: float) -> None:
        if self._closed or self._ended(now):
            return
        self._refresh(now)
        complete = self._in_place == self._catalog.groups
        if self._compute is not None:
            self._use_engine(self._compute, now)
        self._content, asked, self._more_s = False, 0, math.inf
        while not self._content and self._has_room():
            if asked == _ASKED:
                self._more_s = now
                break
            asked += 1
            self._act(self._guard.ask(), now)
        self._decode(now)
        self._conclude(now, complete=complete)

    def _conclude(self, now: float, *, complete: bool) -> None:
        """End the play if nothing is left to ask for, to wait for, or to hope for."""
        if self.over or (complete and self._layers_pay(now)):
            return
        stopped = self._live is not None and self._live.ended is not None
        if self._content and not self._anything_pending() and (complete or stopped or not self.view.coming):
            if complete:
                self._deliver(now)
                return
            if stopped and not self.view.missing:
                self._end_short(now)
                return
            left = self._catalog.groups - self._in_place
            raise self._guard.invalid(f"waits while {left} groups are missing and nothing is in flight")
        waits = self.view.coming and not stopped
        if self._prefix and not waits and not self.view.in_flight and not self._decoding and not self._undecoded:
            if stopped:
                self._end_short(now)
                return
            # All that is left is to wait for the moment at which the engine would start.
            self._deliver(now, cut=None if complete else "the rest cannot be fetched, or is sooner computed")
            return
        if now >= self.view.deadline_s and not complete and self._silent(now):
            self._give_up(now, f"{self._lacking()}, and nothing has come for {now - self._heard_s:.2f} s")

    def _end_short(self, now: float) -> None:
        """End the play of a live asset whose producer has stopped: all that it has published is in place."""
        if self._prefix:
            self._deliver(now, cut=self._lacking())
        else:
            self._give_up(now, self._lacking())

    def _act(self, decision: Decision, now: float) -> None:
        kind, group = decision.kind, decision.group
        if kind in {"wait", "finish", "deliver"}:
            self._content = True
            self._events.decision(decision, now)
            if kind == "deliver":
                for transfer in list(self.view.in_flight.values()):
                    self._cancel(transfer, "it is not worth the wait", now)
                self._content = not self.view.missing
        elif kind == "recompute" and group is not None:
            self._events.decision(decision, now)
            self._leave_to_engine(group, now)
        elif group is not None and decision.track is not None:
            self._fetch(group, decision.track, decision, now)

    def _fetch(self, group: int, track: str, decision: Decision, now: float) -> None:
        """Request what the policy wants, or what is possible instead."""
        view = self.view
        layers = view.layers(track, view.track_of[group])
        unavailable = next((n for n, layer in enumerate(layers) if (group, layer) in view.unavailable), len(layers))
        if decision.kind == "upgrade":
            if unavailable:
                self._request(group, layers[:unavailable], decision, now, upgrade=True)
            else:
                view.settled.discard(group)  # the policy wants what cannot be had: the group keeps its track
        elif usable := self._retries.usable(group, layers[0], engine=self._compute is not None):
            same = layers[:unavailable] if usable == layers[0] else (usable,)
            self._request(group, same, decision, now, upgrade=False)
        elif self._compute is None:
            self._give_up(
                now, f"{self._catalog.title(group)} failed on every track, and there is no engine to compute it"
            )
        else:
            self._leave_to_engine(group, now)

    def _request(self, group: int, layers: Sequence[str], decision: Decision, now: float, *, upgrade: bool) -> None:
        """Request one or more layers of a group, lowest first."""
        view = self.view
        if upgrade:
            saved = view.loss(group, view.track_of[group] or layers[0]) - view.loss(group, layers[-1])
            nbytes = sum(view.bytes(group, track) for track in layers)
            priority = self._priorities.upgrade(self._requests + len(layers) - 1, saved, nbytes, view.in_flight)
            view.settled.discard(group)
        else:
            dearer = not view.front_first and layers[-1] != view.ladder.cheapest
            priority = self._priorities.required(group, dearer=dearer)
            view.missing_groups.discard(group)
        for track in layers:
            request = self._requests
            self._requests += 1
            size = self._catalog.by_name[track].bytes[group]
            # Only the base of a missing group is required.
            transfer = Transfer(request, group, track, size, upgrade or track != layers[0], now, priority=priority)
            view.in_flight[request] = transfer
            self._groups[group].flying += (transfer,)
            if self._stalls is not None:
                self._stalls.asked(transfer)
            view.outstanding_bytes += size
            self._actions.append(FetchGroup(request, group, track, size, priority, request in self._pushed))
            kind = "upgrade" if transfer.upgrade else "fetch"
            self._events.decision(decision, now, request=request, kind=kind, track=track)
            self._events.emit(RequestSent, now, request, group, track, size)
        view.track_of[group] = layers[-1]
        self._undecoded.moved(group)

    def _leave_to_engine(self, group: int, now: float) -> None:
        lane = self._compute
        if lane is not None:
            tail = lane.tail
            lane.choose((group,))
            self.view.settled.discard(group)
            self.view.engine_backlog_s = lane.backlog_s(now)
            self._sync_missing((group,))
            self._sync_engine(lane, tail)
            self._use_engine(lane, now)

    def _use_engine(self, lane: ComputeQueue, now: float) -> None:
        """Re-plan what is left to the engine, and start what it can compute now."""
        alone = self._guard.policy.computes
        after = 1.0 if alone else self._config.plan_after
        if now >= after * self.view.deadline_s:
            dead = self._dead(now) or lane.overdue(now, self._absent)
            changed, found = lane.replan(now, dead=dead)
            if changed:
                what = "nothing" if found is None else f"groups {found.first} to {found.last - 1}"
                reason = "the network should bring the rest in time" if found is None else found.reason
                self._events.decision(Decision.wait(f"recompute {what}: {reason}"), now, kind="plan")
                self._sync_missing(changed)
        # What a producer that has stopped did not publish cannot come any more.
        at_once = alone or (self._live is not None and self._live.ended is not None)
        if (ready := lane.ready(now, self._absent, self.record.groups, at_once=at_once)) is None:
            return
        first, last = ready
        if self._prefix:
            sooner = f"groups {first} to {last - 1} are sooner computed than fetched"
            self._deliver(now, cut=self._lacking() if at_once and not alone else sooner)
            return
        flying = [transfer for group in range(first, last) for transfer in self._groups[group].flying]
        for transfer in sorted(flying, key=lambda one: one.request):
            self._cancel(transfer, "the engine computes this group", now)
        for group in range(first, last):
            self._set_absent(group, absent=False)
            self.view.track_of[group] = RECOMPUTED
            self.view.settled.discard(group)
            self.view.missing_groups.discard(group)
        lane.start(first, last, now)
        self._actions.append(Recompute(first, last))
        self._events.emit(RecomputeStarted, now, first, last)
