"""``oracle`` plays a plan made with full knowledge of the link, in simulations only (`View.oracle`)."""

from __future__ import annotations

from collections.abc import Callable
from heapq import heappop, heappush
from typing import ClassVar

from kvabr.abr.policy import Decision, Policy
from kvabr.abr.view import PlannedPlay, View
from kvabr.replay.frontier import Frontier
from kvabr.replay.link import Capacity
from kvabr.types.errors import PolicyError
from kvabr_lab.policies.foresight import Foresight


class Oracle(Policy):
    """Plays the best plan found."""

    name: ClassVar[str] = "oracle"
    abandons: ClassVar[bool] = False
    paces: ClassVar[bool] = True
    computes: ClassVar[bool] = True

    @staticmethod
    def foresee(
        view: View,
        frontier: Frontier,
        capacity: Capacity,
        first_byte_s: float,
        tried: Callable[[PlannedPlay], float],
    ) -> PlannedPlay:
        """Return the best plan; see `kvabr.replay.experiment.Planner`."""
        return Foresight(view, frontier, capacity, first_byte_s, tried).best()

    def start(self, view: View) -> None:
        """Read the plan; raise a `PolicyError` outside of simulations."""
        if view.oracle is None:
            raise PolicyError("oracle knows the future rate of the link, so it runs only in a simulation")
        plan = view.oracle.plan(view)
        self._engine = plan.engine
        self._goal = dict(plan.requests)
        self._first: dict[int, str] = {}
        for group, track in plan.requests:
            self._first.setdefault(group, track)
        later = (group for group, track in self._first.items() if self._goal[group] != track)
        self._later = {group: place for place, group in enumerate(later)}
        """Groups that will get another track, with their places in the order."""
        self._ready: list[tuple[int, int]] = []
        self._seen_settled = 0
        self._order = iter(self._first.items())

    def decide(self, view: View) -> Decision:
        """Give the engine its groups, then request the next part of the plan."""
        missing = view.missing_groups
        if view.cost is not None:
            group = missing.first(self._engine.start)
            if group is not None and group in self._engine:
                return Decision.recompute(group, "planned: the engine computes this")
        if missing:
            for group, track in self._order:
                if group in missing:
                    return Decision.fetch(group, track, f"planned: {self._goal[group]} in the end")
            # A request has failed, or the engine.
            group = next(iter(missing))
            return Decision.fetch(group, self._goal.get(group, view.ladder.cheapest), "the group was lost")
        for group in view.settled.history[self._seen_settled :]:
            if group in self._later:
                heappush(self._ready, (self._later[group], group))
        self._seen_settled = len(view.settled.history)
        while self._ready:
            _, group = heappop(self._ready)
            if group in view.settled and view.track_of[group] != self._goal[group]:
                return Decision.upgrade(group, self._goal[group], "planned")
        return Decision.wait("the plan is under way")
