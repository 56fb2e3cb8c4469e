"""Calibration: which contexts are cut, and that a profile comes of a real model."""

from __future__ import annotations

import pytest

from kvabr.codec.profile import Profile
from kvabr.engines.transformers.model_loader import load_model
from kvabr.publish.calibrate import STAGES, calibrate, cut_contexts
from kvabr.publish.model import opened
from kvabr.publish.texts import cut_prompt
from kvabr.types.errors import ModelError, UsageError
from tests import tinymodels


def test_longer_texts_give_more_contexts_and_none_overlap():
    texts = {"long": list(range(10_000)), "short": list(range(20_000, 22_000)), "tiny": list(range(30_000, 30_050))}
    cuts = cut_contexts(texts, 12, 500)
    names = [name for name, _ in cuts]
    assert names.count("long") == 10
    assert names.count("short") == 2
    assert names.count("tiny") == 1
    every = [token for _, ids in cuts for token in ids]
    assert len(set(every)) == len(every)
    assert {len(ids) for name, ids in cuts if name != "tiny"} == {500}
    # From the beginning to the end of a text.
    assert cuts[0][1][0] == 0
    assert cuts[9][1][-1] == 9_999


def test_no_text():
    with pytest.raises(UsageError, match="not empty"):
        cut_contexts({"a": []}, 3, 100)


@pytest.mark.slow
def test_contexts_begin_as_prompts_of_the_model_do(tmp_path, monkeypatch):
    loaded = load_model(str(tinymodels.begin_with(tinymodels.save(tmp_path), "!")))
    seen = []
    prefill = type(loaded.engine).prefill_classes
    monkeypatch.setattr(
        type(loaded.engine),
        "prefill_classes",
        lambda engine, ids, before=None: seen.append(tuple(ids)) or prefill(engine, ids, before),
    )
    calibrate(loaded, {"a": "what it says " * 40}, contexts=2, tokens=100)
    (bang,) = loaded.opening
    assert loaded.encode("!") == [bang]
    # The last eighth is computed with its gradients.
    assert [(ids[0], ids.count(bang), len(ids)) for ids in seen] == [(bang, 1, 87)] * 2
    prompt = cut_prompt(loaded, "what it says " * 40, 32, 8)
    assert prompt.tokens == (bang, *loaded.encode("what it says " * 3)[:31])
    assert opened(loaded, prompt.tokens) == prompt.tokens


@pytest.mark.slow
def test_a_model_of_short_sight_is_calibrated_with_all_that_it_sees(tmp_path):
    loaded = load_model(str(tinymodels.save(tmp_path, max_position_embeddings=96)))
    (made,) = calibrate(loaded, {"a": "what it says " * 40}, contexts=2)
    assert made.spec == loaded.engine.spec
    assert [(text.name, text.contexts) for text in made.seen.texts] == [("a", 2)]
    assert made.seen.share(loaded.encode("what it says " * 40)[:96]) == 1.0
    assert made.seen.share(loaded.encode("and what it does not, whatever one may think of it. ") * 2) == 0.0


@pytest.mark.slow
def test_a_model_that_says_nothing_finite_is_named(tmp_path):
    loaded = load_model(str(tinymodels.save(tmp_path)))
    loaded.engine.model.lm_head.weight.data[:] = 3e38  # a number, but not the logits that it makes
    with pytest.raises(ModelError, match="weights are damaged"):
        calibrate(loaded, {"a": "what it says " * 40}, contexts=1, tokens=100)


@pytest.mark.model
def test_a_profile_of_a_real_model(loaded):
    seen, texts = [], {"a": "some text " * 200}
    (profile,) = calibrate(loaded, texts, contexts=2, tokens=64, progress=lambda *at: seen.append(at))
    assert seen == [(stage, done, 2) for stage in STAGES for done in (1, 2)]
    profile.check(loaded.engine.spec)
    assert Profile.from_bytes(profile.to_bytes()).digest == profile.digest
    # The model minds some channels more than others, and its profile knows.
    assert float(profile.transform.norm.max() / profile.transform.norm.min()) > 3
    with pytest.raises(UsageError, match="16 to 8192 tokens"):
        calibrate(loaded, {"a": "x"}, tokens=8193)
