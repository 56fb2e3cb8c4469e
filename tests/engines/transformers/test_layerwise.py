"""Models whose layers stay on the disk: the same statistics as with the whole model in memory, and clear refusals."""

import json

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from kvabr.codec.profile import Profile
from kvabr.engines.transformers.engine import sample_next
from kvabr.engines.transformers.model_loader import load_model
from kvabr.publish.calibrate import calibrate
from kvabr.publish.target import Target
from kvabr.types.errors import ModelError, UsageError
from tests import tinymodels

TEXT = {"a": "what it says, and what it means by it " * 30}
pytestmark = pytest.mark.slow


def both(folder, kind="Llama", **changes):
    """Return a saved model, loaded whole and layer by layer."""
    path = str(tinymodels.save(folder, kind, initializer_range=0.3, **changes))
    return load_model(path), load_model(path, by_layer=True)


def assert_alike(one: Profile, other: Profile, within=0.01):
    """Assert that two profiles have the same statistics, up to the rounding of caches to 16 bits."""
    assert other.spec == one.spec
    assert other.tracks == one.tracks
    for mine, its in zip(getattr(one, "classes", [one]), getattr(other, "classes", [other]), strict=True):
        assert np.abs(mine.transform.mean.astype(float) - its.transform.mean).max() < 1e-3
        assert np.abs(np.log(mine.transform.norm / its.transform.norm)).max() < within
        assert np.allclose(mine.transform.spread, its.transform.spread, rtol=1e-3)


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("Llama", {}),
        ("Qwen3", {}),
        ("Qwen2", {}),
        ("Mistral", {"sliding_window": 64}),
        ("Gemma2", {"sliding_window": 64}),
    ],
)
def test_statistics_are_those_of_the_whole_model(tmp_path, kind, changes):
    whole, layers = both(tmp_path, kind, **changes)
    assert layers.engine.spec == whole.engine.spec
    (one,) = calibrate(whole, TEXT, contexts=3, tokens=200)
    seen = []
    (other,) = calibrate(layers, TEXT, contexts=3, tokens=200, progress=lambda *at: seen.append(at))
    assert_alike(one, other)
    assert [at for at in seen if at[0] == "forward"] == [("forward", step, 6) for step in range(1, 7)]
    assert [at for at in seen if at[0] == "backward"] == [("backward", step, 6) for step in range(1, 7)]


def test_gradients_and_scores_are_those_of_the_whole_model(tmp_path):
    whole, layers = both(tmp_path)
    ids = list(range(1, 61))
    kv = whole.engine.prefill_classes(ids)
    assert torch.allclose(layers.engine.prefill_classes(ids)[0], kv[0], atol=1e-5)
    one, other = (each.engine.gradient_classes(kv, ids[:20], 3)[0] for each in (whole, layers))
    assert float(one.norm()) > 0
    assert torch.allclose(one, other, atol=1e-5 * float(one.abs().max()))
    assert torch.allclose(whole.engine.score_classes(kv, ids[:9]), layers.engine.score_classes(kv, ids[:9]), atol=1e-4)


def test_next_tokens_are_sampled_as_often_as_the_model_says():
    chances = torch.tensor([0.1, 0.0, 0.2, 0.0, 0.3, 0.4, 0.0])
    logits = chances.log().clamp(min=-1e4).repeat(20_000, 1).requires_grad_()
    for seed in range(2):
        (slope,) = torch.autograd.grad(sample_next(logits, seed, "tiny"), logits)
        said = (slope + chances).round()  # the gradient of a token's log-probability: 1 for it, less all chances
        assert torch.equal(said.sum(dim=1), torch.ones(20_000))
        assert torch.allclose(said.mean(dim=0), chances, atol=0.02)
        assert float(said[:, chances == 0].sum()) == 0
    with pytest.raises(ModelError, match="NaN or infinite"):
        sample_next(logits.detach() * float("nan"), 0, "tiny")


