"""What a policy gives to an engine with spare time, besides the groups that the network cannot deliver in time.

A second of the engine has a price in nats per token (`View.gpu_price`): almost none if the engine is idle, a high one
if others wait for it. A group that the network delivers costs its remaining loss, plus the bytes that other groups do
not get; the policy computes this cost (`Worth`). If the engine is cheaper, it computes the group.

- ``hole``: while groups are missing, the engine computes from the front and the network loads from the back. Groups
  between the engine and the meeting point are reserved for it. The point moves as both rates become known, so groups
  that the engine would reach too late are fetched after all. While the next group is on its way, and once all are in
  place, the engine recomputes those in place that gain most per second. Recomputed groups inherit errors from the
  groups before them, see `kvabr.types.catalog`.
- ``suffix``: the engine needs everything in front and computes from there to the end. Once all groups are in place, it
  gets the tail that gains most, at the last possible moment: until then the network may still improve it.
"""

from __future__ import annotations

from collections.abc import Callable
from heapq import heappop, heappush
from itertools import accumulate, pairwise

from kvabr.abr.policy import Decision
from kvabr.abr.view import View
from kvabr.types.catalog import RECOMPUTED
from kvabr.types.loss import INHERITED

_LOOKED_AT = 4
"""Number of groups in place that are examined to find one worth computing."""
_PAUSE_SHARE = 1 / 50
"""Share of the deadline to pause after a search that found nothing."""
_BLIND_SHARE = 0.5
"""Share of the remaining time for which groups are reserved for the engine while no rate is known."""
_SAFETY = 1.1
"""Safety margin: a computation on a complete cache must fit the remaining time this many times."""
_TAIL = 24
"""Maximum tail length in groups; bounds decision time."""
_NEAR = 8
"""Number of preceding groups that are considered for inherited loss."""

Worth = Callable[[int, str | None], float]
"""Cost in nats per token of leaving a group to the network, given its current track or None."""


