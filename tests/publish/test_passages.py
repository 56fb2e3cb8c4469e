"""Caches of passages with a real model of a few thousand weights, whose tokens are bytes."""

import pytest
import torch

from kvabr.blend.selectors import load_selector
from kvabr.engines.transformers.blend import blend_engine
from kvabr.engines.transformers.model_loader import load_model
from kvabr.publish.passages import (
    free_cache,
    fusion_losses,
    joined,
    mean_cache,
    publisher_order,
)
from kvabr.types.errors import UsageError
from tests.tinymodels import save

BEFORE, PASSAGE, TAIL = (f"{words} " * 9 for words in ("ash birch", "cedar elm", "fir hazel"))


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    # Weights that are large enough for what stands before a token to matter.
    return load_model(str(save(tmp_path_factory.mktemp("tiny") / "model", initializer_range=0.3)))


@pytest.fixture(scope="module")
def engine(model):
    return blend_engine(model.engine)


@pytest.fixture(scope="module")
def ids(model):
    return tuple(model.encode(text) for text in (BEFORE, PASSAGE, TAIL))


def test_a_cache_behind_a_text_is_exact_where_it_was_computed(engine, ids):
    before, passage, _ = ids
    exact = engine.prefill([*before, *passage])[:, :, :, len(before) :]
    free = free_cache(engine, passage, before)
    assert free.dtype == torch.float32
    assert torch.allclose(joined([free], engine.spec, len(before)), exact, atol=1e-4)
    assert not torch.allclose(free, free_cache(engine, passage), atol=1e-2)


def test_a_mean_is_over_keys_before_rotation(engine, ids, model):
    before, passage, _ = ids
    other = model.encode("a")
    told = []
    mean = mean_cache(engine, passage, [before, other], lambda *step: told.append(step))
    wanted = (free_cache(engine, passage, before) + free_cache(engine, passage, other)) / 2
    assert torch.allclose(mean, wanted, atol=1e-6)
    assert told == [(1, 2), (2, 2)]
    one = mean_cache(engine, passage, [before])
    assert torch.equal(one, free_cache(engine, passage, before))
    for contexts in ([], [before, []]):
        with pytest.raises(UsageError, match="at least one context"):
            mean_cache(engine, passage, contexts)


def test_the_order_begins_with_the_token_that_is_most_wrong(engine, ids):
    before, passage, tail = ids
    base = free_cache(engine, passage, before)
    base[:, :, :, 11] += 2.0
    order = publisher_order(engine, passage, base, [before], tail)
    assert len(order) == len(passage)
    assert order[11] == max(order) == 255
    assert min(order) == 0
    assert len(set(order)) == len(passage)


@pytest.mark.parametrize("selector", ["question", "order"])
def test_fusion_losses_fall_to_nothing(engine, ids, model, selector):
    before, passage, tail = ids
    base = mean_cache(engine, passage, [model.encode("a"), model.encode("bcd")])
    order = publisher_order(engine, passage, base, [before], tail)
    losses = fusion_losses(
        engine, passage, base, [before, model.encode("pine oak")], tail, load_selector(selector),
        (0.0, 0.5, 1.0), order, question=8,
    )  # fmt: skip
    assert [share for share, _ in losses] == [0.0, 0.5, 1.0]
    none, half, every = (loss for _, loss in losses)
    assert none > half > every
    assert every < 1e-6
    with pytest.raises(UsageError, match="10 are needed"):
        fusion_losses(engine, passage, base, [before], tail[:9], load_selector(selector), question=8)
