"""What a policy leaves to an engine that has time to spare, beside what the network will not bring anyway.

An engine's second has a price, in nats per token (`View.gpu_price`): next to nothing where it is idle, much where
others wait for it. What a group costs if the network has to bring it is what it still loses then, and the bytes that
others do not get: the caller says it (`Spare`). If the engine is cheaper, the group is its.

- ``hole``: while groups are missing, the engine computes from the front and the network loads from the back. Groups
  between the engine and the point where they meet are kept for it; the point is worked out anew as both rates become
  known, so what the engine will not reach before the network does is fetched after all. Once all is in place the engine
  goes on with the groups that gain most a second. They inherit errors from the groups before them, see
  `kvabr.types.catalog`.
- ``suffix``: the engine needs all that lies in front, and computes from there to the end. Once all is in place, the
  tail that gains most is left to it, at the last moment that this can be done: until then the network may better it.
"""

from __future__ import annotations

from collections.abc import Callable
from heapq import heappop, heappush
from itertools import accumulate

from kvabr.abr.policy import Decision
from kvabr.abr.view import View
from kvabr.types.catalog import INHERITED, RECOMPUTED

_LOOKED_AT = 4
"""Groups in place that are looked at for one that is worth computing."""
_PAUSE_SHARE = 1 / 50
"""Share of the deadline before it is looked again after there was none."""
_BLIND_SHARE = 0.5
"""Share of the time left for which groups are kept for the engine while no rate is known."""
_SAFETY = 1.1
"""Times that what is begun on a cache that could be delivered as it is may take longer than it should."""
_TAIL = 24
"""Groups that a tail has at most: who looks at more takes too long to decide."""
_NEAR = 8
"""Groups before one that are looked at for what it inherits."""

Worth = Callable[[int, str | None], float]
"""Nats per token that a group costs if the network has to bring what it lacks, given the track in place or None."""


