"""Policies that deliver a coarse track first, and then upgrade it to the exact one."""

from kvabr.abr.policy import Decision, Policy


class Coarse(Policy):
    """Int8, and once that was handed over, FP16."""

    track = "Int8"

    def __init__(self):
        self.late = True

    def decide(self, view):
        if (group := view.first_missing()) is not None:
            self.late = False
            return Decision.fetch(group, self.track, "coarse")
        if self.late:
            for group in view.settled:
                if view.track_of[group] != "FP16":
                    return Decision.upgrade(group, "FP16", "better")
        return Decision.finish("all there")


class Coarser(Coarse):
    """Int4, and once that was handed over, FP16."""

    track = "Int4"


COARSE, COARSER = (f"{__file__}:{policy.__name__}" for policy in (Coarse, Coarser))
"""As options name them."""
