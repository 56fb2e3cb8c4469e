"""The estimators that come with kvabr."""

from kvabr.abr.estimators.classic import DualEwma, HarmonicMean, LastSample, SlidingPercentile
from kvabr.abr.estimators.tracking import Tracking

BUILTIN = {cls.name: cls for cls in (DualEwma, HarmonicMean, SlidingPercentile, LastSample, Tracking)}

__all__ = ["BUILTIN", "DualEwma", "HarmonicMean", "LastSample", "SlidingPercentile", "Tracking"]
