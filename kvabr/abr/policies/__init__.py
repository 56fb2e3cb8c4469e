"""The policies that come with kvabr, one small file each."""

from kvabr.abr.policies.anytime import Anytime
from kvabr.abr.policies.bola import Bola
from kvabr.abr.policies.budget import Budget
from kvabr.abr.policies.cachegen import CacheGen, CacheGenOracle
from kvabr.abr.policies.cheapfirst import CheapFirst
from kvabr.abr.policies.fixed import Fixed
from kvabr.abr.policies.mpc import Mpc
from kvabr.abr.policies.rate import Rate

DEFAULT = "anytime"

BUILTIN = {cls.name: cls for cls in (Fixed, Rate, Bola, Mpc, CacheGen, CacheGenOracle, Budget, CheapFirst, Anytime)}

__all__ = [
    "BUILTIN",
    "DEFAULT",
    "Anytime",
    "Bola",
    "Budget",
    "CacheGen",
    "CacheGenOracle",
    "CheapFirst",
    "Fixed",
    "Mpc",
    "Rate",
]
