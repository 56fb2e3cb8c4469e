"""Valid and invalid profiles; histograms to tables; machines without the extension."""

from __future__ import annotations

import importlib
import sys
import warnings
from dataclasses import fields, replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvabr.codec import native
from kvabr.codec.native import coder
from kvabr.codec.native.model import TOTAL, CoderModel, StackModel, SynthesisModel, frequencies
from kvabr.types.errors import FormatError, UsageError
from tests.codec.native.models import case, coder_model, synthesis_model


def parts(model: CoderModel) -> dict[str, np.ndarray]:
    return {each.name: getattr(model, each.name).copy() for each in fields(model) if each.init}


def test_a_good_model_is_taken_and_kept_from_change() -> None:
    given_parts = parts(coder_model(np.random.default_rng(0), 100, refines=True))
    model = CoderModel(**given_parts)
    given_parts["freqs"][:] = 0
    assert int(model.freqs.sum()) == model.classes * model.contexts * TOTAL
    with pytest.raises(ValueError, match="read-only"):
        model.freqs[0] = 0


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("row_class", lambda a: np.full_like(a, 200)),
        ("row_class", lambda a: a.astype(np.int64)),
        ("row_class", lambda a: a[:0]),
        ("row_class", lambda a: a.reshape(1, -1)),
        ("radius", lambda a: np.full_like(a, 127)),
        ("radius", lambda a: np.full_like(a, 255)),
        ("radius", lambda a: a + 1),
        ("radius", lambda a: a[:0]),
        ("freqs", lambda a: a + 1),
        ("freqs", np.zeros_like),
        ("freqs", lambda a: a[:, :2]),
        ("freqs", lambda a: a[..., ::-1].copy()),
        ("freqs", lambda a: np.concatenate([a, np.zeros_like(a)], axis=2)),
        ("flag_freq", np.zeros_like),
        ("flag_freq", lambda a: np.full_like(a, 4096)),
        ("flag_freq", lambda a: a[:1]),
        ("flag_freq", lambda a: a[:, :-1]),
        ("delta", lambda a: a + 8),
        ("delta", lambda a: a[:-1]),
        ("delta", lambda a: a.tolist()),
    ],
)
def test_tables_that_are_none_are_refused(name: str, change) -> None:
    good = parts(coder_model(np.random.default_rng(5), 100, refines=True))
    with pytest.raises(FormatError, match="profile"):
        CoderModel(**{**good, name: change(good[name])})


def test_a_symbol_with_all_the_probability_is_refused() -> None:
    good = parts(coder_model(np.random.default_rng(5), 10, refines=False))
    good["freqs"][:] = 0
    good["freqs"][:, :, 2 * int(good["radius"][0]) + 1] = TOTAL
    with pytest.raises(FormatError):
        CoderModel(**good)


def _with_stack(s: SynthesisModel, **changes) -> SynthesisModel:
    return replace(s, stacks=(replace(s.stacks[0], **changes), *s.stacks[1:]))


@pytest.mark.parametrize(
    "change",
    [
        lambda s: replace(s, layers=s.layers + 1),
        lambda s: replace(s, layers=10**9),
        lambda s: replace(s, head_dim=4096, kv_heads=4096, layers=4096),
        lambda s: replace(s, head_dim=0),
        lambda s: replace(s, block_heads=s.kv_heads + 1),
        lambda s: replace(s, block_gain=None),
        lambda s: replace(s, block_gain=s.block_gain[:, :1]),
        lambda s: replace(s, block_mantissa=s.block_mantissa.astype(np.int16)),
        lambda s: replace(s, mean=s.mean * np.float32(np.inf)),
        lambda s: replace(s, mean=s.mean[:, :1]),
        lambda s: replace(s, norm=-s.norm),
        lambda s: replace(s, norm=s.norm * np.float32(np.nan)),
        lambda s: replace(s, norm=s.norm * np.float32(1e30)),
        lambda s: replace(s, stacks=s.stacks[1:]),
        lambda s: replace(s, stacks=(*s.stacks, s.stacks[0])),
        lambda s: replace(s, stacks=()),
        lambda s: _with_stack(s, layers=(s.layers,)),
        lambda s: _with_stack(s, layers=(-1,)),
        lambda s: _with_stack(s, layers=()),
        lambda s: _with_stack(s, kv=2),
        lambda s: _with_stack(s, kept=3),
        lambda s: _with_stack(s, kept=-2),
        lambda s: _with_stack(s, kept=2 * s.width),
        lambda s: _with_stack(s, mantissa=s.stacks[0].mantissa[1:]),
        lambda s: _with_stack(s, gain=s.stacks[0].gain[1:]),
        lambda s: _with_stack(s, gain=s.stacks[0].gain.astype(np.int64)),
    ],
)
def test_syntheses_that_are_none_are_refused(change) -> None:
    seeds = (synthesis_model(np.random.default_rng(seed)) for seed in range(100))
    good = next(s for s in seeds if s.block_gain is not None and s.stacks[0].size and s.kv_heads > 1)
    with pytest.raises(FormatError):
        change(good)


