"""``oracle``: execute the plan of least loss by the deadline, knowing what the link will carry. It gives time no price.

The plan is a multiple-choice knapsack over all options of the asset, stacked layers included, within the bytes that the
link carries until the last of them can still be decoded. It is made at the start, and again whenever the rest no longer
fits. If the round trip is unknown, the plan is remade once the first byte has shown it; until then at most half of it
is requested.

With an engine that fills holes, the best run of about eight starting points is left to it. With one that computes
everything behind a miss, every cut is considered: the groups before it must be in place when the engine starts, and
their further layers may arrive while it computes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import ClassVar

from kvabr.abr.ladder import Choice, knapsack
from kvabr.abr.policy import Decision, Policy
from kvabr.abr.view import Future, View
from kvabr.types.catalog import RECOMPUTED, predicted_loss
from kvabr.types.cost import PrefillCost
from kvabr.types.errors import PolicyError

_BLIND_SHARE = 0.5
"""Share of the plan that is requested before the time to first byte is known."""
_LONGEST_SHARE, _GUESS_SHARE = 0.2, 0.02
"""Plausible maximum of the time to first byte, as a share of the deadline, and the assumption if it was exceeded: then
the link stood still."""
_LATE = 0.9
"""Share of the time before a cut after which the cut is final."""
_HALVINGS = 24
"""Bisection steps to find a point in time: to a ten-millionth of the deadline."""
_FEW = 8
"""Number of groups up to which even provisional plans are exact."""
_STARTS = 8
"""Number of starting points considered for the engine."""
_PATIENCE = 10.0
"""Deadlines to look ahead where no plan meets the first."""
_TAILS = 2
"""Number of decodings, of the slowest kind, that must fit between the last needed byte and the deadline."""
_PRICES = 24
"""Number of decode prices tried until a plan can be decoded in time."""


class Oracle(Policy):
    """Play the best cache that the link will carry."""

    name: ClassVar[str] = "oracle"
    abandons: ClassVar[bool] = False
    paces: ClassVar[bool] = True
    computes: ClassVar[bool] = True

    def start(self, view: View) -> None:
        """Make the plan; raise `PolicyError` if the future is unknown, because this is not a simulation."""
        if view.oracle is None:
            raise PolicyError("oracle reads what the link will carry from the trace: it runs only in a simulation")
        self._future = view.oracle
        self._tracks, self._stacks = view.catalog.by_name, view.ladder.stacks
        self._tail_s = _TAILS * max(track.decode_s for track in view.ladder.tracks)
        self._knows = isinstance(view.oracle, Future)
        self._total = view.oracle(view.deadline_s)
        """Bytes that the link carries by the deadline."""
        self._idle, self._asked = 0.0, 0
        """Bytes that the link has missed for lack of requests, and bytes of all requests."""
        self._until_s = view.deadline_s
        """When everything from the network must be in place,"""
        self._layers_later = False
        """or only the base, with all else due by the deadline (an engine that computes behind a cut)."""
        self._engine: deque[int] = deque()
        """Groups still to be given to the engine."""
        self._theirs: set[int] = set()
        self._front = 0
        """Groups before this one must be in place before the engine starts."""
        self._leave(view)
        self._planned_at = -1
        self._plan(view)

    def decide(self, view: View) -> Decision:
        """Request the next part of the plan."""
        self._check(view)
        while self._engine and self._may_leave(view):
            group = self._engine.popleft()
            if group in view.missing_groups:
                return Decision.recompute(group, "planned: the engine computes this by the deadline")
        missing = [group for group in view.missing_groups if group not in self._theirs]
        if not self._knows and view.outstanding_bytes > _BLIND_SHARE * self._budget(view):
            return Decision.wait("the time to first byte is not known yet")
        if missing:
            # Groups that the engine waits for go first, then those with the most layers: each layer waits for the one
            # below.
            group = min(missing, key=lambda one: (one >= self._front, -len(self._stacks[self._goal[one]]), one))
            first = view.ladder.cheapest if self._layers_later else self._stacks[self._goal[group]][0]
            return self._ask(view, Decision.fetch(group, first, f"planned: {self._goal[group]}"))
        if (decision := self._upgrade(view)) is not None:
            return decision
        if not view.in_flight and self._planned_at != len(view.settled.history):
            self._plan(view)
            if (decision := self._upgrade(view)) is not None:
                return decision
        return Decision.wait("the plan is under way")

    # ------------------------------------------------------------- the engine

    def _may_leave(self, view: View) -> bool:
        """Return whether to give the engine its groups now: a cut may still move once the round trip is known."""
        return not view.front_first or self._knows or not self._engine[0] or view.now > _LATE * self._until_s

    def _leave(self, view: View) -> None:
        """Decide what the engine computes."""
        if view.cost is None:
            return
        run = range(self._cut(view, view.cost), view.groups) if view.front_first else self._run(view, view.cost)
        self._theirs = set(run)
        if view.front_first:
            run = run[:1]  # the engine computes all behind it
        else:
            self._front = run.start
        self._engine = deque(run)

    def _run(self, view: View, cost: PrefillCost) -> range:
        """Return the run of groups for the engine: as many as it can compute once everything before is in place."""
        catalog, ready_s = view.catalog, self._ready_s(view)
        best, best_run = float("inf"), range(0)
        for first in range(0, view.groups, max(1, view.groups // _STARTS)):
            begins_s, base = (ready_s[first] + self._tail_s, view.ladder.cheapest) if first else (view.now, None)
            last = self._reach(view, cost, first, begins_s)
            others = [group for group in range(view.groups) if not first <= group < last]
            goal = self._best(view, others, self._budget(view), view.deadline_s, base, exact=False)
            if goal is not None:
                loss = predicted_loss(catalog, [goal.get(group, RECOMPUTED) for group in range(view.groups)])
                if loss < best:
                    best, best_run, self._layers_later = loss, range(first, last), base is not None
        # If nothing meets the deadline, the longest prefix is as good as any.
        return best_run if best < float("inf") else range(self._reach(view, cost, 0, 0.0))

    def _reach(self, view: View, cost: PrefillCost, first: int, begins_s: float) -> int:
        """Return the end of the groups from ``first`` that the engine can compute by the deadline."""
        last, size, tokens = first, view.catalog.spec.group_tokens, view.catalog.tokens
        while last < view.groups:
            computed_s = cost.seconds(first * size, min((last + 1) * size, tokens) - first * size)
            if begins_s + computed_s > view.deadline_s:
                break
            last += 1
        return last

    def _cut(self, view: View, cost: PrefillCost) -> int:
        """Return the group from which the engine computes; also sets when it must start."""
        catalog, tokens = view.catalog, view.catalog.spec.group_tokens
        best, best_cut = float("inf"), view.groups
        ready_s = self._ready_s(view)
        for cut in range(view.groups, -1, -1):
            first = cut * tokens
            # The engine starts once everything before the cut is decoded.
            until_s = view.deadline_s - cost.seconds(first, catalog.tokens - first) - (self._tail_s if cut else 0.0)
            if until_s < 0:
                break
            if ready_s[cut] > until_s:
                continue
            rest = [RECOMPUTED] * (view.groups - cut)
            for layers_later in (False, True):
                ends_s, base = (view.deadline_s, view.ladder.cheapest) if layers_later else (until_s, None)
                goal = self._best(view, range(cut), self._carried(view, ends_s), ends_s, base, exact=False)
                if goal is not None:
                    loss = predicted_loss(catalog, [*(goal[group] for group in range(cut)), *rest])
                    if loss < best:
                        best, best_cut = loss, cut
                        self._until_s, self._layers_later = until_s, layers_later
        if best == float("inf") and cost.seconds(0, catalog.tokens) < ready_s[-1]:
            return 0  # nothing makes it, but this is sooner than the network
        return best_cut

    def _ready_s(self, view: View) -> list[float]:
        """Return, for each n, the earliest time at which the bases of the first n groups are decoded, in seconds."""
        base = self._tracks[view.ladder.cheapest]
        ready_s, nbytes = [view.now], 0.0
        for group in range(view.groups):
            if view.track_of[group] is None:
                nbytes += base.bytes[group]
                ready_s.append(max(ready_s[-1], self._arrives_s(view, nbytes)) + base.decode_s)
            else:
                ready_s.append(ready_s[-1])
        return ready_s

    def _arrives_s(self, view: View, nbytes: float) -> float:
        """Return when the link has carried everything in flight and ``nbytes`` more; infinite if it takes too long."""
        nbytes += self._idle_after_asking(view) + self._asked - self._passed(view)
        low, high = 0.0, _PATIENCE * view.deadline_s - view.now
        if self._future(high) < nbytes:
            return float("inf")
        for _ in range(_HALVINGS):
            middle = (low + high) / 2
            low, high = (low, middle) if self._future(middle) >= nbytes else (middle, high)
        return view.now + high

    # --------------------------------------------------------------- the plan

    def _first_byte_s(self, view: View) -> float:
        """Return the seconds until a request's first byte, as far as known."""
        if isinstance(self._future, Future):
            return self._future.first_byte_s
        plausible = view.ttfb_s <= _LONGEST_SHARE * view.deadline_s
        return view.ttfb_s if plausible else _GUESS_SHARE * view.deadline_s

    def _carried(self, view: View, until_s: float, tail_s: float | None = None) -> float:
        """Return the bytes of new requests that can be in place by a time; ``tail_s``: to decode what arrives last."""
        if tail_s is None:
            tail_s = min(track.decode_s for track in view.catalog.tracks)
        idle = self._idle_after_asking(view)
        return self._passed(view) + self._future(max(0.0, until_s - view.now - tail_s)) - idle - self._asked

    def _passed(self, view: View) -> float:
        """Return the bytes that the link could have carried so far."""
        return self._total - self._future(view.deadline_s - view.now)

    def _idle_after_asking(self, view: View) -> float:
        """Return the bytes that the link will have missed for lack of requests if one is sent now."""
        came = self._passed(view) - self._idle
        waiting = max(0.0, self._asked - came)
        unused = max(0.0, self._future(self._first_byte_s(view)) - waiting)
        return self._idle + max(0.0, came - self._asked) + unused

    def _ask(self, view: View, decision: Decision) -> Decision:
        """Account for a request."""
        self._idle = self._idle_after_asking(view)
        if decision.group is not None and decision.track is not None:
            self._asked += view.bytes(decision.group, decision.track)
        return decision

    def _ends_s(self, view: View) -> float:
        return view.deadline_s if self._layers_later else self._until_s

    def _budget(self, view: View) -> float:
        return self._carried(view, self._ends_s(view))

    def _plan(self, view: View) -> None:
        """Choose the final track of each group."""
        groups = [group for group in range(view.groups) if view.track_of[group] != RECOMPUTED]
        wanted = [group for group in groups if group not in self._theirs]
        ends_s, base = self._ends_s(view), view.ladder.cheapest if self._layers_later else None
        goal = self._best(view, wanted, self._budget(view), ends_s, base)
        if goal is not None and view.missing_groups:
            # Leave time to decode whatever arrives last, and what came in a burst with it.
            tail_s = _TAILS * max((self._tracks[track].decode_s for track in goal.values()), default=0.0)
            goal = self._best(view, wanted, self._carried(view, ends_s, tail_s), ends_s, base) or goal
        cheapest = view.ladder.cheapest
        self._goal = {group: self._current(view, group) or cheapest for group in range(view.groups)}
        self._goal.update(goal or {})
        self._planned_at = len(view.settled.history)

    def _current(self, view: View, group: int) -> str | None:
        track = view.track_of[group]
        return track if track in self._tracks else None

    def _check(self, view: View) -> None:
        """Plan again if the plan no longer fits, or if the round trip has become known."""
        learnt = not self._knows and view.ttfb_s > 0
        if view.cost is None:  # the engine has failed
            self._engine.clear()
            self._theirs.clear()
        if learnt and view.front_first and self._engine:
            self._leave(view)
        self._knows = self._knows or learnt
        changed = self._planned_at != len(view.settled.history)
        if learnt or (changed and self._rest(view) > self._budget(view)):
            self._plan(view)

    def _rest(self, view: View) -> int:
        """Return the bytes of the plan that have not been requested."""
        return sum(
            self._tracks[layer].bytes[group]
            for group, goal in self._goal.items()
            if group not in self._theirs and view.track_of[group] != goal
            for layer in self._missing_layers(view, group, goal)
        )

    def _missing_layers(self, view: View, group: int, goal: str) -> tuple[str, ...]:
        layers = self._stacks[goal]
        current = self._current(view, group)
        return layers[layers.index(current) + 1 :] if current in layers else layers

    def _upgrade(self, view: View) -> Decision | None:
        """Request the next layer of the group that lacks most."""
        lacking = {
            group: self._missing_layers(view, group, self._goal[group])
            for group in view.settled
            if view.track_of[group] != self._goal[group]
        }
        if not lacking:
            return None
        group = min(lacking, key=lambda one: (-len(lacking[one]), one))
        return self._ask(view, Decision.upgrade(group, lacking[group][0], f"planned: {self._goal[group]}"))

    def _best(
        self,
        view: View,
        groups: Sequence[int],
        budget: float,
        until_s: float,
        base: str | None = None,
        *,
        exact: bool = True,
    ) -> dict[int, str] | None:
        """Return the tracks of least loss within a budget of bytes and of decode time; None if nothing fits.

        With ``base``, missing groups start on that track. Plans that are only compared with others need not be
        ``exact``.
        """
        offers = [self._offers(view, group, base) for group in groups]
        time_s = max(0.0, until_s - view.now - view.decode_backlog_s)
        price = 0.0
        for _ in range(_PRICES):
            priced = [[Choice(size, loss + price * decode_s) for size, loss, decode_s, _ in offer] for offer in offers]
            picks = knapsack(priced, budget, exact=exact or len(priced) <= _FEW)
            if picks is None:
                return None
            chosen = [offer[index] for offer, index in zip(offers, picks, strict=True)]
            if sum(decode_s for _, _, decode_s, _ in chosen) <= time_s:
                break
            price = max(1e-4, 2.0 * price)
        return {group: track for group, (_, _, _, track) in zip(groups, chosen, strict=True)}

    def _offers(self, view: View, group: int, base: str | None) -> list[tuple[int, float, float, str]]:
        """Return a group's possible final tracks: bytes to request, loss, decode seconds, and the track."""
        current = self._current(view, group)
        offers = [] if current is None else [(0, view.loss(group, current), 0.0, current)]
        for track in view.catalog.tracks:
            if track.name != current:
                layers = self._missing_layers(view, group, track.name)
                if base is not None and current is None and layers[0] != base:
                    layers = (base, *layers)
                size = sum(self._tracks[layer].bytes[group] for layer in layers)
                decode_s = sum(self._tracks[layer].decode_s for layer in layers)
                offers.append((size, track.loss[group], decode_s, track.name))
        return offers
