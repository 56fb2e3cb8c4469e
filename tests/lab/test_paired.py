import json
import random
from dataclasses import replace

import numpy as np
import pytest

from kvabr.types.errors import UsageError
from kvabr_lab.cli.tune import as_json
from kvabr_lab.paired import Bootstrap, compare
from kvabr_lab.results_folder import PlayStore
from kvabr_lab.tune import Search, tune
from tests.lab.matrices import matrix, traces, tuned
from tests.replay.worlds import world


def plays(traces=30, each=6):
    return [f"t{trace}" for trace in range(traces) for _ in range(each)]


def noisy(names, dice, *, level, spread=0.01, trace_spread=0.02):
    """Regrets with noise that is partly common to a trace, like a link's."""
    common = {}
    return [level + common.setdefault(name, dice.gauss(0, trace_spread)) + dice.gauss(0, spread) for name in names]


def test_a_clear_winner_is_told_apart_and_twins_are_not():
    names, dice = plays(), random.Random(1)
    good = noisy(names, dice, level=0.1)
    found = compare({"bad": noisy(names, dice, level=0.3), "good": good, "twin": [x + 1e-12 for x in good]}, names)
    assert [row.policy for row in found.ranking] == ["good", "twin", "bad"]
    assert [row.place for row in found.ranking] == [1, 1, 3]
    assert found.ranking[0].like == ("twin",)
    assert found.ranking[2].like == ()
    pair = found.versus("good", "bad")
    assert pair.apart
    assert pair.difference.mean == pytest.approx(-0.2, abs=0.02)
    assert pair.difference.low < pair.difference.mean < pair.difference.high < 0
    assert pair.wins == 1.0
    turned = found.versus("bad", "good")
    assert turned.difference.mean == -pair.difference.mean
    assert (turned.difference.low, turned.difference.high) == (-pair.difference.high, -pair.difference.low)
    assert (turned.wins, turned.losses) == (pair.losses, pair.wins)
    twins = found.versus("good", "twin")
    assert not twins.apart
    assert twins.wins == twins.losses == 0.0
    assert (found.plays, found.traces) == (180, 30)


def test_pairing_sees_what_means_alone_would_not():
    """The links differ far more than the policies do: side by side the difference is plain all the same."""
    names, dice = plays(), random.Random(2)
    one = noisy(names, dice, level=0.5, trace_spread=0.3)
    two = [value + 0.01 + dice.gauss(0, 0.005) for value in one]
    found = compare({"one": one, "two": two}, names)
    assert found.ranking[0].regret.high > found.ranking[1].regret.low
    assert found.versus("one", "two").apart


def test_better_on_every_trace_is_told_apart_though_rare_misses_make_the_mean_uncertain():
    """One policy is a little better everywhere; where the link fails it is much better, and that is seldom."""
    names, dice = plays(60, 2), random.Random(6)
    good = [0.001 * dice.random() for _ in names]
    bad = [value + (0.9 if number in {7, 31} else 0.002) for number, value in enumerate(good)]
    found = compare({"good": good, "bad": bad, **{f"far{i}": [3.0 + i + x for x in good] for i in range(8)}}, names)
    pair = found.versus("good", "bad")
    assert pair.apart
    assert pair.wins == 1.0
    assert pair.chance < 0.01
    # The other way round: better nearly everywhere, but much worse now and then, is not told to be better.
    rare = [value + (0.9 if number in {7, 31} else -0.0005) for number, value in enumerate(good)]
    assert not compare({"good": good, "rare": rare}, names).versus("good", "rare").apart


def test_plays_of_one_trace_do_not_count_as_independent():
    """Ten traces played a hundred times each are ten pieces of evidence, not a thousand."""
    dice = random.Random(3)
    names = [f"t{trace}" for trace in range(10) for _ in range(100)]
    values = np.array(noisy(names, dice, level=0.1, spread=0.001))
    clustered = Bootstrap(names).interval(values)
    single = Bootstrap([str(number) for number in range(1000)]).interval(values)
    assert clustered.high - clustered.low > 5 * (single.high - single.low)
    assert clustered.low <= clustered.mean <= clustered.high


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


@pytest.mark.slow
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


@pytest.mark.slow
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


@pytest.mark.slow
def test_what_cannot_be_tuned_is_refused(tmp_path):
    with pytest.raises(UsageError, match="has no parameters"):
        search(tmp_path, "cachegen")
    calm = tuple(trace for trace in traces() if trace.family == "calm")
    with pytest.raises(UsageError, match="two families"):
        search(tmp_path, tuned(tmp_path), matrix(traces=calm))
    for options in ({"points": 0}, {"rounds": -1}, {"near": 0}, {"points": 5000}):
        with pytest.raises(UsageError):
            Search(**options)


@pytest.mark.slow
def test_families_that_nobody_can_play_are_left_out_and_said_so(tmp_path):
    dead = replace(world("dead", [1.0] * 4 + [0.0] * 4000 + [4e6]), family="dead")
    mine = tuned(tmp_path)
    found = search(tmp_path / "out", mine, matrix(loads=(0.25,), traces=(*walks(), dead), starts=1))
    assert found.left_out == ("dead",)
    assert "dead" not in {fold.held_out for fold in found.folds}
    alone = search(tmp_path / "out", mine, matrix(loads=(0.25,), traces=walks(), starts=1))
    assert alone.folds == found.folds
    assert (alone.gain, alone.held_out_regret) == (found.gain, found.held_out_regret)
    with pytest.raises(UsageError, match="no play over dead is feasible: give a lower load"):
        search(tmp_path / "out", mine, matrix(loads=(0.25,), traces=(walks()[0], dead), starts=1))
