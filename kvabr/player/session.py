"""The state machine of one play.

Theory of operation. Every group is in one of these states::

    absent -> in flight -> arrived -> in place
       |          |           |          |
       |          +-----------+----> (cancelled, failed, refused: back to absent)
       +-> left to the engine -> computing -> in place

and a group in place may have one upgrade in flight. The rules:

1. After every event, and at every tick, the session re-plans what the engine must compute, gives up what will not make
   it, then asks the policy for requests until enough are in flight, and delivers when all is in place.
2. A policy sees a group as missing while it is absent and not left to the engine.
3. The cache is delivered when every group is in place and either the policy wants no more, or the deadline has come.
   A hole is never delivered: without a network and an engine the play is given up instead.
4. Nothing here knows a clock: every event carries ``now``, and the driver calls `timer` when `next_timer` says.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from kvabr.abr.estimator import Estimator
from kvabr.abr.ladder import Ladder
from kvabr.abr.plugins import where
from kvabr.abr.policy import Decision, Policy
from kvabr.abr.view import Transfer, View
from kvabr.errors import PolicyError, UsageError
from kvabr.player import abandon
from kvabr.player.actions import Action, Cancel, Decode, Deliver, Fetch, GiveUp, Recompute
from kvabr.player.meter import Meter
from kvabr.player.record import GroupRecord, PlayRecord
from kvabr.recompute.cost import PrefillCost
from kvabr.recompute.loss import RECOMPUTED
from kvabr.recompute.planner import EngineMode, plan

Log = Callable[[dict[str, Any]], None]


@dataclass(frozen=True, slots=True)
class PlayerConfig:
    """What a player does whatever its policy."""

    min_requests: int = 2
    """Requests kept in flight at least, to hide the round trip."""
    max_requests: int = 32
    """Requests in flight at most."""
    ticks: int = 50
    """Times per deadline that the session looks at transfers that move, or do not."""
    attempts: int = 3
    """Times that one group of one track is asked for before it counts as not to be had."""
    plan_after: float = 0.1
    """Share of the deadline before which nothing is left to the engine: slow start makes every link look too slow."""
    give_up_after: float = 10.0
    """Deadlines after which a play that cannot be completed is given up."""


class Session:
    """One play: events go in by the methods below, actions come out of `actions`."""

    def __init__(
        self,
        ladder: Ladder,
        deadline_s: float,
        policy: Policy,
        estimator: Estimator,
        *,
        cost: PrefillCost | None = None,
        mode: EngineMode = "hole",
        config: PlayerConfig | None = None,
        oracle: Callable[[float], float] | None = None,
        log: Log | None = None,
    ) -> None:
        if not 0 < deadline_s < float("inf"):
            raise UsageError(f"the deadline is {deadline_s} s; it must be a positive number of seconds")
        self.view = View(ladder, deadline_s, cost=cost, oracle=oracle)
        self._catalog = ladder.catalog
        self._policy, self._cost, self._mode, self._log = policy, cost, mode, log
        self._config = config or PlayerConfig()
        self._meter = Meter(estimator, deadline_s)
        groups = self._catalog.groups
        self.record = PlayRecord([GroupRecord(group) for group in range(groups)])
        self._absent: dict[int, None] = dict.fromkeys(range(groups))
        self._in_place = 0
        self._pending_decode: dict[int, Transfer] = {}
        self._planned: range = range(0)
        self._chosen: set[int] = set()
        self._computing: tuple[int, int] | None = None
        self._lane_free_s = self._lane_started_s = 0.0
        self._tick_s = deadline_s / self._config.ticks
        self._failures: dict[tuple[int, str], int] = {}
        self._requests = self._upgrades = 0
        self._content = False
        self._actions: list[Action] = []
        self.over = False
        """True once the play has been delivered or given up."""

    # ------------------------------------------------------------------ events

    def start(self, now: float = 0.0) -> None:
        """Begin the play.

        Raises:
            PolicyError: the policy refuses this play, raises, or asks for what does not exist (also from every other
                event).
        """
        self.view.now = now
        try:
            self._policy.start(self.view)
        except PolicyError:
            raise
        except Exception as error:
            raise self._raised(error) from error
        self._advance(now)

    def first_byte(self, request: int, now: float) -> None:
        """The first byte of a request came."""
        transfer = self.view.in_flight.get(request)
        if transfer is None or transfer.first_byte_s is not None:
            return
        transfer.first_byte_s = now
        self._meter.first_byte(now - transfer.requested_s, now)
        if self._log:
            self._log({"t": now, "event": "first_byte", "request": request})

    def progress(self, request: int, received: int, now: float) -> None:
        """A request has received so many bytes in all."""
        transfer = self.view.in_flight.get(request)
        if transfer is None:
            return
        more = min(received, transfer.bytes) - transfer.received
        if more > 0:
            if transfer.first_byte_s is None:
                self.first_byte(request, now)
            transfer.received += more
            self.view.outstanding_bytes -= more
            self.record.bytes_fetched += more
            self._meter.received(more, now)

    def done(self, request: int, now: float) -> None:
        """A request is complete: its bytes are all here."""
        transfer = self.view.in_flight.get(request)
        if transfer is None:
            return
        self.progress(request, transfer.bytes, now)
        del self.view.in_flight[request]
        self._pending_decode[request] = transfer
        self._absent.pop(transfer.group, None)
        self._meter.settle(now, idle=self._idle())
        if self._log:
            event = {"event": "done", "request": request, "group": transfer.group, "track": transfer.track}
            self._log({"t": now, **event, "bytes": transfer.bytes})
        if not transfer.upgrade:
            self._note(transfer, now)
        self.view.decode_backlog_s += self.view.decode_s(transfer.track)
        self._actions.append(Decode(request, transfer.group, transfer.track))
        self._advance(now)

    def failed(self, request: int, reason: str, now: float) -> None:
        """A request ended without its bytes: reset, refused, or the wrong length."""
        transfer = self.view.in_flight.pop(request, None)
        if transfer is not None:
            self.view.outstanding_bytes -= transfer.remaining
            self._meter.settle(now, idle=self._idle())
            self._lost(transfer, "failed", reason, now)
            self._advance(now)

    def decoded(self, request: int, now: float) -> None:
        """A group that had arrived is decoded and in place."""
        transfer = self._pending_decode.pop(request, None)
        if transfer is None:
            return
        self.view.decode_backlog_s = max(0.0, self.view.decode_backlog_s - self.view.decode_s(transfer.track))
        record = self.record.groups[transfer.group]
        if record.track == RECOMPUTED or (record.ready_s is not None and not transfer.upgrade):
            self.record.bytes_wasted += transfer.bytes
        else:
            self._place(transfer, record, now)
        if self._log:
            event = {"event": "decoded", "request": request, "group": transfer.group, "track": transfer.track}
            self._log({"t": now, **event})
        self._advance(now)

    def refused(self, request: int, reason: str, now: float) -> None:
        """A group that had arrived could not be decoded: corrupt, truncated, or foreign."""
        transfer = self._pending_decode.pop(request, None)
        if transfer is not None:
            self.view.decode_backlog_s = max(0.0, self.view.decode_backlog_s - self.view.decode_s(transfer.track))
            self._lost(transfer, "failed", reason, now)
            self._advance(now)

    def computed(self, first: int, last: int, now: float) -> None:
        """The engine has computed groups ``first`` to ``last`` - 1, and they are in place."""
        if self._computing != (first, last):
            return
        self._computing = None
        self.record.steps.append(("compute", first, last))
        for group in range(first, last):
            record = self.record.groups[group]
            if record.ready_s is None:
                self._in_place += 1
            elif record.bytes:
                self.record.bytes_wasted += record.bytes
            self.record.groups[group] = GroupRecord(
                group, RECOMPUTED, requested_s=self._lane_started_s, ready_s=now, source="recomputed"
            )
            self.record.tokens_recomputed += self._catalog.group_tokens(group)
            self.view.track_of[group] = RECOMPUTED
            self._absent.pop(group, None)
            self._chosen.discard(group)
        self.record.recompute_s += now - self._lane_started_s
        if self._log:
            self._log({"t": now, "event": "recompute_done", "first": first, "last": last})
        self._advance(now)

    def timer(self, now: float) -> None:
        """The time that `next_timer` named has come."""
        if self.over:
            return
        self._tick_s = now + self.view.deadline_s / self._config.ticks
        self._meter.tick(now, waiting=bool(self.view.in_flight), idle=self._idle())
        self._refresh(now)
        if self._policy.abandons:
            self._abandon(now)
        if self._log and self.view.in_flight:
            received = self.record.bytes_fetched
            event = {"event": "progress", "received": received, "rate": self.view.rate, "lower": self.view.lower_bound}
            self._log({"t": now, **event, "slack_s": _finite(self.view.slack_s())})
        self._advance(now)

    # ----------------------------------------------------------------- outputs

    def actions(self) -> list[Action]:
        """What the driver must do now, in order; each action comes out once."""
        out, self._actions = self._actions, []
        return out

    def next_timer(self) -> float | None:
        """When the driver must call `timer`, seconds since the play began; None once the play is over."""
        if self.over:
            return None
        deadline = self.view.deadline_s
        return deadline if self.view.now < deadline < self._tick_s else self._tick_s

    # ---------------------------------------------------------------- internals

    def _advance(self, now: float) -> None:
        if self.over:
            return
        self._refresh(now)
        if self._in_place == self._catalog.groups and now >= self.view.deadline_s:
            self._deliver(now)
            return
        if self._cost is not None:
            self._replan(now)
            self._compute(now)
        self._content = False
        while not self._content and self._has_room():
            self._act(self._ask(), now)
        nothing_pending = not self.view.in_flight and not self._pending_decode and self._computing is None
        if self._in_place == self._catalog.groups and self._content and not self._anything_coming():
            self._deliver(now)
        elif nothing_pending and self._absent and self._content and not self._waits_for_engine():
            self._starved(now)
        elif now > self._config.give_up_after * self.view.deadline_s:
            left = self._catalog.groups - self._in_place
            self._give_up(now, f"{left} of {self._catalog.groups} groups are still not in place")

    def _refresh(self, now: float) -> None:
        view = self.view
        view.now = now
        estimator = self._meter.estimator
        view.rate = estimator.rate()
        view.lower_bound = min(view.rate, estimator.lower_bound())
        view.ttfb_s = estimator.ttfb()

    def _idle(self) -> bool:
        return not any(t.first_byte_s is not None for t in self.view.in_flight.values())

    def _has_room(self) -> bool:
        view, config = self.view, self._config
        flying = len(view.in_flight)
        if flying < config.min_requests:
            return True
        # What is in flight must last for a round trip and a tick, or the link runs dry.
        enough = view.rate * (1.5 * view.ttfb_s + view.deadline_s / config.ticks)
        return flying < config.max_requests and view.outstanding_bytes < enough

    def _anything_coming(self) -> bool:
        if self.view.now >= self.view.deadline_s:
            return False
        return bool(self.view.in_flight) or bool(self._pending_decode)

    def _waits_for_engine(self) -> bool:
        return self._cost is not None and (bool(self._planned) or bool(self._chosen))

    def _ask(self) -> Decision:
        try:
            decision = self._policy.decide(self.view)
        except PolicyError:
            raise
        except Exception as error:
            raise self._raised(error) from error
        self._check(decision)
        return decision

    def _check(self, decision: Any) -> None:
        view = self.view
        if not isinstance(decision, Decision):
            raise self._nonsense(f"returned {decision!r}, not a Decision")
        kind, group, track = decision.kind, decision.group, decision.track
        if kind in {"wait", "finish"}:
            if kind == "finish" and view.missing:
                raise self._nonsense(f"wants to finish while {len(view.missing)} groups are missing")
            return
        if kind not in {"fetch", "upgrade", "recompute"}:
            raise self._nonsense(f"returned a decision of unknown kind {kind!r}")
        if isinstance(group, bool) or not isinstance(group, int) or not 0 <= group < view.groups:
            raise self._nonsense(f"asked for group {group!r}; there are 0 to {view.groups - 1}")
        if kind == "recompute":
            if self._cost is None or group not in view.missing:
                raise self._nonsense(f"wants group {group} recomputed, which is not possible here")
            return
        if track not in self._catalog.by_name:
            raise self._nonsense(f"asked for unknown track {track!r}; there are {', '.join(self._catalog.by_name)}")
        current = view.track_of[group]
        if kind == "fetch" and group not in view.missing:
            raise self._nonsense(f"asked to fetch group {group}, which is not missing (it has {current})")
        if kind == "upgrade" and (current is None or current in {RECOMPUTED, track}):
            raise self._nonsense(f"asked to upgrade group {group} to {track} while it has {current}")
        refines = self._catalog.by_name[track].refines
        if refines is not None and refines != current:
            raise self._nonsense(f"asked for {track} of group {group}, which refines {refines}, while it has {current}")

    def _act(self, decision: Decision, now: float) -> None:
        kind, group, track = decision.kind, decision.group, decision.track
        if kind in {"wait", "finish"}:
            self._content = True
            self._log_decision(decision, now)
            return
        assert group is not None  # noqa: S101  # `_check` has seen to it
        if kind == "recompute":
            self._log_decision(decision, now)
            self._chosen.add(group)
            self._sync_missing()
            self._compute(now)
            return
        assert track is not None  # noqa: S101
        upgrade = kind == "upgrade"
        usable = self._usable(group, track, upgrade=upgrade)
        if usable is None:
            self._content = upgrade
            if not upgrade:
                self._no_source(group, now)
            return
        self._request(group, usable, decision, now, upgrade=upgrade)

    def _usable(self, group: int, track: str, *, upgrade: bool) -> str | None:
        """The track asked for, or, if that group of it has failed too often, the cheapest one left; None if none is."""
        limit = self._config.attempts
        if not self._failures or self._failures.get((group, track), 0) < limit:
            return track
        if upgrade:
            return None
        return next((name for name in self.view.ladder.names if self._failures.get((group, name), 0) < limit), None)

    def _request(self, group: int, track: str, decision: Decision, now: float, *, upgrade: bool) -> None:
        view = self.view
        request = self._requests
        self._requests += 1
        size = self._catalog.by_name[track].bytes[group]
        view.in_flight[request] = Transfer(request, group, track, size, upgrade, now)
        view.outstanding_bytes += size
        view.track_of[group] = track
        if upgrade:
            priority = 128 + min(127, self._upgrades)
            self._upgrades += 1
        else:
            priority = group * 128 // view.groups
            view._missing.pop(group, None)  # noqa: SLF001  # the view is the session's own
        self._actions.append(Fetch(request, group, track, size, priority))
        if self._log:
            self._log_decision(decision, now, request)
            event = {"event": "request", "request": request, "group": group, "track": track}
            self._log({"t": now, **event, "bytes": size})

    def _note(self, transfer: Transfer, now: float) -> None:
        record = self.record.groups[transfer.group]
        record.requested_s, record.first_byte_s, record.done_s = transfer.requested_s, transfer.first_byte_s, now
        record.bytes = transfer.bytes

    def _place(self, transfer: Transfer, record: GroupRecord, now: float) -> None:
        layered = self._catalog.by_name[transfer.track].refines is not None
        if transfer.upgrade:
            below = record.bytes
            if not layered:
                self.record.bytes_wasted += below
            self._note(transfer, now)
            record.bytes += below if layered else 0
        if record.ready_s is None:
            self._in_place += 1
        record.source = "upgraded" if transfer.upgrade else "fetched"
        record.track, record.ready_s = transfer.track, now
        self.view.track_of[transfer.group] = self._best_under_way(transfer.group, transfer.track)
        self.record.steps.append(("fetch", transfer.group, transfer.track))

    def _best_under_way(self, group: int, track: str) -> str:
        for transfer in (*self.view.in_flight.values(), *self._pending_decode.values()):
            if transfer.group == group and transfer.upgrade:
                return transfer.track
        return track

    def _lost(self, transfer: Transfer, event: str, reason: str, now: float) -> None:
        """Put a group whose transfer came to nothing back to where it was."""
        view, group = self.view, transfer.group
        self.record.bytes_wasted += transfer.received
        if self._log:
            what = {"event": event, "request": transfer.request, "group": group, "track": transfer.track}
            self._log({"t": now, **what, "received": transfer.received, "reason": reason})
        if event == "failed":
            key = (group, transfer.track)
            self._failures[key] = self._failures.get(key, 0) + 1
        record = self.record.groups[group]
        if transfer.upgrade:
            view.track_of[group] = record.track
        elif record.track is None:
            view.track_of[group] = None
            self._absent[group] = None
            self._absent = dict.fromkeys(sorted(self._absent))
            self._sync_missing()

    def _sync_missing(self) -> None:
        """Work out anew what the policy sees as missing."""
        flying = {transfer.group for transfer in self.view.in_flight.values()}
        first_chosen = min(self._chosen, default=self._catalog.groups) if self._mode == "suffix" else None
        self.view._missing = {  # noqa: SLF001  # the view is the session's own
            group: None
            for group in self._absent
            if group not in flying
            and group not in self._planned
            and group not in self._chosen
            and (first_chosen is None or group < first_chosen)
        }

    def _replan(self, now: float) -> None:
        if self._cost is None or (self._computing is not None and self._mode == "suffix"):
            return
        view = self.view
        if now < self._config.plan_after * view.deadline_s or not self._absent:
            found = None
        else:
            running = self._computing or (0, 0)
            absent = [g for g in self._absent if not running[0] <= g < running[1] and g not in self._chosen]
            found = plan(view, self._cost, self._mode, absent, self._lane_free_s)
        planned = range(0) if found is None else range(found.first, found.last)
        if planned != self._planned:
            self._planned = planned
            if self._log:
                reason = "the network should bring the rest in time" if found is None else found.reason
                groups = "nothing" if found is None else f"groups {found.first} to {found.last - 1}"
                self._log_decision(Decision("wait", f"recompute {groups}: {reason}"), now, kind="plan")
            self._sync_missing()

    def _compute(self, now: float) -> None:
        """Start the engine on what is left to it, if it is idle and all groups before are in place."""
        if self._cost is None or self._computing is not None or not (self._planned or self._chosen):
            return
        records = self.record.groups
        front = min(g for g in (*self._chosen, *(g for g in self._planned if g in self._absent)) or [len(records)])
        if front >= len(records) or any(record.ready_s is None for record in records[:front]):
            return
        last = len(records) if self._mode == "suffix" else front + 1
        if last > front + 1 and not self._must_start(front, now):
            return
        for transfer in list(self.view.in_flight.values()):
            if front <= transfer.group < last:
                self._cancel(transfer, "the engine computes this group", now)
        for group in range(front, last):
            self._absent.pop(group, None)
            self.view.track_of[group] = RECOMPUTED
        self._computing = (front, last)
        tokens = sum(self._catalog.group_tokens(group) for group in range(front, last))
        self._lane_started_s = now
        self._lane_free_s = now + self._cost.seconds(front * self._catalog.spec.group_tokens, tokens)
        self._actions.append(Recompute(front, last))
        if self._log:
            self._log({"t": now, "event": "recompute_start", "first": front, "last": last})
        self._sync_missing()

    def _must_start(self, front: int, now: float) -> bool:
        """Whether the tail must be computed now: until then the network may still shorten it."""
        assert self._cost is not None  # noqa: S101
        first = front * self._catalog.spec.group_tokens
        last_call = self.view.deadline_s - self._cost.seconds(first, self._catalog.tokens - first)
        return now + 1.5 * self.view.deadline_s / self._config.ticks >= last_call

    def _abandon(self, now: float) -> None:
        while (found := abandon.choose(self.view)) is not None:
            transfer, reason = found
            self.record.abandoned += 1
            self._cancel(transfer, reason, now)

    def _cancel(self, transfer: Transfer, reason: str, now: float) -> None:
        del self.view.in_flight[transfer.request]
        self.view.outstanding_bytes -= transfer.remaining
        self._actions.append(Cancel(transfer.request))
        self._meter.settle(now, idle=self._idle())
        self._lost(transfer, "cancel", reason, now)

    def _no_source(self, group: int, now: float) -> None:
        """No track of this group can be had: the engine must compute it, or the play is over."""
        if self._cost is None:
            self._give_up(now, f"group {group} cannot be had on any track, and there is no engine to compute it")
        else:
            self._chosen.add(group)
            self._sync_missing()
            self._compute(now)

    def _starved(self, now: float) -> None:
        if self.view.missing:
            raise self._nonsense(f"waits while {len(self.view.missing)} groups are missing and nothing is under way")
        self._give_up(now, "groups are missing and nothing is under way")

    def _deliver(self, now: float) -> None:
        for transfer in list(self.view.in_flight.values()):
            self._cancel(transfer, "the cache is delivered", now)
        for transfer in self._pending_decode.values():
            self.record.bytes_wasted += transfer.bytes
        self.over = True
        self.record.delivered_s = now
        self.record.met = now <= self.view.deadline_s
        self._actions.append(Deliver(now, self.record.met))

    def _give_up(self, now: float, reason: str) -> None:
        for transfer in list(self.view.in_flight.values()):
            self._cancel(transfer, "the play is given up", now)
        self.over = self._content = True
        self.record.gave_up = reason
        self._actions.append(GiveUp(now, reason))

    def _log_decision(
        self, decision: Decision, now: float, request: int | None = None, kind: str | None = None
    ) -> None:
        if self._log is None:
            return
        view = self.view
        self._log(
            {
                "t": now,
                "event": "decision",
                "kind": kind or decision.kind,
                "group": decision.group,
                "track": decision.track,
                "request": request,
                "reason": decision.reason,
                "rate": view.rate,
                "lower": view.lower_bound,
                "ttfb_s": view.ttfb_s,
                "slack_s": _finite(view.slack_s()),
                "alternatives": None if decision.alternatives is None else dict(decision.alternatives),
            }
        )

    def _raised(self, error: Exception) -> PolicyError:
        return PolicyError(f"policy {_title(self._policy)} raised {error!r} ({where(type(self._policy), error)})")

    def _nonsense(self, what: str) -> PolicyError:
        return PolicyError(f"policy {_title(self._policy)} {what} ({where(type(self._policy))})")


def _title(policy: Policy) -> str:
    return policy.name or type(policy).__name__


def _finite(value: float) -> float | None:
    return value if value not in {float("inf"), float("-inf")} else None