class Spare:
    """What the engine of one play is to do of its own accord."""

    def __init__(self, view: View, worth: Worth) -> None:
        """Begin a play.

        Args:
            view: the play; it has an engine.
            worth: asked for whatever group may be left to the engine.
        """
        catalog, cost = view.catalog, view.cost
        assert cost is not None  # noqa: S101  # who has no engine has no use for this
        self._worth, self._tail_first = worth, view.front_first
        size, groups = catalog.spec.group_tokens, range(view.groups)
        self._seconds = [cost.seconds(group * size, catalog.group_tokens(group)) for group in groups]
        """Per group, seconds to compute it alone."""
        self._until = list(accumulate(self._seconds, initial=0.0))
        """Seconds to compute all groups before this one, one after the other."""
        base = view.ladder.tracks[0]
        self._each = base.total_bytes / view.groups
        everything = sum(base.loss)
        near = accumulate((base.loss[group] for group in reversed(groups)), initial=0.0)
        self._near = [sum_ / everything if everything > 0 else 1.0 for sum_ in near][: _NEAR + 1]
        """Share of what a group inherits that comes from so many groups right before it."""
        self._placed: set[int] = set()
        self._solid = 0
        """All groups before this one are in place."""
        self._offers: list[tuple[float, int, str]] = []
        self._again_s = 0.0
        self.kept = range(0)
        """Groups that the network need not bring as things stand."""

    def settled(self, group: int, track: str, loss: float) -> None:
        """A group has come into place on a track, where it loses so much."""
        self._placed.add(group)
        if not self._tail_first and loss > 0:
            heappush(self._offers, (-loss / self._seconds[group], group, track))

    def plan(self, view: View) -> None:
        """Work out where engine and network meet, as far as both are known."""
        first = view.first_missing()
        if first is None or self._tail_first or view.cost is None or not self._pays(view, first, None):
            self.kept = range(0)
            return
        behind = next(reversed(view.missing_groups)) + 1
        reached_s = view.engine_backlog_s - self._until[first]
        left_s, each_s, begins_s = view.time_left, 0.0, 0.0
        if view.rate <= 0:
            left_s *= _BLIND_SHARE
        else:
            each_s = self._each / view.rate
            begins_s = max(view.ttfb_s, view.outstanding_bytes / view.rate)
        low, high = first, behind
        while low < high:  # the last group before which the engine is no later than the network, by halves
            middle = (low + high + 1) // 2
            engine_s = reached_s + self._until[middle]
            network_s = begins_s + each_s * (behind - middle) if each_s else left_s
            if engine_s <= min(left_s, network_s):
                low = middle
            else:
                high = middle - 1
        self.kept = range(first, low)

    def next(self, view: View) -> Decision | None:
        """What an engine that has nothing to do should compute now, if anything."""
        if view.cost is None or view.engine_backlog_s > 0:
            return None
        track_of, placed, groups = view.track_of, self._placed, view.groups
        while self._solid < groups and (self._solid in placed or track_of[self._solid] == RECOMPUTED):
            self._solid += 1
        if self._solid < groups:
            return None if self._tail_first else self._front(view)
        if view.now < self._again_s:
            return None
        found = self._tail(view) if self._tail_first else self._best(view)
        if found is None:
            self._again_s = view.now + _PAUSE_SHARE * view.deadline_s
        return found

    def _pays(self, view: View, group: int, track: str | None) -> bool:
        return self._worth(group, track) > view.gpu_price * self._seconds[group]

    def _front(self, view: View) -> Decision | None:
        group = self._solid
        if group not in view.missing_groups or self._seconds[group] > view.time_left:
            return None
        if not self._pays(view, group, None):
            return None
        return Decision.recompute(group, f"the engine computes from the front, up to group {self.kept.stop}")

    def _best(self, view: View) -> Decision | None:
        """The group in place that gains most a second."""
        offers, settled, track_of = self._offers, view.settled, view.track_of
        looked: list[tuple[float, int, str]] = []
        most, best = 0.0, -1
        while offers and len(looked) < _LOOKED_AT:
            offer = heappop(offers)
            _, group, track = offer
            if group not in settled or track_of[group] != track:
                continue  # it comes again when it is in place on another track
            looked.append(offer)
            seconds = self._seconds[group]
            gain = self._gain(view, group, track) / seconds
            if gain > max(most, view.gpu_price) and _SAFETY * seconds <= view.time_left:
                most, best = gain, group
        for offer in looked:
            heappush(offers, offer)
        if best < 0:
            return None
        return Decision.recompute(best, f"computing it saves {most * self._seconds[best]:.1e} nats")

    def _tail(self, view: View) -> Decision | None:
        """The tail that gains most, if it is high time to begin with it."""
        cost, size, tokens = view.cost, view.catalog.spec.group_tokens, view.catalog.tokens
        assert cost is not None  # noqa: S101  # see `next`
        gained = most = seconds = 0.0
        best = -1
        for group in range(view.groups - 1, max(-1, view.groups - 1 - _TAIL), -1):
            track = view.track_of[group]
            if track is None or track == RECOMPUTED:
                break
            gained += self._gain(view, group, track)
            takes_s = cost.seconds(group * size, tokens - group * size)
            if _SAFETY * takes_s > view.time_left:
                break
            if group in view.settled and gained - view.gpu_price * takes_s > most:
                most, best, seconds = gained - view.gpu_price * takes_s, group, takes_s
        if best < 0 or view.time_left - _SAFETY * seconds > 3 * _PAUSE_SHARE * view.deadline_s:
            return None
        return Decision.recompute(best, f"computing the tail saves {most:.1e} nats more than it costs")

    def _gain(self, view: View, group: int, track: str) -> float:
        """Nats per token that computing a group in place saves: what it costs as it is, less what it then inherits."""
        before = group - 1
        while before >= 0 and group - before < _NEAR and view.track_of[before] == RECOMPUTED:
            before -= 1
        other = view.track_of[before] if before >= 0 else None
        inherited = 0.0
        if other is not None and other != RECOMPUTED:
            inherited = INHERITED * view.loss(group, other) * (1.0 - self._near[group - 1 - before])
        return self._worth(group, track) - inherited
