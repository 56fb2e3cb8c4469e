"""KL, change of NLL and top-1 agreement against numbers worked out by hand."""

from __future__ import annotations

import math

import pytest
import torch

from kvabr.publish.score import Reference, compare
from kvabr.types.errors import ModelError
from tests.toymodel import ToyModel, prompt


def logs(*rows):
    return torch.tensor(rows, dtype=torch.float64).log()


def test_two_outcomes_by_hand():
    exact, other = logs((0.5, 0.5), (0.9, 0.1), (0.2, 0.8)), logs((0.5, 0.5), (0.6, 0.4), (0.8, 0.2))
    quality = compare(exact, other, [0, 1, 0])
    second = 0.9 * math.log(0.9 / 0.6) + 0.1 * math.log(0.1 / 0.4)
    third = 0.2 * math.log(0.2 / 0.8) + 0.8 * math.log(0.8 / 0.2)
    assert quality.kl == pytest.approx((second + third) / 3)
    # Row 0 says how likely token 1 was (the same), row 1 how likely token 0 was (0.9, then 0.6).
    assert quality.dnll == pytest.approx((0.0 + math.log(0.9 / 0.6)) / 2)
    assert quality.top1 == pytest.approx(2 / 3)


@pytest.mark.parametrize("where", [0, 1])
def test_what_is_not_finite_is_no_loss_of_nothing(where):
    runs = [logs((0.5, 0.5), (0.9, 0.1)), logs((0.5, 0.5), (0.6, 0.4))]
    runs[where][1] = float("nan")
    with pytest.raises(ModelError, match="NaN"):
        compare(*runs, [0, 1])


def test_equal_runs_lose_nothing():
    some = torch.log_softmax(torch.randn(40, 300, dtype=torch.float64), dim=-1)
    assert compare(some, some.clone(), list(range(40))) == compare(some, some, list(range(40)))
    assert compare(some, some, list(range(40))).kl == 0.0


def test_kl_is_that_of_torch_for_any_number_of_rows():
    for rows in (2, 15, 16, 17, 33):
        exact = torch.log_softmax(torch.randn(rows, 50, dtype=torch.float64), dim=-1)
        other = torch.log_softmax(torch.randn(rows, 50, dtype=torch.float64), dim=-1)
        wanted = torch.nn.functional.kl_div(other, exact, reduction="batchmean", log_target=True)
        assert compare(exact, other, [0] * rows).kl == pytest.approx(float(wanted))


def test_a_reference_knows_its_own_cache():
    model, made = ToyModel(), prompt()
    cache = model.prefill(made.tokens)
    reference = Reference(model, cache, made.continuation)
    assert reference.measure(cache).kl == 0.0
    assert reference.measure(cache + 0.1).kl > 0.0
    assert reference.measure(None).kl > reference.measure(cache + 0.01).kl


def test_a_continuation_of_one_token_measures_nothing():
    with pytest.raises(ModelError, match="at least 2"):
        Reference(ToyModel(), None, [1])
