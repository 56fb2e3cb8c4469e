"""The whole cache: delivered once every group is in place, or given up. Other goals derive from this one.

A goal ends the play and delivers its result; the session handles requests, decoding and the engine.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Protocol

from kvabr.abr.policy import Decision
from kvabr.abr.view import Transfer, View
from kvabr.player.blend_plan import delivered_loss
from kvabr.player.compute_queue import ComputeQueue
from kvabr.player.groups import Groups
from kvabr.player.play_policy import PolicyGuard
from kvabr.player.requests import RetryTracker
from kvabr.player.session_types import ENGINE_PATIENCE, Action, EventLog, PlayerConfig, PlayRecord
from kvabr.types.catalog import Catalog


class Playing(Protocol):
    """The interface of a `Session` that its goal uses."""

    view: View
    record: PlayRecord
    catalog: Catalog
    config: PlayerConfig
    groups: Groups
    guard: PolicyGuard
    retries: RetryTracker
    events: EventLog
    engine: ComputeQueue | None
    alone_s: float | None
    over: bool
    closed: bool
    content: bool
    last_received_s: float
    tick_s: float
    next_tick_s: float

    @property
    def stopped(self) -> str | None: ...
    def lacking(self) -> str: ...
    def waiting(self) -> bool: ...
    def undecoded(self) -> int: ...
    def decoding(self) -> bool: ...
    def silent(self, now: float) -> bool: ...
    def layers_pay(self, now: float) -> bool: ...
    def requests_made(self) -> int: ...
    def may_request(self) -> bool: ...
    def look(self, now: float) -> None: ...
    def advance(self, now: float) -> None: ...
    def obey(self, decision: Decision, now: float) -> None: ...
    def request(
        self, group: int, layers: Sequence[str], decision: Decision, now: float, *, upgrade: bool, pushed: bool = False
    ) -> None: ...
    def cancel(self, transfer: Transfer, reason: str, now: float) -> None: ...
    def decode(self, now: float) -> None: ...
    def act(self, action: Action) -> None: ...
    def engine_done(self, begun_s: float, now: float) -> None: ...
    def compute_all(self, now: float) -> bool: ...
    def hand_over(self, now: float, cut: str | None = None) -> None: ...
    def give_up(self, now: float, reason: str) -> None: ...


class WholeAim:
    """Delivers the whole cache."""

    drops_upgrades = True
    """True: cancel an upgrade that cannot arrive in time if a smaller one can."""

    def __init__(self, play: Playing) -> None:
        self.play = play

    def start(self, now: float) -> bool:
        """Begin; return False if the play was given up."""
        del now
        return True

    def patience_s(self) -> float:
        """Return when an incomplete play ends, in seconds since it began."""
        play = self.play
        engine_s = 0.0 if play.engine is None else ENGINE_PATIENCE * (play.alone_s or 0.0)
        return play.config.give_up_after * play.view.deadline_s + engine_s

    def next_timer(self, soonest_s: float) -> float:
        """Return when the timer must fire, given the earliest time for which the session needs it."""
        return soonest_s

    def timer(self, now: float) -> bool:
        """Handle a tick; return True if the session must ignore it."""
        del now
        return False

    def look(self, now: float) -> None:
        """Adjust the view after new estimates."""

    def may_request(self) -> bool:
        """Return True if the goal permits more requests."""
        return True

    def ended(self, now: float) -> bool:
        """End the play if its time is up; return True if it is closed.

        Makes no decision, and does not wait for decoding.
        """
        play, complete = self.play, self.play.groups.complete
        if now >= play.view.deadline_s and complete and self.suffices(now):
            play.look(now)
            self.deliver(now)
        elif now >= play.view.deadline_s and self.cuts(now):
            self.deliver(now, cut="the deadline has passed")
        elif now >= self.patience_s():
            play.look(now)
            play.give_up(now, self._excess() if complete else play.lacking())
        return play.closed

    def suffices(self, now: float) -> bool:
        """Return True if the cache in place is within the loss limit."""
        play = self.play
        if math.isinf(play.view.max_loss) or delivered_loss(play.catalog, play.record) <= play.view.max_loss:
            return True
        play.record.late_for_loss = now >= play.view.deadline_s
        return False

    def _excess(self) -> str:
        loss, limit = delivered_loss(self.play.catalog, self.play.record), self.play.view.max_loss
        return f"the cache would lose {loss:.2g} nats per token, more than max_loss ({limit:g})"

    def cuts(self, now: float) -> bool:
        """Return True to deliver a partial cache at the deadline."""
        del now
        return False

    def computes(self, now: float, first: int, last: int, why: str | None) -> bool:
        """Return True if the engine should compute groups now; ``why``: the reason if it must, else None."""
        del now, first, last, why
        return True

    def conclude(self, now: float, *, complete: bool) -> None:
        """End the play if no request, arrival or computation can improve it."""
        play = self.play
        if play.over or (complete and play.layers_pay(now)):
            return
        stopped = play.stopped is not None
        idle = not play.waiting() and not (play.engine is not None and play.engine.busy)
        if play.content and idle and (complete or stopped or not play.view.coming):
            if complete and self.suffices(now):
                self.deliver(now)
            elif complete:
                self.exceed(now)
            elif stopped and not play.view.missing:
                self.fall_short(now)
            else:
                left = play.catalog.groups - play.groups.in_place
                raise play.guard.invalid(f"must request a group: {left} are missing and no request is in flight")
        else:
            self.wait(now, complete=complete, stopped=stopped)

    def exceed(self, now: float) -> None:
        """Handle a complete cache above the loss limit that no request can improve."""
        if not self.play.compute_all(now):
            self.play.give_up(now, self._excess())

    def wait(self, now: float, *, complete: bool, stopped: bool) -> None:
        """End the play if it is late and silent; otherwise wait."""
        del stopped
        play = self.play
        if now >= play.view.deadline_s and not complete and play.silent(now):
            play.give_up(now, f"{play.lacking()}, and no data has arrived for {now - play.last_received_s:.2f} s")

    def fall_short(self, now: float) -> None:
        """End a live play after its producer stopped early."""
        self.play.give_up(now, self.play.lacking())

    def stop(self, now: float, reason: str) -> None:
        """End the play at its owner's request."""
        if self.play.groups.complete and self.suffices(now):
            self.deliver(now)
        else:
            self.play.give_up(now, reason)

    def go_on(self, now: float) -> bool:
        """Return True if the session should continue after an event."""
        del now
        return True

    def advanced(self, now: float) -> None:
        """Continue after the session has handled an event."""

    def deliver(self, now: float, *, cut: str | None = None) -> None:
        """Deliver the cache; ``cut``: why it is only a part, or None."""
        self.play.hand_over(now, cut)
