import pytest

from kvabr.replay.report import verdict
from tests.replay.report_samples import result_of, run


def plays(policy, count=4, *, missed=0, **fields):
    return [run(policy, f"t{i}", met=i >= missed, **fields) for i in range(count)]


SAID = [
    (
        [*plays("cheapfirst", loss=0.0031), *plays("fixed:AC-5x", loss=0.0082)],
        "cheapfirst met the deadline in 4 of 4 plays, as often as the best fixed track (AC-5x), and lost 62 % less",
    ),
    (
        [*plays("rate", loss=0.004), *plays("fixed:FP8", loss=0.002, missed=3)],
        "in 4 of 4 plays, against 1 of 4 for the best fixed track (FP8), but lost 100 % more quality",
    ),
    (
        [*plays("mpc", loss=0.1, missed=1), *plays("fixed:Int4", loss=0.9)],
        "mpc met the deadline in 3 of 4 plays, against 4 of 4 for the best fixed track (Int4), and lost 89 %",
    ),
    (
        [*plays("rate", loss=0.01, missed=2), *plays("bola", loss=0.5), *plays("fixed:AC-5x")],
        "No adaptive policy beat the best fixed track here: AC-5x met the deadline in 4 of 4 plays",
    ),
    (
        [*plays("bola", loss=0.00801), *plays("fixed:AC-5x", loss=0.008)],
        "bola did as well as the best fixed track (AC-5x) and no better: both met the deadline",
    ),
    (
        [run("cheapfirst", loss=0.001), run("fixed:FP8", loss=0.002)],
        "cheapfirst met the deadline, as did the best fixed track (FP8), and lost 50 % less quality",
    ),
    (
        [*plays("bola", loss=1e-8), *plays("fixed:FP16", loss=1e-7, missed=2)],
        "neither lost any quality that could be measured",
    ),
    ([*plays("bola", loss=0.01205), *plays("fixed:FP16", loss=0.01235)], "0.0120 against 0.0123"),
    ([*plays("rate", loss=0.004), *plays("fixed:FP8"), run("rate", "extra", met=False)], "in 4 of 4 plays"),
    ([run("rate", "a", loss=0.001), run("fixed:FP8", "b", loss=0.004)], "they share none"),
]


@pytest.mark.parametrize(("runs", "words"), SAID)
def test_what_adapting_was_worth(runs, words):
    assert words in verdict(result_of(*runs))


def test_nothing_to_compare_with():
    for runs, words in (
        (plays("cheapfirst", loss=0.003), "lost 0.0030 nats per token; no fixed track was played"),
        (
            [*plays("bola", loss=0.02), *plays("cheapfirst", loss=0.003)],
            "its mean regret is 0.0030 against 0.020 for bola.",
        ),
        ([*plays("fixed:FP8"), *plays("fixed:Int4", loss=0.1)], "no adaptive policy was played"),
        ([], "Nothing was played."),
    ):
        assert words in verdict(result_of(*runs))


def test_infeasible_plays_are_set_apart_and_counted_once():
    hopeless = [run(policy, "dead", feasible=False, met=False) for policy in ("cheapfirst", "fixed:AC-5x")]
    played = [*plays("cheapfirst", loss=0.001), *plays("fixed:AC-5x", loss=0.002)]
    text = verdict(result_of(*played, *hopeless))
    assert "in 4 of 4 plays" in text
    assert text.endswith("; one more play is set apart because even the cheapest tracks could not arrive in time.")
    assert verdict(result_of(*hopeless)).startswith("In the only play, even the cheapest tracks could not arrive")


@pytest.mark.parametrize("told", ["oracle", "cachegen-oracle"])
def test_an_oracle_does_not_compete(told):
    runs = [*plays(told, loss=0.0), *plays("rate", loss=0.004), *plays("fixed:FP8", loss=0.008)]
    assert verdict(result_of(*runs)).startswith("rate met")


def test_a_play_that_was_given_up_is_worse_than_any():
    given_up = run("rate", "t1", met=False, ttft=None) | {"regret": None}
    runs = [run("rate", "t0"), given_up, *plays("fixed:FP8", 2)]
    text = verdict(result_of(*runs))
    assert text.startswith("No adaptive policy beat")
    assert "beyond measure" in text
