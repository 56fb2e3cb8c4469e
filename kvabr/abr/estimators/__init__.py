"""The estimators that come with kvabr; `kvabr_lab.estimators` has rivals."""

from kvabr.abr.estimators.classic import DualEwma, HarmonicMean
from kvabr.abr.estimators.tracking import Tracking

BUILTIN = {cls.name: cls for cls in (DualEwma, HarmonicMean, Tracking)}

__all__ = ["BUILTIN", "DualEwma", "HarmonicMean", "Tracking"]