class ComputePlanner:
    """Decides what the engine of one play computes in its spare time."""

    def __init__(self, view: View, worth: Worth) -> None:
        """Start a play that has an engine; ``worth``: cost of leaving a group to the network."""
        catalog, cost = view.catalog, view.cost
        assert cost is not None  # noqa: S101  # callers check that there is an engine
        self._worth, self._tail_first = worth, view.front_first
        groups, ends = range(view.groups), [catalog.tokens_before(group) for group in range(view.groups + 1)]
        self._seconds = [cost.seconds(begin, end - begin) for begin, end in pairwise(ends)]
        """Seconds to compute each group alone."""
        self._until = list(accumulate(self._seconds, initial=0.0))
        """Seconds to compute all groups before this one, one after the other."""
        base = view.ladder.tracks[0]
        self._each = base.total_bytes / view.groups
        everything = sum(base.loss)
        near = accumulate((base.loss[group] for group in reversed(groups)), initial=0.0)
        self._near = [sum_ / everything if everything > 0 else 1.0 for sum_ in near][: _NEAR + 1]
        """Share of a group's inherited loss that comes from the n groups right before it, by n."""
        self._placed: set[int] = set()
        self._solid = 0
        """All groups before this one are in place."""
        self._offers: list[tuple[float, int, str]] = []
        """Heap of the groups in place with all before them in place: loss per second, negated, group and track."""
        self._behind: dict[int, tuple[float, int, str]] = {}
        """Other groups in place, alike."""
        self._again_s = 0.0
        self.reserved = range(0)
        """Groups reserved for the engine."""

    def settled(self, group: int, track: str, loss: float) -> None:
        """Note that a group is in place on a track, with its loss."""
        self._placed.add(group)
        if self._tail_first or loss <= 0:
            return
        offer = (-loss / self._seconds[group], group, track)
        if group < self._solid:
            heappush(self._offers, offer)
        else:
            self._behind[group] = offer

    def plan(self, view: View) -> None:
        """Estimate where engine and network will meet."""
        first = view.first_missing()
        if first is None or self._tail_first or view.cost is None or not self._pays(view, first, None):
            self.reserved = range(0)
            return
        behind = next(reversed(view.missing_groups)) + 1
        reached_s = view.engine_backlog_s - self._until[first]
        left_s, each_s, begins_s = view.time_left, 0.0, 0.0
        if view.rate <= 0:
            left_s *= _BLIND_SHARE
        else:
            each_s = self._each / view.rate
            begins_s = max(view.ttfb_s, view.outstanding_bytes / view.rate)
        # While no rate is known the last group is left to the network: without a request it stays unknown.
        low, high = first, behind - (view.rate <= 0 and not view.in_flight)
        while low < high:  # binary search: the last group before which the engine is no later than the network
            middle = (low + high + 1) // 2
            engine_s = reached_s + self._until[middle]
            network_s = begins_s + each_s * (behind - middle) if each_s else left_s
            if engine_s <= min(left_s, network_s):
                low = middle
            else:
                high = middle - 1
        self.reserved = range(first, low)

    def next(self, view: View) -> Decision | None:
        """Return what an idle engine should compute now, if anything."""
        if view.cost is None or view.engine_backlog_s > 0:
            return None
        self._look(view)
        if self._solid < view.groups:
            if self._tail_first:
                return None
            if (front := self._front(view)) is not None:
                return front
        if view.now < self._again_s:
            return None
        found = self._tail(view) if self._tail_first else self._best(view)
        if found is None:
            self._again_s = view.now + _PAUSE_SHARE * view.deadline_s
        return found

    def _look(self, view: View) -> None:
        """Find out up to where all groups are in place."""
        track_of, placed, groups = view.track_of, self._placed, view.groups
        if (lost := view.first_missing()) is not None and lost < self._solid:
            self._solid = lost  # it had arrived, and could not be decoded
        if lost is not None:
            placed.discard(lost)
        while self._solid < groups and (self._solid in placed or track_of[self._solid] == RECOMPUTED):
            if (offer := self._behind.pop(self._solid, None)) is not None:
                heappush(self._offers, offer)
            self._solid += 1

    def _pays(self, view: View, group: int, track: str | None) -> bool:
        return self._worth(group, track) > view.gpu_price * self._seconds[group]

    def _front(self, view: View) -> Decision | None:
        group = self._solid
        if group not in view.missing_groups or self._seconds[group] > view.time_left:
            return None
        if not self._pays(view, group, None):
            return None
        return Decision.recompute(group, f"the engine computes from the front, up to group {self.reserved.stop}")

    def _best(self, view: View) -> Decision | None:
        """Pick the group in place, with all before it, whose recomputation gains most per second."""
        offers, settled, track_of = self._offers, view.settled, view.track_of
        looked: list[tuple[float, int, str]] = []
        # With nothing under way, the play could end now: then a second costs its time, too.
        price = view.gpu_price + (0.0 if view.in_flight or view.missing_groups else view.time_price)
        # Before that, the engine must stay free for what the link may not bring in time.
        left_s = view.time_left if self._solid == view.groups else view.slack_s()
        most, best = 0.0, -1
        while offers and len(looked) < _LOOKED_AT:
            offer = heappop(offers)
            _, group, track = offer
            if group not in settled or track_of[group] != track:
                continue  # it returns to the heap once it is in place on another track
            looked.append(offer)
            seconds = self._seconds[group]
            gain = self._gain(view, group, track) / seconds
            if gain > max(most, price) and _SAFETY * seconds <= left_s:
                most, best = gain, group
        for offer in looked:
            heappush(offers, offer)
        if best < 0:
            return None
        return Decision.recompute(best, f"computing it saves {most * self._seconds[best]:.1e} nats")

    def _tail(self, view: View) -> Decision | None:
        """Pick the tail that gains most, if it must start now."""
        cost, catalog = view.cost, view.catalog
        assert cost is not None  # noqa: S101  # see `next`
        gained = most = seconds = 0.0
        best = -1
        for group in range(view.groups - 1, max(-1, view.groups - 1 - _TAIL), -1):
            track = view.track_of[group]
            if track is None or track == RECOMPUTED:
                break
            gained += self._gain(view, group, track)
            begin = catalog.tokens_before(group)
            takes_s = cost.seconds(begin, catalog.tokens - begin)
            if _SAFETY * takes_s > view.time_left:
                break
            if group in view.settled and catalog.cut(group) == group and gained - view.gpu_price * takes_s > most:
                most, best, seconds = gained - view.gpu_price * takes_s, group, takes_s
        if best < 0 or view.time_left - _SAFETY * seconds > 3 * _PAUSE_SHARE * view.deadline_s:
            return None
        return Decision.recompute(best, f"computing the tail saves {most:.1e} nats more than it costs")

    def _gain(self, view: View, group: int, track: str) -> float:
        """Return the nats per token that recomputing a group saves: its present cost less the loss it would inherit."""
        before = group - 1
        while before >= 0 and group - before < _NEAR and view.track_of[before] == RECOMPUTED:
            before -= 1
        other = view.track_of[before] if before >= 0 else None
        inherited = 0.0
        if other is not None and other != RECOMPUTED:
            inherited = INHERITED * view.loss(group, other) * (1.0 - self._near[group - 1 - before])
        return self._worth(group, track) - inherited
