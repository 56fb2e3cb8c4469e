"""The built-in estimators; `kvabr_lab.estimators` has others to compare with."""

from kvabr.abr.estimators.classic import HarmonicMean
from kvabr.abr.estimators.tracking import Tracking

BUILTIN = {cls.name: cls for cls in (HarmonicMean, Tracking)}

__all__ = ["BUILTIN", "HarmonicMean", "Tracking"]
