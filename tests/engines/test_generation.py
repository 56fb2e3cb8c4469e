"""A text behind a cache that gets better while it is written."""

from __future__ import annotations

import pytest
import torch

from kvabr.engines.generation import Generation
from kvabr.engines.transformers.model_loader import load_model
from kvabr.types.errors import ModelError
from tests import tinymodels

pytestmark = pytest.mark.model

PROMPT, TEXT = list(range(40, 140)), list(range(30, 60))


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    return load_model(str(tinymodels.save(tmp_path_factory.mktemp("models") / "tiny"))).engine


def test_steps_say_what_a_score_says(engine):
    kv = engine.prefill(PROMPT)
    text = Generation(engine, kv)
    steps = torch.cat([text.step(TEXT[:1]), text.step(TEXT[1:20]), text.step(TEXT[20:])])
    assert torch.allclose(steps, engine.score(kv, TEXT), atol=1e-5)


def test_what_is_rewritten_counts_from_the_next_step_on(engine):
    exact = engine.prefill(PROMPT)
    kv = exact.clone()
    kv[..., 32:64, :] += 0.5 * torch.randn(kv[..., 32:64, :].shape, generator=torch.Generator().manual_seed(1))
    bad = engine.score(kv, TEXT)
    text = Generation(engine, kv)
    first = text.step(TEXT[:10])
    assert torch.allclose(first, bad[:10], atol=1e-5)
    assert text.rewrite(32, 64, lambda: kv[..., 32:64, :].copy_(exact[..., 32:64, :]))
    rest = text.step(TEXT[10:])
    good = engine.score(exact, TEXT)
    assert float((rest - good[10:]).abs().max()) < 0.2 * float((bad[10:] - good[10:]).abs().max())
    assert not torch.allclose(rest, good[10:], atol=1e-5)  # the text so far keeps what it was written with
    assert torch.equal(kv, exact)
    assert text.rewritten == 1


def test_what_does_not_fit_is_refused(engine):
    with pytest.raises(ModelError):
        Generation(engine, torch.zeros(1, 2, 3, 4, 5))
    with pytest.raises(ModelError):
        Generation(engine, engine.prefill(PROMPT)[:, :, :, :0])
    text = Generation(engine, engine.prefill(PROMPT))
    with pytest.raises(ModelError, match="do not fit"):
        text.step([1] * 600)
    with pytest.raises(ModelError, match="vocabulary"):
        text.step([256])
