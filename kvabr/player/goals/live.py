"""The live edge: how much of a cache is published while it is still being prefilled."""

from __future__ import annotations

import math
from collections.abc import Collection, Container, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from kvabr.abr.policy import Decision
from kvabr.player.goals.whole import Playing
from kvabr.player.session_types import LiveRecord
from kvabr.types.catalog import RECOMPUTED
from kvabr.types.errors import UsageError
from kvabr.types.events import GroupsPublished, ProducerStopped, SoonerAlone

_MAX_PACE = 4.0
"""Maximum factor between observed and expected pace."""
_MIN_LOOK_S = 0.01
"""Minimum seconds between checks for layers worth the wait."""
_MAX_LATE_FACTOR, _MAX_LATE_S = 4.0, 0.25
"""Layers count as too late after this multiple of the announced seconds, plus these seconds."""


@dataclass(frozen=True, slots=True)
class EdgeChanges:
    """Changes announced together with the number of published groups."""

    left_out: Collection[tuple[int, str]] = ()
    """Tracks that new groups lack, as (group, track)."""
    added: Collection[tuple[int, str]] = ()
    """Newly available tracks of earlier groups, as (group, track)."""
    coming: Mapping[int, float | None] = field(default_factory=dict)
    """Seconds until further tracks of a group; None: there will be none."""
    pushed: Container[int] | None = None
    """Groups whose base was requested before publication; None: all."""


NO_CHANGES = EdgeChanges()


class LiveEdge:
    """Estimates a producer's pace from the times at which its groups are published."""

    def __init__(self, expected_s: Sequence[float]) -> None:
        """``expected_s``: when each group should be published, in ascending seconds since the play began."""
        finite = all(math.isfinite(time_s) for time_s in expected_s)
        if not expected_s or not finite or any(later < sooner for sooner, later in pairwise(expected_s)):
            raise UsageError("expected_s must have at least one time, all finite and ascending")
        self._expected_s = expected_s
        self.edge = 0
        self._first_s = self._last_s = 0.0
        self._firsts = 0
        """Number of groups in the first announcement; they may be much older."""
        self.ended: str | None = None
        self.coming: dict[int, tuple[float, float]] = {}
        """When a group's further tracks are due, and the announced delay, in seconds."""

    def reach(self, edge: int, now: float) -> None:
        """Record that the first ``edge`` groups are published."""
        if not self.edge:
            self._first_s, self._firsts = now, edge
        self.edge, self._last_s = edge, now

    def expect(self, coming: Mapping[int, float | None], now: float) -> None:
        """Record announcements of further tracks."""
        for group, rest_s in coming.items():
            if rest_s is None:
                self.coming.pop(group, None)
            elif group not in self.coming or self.coming[group][1] != rest_s:
                self.coming[group] = now + rest_s, rest_s

    def rest_s(self, group: int, now: float) -> float | None:
        """Return the seconds until a group's further tracks, or None if there are none or they are too late.

        An overdue track is expected to take as long again as it is late.
        """
        due_s, announced_s = self.coming[group]
        last_s = due_s + _MAX_LATE_FACTOR * announced_s + _MAX_LATE_S
        return None if now >= last_s else min(abs(now - due_s), last_s - now)

    def ends_s(self, now: float) -> float:
        """Return when the last group should be published, in seconds since the play began."""
        return self.ready_s(len(self._expected_s) - 1, now)

    def late_s(self, now: float) -> float:
        """Return how late the next group is, in seconds; 0.0 up to the duration of one group."""
        if self.edge == len(self._expected_s):
            return 0.0
        before = self._expected_s[self.edge - 1] if self.edge else 0.0
        took_s = max(0.0, self._expected_s[self.edge] - before)
        late_s = self.ready_s(self.edge, now) - (self._last_s + took_s if self.edge else self._expected_s[0])
        return late_s if late_s > took_s else 0.0

    def ready_s(self, group: int, now: float) -> float:
        """Return when a group should be published; if it is, when the latest one was."""
        expected = self._expected_s
        if group < self.edge:
            return self._last_s
        if not self.edge:
            return expected[group] + max(0.0, now - expected[0])
        pace, since_s = 1.0, expected[self.edge - 1]
        if (planned_s := since_s - expected[self._firsts - 1]) > 0:
            pace = min(max((self._last_s - self._first_s) / planned_s, 1.0 / _MAX_PACE), _MAX_PACE)
        late_s = max(0.0, now - self._last_s - pace * (expected[self.edge] - since_s))
        return self._last_s + pace * (expected[group] - since_s) + late_s