def test_layers_are_in_memory_only_while_they_run(tmp_path):
    _, layers = both(tmp_path, num_hidden_layers=3)
    body = layers.engine.model.base_model.layers
    held = []
    for layer in body:
        forward = layer.self_attn.forward
        layer.self_attn.forward = lambda *args, forward=forward, **kwargs: (
            held.append([not each.self_attn.q_proj.weight.is_meta for each in body]) or forward(*args, **kwargs)
        )
    layers.engine.prefill_classes([1, 2, 3])
    assert held == [[True, False, False], [False, True, False], [False, False, True]]
    assert all(weights.is_meta for layer in body for weights in layer.parameters())


def test_steps_are_chosen_by_loss(tmp_path):
    whole, layers = both(tmp_path)
    one, other = (calibrate(each, TEXT, contexts=4, tokens=200, target=Target(0.01))[0] for each in (whole, layers))
    for mine, its in zip(one.depths.values(), other.depths.values(), strict=True):
        # A search ends anywhere near the target, and where depends on how a processor rounds.
        assert mine.step / 2 < its.step < 2 * mine.step


def test_weights_in_several_files_and_in_16_bits(tmp_path):
    whole, _ = both(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    (tmp_path / "model.safetensors").unlink()
    halves = {"model-1.safetensors": {}, "model-2.safetensors": {}}
    for number, (name, each) in enumerate(weights.items()):
        list(halves.values())[number % 2][name] = each
    for name, half in halves.items():
        save_file(half, tmp_path / name)
    index = {name: file for file, half in halves.items() for name in half}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    layers = load_model(str(tmp_path), by_layer=True)
    ids = list(range(1, 30))
    exact = whole.engine.prefill_classes(ids)[0]
    assert torch.allclose(layers.engine.prefill_classes(ids)[0], exact, atol=1e-5)
    half = load_model(str(tmp_path), by_layer=True, dtype="bfloat16").engine.prefill_classes(ids)[0]
    assert half.dtype == torch.bfloat16
    assert 0 < float((half.float() - exact).norm() / exact.norm()) < 0.05


@pytest.mark.parametrize(
    ("name", "value"), [("model.layers.1.mlp.up_proj.weight", "nan"), ("model.norm.weight", "inf")]
)
def test_weights_that_are_no_numbers_are_named(tmp_path, name, value):
    both(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    weights[name].view(-1)[5] = float(value)
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match=f"{name} have numbers that are NaN or infinite"):
        load_model(str(tmp_path), by_layer=True)
    with pytest.raises(ModelError, match=f"{name} have numbers that are NaN or infinite"):
        calibrate(load_model(str(tmp_path)), TEXT, contexts=2, tokens=100)


@pytest.mark.parametrize(
    ("kind", "changes", "why"),
    [
        ("GPTNeoX", {}, "cannot be run layer by layer: its body has embed_in"),
        ("Mixtral", {}, "stored under other names"),
        ("Mamba2", {"num_heads": 4, "head_dim": 16, "n_groups": 1}, "cannot be run layer by layer"),
    ],
)
def test_models_of_other_kinds_are_refused(tmp_path, kind, changes, why):
    path = str(tinymodels.save(tmp_path, kind, **changes))
    with pytest.raises(ModelError, match=why) as raised:
        load_model(path, by_layer=True)
    assert "--load whole" in str(raised.value)


@pytest.mark.parametrize("content", ["{", '{"weight_map": 3}', '{"weight_map": {"a": "../b.safetensors"}}'])
def test_damaged_indices_are_refused(tmp_path, content):
    both(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    (tmp_path / "model.safetensors.index.json").write_text(content)
    with pytest.raises(ModelError, match=r"model\.safetensors\.index\.json"):
        load_model(str(tmp_path), by_layer=True)


def test_quantised_weights_are_refused(tmp_path):
    both(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match="quantised weights"):
        load_model(str(tmp_path), by_layer=True)


def test_devices_that_do_not_exist_are_refused(tmp_path):
    path = str(tinymodels.save(tmp_path))
    for device in ("cuda:99", "nothing", "meta"):
        with pytest.raises(UsageError, match="use cpu"):
            load_model(path, device=device)
