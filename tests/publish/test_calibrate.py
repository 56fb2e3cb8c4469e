"""Calibration: which contexts are cut, and that a profile comes of a real model."""

import tempfile
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from kvabr.cli.main import main
from kvabr.codec.fit import FitConfig, fit_transform
from kvabr.codec.profile import Profile
from kvabr.engines.transformers.model_loader import load_model
from kvabr.publish import collect
from kvabr.publish.calibrate import GAINS, calibrate, cut_contexts
from kvabr.publish.model import opened
from kvabr.publish.target import HeldOutText, choose_gains, measurements
from kvabr.publish.texts import calibration_texts, cut_prompt, measuring_texts
from kvabr.types.catalog import Quality
from kvabr.types.errors import AssetError, ModelError, UsageError
from tests import kvdata, tinymodels


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
    with pytest.raises(UsageError, match="all texts are empty"):
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


TEXT = {"a": "what it says " * 60}
pytestmark = pytest.mark.slow


@pytest.mark.parametrize("by_layer", [False, True])
def test_a_disk_that_fills_is_named_and_leaves_no_profile(tmp_path, monkeypatch, capsys, by_layer):
    model = tinymodels.save(tmp_path / "model")
    text, out = tmp_path / "text.txt", tmp_path / "profile.safetensors"
    text.write_text(TEXT["a"])
    monkeypatch.setattr(tempfile, "TemporaryFile", lambda **_: Path("/dev/full").open("w+b"))  # noqa: SIM115
    load = "layers" if by_layer else "whole"
    call = ["calibrate", "--model", str(model), "--text", str(text), "--context-tokens", "100", "--load", load]
    assert main([*call, "--out", str(out)]) == 1
    assert "No space left on device" in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model", "text.txt"]


@pytest.mark.parametrize("by_layer", [False, True])
def test_a_disk_that_is_too_small_is_refused_before_the_work(tmp_path, monkeypatch, by_layer):
    loaded = load_model(str(tinymodels.save(tmp_path)), by_layer=by_layer)
    wanted = collect.disk_bytes_needed(loaded.engine, [100] * 3)
    monkeypatch.setattr(collect.shutil, "disk_usage", lambda _: SimpleNamespace(free=wanted - 1))
    with pytest.raises(AssetError, match="set TMPDIR to a folder with more space"):
        calibrate(loaded, TEXT, contexts=3, tokens=100)
    monkeypatch.setattr(collect.shutil, "disk_usage", lambda _: SimpleNamespace(free=wanted))
    calibrate(loaded, TEXT, contexts=3, tokens=100)


@pytest.mark.parametrize("by_layer", [False, True])
def test_caches_that_are_no_numbers_are_refused_with_the_layer(tmp_path, monkeypatch, by_layer):
    loaded = load_model(str(tinymodels.save(tmp_path)), by_layer=by_layer)
    attention = loaded.engine.model.base_model.layers[1].self_attn
    projected = attention.v_proj.forward
    monkeypatch.setattr(attention.v_proj, "forward", lambda hidden: projected(hidden).fill_(float("nan")))
    with pytest.raises(ModelError, match=r"layer 1 (has|is) NaN"):
        calibrate(loaded, TEXT, contexts=2, tokens=100)


def test_no_text_is_in_both():
    def paragraphs(texts):
        plain = [" ".join(part.split()) for text in texts.values() for part in text.split("\n\n")]
        return {part for part in plain if len(part) > 160}

    assert len(paragraphs(measuring_texts())) > 300
    assert not paragraphs(calibration_texts()) & paragraphs(measuring_texts())


SPEC = kvdata.spec(4, 2, 32)
CONFIG = FitConfig(outliers=0.0, stack_layers=2)


@pytest.mark.slow
@pytest.mark.parametrize(("wanted", "kept"), [({1: 1.06, 3: 1.2}, True), ({1: 1.0, 3: 1.0}, False)])
def test_gains_are_found_for_every_stack_of_values(wanted, kept):
    caches = [kvdata.related(SPEC, 200, seed) for seed in range(2)]
    transform = fit_transform(SPEC, lambda: caches, CONFIG)
    stacks = transform.structure.stacks
    assert [stack.kind for stack in stacks] == [0, 1, 0, 1]
    plain = {}

    def measure(kv):
        """Lose by how far the decoded values are from those with the wanted gains."""
        mean = torch.from_numpy(transform.mean.astype("float32"))[:, 1, :, None]
        values = kv[0][:, 1] - mean
        own = plain.setdefault("values", values.clone())
        loss = 0.1
        for number, stack in enumerate(stacks):
            if stack.kind:
                layers = slice(stack.first, stack.last)
                loss += float((values[layers] - own[layers] * wanted[number]).square().mean())
        return Quality(loss, 0.0, 1.0)

    seen = []
    sample = HeldOutText((caches[0],), SimpleNamespace(measure=measure))
    (gains,), saved = choose_gains([transform], [CONFIG], [sample], lambda *at: seen.append(at))
    assert seen == [(step, 6) for step in range(1, 7)]
    assert measurements([transform]) == 6
    if kept:
        assert gains == pytest.approx([wanted.get(number, 1.0) for number in range(4)], abs=0.01)
        assert saved > 0.01
    else:
        assert (gains, saved) == ((), 0.0)


@pytest.mark.slow
def test_a_calibration_says_what_it_found(tmp_path):
    loaded = load_model(str(tinymodels.save(tmp_path, initializer_range=0.3)))
    told, seen = [], []
    (profile,) = calibrate(
        loaded, {"a": "what it says and means " * 60}, contexts=3, tokens=200, gain=True,
        notify=told.append, progress=lambda *at: seen.append(at),
    )  # fmt: skip
    gains = profile.depths["AC-L0"].gains
    assert [at for at in seen if at[0] == GAINS] == [(GAINS, step, 4) for step in range(1, 5)]
    assert len(told) == 1
    wanted = "decoded values of AC-L0 times 1." if gains else "gains of decoded values save less than 1 %"
    assert told[0].startswith(wanted)
    assert profile.depths["AC-L1"].gains == ()
    read = Profile.from_bytes(profile.to_bytes())
    assert replace(read.depths["AC-L0"], coder=profile.depths["AC-L0"].coder) == profile.depths["AC-L0"]
