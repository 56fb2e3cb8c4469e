"""Adaptive bitrate (ABR): estimators predict the network's rate, policies decide what to request next.

Both are plug-ins: by name, by entry point (``kvabr.policies``, ``kvabr.estimators``), or from a file. They use catalog
numbers and estimates, never tensors, sockets or clocks.
"""

from kvabr.abr.estimators import Estimator
from kvabr.abr.ladder import Ladder, Option
from kvabr.abr.policy import Decision, Policy
from kvabr.abr.view import Transfer, View

__all__ = ["Decision", "Estimator", "Ladder", "Option", "Policy", "Transfer", "View"]
