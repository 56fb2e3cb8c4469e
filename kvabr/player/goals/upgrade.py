"""Upgrades of a cache in use, after the deadline.

The play starts with every group in place. The policy of the previous play continues, so the upgrades that save the most
loss per byte are still first. The play's deadline always stays its original length ahead, which limits requests in
flight.

A decoded upgrade waits until the engine admits it; while several wait, requests pause. The play ends when time is up,
when the policy is done or requests no group for the length of a deadline, when every group is on its best track, or
after several such lengths without any bytes.
"""

from __future__ import annotations

import math

from kvabr.player.goals.whole import Playing, WholeAim
from kvabr.player.session_types import UpgradeGoal
from kvabr.types.catalog import RECOMPUTED
from kvabr.types.errors import UsageError

_MAX_WAITING = 4
"""Maximum groups that wait for decoding or admission before requests pause."""
_MAX_SILENT_DEADLINES = 5.0
"""Lengths of the deadline without any bytes after which the play ends."""


class UpgradeAim(WholeAim):
    """Upgrades a cache in use; the deadline is the planning horizon."""

    drops_upgrades = False  # the deadline is a planning horizon, not the end of the play

    def __init__(self, play: Playing, goal: UpgradeGoal) -> None:
        """Raise `UsageError` if the goal is invalid, or does not match this cache."""
        super().__init__(play)
        tracks, view = goal.tracks, play.view
        if not goal.until_s > 0:
            raise UsageError(f"until_s must be a positive number of seconds, got {goal.until_s}")
        if len(tracks) != view.groups:
            raise UsageError(f"tracks must name one track for each of {view.groups} groups, got {len(tracks)}")
        self._horizon_s, self._until_s, self._rate = view.deadline_s, goal.until_s, goal.rate
        self._wanted_s = self._moved_s = 0.0
        """When the policy last requested a group; when the last silence had another cause, decoding or an idle link."""
        self._best = 0
        view.time_price = 0.0  # the first token was generated already
        for record, track in zip(play.record.groups, tracks, strict=True):
            record.track, record.ready_s = track, 0.0
            view.track_of[record.group] = track
        play.groups.in_place = view.groups
        play.groups.restage(range(view.groups))
        for group in range(view.groups):
            play.groups.settle(group)
        self._end_of_view(0.0)

    def look(self, now: float) -> None:
        view = self.play.view
        if view.rate <= 0:
            view.rate = view.lower_bound = self._rate
        self._end_of_view(now)

    def _end_of_view(self, now: float) -> None:
        self.play.view.deadline_s = min(self._until_s, now + self._horizon_s)

    def next_timer(self, soonest_s: float) -> float:
        del soonest_s
        return min(self._until_s, self.play.next_tick_s)

    def ended(self, now: float) -> bool:
        play = self.play
        silent_s = now - max(play.last_received_s, self._moved_s) if play.view.in_flight else 0.0
        if now >= self._until_s or silent_s >= _MAX_SILENT_DEADLINES * self._horizon_s:
            play.look(now)
            self.deliver(now)
        return play.over

    def go_on(self, now: float) -> bool:
        play = self.play
        play.content, before = False, play.requests_made()
        while not play.content and play.may_request():
            decision = play.guard.next_decision()
            if decision.kind == "finish" and not play.waiting():
                self.deliver(now)
                return False
            play.obey(decision, now)
        play.decode(now)
        if play.decoding() or not play.view.in_flight:
            self._moved_s = now
        if play.requests_made() > before or play.waiting():
            self._wanted_s = now
        elif self._done() or now - self._wanted_s >= self._horizon_s:
            self.deliver(now)
        return False

    def may_request(self) -> bool:
        return self.play.undecoded() < _MAX_WAITING

    def _done(self) -> bool:
        while self._best < self.play.view.groups and self._is_best(self._best):
            self._best += 1
        return self._best == self.play.view.groups

    def _is_best(self, group: int) -> bool:
        held = self.play.record.groups[group].track
        if held in (None, RECOMPUTED):
            return True
        loss = self.play.catalog.by_name[held].loss[group]
        least = min(track.loss[group] for track in self.play.catalog.tracks)
        return loss <= least or math.isclose(loss, least)
