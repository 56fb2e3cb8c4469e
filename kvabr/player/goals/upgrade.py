"""Upgrades of a cache that is already in use, after the deadline, for as long as they are wanted.

Theory of operation. A play for upgrades begins where a play ended: every group is in place. The same policy drives it,
so upgrades come in the same order, most loss saved per byte first. The policy sees a deadline that moves ahead of it,
one deadline's length away, until the real end is nearer. So it has no more in flight than it had before the cache was
handed over, and asks for nothing that would come after the end.

A decoded upgrade waits until the engine lets it into the cache; while several wait, nothing more is requested. The
play ends when time is up, when the policy is done, when every group is as good as it can be, when the policy has
wanted nothing for one deadline's length, or when nothing that was requested has moved for several.
"""

from __future__ import annotations

import math

from kvabr.player.goals.whole import Playing, WholeAim
from kvabr.player.session_types import UpgradeGoal
from kvabr.types.catalog import RECOMPUTED
from kvabr.types.errors import UsageError

_MOST_WAITING = 4
"""Most groups that may wait to be decoded or to be let into the cache; then nothing more is requested."""
_SILENT = 5.0
"""Deadline lengths without a byte of what was requested, after which the play ends."""


class UpgradeAim(WholeAim):
    """Upgrades of a cache that is in use; its deadline is how far ahead they are planned, that of the play before."""

    drops_upgrades = False  # the end of the play is not near, however far ahead upgrades are planned

    def __init__(self, play: Playing, goal: UpgradeGoal) -> None:
        """Begin with every group in place.

        Raises:
            UsageError: the goal makes no sense, or is not for this cache.
        """
        super().__init__(play)
        tracks, view = goal.tracks, play.view
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
        for record, track in zip(play.record.groups, tracks, strict=True):
            record.track, record.ready_s = track, 0.0
            view.track_of[record.group] = track
        play.groups.in_place = view.groups
        play.groups.restage(range(view.groups))
        for group in range(view.groups):
            play.groups.settle(group)
        self._end_of_view(0.0)

    def look(self, now: float) -> None:
        """See `WholeAim.look`."""
        view = self.play.view
        if view.rate <= 0:
            view.rate = view.lower_bound = self._rate
        self._end_of_view(now)

    def _end_of_view(self, now: float) -> None:
        self.play.view.deadline_s = min(self._until_s, now + self._horizon_s)

    def next_timer(self, soonest_s: float) -> float:
        """See `WholeAim.next_timer`."""
        del soonest_s
        return min(self._until_s, self.play.next_tick_s)

    def ended(self, now: float) -> bool:
        """See `WholeAim.ended`."""
        play = self.play
        silent_s = now - max(play.heard_s, self._moved_s) if play.view.in_flight else 0.0
        if now >= self._until_s or silent_s >= _SILENT * self._horizon_s:
            play.look(now)
            self.deliver(now)
        return play.over

    def go_on(self, now: float) -> bool:
        """See `WholeAim.go_on`: nothing is needed, and nothing waited for."""
        play = self.play
        play.content, asked = False, play.asked()
        while not play.content and play.has_room():
            decision = play.guard.ask()
            if decision.kind == "finish" and not play.waiting():
                self.deliver(now)
                return False
            play.obey(decision, now)
        play.decode(now)
        if play.decoding() or not play.view.in_flight:
            self._moved_s = now
        if play.asked() > asked or play.waiting():
            self._wanted_s = now
        elif self._done() or now - self._wanted_s >= self._horizon_s:
            self.deliver(now)
        return False

    def has_room(self) -> bool:
        """See `WholeAim.has_room`."""
        return self.play.undecoded() < _MOST_WAITING

    def _done(self) -> bool:
        """Return whether no group can be improved; what was found of the first ones stays so."""
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
