"""The estimators that come with kvabr, one per file."""

from kvabr.abr.estimators.ewma import DualEwma
from kvabr.abr.estimators.harmonic import HarmonicMean
from kvabr.abr.estimators.last import LastSample
from kvabr.abr.estimators.percentile import SlidingPercentile
from kvabr.abr.estimators.tracking import Tracking

BUILTIN = {cls.name: cls for cls in (DualEwma, HarmonicMean, SlidingPercentile, LastSample, Tracking)}

__all__ = ["BUILTIN", "DualEwma", "HarmonicMean", "LastSample", "SlidingPercentile", "Tracking"]
