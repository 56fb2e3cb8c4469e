"""Any local transformers model: plain full attention is taken, the rest refused by name."""

import copy
import json
import math

import pytest
import torch

from kvabr.codec.rope import rotate
from kvabr.engines.transformers import spec_of
from kvabr.engines.transformers.model_loader import engine_of, load_model
from kvabr.types.errors import ModelError
from kvabr.types.kv import KVSpec, RopeSpec
from tests import tinymodels

pytestmark = pytest.mark.model


@pytest.fixture(scope="module")
def tiny(folder):
    return load_model(str(folder))


def test_a_prefill_in_parts_is_the_whole(tiny):
    tokens = tiny.encode("the quick brown fox jumps over the lazy dog " * 3)
    whole = tiny.engine.prefill(tokens)
    assert whole.shape == tiny.engine.spec.shape(len(tokens))
    parts = tiny.engine.prefill(tokens[:50])
    parts = torch.cat([parts, tiny.engine.prefill(tokens[50:], parts)], dim=3)
    assert (whole - parts).abs().max() < 1e-5


def test_the_callers_cache_is_only_read(tiny):
    tokens = tiny.encode("a cache that belongs to someone else")
    before = tiny.engine.prefill(tokens)
    copy = before.clone()
    tiny.engine.prefill(tokens, before)
    tiny.engine.score(before, tokens)
    assert torch.equal(before, copy)
    # Another dtype and odd strides are as good.
    strided = before.double().transpose(3, 4).contiguous().transpose(3, 4)
    assert torch.allclose(tiny.engine.prefill(tokens, strided), tiny.engine.prefill(tokens, before))


def test_what_does_not_fit_is_refused(tiny):
    engine = tiny.engine
    full = torch.zeros(engine.spec.shape(600))
    for ids, before in (([], None), ([1] * 41, full), ([256], None), ([1], torch.zeros(2, 2, 2, 5, 9))):
        with pytest.raises(ModelError):
            engine.prefill(ids, before)
    with pytest.raises(ModelError):
        engine.score(torch.zeros(1, 2, 2, 5, 8), [1, 2])


SHORT = {"original_max_position_embeddings": 160}


def scaled(kind, **parameters):
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 10000.0} | parameters}


