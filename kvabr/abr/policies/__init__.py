"""The built-in policies; `kvabr_lab.policies` has others to compare with."""

from kvabr.abr.policies.anytime import Anytime
from kvabr.abr.policies.cheapfirst import CheapFirst
from kvabr.abr.policies.fixed import Fixed
from kvabr.abr.policies.mpc import Mpc
from kvabr.abr.policies.rate import Rate

DEFAULT = "anytime"

BUILTIN = {cls.name: cls for cls in (Fixed, Rate, Mpc, CheapFirst, Anytime)}

__all__ = ["BUILTIN", "DEFAULT", "Anytime", "Mpc"]
