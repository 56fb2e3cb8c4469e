"""The player: a sans-I/O state machine that turns a catalog, a deadline and a policy into fetches and one KV cache.

No sockets, no clock, no threads: time comes in as ``now`` (seconds since the play began), events go in, actions come
out. The simulator and the network drivers run the very same `Session`.
"""

from kvabr.player.builder import new_estimator, new_session
from kvabr.player.session import Session
from kvabr.player.session_types import (
    Action,
    Cancel,
    Decode,
    Deliver,
    Fetch,
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
    "Fetch",
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