class LivePlay:
    """The part of a session that follows a producer."""

    def __init__(self, play: Playing, expected_s: Sequence[float]) -> None:
        if len(expected_s) != (groups := play.view.groups):
            raise UsageError(f"expected_s must have a time for each of {groups} groups, got {len(expected_s)}")
        self.play, self.edge = play, LiveEdge(expected_s)
        play.record.live = LiveRecord()
        play.view.edge = 0
        play.groups.restage(range(groups))
        self.look_s = math.inf
        """When to check again whether announced layers are worth the wait."""
        self._looked_for = 0

    def look(self, now: float) -> None:
        """Update the view with the producer's progress."""
        view, edge = self.play.view, self.edge
        view.ends_s, view.late_s = edge.ends_s(now), edge.late_s(now)
        view.ready_s = lambda group: edge.ready_s(group, now)

    def published(self, edge: int, now: float, changes: EdgeChanges) -> None:
        """Handle an announcement; see `Session.published`."""
        play, live, view = self.play, self.edge, self.play.view
        new = range(live.edge, max(live.edge, min(edge, view.groups)))
        if not new and not changes.added and not changes.coming:
            return
        live.expect(changes.coming, now)
        play.retries.unavailable.update(changes.left_out)
        for group, track in changes.added:
            play.retries.added(group, track)
            if group in view.settled:
                view.settled.add(group)
        view.added += bool(changes.added)
        if new:
            live.reach(new.stop, now)
            view.edge = new.stop
            self._note(now)
        base = view.ladder.cheapest
        for group in new:
            engine = group not in play.groups.absent or (play.engine is not None and group in play.engine.chosen)
            if (group, base) in view.unavailable or engine:
                continue
            decision = Decision.fetch(group, base, "the publisher pushes the base of each group")
            pushed = changes.pushed is None or group in changes.pushed
            play.request(group, (base,), decision, now, upgrade=False, pushed=pushed)
        play.groups.restage(new)
        play.advance(now)

    def stopped(self, reason: str, now: float) -> None:
        """Handle the end of the producer; see `Session.producer_stopped`."""
        play, live = self.play, self.edge
        if live.ended is not None:
            return
        live.coming.clear()
        if live.edge < play.view.groups:
            live.ended = reason
            if play.record.live is not None:
                play.record.live.stopped = reason
            play.events.emit(ProducerStopped, now, live.edge, reason)
            if play.engine is not None:
                play.engine.choose([group for group in play.groups.absent if group >= live.edge])
                play.groups.restage(range(play.view.groups))
        play.advance(now)

    def lacking(self) -> str:
        """Describe the producer's progress; empty once it is done."""
        live = self.edge
        if live.edge == self.play.view.groups:
            return ""
        why = "and has not stopped" if live.ended is None else f"and then stopped: {live.ended}"
        return f"; the producer has published {live.edge or 'none'} {why}"

    def layers_pay(self, now: float) -> bool:
        """Return True if layers that are being encoded save more than waiting for them costs."""
        live, view, saved, soonest_s = self.edge, self.play.view, 0.0, math.inf
        if not live.coming:
            self.look_s = math.inf
            return False
        if self._looked_for > 0 and now < self.look_s:
            self._looked_for -= 1
            return self.look_s < math.inf
        self._looked_for, self.look_s = view.keeps, math.inf
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
            self.look_s = now + max(soonest_s, _MIN_LOOK_S)
            return True
        return False

    def _note(self, now: float) -> None:
        play, live = self.play, self.edge
        record = play.record.live = play.record.live or LiveRecord()
        ends_s, began, alone_s = live.ends_s(now), record.published == 0, play.alone_s
        record.published = live.edge
        if live.edge == play.view.groups:
            record.complete_s = now
        play.events.emit(GroupsPublished, now, live.edge, ends_s)
        if began and alone_s is not None and now + alone_s < ends_s:
            record.sooner_alone_s = ends_s - now - alone_s
            play.events.emit(SoonerAlone, now, alone_s, ends_s)