@pytest.mark.parametrize("step", [0.0, -1.0, float("nan"), float("inf"), 1e30])
def test_steps_that_are_none_are_refused(step: float) -> None:
    with pytest.raises(FormatError):
        synthesis_model(np.random.default_rng(0)).scale(step)


def test_a_stack_may_leave_layers_out() -> None:
    """A layer in the middle without a transform is a stack of its own that keeps nothing."""
    dice = np.random.default_rng(0)
    empty = StackModel(0, (1,), 0, np.empty((0, 0), np.int8), np.empty(0, np.uint8))
    whole = [StackModel(kv, (0, 2), 2, np.eye(4, dtype=np.int8), np.ones(4, np.uint8)) for kv in (0, 1)]
    stacks = (whole[0], empty, whole[1], replace(empty, kv=1))
    mean, norm = np.zeros((3, 2, 1, 4), np.float32), np.ones((3, 2), np.float32)
    s = SynthesisModel(3, 1, 4, None, 1, None, None, stacks, mean, norm)
    assert s.trailing_rows(0) == slice(4, 8)
    z = dice.integers(-9, 9, (s.rows, 5)).astype(np.int16)
    out = torch.empty(3, 2, 1, 5, 4)
    coder.synthesise(s, z, 16.0, 0, out)
    assert torch.equal(out[1, 0, 0].T, torch.from_numpy(z[8:12].astype(np.float32)))


@settings(max_examples=60, deadline=None)
@given(st.lists(st.one_of(st.just(0), st.floats(0, 1e9), st.floats(0, 1e-3)), min_size=2, max_size=254))
def test_histograms_become_tables(counts: list[float]) -> None:
    table = frequencies(np.array(counts)).astype(int)
    assert table.sum() == TOTAL
    assert table[-1] >= 1
    assert table.max() < TOTAL
    assert all(table[n] >= 1 for n, count in enumerate(counts[:-1]) if count > 0)
    if any(counts[:-1]):
        assert all(table[n] == 0 for n, count in enumerate(counts[:-1]) if count == 0)


def test_tables_lose_next_to_nothing() -> None:
    counts = np.random.default_rng(0).random(40) ** 6 * 1e6
    share = counts / counts.sum()
    table = frequencies(counts) / TOTAL
    assert -(share * np.log2(table)).sum() < -(share * np.log2(share)).sum() * 1.001


def test_a_path_that_is_not_there_is_an_error(use) -> None:
    use("mmx")
    with pytest.raises(UsageError, match="mmx"):
        coder.active_path()


def test_without_the_extension_it_works_and_says_so_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(coder.VARIABLE, raising=False)
    it = case(7, small=True, depths=1)
    there = coder.encode_indices(it.models[0], it.indices[0])
    monkeypatch.setattr(coder, "_kvcoder", None)
    monkeypatch.setattr(coder, "_warned", False)
    with pytest.warns(RuntimeWarning, match="slower"):
        coded = coder.encode_indices(it.models[0], it.indices[0])
    assert coded == there
    assert coder.available_paths() == ("reference",)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        coder.encode_indices(it.models[0], it.indices[0])


def test_a_big_endian_machine_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "byteorder", "big")
    with pytest.raises(ImportError, match="little-endian"):
        importlib.reload(native)
