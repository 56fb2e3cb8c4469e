"""Results for tests of the reports: played for real where it matters, written down by hand where cases are wanted."""

import copy
from dataclasses import replace
from functools import cache

from kvabr.replay.experiment import ReplayOptions
from kvabr.replay.live_bound import Producer
from kvabr.replay.run import Matrix, replay
from kvabr.types.cost import PrefillCost
from kvabr.types.events import DecisionMade
from tests.catalogs import catalog
from tests.replay.worlds import worlds

HOSTILE = "</script><script>alert(1)</script><!-- {{style}} \u2028 & \"'"
"""A name that would break out of a page that is put together carelessly."""
POLICIES = ("fixed:AC-5x", "fixed:Int8", "rate", "bola", "cheapfirst")


@cache
def _played():
    options = ReplayOptions(1.0, 0.03, 0.4, PrefillCost(0.0, 1e-3))
    matrix = Matrix(catalog(12), tuple(worlds()[1:5]), POLICIES, options, starts=2, seed=4, timelines=-1)
    report = replay(matrix, jobs=1)
    return report.result, report.timelines


def sample():
    """Result and timelines of 4 traces x 2 starts x 5 policies, with upgrades, cancels, recomputing and misses."""
    return copy.deepcopy(_played())


@cache
def _live():
    options = ReplayOptions(2.0, 0.03, 0.4, producer=Producer(1.2))
    matrix = Matrix(catalog(12, layered=True), tuple(worlds()[1:2]), ("anytime",), options, starts=1, timelines=-1)
    report = replay(matrix, jobs=1)
    return report.result, report.timelines


def live_sample():
    """A play of a cache of 12 groups that is prefilled meanwhile, in 1.2 seconds."""
    return copy.deepcopy(_live())


def hostile():
    """The same as `sample`, with a trace, a family, a policy, a reason and a model that have `HOSTILE` names."""
    result, timelines = sample()
    for run in result["runs"]:
        run["trace_family"] = HOSTILE if run["trace"] == result["runs"][0]["trace"] else run["trace_family"]
        run["policy"] = HOSTILE if run["policy"] == "rate" else run["policy"]
        run["trace"] = HOSTILE if run["trace"] == result["runs"][0]["trace"] else run["trace"]
    result["summary"] = {HOSTILE if name == "rate" else name: line for name, line in result["summary"].items()}
    result["asset"]["model"] = HOSTILE
    for timeline in timelines:
        log, trace = timeline["log"], result["runs"][timeline["run"]]["trace"]
        log[0] = replace(log[0], trace=trace)
        log[1:] = [replace(event, reason=HOSTILE) if hasattr(event, "reason") else event for event in log[1:]]
    return result, timelines


def early_base(result, timelines):
    """End a play of the cheapest track by a decision of its policy, and return the index of its timeline."""
    for index, timeline in enumerate(timelines):
        run = result["runs"][timeline["run"]]
        if run["policy"] == "fixed:AC-5x" and run["met"] and run["ttft_s"] < 0.9 * run["deadline_s"]:
            run["ttft_s"] = round(run["ttft_s"], 5)
            end = DecisionMade(run["ttft_s"], "finish", None, None, None, "not worth it", 1e6, 9e5, 0.04, 0.1, None)
            kept = [event for event in timeline["log"] if event.t <= run["ttft_s"]]
            timeline["log"] = [*kept, end]
            return index
    raise AssertionError("no play of the cheapest track comes early")


def run(policy, trace="t", start=0.0, *, met=True, loss=0.001, regret=None, feasible=True, family="f", ttft=0.9):
    """One line of a result, as short as a verdict needs it."""
    regret = loss + (0.0 if met else 0.5) if regret is None else regret
    return {
        "trace": trace,
        "trace_family": family,
        "start_s": start,
        "policy": policy,
        "deadline_s": 1.0,
        "ttft_s": ttft,
        "met": met,
        "loss": loss,
        "regret": regret if feasible else None,
        "clairvoyant_loss": 0.0 if feasible else None,
        "feasible": feasible,
        "groups": [],
    }


def result_of(*runs):
    """A result with these runs and the sparest summary."""
    policies = dict.fromkeys(line["policy"] for line in runs)
    summary = {}
    for policy in policies:
        regrets = [line["regret"] for line in runs if line["policy"] == policy and line["regret"] is not None]
        summary[policy] = {"runs": len(regrets), "regret_mean": sum(regrets) / len(regrets) if regrets else None}
    return {"schema": "kvabr.replay/1", "runs": list(runs), "summary": summary}
