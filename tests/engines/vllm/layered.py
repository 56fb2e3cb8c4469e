"""A policy that plays the AC layers up to one of them in every group, whatever the link is like."""

from typing import ClassVar

from kvabr.abr import Decision, Policy, View

LAYERS = ("AC-L0", "AC-L1", "AC-L2", "AC-L3")


class UpToL0(Policy):
    top: ClassVar[int] = 0

    def decide(self, view: View) -> Decision:
        group = view.first_missing()
        if group is not None:
            return Decision.fetch(group, LAYERS[0], "the base of every group first")
        below = [group for group in range(view.groups) if view.track_of[group] != LAYERS[self.top]]
        if not below:
            return Decision.finish("every group has its layers")
        for group in below:
            if group in view.settled:
                return Decision.upgrade(group, LAYERS[LAYERS.index(view.track_of[group]) + 1], "the next layer")
        return Decision.wait("layers are under way")


class UpToL1(UpToL0):
    top = 1


class UpToL2(UpToL0):
    top = 2


class UpToL3(UpToL0):
    top = 3
