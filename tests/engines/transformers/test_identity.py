"""What was changed of a model after its folder was written is in the name of its caches."""

import pytest
import torch

from kvabr.engines.transformers import engine_of
from kvabr.engines.transformers.model_loader import load_model
from kvabr.engines.transformers.publish import find_profile
from kvabr.engines.weights import model_name
from kvabr.types.errors import ForeignError, ModelError
from kvabr.types.naming import MARK
from tests import kvdata, tinymodels

pytestmark = pytest.mark.model


def loaded(folder, **options):
    import transformers

    return transformers.AutoModelForCausalLM.from_pretrained(folder, **options)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_a_model_as_its_folder_has_it_needs_no_more_in_its_name(folder, dtype):
    options = {"dtype": getattr(torch, dtype), "attn_implementation": "eager"}
    assert engine_of(loaded(folder, **options), folder).spec.model == model_name(folder)
    assert load_model(str(folder), dtype=dtype).engine.spec.model == model_name(folder)


@pytest.mark.parametrize(
    "change",
    [
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}},
        {"rms_norm_eps": 1e-3},
        {"hidden_act": "gelu"},
        {"attention_bias": True},
    ],
)
def test_settings_that_were_given_while_it_was_loaded_count(folder, change):
    import transformers

    config = transformers.AutoConfig.from_pretrained(folder)
    for key, value in change.items():
        setattr(config, key, value)
    name = engine_of(loaded(folder, config=config), folder).spec.model
    assert name.startswith(f"{model_name(folder)}{MARK}")
    assert engine_of(loaded(folder, config=config), folder).spec.model == name


def test_weights_that_were_changed_in_memory_count(folder):
    model = loaded(folder)
    with torch.no_grad():
        model.model.layers[0].mlp.up_proj.weight += 0.1
    one = engine_of(model, folder).spec.model
    with torch.no_grad():
        model.model.layers[0].mlp.up_proj.weight += 0.1
    other = engine_of(model, folder).spec.model
    assert len({model_name(folder), one, other}) == 3


def test_an_engine_whose_weights_have_changed_since_is_refused(folder):
    model = loaded(folder)
    engine = engine_of(model, folder)
    engine.prefill(list(range(20)))
    model.to(torch.float64)  # moves numbers, and changes none
    engine.check_unchanged()
    with torch.no_grad():
        model.model.layers[0].mlp.up_proj.weight += 0.1
    with pytest.raises(ModelError, match="have changed since this engine was created"):
        engine.prefill(list(range(20)))


def test_prompts_that_longrope_rotates_otherwise_are_not_taken(tmp_path):
    """Their first keys differ from those of short prompts with the same tokens, under the same name."""
    rope = {"rope_type": "longrope", "rope_theta": 10000.0, "original_max_position_embeddings": 128}
    rope |= {"factor": 4.0, "short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
    folder = tinymodels.save(tmp_path / "long", rope_parameters=rope)
    engine = load_model(str(folder)).engine
    assert engine.context == 128
    engine.prefill(list(range(128)))
    with pytest.raises(ModelError, match="do not fit"):
        engine.prefill(list(range(129)))


def test_a_profile_of_the_model_before_it_was_tuned_serves(folder, tmp_path):
    spec = engine_of(loaded(folder), folder).spec
    for name, fits in (
        ("tiny-llama-0123456789abcdef", True),
        (f"{spec.model}{MARK}0123456789abcdef", True),
        ("other-0123456789abcdef", False),
    ):
        shape = kvdata.spec(spec.layers, spec.kv_heads, spec.head_dim)
        theirs = shape.changed(rope=spec.rope, dtype=spec.dtype)
        theirs = theirs.__class__(name, spec.tokenizer, theirs.classes, theirs.group_tokens)
        path = tmp_path / f"{name}.safetensors"
        path.write_bytes(kvdata.profile(theirs).to_bytes())
        if fits:
            profile = find_profile(spec, path)
            profile.check(spec)
            assert profile.spec.model == spec.model
        else:
            with pytest.raises(ForeignError, match="calibrated for"):
                find_profile(spec, path)
