"""Plays over kvabr's traces, in virtual time: for each family of links how much worse than the clairvoyant they are.

`regret.toml` has what was measured when it was written; KVABR_WRITE_TABLE=1 writes it anew, which a change that is
meant to play otherwise must do.
"""

import os
import random
import tomllib
from collections import defaultdict
from functools import cache
from pathlib import Path
from statistics import fmean

import pytest

from kvabr.replay import readers
from kvabr.replay.experiment import Experiment, ReplayOptions
from kvabr.replay.trace import Trace
from kvabr.types.cost import PrefillCost
from tests.catalogs import catalog

ROOT = Path(__file__).parents[2]
TABLE = Path(__file__).with_name("regret.toml")
POLICIES = ("anytime", "cheapfirst")
GROUPS, DEADLINE_S, STARTS_S = 16, 2.0, (0.0, 17.3)
ENGINE = PrefillCost(0.02, 4.0 / (GROUPS * 128))
PLAYS = {
    "scarce": ReplayOptions(DEADLINE_S, None, 0.1),
    "rich": ReplayOptions(DEADLINE_S, None, 1.0),
    "engine": ReplayOptions(DEADLINE_S, None, 0.1, ENGINE),
    "prefix": ReplayOptions(DEADLINE_S, None, 0.1, ENGINE, "suffix", prefix=True),
}
"""Bytes that the link carries within a deadline, as a share of the FP16 cache, and an engine that takes two."""


def collapses(seed: int) -> Trace:
    """A link of packets in bursts; its level changes by up to four orders of magnitude."""
    dice = random.Random(seed)
    times, rates, now, level = [], [], 0.0, 1.0
    while now < 60:
        if dice.random() < 0.08:
            level = 10 ** dice.uniform(-2.5, 1.5)
        times.append(now)
        rates.append(0.0 if dice.random() < 0.6 else level * 1e6 * dice.choice((1, 1, 5)))
        now += dice.choice((0.01, 0.02, 0.1))
    return Trace(f"collapses {seed}", "collapses", tuple(times), tuple(rates), now)


@cache
def measured() -> dict[str, dict[str, dict[str, float]]]:
    """Return the mean loss of plays, and the share that meets the deadline, by family and policy."""
    traces = [trace for path in sorted((ROOT / "traces").glob("*.csv")) for trace in readers.read(path)]
    traces += [collapses(seed) for seed in range(3)]
    runs: dict[tuple[str, str], list[dict]] = defaultdict(list)
    for options in PLAYS.values():
        experiment = Experiment(catalog(GROUPS, layered=True), options)
        for trace in traces:
            for start_s in STARTS_S[: 1 if options.prefix else None]:
                prepared = experiment.prepare(trace, start_s)
                for policy in POLICIES:
                    if not options.prefix or policy == "anytime":
                        run = experiment.play_on(trace, start_s, policy, *prepared, log=False).run
                        runs[trace.family, policy].append(run)
    found: dict[str, dict[str, dict[str, float]]] = defaultdict(dict)
    for (family, policy), plays in sorted(runs.items()):
        bounded = [run for run in plays if run["regret"] is not None]
        found[family][policy] = {
            "regret": fmean(run["regret"] for run in bounded),
            "objective": fmean(run["objective"] for run in plays),
            "met": fmean(run["met"] for run in plays),
        }
    return found


def write() -> None:
    lines = ["# Written by tests/abr/test_regret.py"]
    for family, policies in measured().items():
        for policy, row in policies.items():
            lines += ["", f"[{family}.{policy}]", *(f"{name} = {value:.6f}" for name, value in row.items())]
    TABLE.write_text("\n".join([*lines, ""]), encoding="utf-8")


if os.environ.get("KVABR_WRITE_TABLE"):
    write()
EXPECTED = tomllib.loads(TABLE.read_text(encoding="utf-8"))
ROWS = [(family, policy) for family, policies in EXPECTED.items() for policy in policies]


@pytest.mark.parametrize(("family", "policy"), ROWS)
def test_plays_are_as_near_to_the_best_as_they_were(family, policy):
    found, expected = measured()[family][policy], EXPECTED[family][policy]
    for name in ("regret", "objective"):
        assert found[name] <= 1.1 * expected[name] + 0.002
    assert found["met"] >= expected["met"] - 0.02


def test_the_table_has_every_family():
    assert measured().keys() == EXPECTED.keys()
