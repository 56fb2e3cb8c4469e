"""What a play is for. A session is given one goal, and its goal decides when it ends."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class WholeGoal:
    """The whole cache: deliver once every group is in place, or give up."""


@dataclass(frozen=True, slots=True)
class PrefixGoal:
    """The groups before the first miss, for an engine that computes everything behind them by itself (vLLM, SGLang).

    The play never waits for the engine. It ends when every group is in place, when computing the rest is sooner than
    fetching it, when nothing but the engine could still bring a group, or at the deadline.
    """


@dataclass(frozen=True, slots=True)
class UpgradeGoal:
    """Better tracks for a complete cache that is already in use."""

    tracks: tuple[str, ...]
    """Per group, the track in place, or ``recomputed``: such a group is exact enough and stays."""
    until_s: float = math.inf
    """Seconds after which no more upgrades are wanted; infinite: until there is nothing to upgrade."""
    rate: float = 0.0
    """Rate of the link during the play before, bytes per second. It counts until the estimator knows one, since a
    policy that knows no rate asks for no upgrade."""


Goal = WholeGoal | PrefixGoal | UpgradeGoal