@pytest.mark.parametrize(
    ("kind", "changes", "rope"),
    [
        ("GPTNeoX", {"rotary_pct": 0.5, "hidden_size": 64, "head_dim": 16}, RopeSpec(10000.0, 8, "half")),
        ("Cohere", {}, RopeSpec(500000.0, 8, "interleaved")),
        ("Qwen3", {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}, RopeSpec(1e6, 8, "half")),
        ("Llama", scaled("linear", factor=1.0), RopeSpec(10000.0, 8, "half")),
        ("Llama", scaled("dynamic", factor=4.0), RopeSpec(10000.0, 8, "half")),
        ("Llama", scaled("longrope", factor=4.0, **SHORT, short_factor=[1.0] * 4, long_factor=[2.0] * 4), None),
        (
            "Llama",
            scaled("linear", factor=4.0),
            RopeSpec(10000.0, 8, "half", (0.25, 0.025, 0.0025, 0.00025)),
        ),
        (
            "Cohere",
            scaled("linear", factor=5.0),
            RopeSpec(10000.0, 8, "interleaved", (0.2, 0.02, 0.002, 0.0002)),
        ),
        (
            "GPTNeoX",
            {"rotary_pct": 0.5, "hidden_size": 64, "head_dim": 16} | scaled("linear", factor=4.0),
            RopeSpec(10000.0, 8, "half", (0.25, 0.025, 0.0025, 0.00025)),
        ),
        # The second pair turns 2.546 times within the original context, so it keeps 1.546 / 3 of its speed.
        (
            "Llama",
            scaled("llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, **SHORT),
            RopeSpec(10000.0, 8, "half", (1.0, 0.0576056401, 0.00125, 0.000125)),
        ),
        # One turn within the original context is between the second pair and the third, 32 before the first.
        (
            "Qwen3",
            scaled("yarn", factor=4.0, **SHORT),
            RopeSpec(10000.0, 8, "half", (1.0, 0.0625, 0.0025, 0.00025), 1.13862944),
        ),
    ],
)  # fmt: skip
def test_the_rotary_embedding_is_what_the_keys_show(tmp_path, kind, changes, rope):
    """Undoing the rotation that the spec names makes the keys of one repeated token the same at every position."""
    loaded = load_model(str(tinymodels.save(tmp_path / "model", kind, **changes)))
    assert loaded.engine.spec.rope == rope
    if rope is not None:
        assert unturned(loaded) < 1e-4


def unturned(loaded):
    """How far the keys of one token, turned back, differ between positions, of the largest."""
    keys = loaded.engine.prefill([7] * 600)[0, 0].float()
    plain = rotate(keys, loaded.engine.spec.rope, 0, undo=True)
    return float((plain - plain[:, :1]).abs().max() / plain.abs().max())


YARN = {"factor": 16.0, "rope_theta": 5e5, "original_max_position_embeddings": 4096}


@pytest.mark.parametrize(
    ("changes", "factor"),
    [
        (
            scaled(
                "llama3", factor=8.0, rope_theta=5e5, low_freq_factor=1.0, high_freq_factor=4.0,
                original_max_position_embeddings=8192,
            ),
            1.0,
        ),
        (scaled("yarn", **YARN), 1.27725887),
        (scaled("yarn", **YARN, beta_fast=20, beta_slow=2, truncate=False, attention_factor=0.75), 0.75),
        (scaled("yarn", **YARN, mscale=0.7, mscale_all_dim=1.2), (1 + 0.07 * math.log(16)) / (1 + 0.12 * math.log(16))),
    ],
)  # fmt: skip
def test_scaled_embeddings_of_a_real_models_size(tmp_path, changes, factor):
    loaded = load_model(str(tinymodels.save(tmp_path / "model", head_dim=128, **changes)))
    rope = loaded.engine.spec.rope
    module = loaded.engine.model.model.rotary_emb
    assert torch.allclose(torch.tensor(rope.frequencies), module.inv_freq, rtol=1e-5, atol=0)
    assert rope.factor == pytest.approx(factor, rel=1e-8)
    assert module.attention_scaling == pytest.approx(factor, rel=1e-8)
    assert rope.frequencies[0] == 1.0
    assert rope.frequencies[-1] < 0.2 * 5e5 ** (-126 / 128)
    assert unturned(loaded) < 1e-4
    spec = loaded.engine.spec
    assert KVSpec.from_json(json.loads(json.dumps(spec.to_json()))) == spec


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("Llama", {}),
        ("Cohere", {}),
        ("Llama", scaled("llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, **SHORT)),
        ("Qwen3", scaled("yarn", factor=4.0, **SHORT)),
    ],
)
def test_a_model_that_computes_in_16_bits_has_the_same_spec(tmp_path, kind, changes, dtype):
    import transformers

    folder = tinymodels.save(tmp_path / "model", kind, **changes)
    exact = load_model(str(folder)).engine.spec
    assert exact.rope is not None
    half = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    assert engine_of(half, folder).spec == exact


def test_what_a_model_does_not_do_is_not_believed(tiny):
    """A configuration that says one thing, while the model's module does another."""
    model = copy.deepcopy(tiny.engine.model)
    turned = {"name": "m", "tokenizer": "t", "dtype": "float16"}
    model.config.rope_parameters = scaled("linear", factor=4.0)["rope_parameters"]
    assert spec_of(model, **turned).rope is None
    module = model.model.rotary_emb
    module.inv_freq /= 4
    assert spec_of(model, **turned).rope.frequencies == (0.25, 0.025, 0.0025, 0.00025)
    module.attention_scaling = 1.1
    assert spec_of(model, **turned).rope is None
    module.attention_scaling = 1.0
    module.inv_freq[3] *= 1.01  # so slow a turn that keys hardly show it
    assert spec_of(model, **turned).rope is None


@pytest.mark.parametrize(
    "parameters",
    [
        {"rope_type": "linear", "factor": 0.0},
        {"rope_type": "linear", "factor": "many"},
        {"rope_type": "linear"},
        {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 1.0, **SHORT},
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 0},
        {"rope_type": "yarn", "factor": float("nan"), **SHORT},
        {"rope_type": "yarn", "factor": 4.0, "attention_factor": 1e9, **SHORT},
    ],
)
def test_scalings_that_make_no_sense_are_none(tiny, parameters):
    model = copy.deepcopy(tiny.engine.model)
    model.config.rope_parameters = {"rope_theta": 10000.0} | parameters
    assert spec_of(model, name="m", tokenizer="t", dtype="float16").rope is None


@pytest.mark.parametrize("whole", [False, True])
def test_windows_may_be_taken_for_full_attention(tmp_path, whole):
    """For measurements, whose caches keep every token in every layer."""
    folder = tinymodels.save(tmp_path / "model", "Mistral", sliding_window=16)
    (only,) = load_model(str(folder), whole_windows=whole).engine.spec.classes
    assert (only.kind, only.window, only.rope) == (
        "full" if whole else "window",
        None if whole else 16,
        RopeSpec(1e4, 8),
    )


def test_what_is_no_model(tmp_path, folder):
    with pytest.raises(ModelError, match="no such model; give 'smollm2' or a directory"):
        load_model(str(tmp_path / "nothing"))
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).write_bytes((folder / name).read_bytes())
    with pytest.raises(ModelError, match=r"no tokenizer\.json"):
        load_model(str(tmp_path))
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ModelError, match="cannot load this model"):
        load_model(str(tmp_path))


def test_pickled_weights_are_not_loaded(tmp_path, folder):
    """A model's folder is data; a pickle would be a program."""
    for name in ("config.json", "tokenizer.json"):
        (tmp_path / name).write_bytes((folder / name).read_bytes())
    torch.save({}, tmp_path / "pytorch_model.bin")
    with pytest.raises(ModelError, match="cannot load this model"):
        load_model(str(tmp_path))
