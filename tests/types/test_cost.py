import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvabr.types.cost import MISS_PENALTY, PrefillCost, objective
from kvabr.types.errors import FormatError, UsageError
from kvabr.types.records import convert

SHAPES = [(0, 16), (0, 128), (0, 1024), (1024, 128), (4096, 128), (4096, 1024)]
constants = st.floats(0, 0.1), st.floats(1e-6, 1e-2), st.floats(0, 1e-6)


@given(*constants)
def test_fit_finds_the_constants_that_made_the_timings(constant, linear, attention):
    made = PrefillCost(constant, linear, attention)
    found = PrefillCost.fit([(before, new, made.seconds(before, new)) for before, new in SHAPES])
    for before, new in [*SHAPES, (2048, 256), (0, 4096)]:
        assert found.seconds(before, new) == pytest.approx(made.seconds(before, new), rel=1e-4, abs=1e-9)


def test_fit_of_noisy_timings_is_close_and_never_negative():
    made = PrefillCost(0.01, 2e-3, 1e-8)
    noise = [1.1, 0.9, 1.05, 0.97, 1.02, 0.95]
    found = PrefillCost.fit([(b, n, made.seconds(b, n) * k) for (b, n), k in zip(SHAPES, noise, strict=True)])
    assert min(found.constant_s, found.per_token_s, found.attention_s) >= 0
    assert found.seconds(2048, 512) == pytest.approx(made.seconds(2048, 512), rel=0.15)


@given(*constants, st.integers(0, 5000), st.integers(1, 5000), st.integers(1, 5000))
def test_two_halves_cost_what_the_whole_does_and_one_constant_more(constant, linear, attention, before, one, two):
    cost = PrefillCost(constant, linear, attention)
    parts = cost.seconds(before, one) + cost.seconds(before + one, two)
    assert parts == pytest.approx(cost.seconds(before, one + two) + constant)


def test_no_tokens_cost_nothing_and_a_rate_is_linear():
    assert PrefillCost(1.0, 1.0).seconds(5, 0) == 0.0
    assert PrefillCost.from_rate(500).seconds(1000, 250) == pytest.approx(0.5)


@pytest.mark.parametrize("rate", [0, -1, float("nan"), float("inf")])
def test_impossible_rates_are_refused(rate):
    with pytest.raises(UsageError, match=r"rate|per_second"):
        PrefillCost.from_rate(rate)


def test_impossible_costs_and_timings_are_refused():
    for value in ({"constant_s": -1.0, "per_token_s": 1.0}, {"constant_s": 0, "per_token_s": 0}, {"nonsense": 1}):
        with pytest.raises(FormatError):
            convert(value, PrefillCost, "prefill")
    with pytest.raises(UsageError, match="three"):
        PrefillCost.fit([(0, 1, 1.0), (0, 2, 2.0)])
    assert PrefillCost(**PrefillCost(0.1, 0.2, 0.3).to_json()) == PrefillCost(0.1, 0.2, 0.3)


def test_the_objective_adds_loss_time_engine_and_lateness():
    prices = {"engine_s": 3.0, "time_price": 0.01, "gpu_price": 0.1}
    assert objective(0.2, 1.5, 2.0, met=True, **prices) == pytest.approx(0.2 + 0.015 + 0.3)
    assert objective(0.2, 3.0, 2.0, met=False, **prices) == pytest.approx(0.2 + 0.03 + 0.3 + MISS_PENALTY + 0.5)
    assert objective(0.2, 1.5, 2.0, met=True, engine_s=3.0, time_price=0.0, gpu_price=float("inf")) == 0.2


def test_the_cost_behind_tokens_that_are_in_place():
    cost = PrefillCost(0.5, 0.01, 1e-4)
    assert cost.behind(100).seconds(30, 7) == pytest.approx(cost.seconds(130, 7))
