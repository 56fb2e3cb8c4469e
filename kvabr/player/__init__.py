"""The player: a sans-I/O state machine that turns a catalog, a goal, a deadline and a policy into one KV cache.

It has no sockets, clock or threads. Events go in with ``now`` (seconds since the play began), actions come out. The
simulator and the network driver run the same `Session`, built by `new_session`. `kvabr.player.assembler` holds the
tensor; only it needs torch.
"""

from kvabr.player.builder import new_estimator, new_session
from kvabr.player.session import Session
from kvabr.player.session_types import (
    Action,
    Cancel,
    Decode,
    Deliver,
    FetchGroup,
    GiveUp,
    Goal,
    GroupRecord,
    PlayerConfig,
    PlayRecord,
    PrefixGoal,
    Recompute,
    UpgradeGoal,
    WholeGoal,
)

__all__ = [
    "Action",
    "Cancel",
    "Decode",
    "Deliver",
    "FetchGroup",
    "GiveUp",
    "Goal",
    "GroupRecord",
    "PlayRecord",
    "PlayerConfig",
    "PrefixGoal",
    "Recompute",
    "Session",
    "UpgradeGoal",
    "WholeGoal",
    "new_estimator",
    "new_session",
]
