"""The policies that come with kvabr, one small file each."""

from kvabr.abr.policies.anytime import Anytime
from kvabr.abr.policies.bola import Bola
from kvabr.abr.policies.bola_e import BolaE
from kvabr.abr.policies.budget import Budget, Mpc
from kvabr.abr.policies.cachegen import CacheGen, CacheGenOracle
from kvabr.abr.policies.cake import Cake
from kvabr.abr.policies.cheapfirst import CheapFirst
from kvabr.abr.policies.dynamic import Dynamic
from kvabr.abr.policies.fixed import Fixed
from kvabr.abr.policies.fugu import Fugu
from kvabr.abr.policies.l2a import L2A
from kvabr.abr.policies.oracle import Oracle
from kvabr.abr.policies.rate import Rate
from kvabr.abr.policies.robustmpc import RobustMpc

DEFAULT = "anytime"

BUILTIN = {
    cls.name: cls
    for cls in (
        Fixed, Rate, Bola, BolaE, Dynamic, L2A, Mpc, RobustMpc, Fugu, CacheGen, CacheGenOracle, Cake, Budget,
        CheapFirst, Anytime, Oracle,
    )
}  # fmt: skip

__all__ = [
    "BUILTIN",
    "DEFAULT",
    "L2A",
    "Anytime",
    "Bola",
    "BolaE",
    "Budget",
    "CacheGen",
    "CacheGenOracle",
    "Cake",
    "CheapFirst",
    "Dynamic",
    "Fixed",
    "Fugu",
    "Mpc",
    "Oracle",
    "Rate",
    "RobustMpc",
]
