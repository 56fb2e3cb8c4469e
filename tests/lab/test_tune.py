import json
import random
from dataclasses import replace

import pytest

from kvabr.types.errors import UsageError
from kvabr_lab.cli.tune import as_json
from kvabr_lab.results_folder import PlayStore
from kvabr_lab.tune import Search, tune
from tests.lab.matrices import matrix, traces, tuned
from tests.replay.worlds import world

pytestmark = pytest.mark.slow

QUICK = Search(points=4, rounds=1, near=2)


def walks():
    """Four families of three links that wander, each family by another pace."""
    dice, found = random.Random(8), []
    for family, pace in (("idle", 0.02), ("slow", 0.05), ("brisk", 0.08), ("quick", 0.12)):
        for number in range(3):
            rates, level = [], 1e6
            for _ in range(80):
                level = min(4e6, max(2e5, level * dice.lognormvariate(0.0, pace)))
                rates.append(level)
            found.append(replace(world(f"{family}{number}", rates), family=family))
    return tuple(found)


def search(folder, policy, what=None, options=QUICK):
    with PlayStore(folder) as store:
        return tune(policy, what or matrix(loads=(0.25,), starts=3), store, options, jobs=1)


def test_a_bad_default_is_found_out_and_the_gain_holds_where_it_was_not_sought(tmp_path):
    mine = tuned(tmp_path, default=0.1)  # never dares to ask for more than the cheapest track
    found = search(tmp_path / "out", mine, matrix(loads=(0.25,), traces=walks(), starts=1))
    assert found.won
    assert found.gain.low > 0
    assert found.held_out_regret < found.default_regret
    assert found.values(found.chosen)["caution"] > 0.3
    assert mine in found.chosen
    assert "Tuning won" in found.verdict()
    for fold in found.folds:
        assert fold.default_outside >= 0
    json.dumps(as_json(found), allow_nan=False)


def test_a_fold_never_sees_what_it_holds_out(tmp_path):
    """The choice for a family is the same when that family's links are replaced by others."""
    mine = tuned(tmp_path)
    first = search(tmp_path / "a", mine)
    others = tuple(trace.scaled(0.3) if trace.family == "rough" else trace for trace in traces())
    dice = random.Random(1)
    others = tuple(
        type(trace)(trace.name, trace.family, trace.times, tuple(dice.choice(trace.rates) + 1 for _ in trace.rates),
                    trace.duration_s) if trace.family == "rough" else trace
        for trace in others
    )  # fmt: skip
    second = search(tmp_path / "b", mine, matrix(loads=(0.25,), starts=3, traces=others))
    chosen = [next(fold.chosen for fold in found.folds if fold.held_out == "rough") for found in (first, second)]
    assert chosen[0] == chosen[1]
    assert first.folds != second.folds


def test_the_same_seed_finds_the_same_and_plays_nothing_again(tmp_path):
    mine = tuned(tmp_path)
    first = search(tmp_path / "out", mine)
    again = search(tmp_path / "out", mine)
    assert again == first
    other = search(tmp_path / "out", mine, options=Search(points=4, rounds=1, near=2, seed=5))
    assert {fold.chosen for fold in other.folds} != {fold.chosen for fold in first.folds}


def test_what_cannot_be_tuned_is_refused(tmp_path):
    with pytest.raises(UsageError, match="declares no parameters"):
        search(tmp_path, "cachegen")
    calm = tuple(trace for trace in traces() if trace.family == "calm")
    with pytest.raises(UsageError, match="two families"):
        search(tmp_path, tuned(tmp_path), matrix(traces=calm))
    for options in ({"points": 0}, {"rounds": -1}, {"near": 0}, {"points": 5000}):
        with pytest.raises(UsageError):
            Search(**options)


def test_families_that_nobody_can_play_are_left_out_and_said_so(tmp_path):
    dead = replace(world("dead", [1.0] * 4 + [0.0] * 4000 + [4e6]), family="dead")
    mine = tuned(tmp_path)
    found = search(tmp_path / "out", mine, matrix(loads=(0.25,), traces=(*walks(), dead), starts=1))
    assert found.left_out == ("dead",)
    assert "dead" not in {fold.held_out for fold in found.folds}
    alone = search(tmp_path / "out", mine, matrix(loads=(0.25,), traces=walks(), starts=1))
    assert alone.folds == found.folds
    assert (alone.gain, alone.held_out_regret) == (found.gain, found.held_out_regret)
    with pytest.raises(UsageError, match="no play over dead is feasible: give less load"):
        search(tmp_path / "out", mine, matrix(loads=(0.25,), traces=(walks()[0], dead), starts=1))
