"""The policies that come with kvabr."""

from kvabr.abr.policies.anytime import Anytime
from kvabr.abr.policies.budget import Budget, Mpc, RobustMpc
from kvabr.abr.policies.cachegen import CacheGen, CacheGenOracle
from kvabr.abr.policies.cheapfirst import CheapFirst
from kvabr.abr.policies.fugu import Fugu
from kvabr.abr.policies.kvserve import KvServe
from kvabr.abr.policies.oracle import Oracle
from kvabr.abr.policies.single_track import Cake, Fixed
from kvabr.abr.policies.video import L2A, Bola, BolaE, Dynamic, Rate

DEFAULT = "anytime"

BUILTIN = {
    cls.name: cls
    for cls in (
        Fixed, Rate, Bola, BolaE, Dynamic, L2A, Mpc, RobustMpc, Fugu, CacheGen, CacheGenOracle, Cake, KvServe, Budget,
        CheapFirst, Anytime, Oracle,
    )
}  # fmt: skip

__all__ = ["BUILTIN", "DEFAULT", "Anytime", "Budget", "Mpc"]
