import pytest

from kvabr.replay.report import verdict
from tests.replay.report_samples import result_of, run, sample


def plays(policy, count=4, *, missed=0, **fields):
    return [run(policy, f"t{i}", met=i >= missed, **fields) for i in range(count)]


def test_adapting_won_quality_at_equal_hits():
    text = verdict(result_of(*plays("cheapfirst", loss=0.0031), *plays("fixed:AC-5x", loss=0.0082)))
    assert text == (
        "cheapfirst met the deadline in 4 of 4 plays, as often as the best fixed track (AC-5x), and lost 62 % less "
        "quality: 0.0031 against 0.0082 nats per token."
    )


def test_adapting_won_the_deadline_at_the_price_of_quality():
    text = verdict(result_of(*plays("rate", loss=0.004), *plays("fixed:FP8", loss=0.002, missed=3)))
    assert "in 4 of 4 plays, against 1 of 4 for the best fixed track (FP8), but lost 100 % more quality" in text
    assert "mean regret is 0.0040 against 0.38" in text


def test_adapting_missed_more_but_saved_more():
    text = verdict(result_of(*plays("mpc", loss=0.1, missed=1), *plays("fixed:Int4", loss=0.9)))
    assert "mpc met the deadline in 3 of 4 plays, against 4 of 4 for the best fixed track (Int4), and lost 89 %" in text
    assert "mean regret is 0.23 against 0.90" in text


def test_adapting_lost():
    text = verdict(result_of(*plays("rate", loss=0.01, missed=2), *plays("bola", loss=0.5), *plays("fixed:AC-5x")))
    assert text.startswith("No adaptive policy beat the best fixed track here: AC-5x met the deadline in 4 of 4 plays")
    assert "the best adaptive one, rate, met the deadline in 2 of 4 plays" in text


def test_a_tie_is_called_one():
    text = verdict(result_of(*plays("bola", loss=0.00801), *plays("fixed:AC-5x", loss=0.008)))
    assert text.startswith("bola did as well as the best fixed track (AC-5x) and no better: both met the deadline")


def test_a_single_play_is_told_in_the_singular():
    text = verdict(result_of(run("cheapfirst", loss=0.001), run("fixed:FP8", loss=0.002)))
    assert text.startswith("cheapfirst met the deadline, as did the best fixed track (FP8), and lost 50 % less quality")


def test_loss_too_small_to_measure_is_not_a_percentage():
    text = verdict(result_of(*plays("bola", loss=1e-8), *plays("fixed:FP16", loss=1e-7, missed=2)))
    assert "neither lost any quality that could be measured" in text
    assert "%" not in text


def test_losses_that_round_alike_are_told_apart():
    text = verdict(result_of(*plays("bola", loss=0.01205), *plays("fixed:FP16", loss=0.01235)))
    assert "0.0120 against 0.0123" in text


def test_nothing_to_compare_with():
    alone = verdict(result_of(*plays("cheapfirst", loss=0.003)))
    assert alone == (
        "cheapfirst met the deadline in 4 of 4 plays and lost 0.0030 nats per token; "
        "no fixed track was played to compare it with."
    )
    two = verdict(result_of(*plays("bola", loss=0.02), *plays("cheapfirst", loss=0.003)))
    assert two == (
        "cheapfirst, the best of 2 policies, met the deadline in 4 of 4 plays and lost 0.0030 nats per token; "
        "its mean regret is 0.0030 against 0.020 for bola."
    )
    fixed = verdict(result_of(*plays("fixed:FP8"), *plays("fixed:Int4", loss=0.1)))
    assert fixed.startswith("fixed:FP8, the best of 2 policies, met the deadline in 4 of 4 plays")
    assert "no adaptive policy was played" in fixed
    assert verdict(result_of()) == "Nothing was played."


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


def test_only_shared_plays_are_compared():
    runs = [*plays("rate", loss=0.004), *plays("fixed:FP8", loss=0.008), run("rate", "extra", met=False)]
    assert "rate met the deadline in 4 of 4 plays" in verdict(result_of(*runs))
    apart = verdict(result_of(run("rate", "a", loss=0.001), run("fixed:FP8", "b", loss=0.004)))
    assert "they share none" in apart


def test_a_play_that_was_given_up_is_worse_than_any():
    given_up = run("rate", "t1", met=False, ttft=None) | {"regret": None}
    runs = [run("rate", "t0"), given_up, *plays("fixed:FP8", 2)]
    text = verdict(result_of(*runs))
    assert text.startswith("No adaptive policy beat")
    assert "beyond measure" in text


@pytest.mark.parametrize("policies", [("cheapfirst", "fixed:AC-5x"), ("rate", "fixed:Int8"), ("bola",)])
def test_a_real_replay_gets_one_sentence(policies):
    result, _ = sample()
    result["runs"] = [line for line in result["runs"] if line["policy"] in policies]
    text = verdict(result)
    assert "\n" not in text
    assert text.endswith(".")
    assert any(policy.removeprefix("fixed:") in text for policy in policies)
