"""Valid and invalid profiles; histograms to tables; machines without the extension."""

from dataclasses import fields, replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvabr.codec import analysis
from kvabr.codec.analysis import Analysis
from kvabr.codec.native import coder
from kvabr.codec.native.coder_model import TOTAL, CoderModel, frequencies
from kvabr.codec.transform import Matrices, Structure, Transform
from kvabr.types.errors import FormatError, UsageError
from tests.codec.native.models import case, coder_model, random_transform
from tests.examples import examples


def parts(model: CoderModel) -> dict[str, np.ndarray]:
    return {each.name: getattr(model, each.name).copy() for each in fields(model) if each.init and each.name != "near"}


def test_a_good_model_is_taken_and_kept_from_change() -> None:
    given_parts = parts(coder_model(np.random.default_rng(0), 100, refines=True))
    model = CoderModel(**given_parts)
    given_parts["freqs"][:] = 0
    assert int(model.freqs.sum()) == model.classes * model.contexts * TOTAL
    with pytest.raises(ValueError, match="read-only"):
        model.freqs[0] = 0


def _certain(freqs: np.ndarray) -> np.ndarray:
    """Return tables that give one symbol all the probability."""
    return (freqs == freqs.max(axis=2, keepdims=True)) * np.uint16(TOTAL)


@pytest.mark.parametrize(
    ("name", "change"),
    [
        *(("row_class", change) for change in (
            lambda a: np.full_like(a, 200), lambda a: a.astype(np.int64), lambda a: a[:0], lambda a: a.reshape(1, -1),
        )),
        *(("radius", change) for change in (
            lambda a: np.full_like(a, 127), lambda a: np.full_like(a, 255), lambda a: a + 1, lambda a: a[:0],
        )),
        *(("freqs", change) for change in (
            lambda a: a + 1, np.zeros_like, _certain, lambda a: a[:, :2], lambda a: a[..., ::-1].copy(),
            lambda a: np.concatenate([a, np.zeros_like(a)], axis=2),
        )),
        *(("flag_freq", change) for change in (
            np.zeros_like, lambda a: np.full_like(a, 4096), lambda a: a[:1], lambda a: a[:, :-1],
        )),
        *(("delta", change) for change in (lambda a: a + 8, lambda a: a[:-1], lambda a: a.tolist())),
    ],
)  # fmt: skip
def test_tables_that_are_none_are_refused(name: str, change) -> None:
    good = parts(coder_model(np.random.default_rng(5), 100, refines=True))
    with pytest.raises(FormatError, match="profile"):
        CoderModel(**{**good, name: change(good[name])})


def _with_stack(s: Structure, **changes) -> Structure:
    return replace(s, stacks=(replace(s.stacks[0], **changes), *s.stacks[1:]))


GOOD = next(
    made
    for made in (random_transform(np.random.default_rng(seed)) for seed in range(100))
    if made.block is not None and made.stack[0].gain.size and made.structure.spec.kv_heads > 1
)


@pytest.mark.parametrize(
    "change",
    [
        lambda s: replace(s, spec=s.spec.changed(layers=tuple(range(s.spec.layers + 1)))),
        lambda s: replace(
            s, spec=s.spec.changed(k_dim=4096, v_dim=4096, heads=1024, layers=tuple(range(1024)), rope=None)
        ),
        lambda s: replace(s, block_heads=0),
        lambda s: replace(s, block_heads=s.spec.kv_heads + 1),
        lambda s: replace(s, stacks=s.stacks[1:]),
        lambda s: replace(s, stacks=(*s.stacks, s.stacks[0])),
        lambda s: replace(s, stacks=()),
        lambda s: _with_stack(s, first=s.spec.layers),
        lambda s: _with_stack(s, first=-1),
        lambda s: _with_stack(s, last=s.stacks[0].first),
        lambda s: _with_stack(s, kind=2),
        lambda s: _with_stack(s, kept=3),
        lambda s: _with_stack(s, kept=-2),
        lambda s: _with_stack(s, kept=2 * s.width),
    ],
)
def test_structures_that_are_none_are_refused(change) -> None:
    with pytest.raises(FormatError):
        change(GOOD.structure)


def _with_matrix(t: Transform, mantissa, gain) -> Transform:
    return replace(t, stack=(Matrices(mantissa, gain), *t.stack[1:]))


@pytest.mark.parametrize(
    "change",
    [
        *(lambda t, step=step: t.scale(step) for step in (0.0, -1.0, float("nan"), float("inf"), 1e30)),
        lambda t: replace(t, block=Matrices(t.block.mantissa, t.block.gain[:, :1])),
        lambda t: replace(t, block=Matrices(t.block.mantissa.astype(np.int16), t.block.gain)),
        lambda t: replace(t, mean=t.mean * np.float16(np.inf)),
        lambda t: replace(t, mean=t.mean[:, :1]),
        lambda t: replace(t, norm=-t.norm),
        lambda t: replace(t, norm=t.norm * np.float32(np.nan)),
        lambda t: replace(t, norm=t.norm * np.float32(1e30)),
        lambda t: replace(t, spread=-t.spread),
        lambda t: replace(t, stack=t.stack[1:]),
        lambda t: _with_matrix(t, t.stack[0].mantissa[1:], t.stack[0].gain),
        lambda t: _with_matrix(t, t.stack[0].mantissa, t.stack[0].gain[1:]),
        lambda t: _with_matrix(t, t.stack[0].mantissa, t.stack[0].gain.astype(np.int64)),
    ],
)
def test_transforms_that_are_none_are_refused(change) -> None:
    with pytest.raises(FormatError):
        change(GOOD)


@examples(60)
@given(st.lists(st.one_of(st.just(0), st.floats(0, 1e9), st.floats(0, 1e-3)), min_size=2, max_size=254))
def test_histograms_become_tables(counts: list[float]) -> None:
    table = frequencies(np.array(counts)).astype(int)
    assert table.sum() == TOTAL
    assert table[-1] >= 1
    assert table.max() < TOTAL
    assert all(table[n] >= 1 for n, count in enumerate(counts[:-1]) if count > 0)
    if any(counts[:-1]):
        assert all(table[n] == 0 for n, count in enumerate(counts[:-1]) if count == 0)


def test_a_path_that_is_not_there_is_an_error(use) -> None:
    use("mmx")
    with pytest.raises(UsageError, match="mmx"):
        coder.active_path()


def test_without_the_extension_it_is_an_error_that_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    it = case(7, small=True, depths=1)
    payload = coder.encode_indices(it.models[0], it.indices[0])
    monkeypatch.setattr(coder, "_kvcoder", None)
    for use in (
        coder.available_paths,
        coder.active_path,
        lambda: coder.encode_indices(it.models[0], it.indices[0]),
        lambda: coder.decode(it.job([payload], 1.0, 0, torch.empty(it.shape()))),
        lambda: coder.gather([payload], [1], [0], it.rows, None),
    ):
        with pytest.raises(UsageError, match="native coder is missing"):
            use()
    monkeypatch.setattr(analysis, "_kvanalysis", None)
    with pytest.raises(UsageError, match="native coder is missing"):
        Analysis(it.transform).prepare()
