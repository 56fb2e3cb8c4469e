import numpy as np
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


def test_impossible_costs_and_timings_are_refused():
    for value in (
        {"constant_s": -1.0, "per_token_s": 1.0},
        {"constant_s": 0, "per_token_s": 0},
        {"nonsense": 1},
        {"constant_s": 0, "per_token_s": 1, "floor_s": float("nan")},
        {"constant_s": 0, "per_token_s": 1, "before_s": -1},
    ):
        with pytest.raises(FormatError):
            convert(value, PrefillCost, "prefill")
    with pytest.raises(UsageError, match="three"):
        PrefillCost.fit([(0, 1, 1.0), (0, 2, 2.0)])
    for wrong in ((-1, 1, 1.0), (0, 0, 1.0), (0, 1, 0.0), (0, 1, float("inf")), (0, 1, -1.0), (0, 1, float("nan"))):
        with pytest.raises(UsageError, match="timing"):
            PrefillCost.fit([wrong], PrefillCost(0.1, 0.2))
    for rate in (0, -1, 1e-300, float("nan"), float("inf")):
        with pytest.raises(UsageError, match="prefill rate must be at least 1e-100"):
            PrefillCost.from_rate(rate)
    assert PrefillCost(**PrefillCost(0.1, 0.2, 0.3).to_json()) == PrefillCost(0.1, 0.2, 0.3)


def test_the_objective_adds_loss_time_engine_and_lateness():
    prices = {"engine_s": 3.0, "time_price": 0.01, "gpu_price": 0.1}
    assert objective(0.2, 1.5, 2.0, met=True, **prices) == pytest.approx(0.2 + 0.015 + 0.3)
    assert objective(0.2, 3.0, 2.0, met=False, **prices) == pytest.approx(0.2 + 0.03 + 0.3 + MISS_PENALTY + 0.5)
    assert objective(0.2, 1.5, 2.0, met=True, engine_s=3.0, time_price=0.0, gpu_price=float("inf")) == 0.2


@given(
    *constants, st.floats(0, 1e-4), st.floats(0, 1.0), st.integers(0, 5000), st.integers(0, 5000), st.integers(0, 99)
)
def test_the_cost_behind_tokens_that_are_in_place(constant, linear, attention, uploads, floor, skipped, before, new):
    cost = PrefillCost(constant, linear, attention, uploads, floor)
    assert cost.after(skipped).seconds(before, new) == pytest.approx(cost.seconds(skipped + before, new))


GPU = [
    PrefillCost(0.004, 30e-6, 3e-10, floor_s=0.03),
    PrefillCost(0.004, 30e-6, 3e-10, 1.7e-6, 0.02),
    PrefillCost(0.018, 3e-7, 9e-11),
    PrefillCost(0.03, 2.3e-4, 3e-9, 1e-5),
]
SIZES = [(0, n) for n in (64, 128, 512, 1024, 2048, 4096, 16384)] + [(2048, 256), (16384, 512), (30000, 4000)]
ASKED = [(0, 1 << n) for n in range(7, 17)] + [(2048, 128), (60000, 128), (60000, 2048)]


@pytest.mark.parametrize("true", GPU)
def test_a_kink_and_uploads_are_found(true):
    found = PrefillCost.fit([(before, new, true.seconds(before, new)) for before, new in SIZES])
    for shape in ASKED:
        assert found.seconds(*shape) == pytest.approx(true.seconds(*shape), rel=1e-3)


@pytest.mark.parametrize("true", GPU)
def test_wild_timings_among_good_ones_count_little(true):
    rng = np.random.default_rng(0)
    rows = [(*size, true.seconds(*size) * factor) for size in SIZES for factor in rng.normal(1, 0.02, 3)]
    wild = [(0, 1024, 1e3), (0, 4096, 1e-7), (2048, 256, 30 * true.seconds(2048, 256))]
    found = PrefillCost.fit(rows + wild, true.scaled(1.2))
    for shape in ASKED:
        assert found.seconds(*shape) == pytest.approx(true.seconds(*shape), rel=0.05)


TIMINGS = st.lists(
    st.tuples(st.integers(0, 1 << 20), st.integers(1, 1 << 20), st.floats(1e-9, 1e9)), min_size=3, max_size=30
)
ANY = st.builds(PrefillCost, *(st.sampled_from([0.0, 1e-12, 1e-3, 1e50]) for _ in range(4)), st.floats(1e-9, 10.0))


@given(TIMINGS, st.one_of(st.none(), ANY, st.just(PrefillCost(0.0, 0.0, 0.0, 1e-9))))
def test_whatever_was_timed_has_a_cost(timings, prior):
    found = PrefillCost.fit(timings, prior)
    assert 0 < found.seconds(1000, 1000) < float("inf")


@pytest.mark.parametrize("most", [1024, 8192, 1 << 20])
def test_a_prompt_of_several_calls_costs_about_what_they_cost(most):
    cost = PrefillCost(0.004, 28e-6, 4.8e-10, 1.7e-6, 0.021)
    for tokens in (128, 5000, 32768):
        steps = [cost.seconds(at, min(most, tokens - at)) for at in range(0, tokens, most)]
        assert cost.in_steps(most).seconds(0, tokens) == pytest.approx(sum(steps), rel=0.1)
