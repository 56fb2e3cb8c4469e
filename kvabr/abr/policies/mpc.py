"""``mpc``: RobustMPC of video players (Yin et al., SIGCOMM 2015), with the bound of Puffer and Pensieve.

A video player plans five chunks ahead, limited by its buffer. This policy plans five groups ahead, limited by their
share of the time left, at the harmonic mean of the recent rates over one plus the largest recent error. It takes steps
to better tracks in the order of loss saved per byte, which is within one step of the optimum.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import islice
from typing import ClassVar

from kvabr.abr.ladder import LadderStep, spend
from kvabr.abr.policy import Decision, FrontToBack
from kvabr.abr.view import View
from kvabr.types.parameters import Parameter


class Mpc(FrontToBack):
    """Plan five groups ahead, one track for each (RobustMPC); a group is never refined."""

    name: ClassVar[str] = "mpc"
    estimator: ClassVar[str] = "harmonic"
    parameters: ClassVar[Mapping[str, Parameter]] = {"horizon": Parameter(1.0, 64.0, 5.0, log=True)}

    def __init__(self, *, horizon: float = 5.0) -> None:
        """``horizon``: number of groups planned ahead."""
        self._horizon = round(horizon)

    def start(self, view: View) -> None:
        self._steps: dict[int, list[LadderStep]] = {}
        for step in view.ladder.steps:
            self._steps.setdefault(step.group, []).append(step)

    def choose(self, view: View, group: int) -> Decision:
        missing = view.missing_groups
        ahead = list(islice(missing, self._horizon))
        budget = view.budget_bytes(view.lower_bound, view.last_decode_s(view.ladder.cheapest))
        budget *= len(ahead) / len(missing)
        steps = sorted((step for each in ahead for step in self._steps.get(each, ())), key=lambda step: -step.worth)
        track = spend(view.ladder.options, steps, ahead, budget)[group]
        reason = f"{budget / 1e6:.2f} MB can still arrive for {len(ahead)} groups"
        return Decision.fetch(group, track, reason, {name: view.bytes(group, name) for name in view.ladder.names})
