"""Lines of simulated plays."""

from functools import cache

from kvabr.replay.experiment import Experiment, ReplayOptions
from kvabr.telemetry import Listener
from kvabr.types.cost import PrefillCost
from kvabr.types.events import ProgressMade
from tests.catalogs import catalog
from tests.replay.worlds import world

DEADLINE_S = 2.0
GROUPS = 8
OFFER = catalog(GROUPS, layered=True)


@cache
def simulated(rates=(3e5,), policy="anytime", engine=False):
    cost = PrefillCost(0.0, 0.2 / 128) if engine else None
    experiment = Experiment(OFFER, ReplayOptions(DEADLINE_S, 0.05, None, cost))
    return experiment.play(world("flat", list(rates), 50.0 if len(rates) == 1 else 0.25), 0.0, policy, log=True).log


class Ear(Listener):
    name = "ear"

    def __init__(self):
        self.records = []
        self.closed = 0

    def receive(self, record):
        self.records.append(record)

    def close(self):
        self.closed += 1


def broken(telemetry, lines, error):
    """A play that writes some lines and then raises."""
    with telemetry.play() as log:
        for line in lines:
            log(line)
        raise error


def progress(t, received=7, rate=1e5, lower=1e4, slack_s=0.3):
    """Return an event that says how much has come."""
    return ProgressMade(t, received, rate, lower, slack_s)
