"""Small matrices for tests of the laboratory."""

from dataclasses import replace

from kvabr_lab.matrix import EngineSpec, LabMatrix, Offer
from tests.catalogs import catalog
from tests.replay.worlds import worlds

TUNED = """
from kvabr.abr import Decision, Policy
from kvabr.types.parameters import Parameter


class Mine(Policy):
    parameters = {"caution": Parameter(0.1, 1.5, DEFAULT), "idle": Parameter(0.01, 10.0, 1.0, log=True)}

    def __init__(self, *, caution: float = DEFAULT, idle: float = 1.0) -> None:
        self._caution = caution

    def decide(self, view):
        group = view.first_missing()
        if group is None:
            return Decision.finish("every group is in place or under way")
        share = self._caution * view.budget_bytes(view.lower_bound) / len(view.missing)
        return Decision.fetch(group, view.best_track(group, share), "a share")
"""


def tuned(folder, default=0.7, name="mine.py"):
    path = folder / name
    path.write_text(TUNED.replace("DEFAULT", str(default)))
    return f"{path}:Mine"


def traces():
    found = worlds()
    families = ("calm", "calm", "calm", "rough", "rough", "rough", "bursts")
    return tuple(
        replace(trace, family=family, name=f"{family}/{trace.name.rpartition('/')[2]}")
        for trace, family in zip(found, families, strict=True)
        if trace.name != "test/dies"
    )


def matrix(**changes):
    fields = {
        "offers": (Offer("small", catalog(8, layered=True)),),
        "traces": traces(),
        "policies": ("fixed:AC-5x", "cheapfirst", "mpc"),
        "deadlines": (1.0,),
        "loads": (0.1, 0.4),
        "rtts": (0.03,),
        "engines": (EngineSpec.parse("none"),),
        "starts": 2,
        "seed": 3,
    }
    return LabMatrix(**(fields | changes))
