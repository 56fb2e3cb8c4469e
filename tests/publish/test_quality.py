"""Losses against numbers worked out by hand; a track's losses add up to its KL, and take few forward passes."""

import math

import pytest
import torch

from kvabr.publish.encoder import own_profile
from kvabr.publish.frames import FrameEncoder, MemoryFrames
from kvabr.publish.quality import measure_quality
from kvabr.publish.reference import Reference, compare
from kvabr.types.errors import ModelError
from tests.kvdata import related, spec
from tests.toymodel import SPEC, ToyModel, prompt


class Noise:
    """Tracks that add a given error to given groups: what a codec does, but known."""

    def __init__(self, exact, errors):
        self.exact, self.errors, self.calls = exact, errors, 0

    def decode(self, group, track, out):
        self.calls += 1
        first, last = SPEC.group_range(group, self.exact.shape[3])
        out.copy_(self.exact[:, :, :, first:last] * (1 + self.errors[track][group]))


@pytest.fixture(scope="module")
def setting():
    model, made = ToyModel(), prompt()
    exact = model.prefill(made.tokens)
    return Reference(model, exact, made.continuation), exact


def measure(setting, errors, **options):
    reference, exact = setting
    noise = Noise(exact, errors)
    return measure_quality(reference, (exact,), SPEC, list(errors), noise.decode, **options)


def test_the_first_tokens_are_measured_apart():
    torch.manual_seed(0)
    exact = torch.log_softmax(torch.randn(40, 20, dtype=torch.float64), dim=-1)
    other = torch.log_softmax(exact + torch.linspace(1, 0, 40)[:, None] * torch.randn(40, 20), dim=-1)
    rows = (exact.exp() * (exact - other)).sum(dim=1)
    quality = compare(exact, other, [0] * 40)
    wanted = [float(rows[:count].mean()) for count in (8, 32, 40)]
    assert [quality.kl8, quality.kl32, quality.kl] == pytest.approx(wanted)
    assert quality.loss == pytest.approx(sum(wanted) / 3)
    assert quality.loss > quality.kl
    short = compare(exact[:32], other[:32], [0] * 32)
    assert (short.kl32, short.loss) == (None, pytest.approx((short.kl + short.kl8) / 2))
    shorter = compare(exact[:8], other[:8], [0] * 8)
    assert (shorter.kl8, shorter.kl32, shorter.loss) == (None, None, shorter.kl)


def test_losses_add_up_and_go_where_the_damage_is(setting):
    errors = {"clean": [1e-4] * 5, "first": [0.2, 0, 0, 0, 0], "fourth": [0, 0, 0, 0.2, 0], "all": [0.2] * 5}
    measured = measure(setting, errors)
    for track, losses in measured.loss.items():
        assert sum(losses) == pytest.approx(measured.quality[track].loss)
        assert all(loss >= 0 for loss in losses)
    assert max(range(5), key=measured.loss["first"].__getitem__) == 0
    assert max(range(5), key=measured.loss["fourth"].__getitem__) == 3
    assert measured.loss["first"][0] > 0.98 * measured.quality["first"].loss
    # No group is free: one continuation that ignores it proves little.
    assert min(measured.loss["first"]) > 0


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


def test_a_reference_knows_its_own_cache():
    model, made = ToyModel(), prompt()
    cache = model.prefill(made.tokens)
    reference = Reference(model, cache, made.continuation)
    assert reference.measure(cache).kl == 0.0
    assert reference.measure(cache + 0.1).kl > 0.0
    assert reference.measure(None).kl > reference.measure(cache + 0.01).kl


def test_a_reference_knows_what_the_model_expected_and_what_the_text_cost():
    class Dice:
        """Says the same before every token: a half, a quarter, a quarter."""

        def score(self, kv, tokens):
            return torch.tensor([0.5, 0.25, 0.25], dtype=torch.float64).log().expand(len(tokens), 3)

    expected = 1.5 * math.log(2)
    assert Reference(Dice(), None, [2, 0, 0, 1, 2]).calibration() == pytest.approx((expected, expected))
    assert Reference(Dice(), None, [0, 1, 2]).calibration() == pytest.approx((2 * math.log(2), expected))


def test_passes_are_bounded_and_announced(setting):
    seen = []
    errors = {name: [0.1 + i / 100] * 5 for i, name in enumerate("abcdef")}
    measure(setting, errors, max_passes=12, progress=lambda *told: seen.append(told))
    # What is announced at first stays: a stage's total never changes.
    assert seen == [("measure", done, 6) for done in range(1, 7)] + [("groups", done, 10) for done in range(1, 11)]


SHAPE = spec(4, 2, 32, group_tokens=128)


@pytest.mark.parametrize("tokens", [1024, 1025, 1027])
def test_the_last_tokens_of_a_prompt_are_stored_finer_wherever_its_groups_end(tokens):
    kv = related(SHAPE, tokens, 3)
    frames = FrameEncoder(
        SHAPE,
        [f"{n:064x}" for n in range(-(-tokens // 128))],
        tokens,
        ["AC-L0"],
        own_profile(SHAPE, (kv,)),
        MemoryFrames(),
        finer_end=True,
    )
    frames.encode((kv,))
    out = torch.empty_like(kv)
    for unit in frames.units:
        frames.decode(unit.group, "AC-L0", out[:, :, :, unit.first : unit.first + unit.tokens])
    error = (out - kv).square().mean(dim=(0, 1, 2, 4)).sqrt()
    assert float(error[-4:].max()) < 0.02 * float(error.median())
