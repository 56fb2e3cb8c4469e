"""Upgrades of a cache that is already in use, after the deadline, for as long as they are wanted.

Theory of operation. An upgrade session begins where a play ended: every group is in place. The same policy drives it,
so upgrades come in the same order, most loss saved per byte first. The policy sees a deadline that moves ahead of it,
one deadline's length away, until the real end is nearer. So it has no more in flight than it had before the cache was
handed over, and asks for nothing that would come after the end.

A decoded upgrade waits until the engine lets it into the cache; while several wait, nothing more is requested. The
session ends when time is up, when the policy is done, when every group is as good as it can be, when the policy has
wanted nothing for one deadline's length, or when nothing that was requested has moved for several.
"""

from __future__ import annotations

import math

from kvabr.abr.group_set import GroupSet
from kvabr.player.session import Session
from kvabr.player.session_types import Goal, UpgradeGoal
from kvabr.types.catalog import RECOMPUTED
from kvabr.types.errors import UsageError

_MOST_WAITING = 4
"""Most groups that may wait to be decoded or to be let into the cache; then nothing more is requested."""
_SILENT = 5.0
"""Deadline lengths without a byte of what was requested, after which the session ends."""


class UpgradeSession(Session):
    """Upgrades of a cache that is in use; its deadline is how far ahead they are planned, that of the play before."""

    _drops_upgrades = False  # the end of the play is not near, however far ahead upgrades are planned

    def _begin(self, goal: Goal) -> None:
        if not isinstance(goal, UpgradeGoal):
            raise UsageError("the goal of upgrades is an UpgradeGoal")
        tracks, view = goal.tracks, self.view
        if not goal.until_s > 0:
            raise UsageError(f"upgrades for {goal.until_s} s; it must be a positive number of seconds")
        if len(tracks) != view.groups:
            raise UsageError(f"{len(tracks)} tracks for a cache of {view.groups} groups")
        self._horizon_s, self._until_s, self._rate = view.deadline_s, goal.until_s, goal.rate
        self._wanted_s = self._moved_s = 0.0
        """When the policy last wanted something, and when nothing but decoded groups was last waited for."""
        self._best = 0
        """The groups before this one cannot be improved."""
        view.time_price = 0.0  # the first token is out
        self._absent, view.missing_groups = GroupSet(view.groups, ()), GroupSet(view.groups, ())
        self._in_place = view.groups
        for record, track in zip(self.record.groups, tracks, strict=True):
            record.track, record.ready_s = track, 0.0
            view.track_of[record.group] = track
            if track != RECOMPUTED:
                view.settled.add(record.group)
        self._end_of_view(0.0)

    def _refresh(self, now: float) -> None:
        super()._refresh(now)
        if self.view.rate <= 0:
            self.view.rate = self.view.lower_bound = self._rate
        self._end_of_view(now)

    def _end_of_view(self, now: float) -> None:
        self.view.deadline_s = min(self._until_s, now + self._horizon_s)

    def next_timer(self) -> float | None:
        """Return when the driver must call `timer`; see `Session.next_timer`."""
        return None if self.over else min(self._until_s, self._next_tick_s)

    def _ended(self, now: float) -> bool:
        silent_s = now - max(self._heard_s, self._moved_s) if self.view.in_flight else 0.0
        if now >= self._until_s or silent_s >= _SILENT * self._horizon_s:
            self._refresh(now)
            self._deliver(now)
        return self.over

    def _advance(self, now: float) -> None:
        if self.over or self._ended(now):
            return
        self._refresh(now)
        self._content = False
        asked = self._requests
        while not self._content and self._has_room():
            decision = self._guard.ask()
            if decision.kind == "finish" and not self._anything_pending():
                self._deliver(now)
                return
            self._act(decision, now)
        self._decode(now)
        if self._decoding or not self.view.in_flight:
            self._moved_s = now
        if self._requests > asked or self._anything_pending():
            self._wanted_s = now
        elif self._done() or now - self._wanted_s >= self._horizon_s:
            self._deliver(now)

    def _has_room(self) -> bool:
        return len(self._decoding) + len(self._undecoded) < _MOST_WAITING and super()._has_room()

    def _done(self) -> bool:
        """Return whether no group can be improved; what was found of the first ones stays so."""
        while self._best < self.view.groups and self._is_best(self._best):
            self._best += 1
        return self._best == self.view.groups

    def _is_best(self, group: int) -> bool:
        held = self.record.groups[group].track
        if held in (None, RECOMPUTED):
            return True
        loss = self._catalog.by_name[held].loss[group]
        least = min(track.loss[group] for track in self._catalog.tracks)
        return loss <= least or math.isclose(loss, least)
