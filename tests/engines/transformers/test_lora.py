"""Adapters of PEFT in transformers: each has caches of its own, and nobody plays those of another."""

import copy
import json
import re

import pytest

pytest.importorskip("peft", reason="peft is not installed: tools/setup-venv")

import peft
import torch
import transformers
from packaging.version import parse
from safetensors.torch import save
from transformers.integrations.peft import MIN_PEFT_VERSION

from kvabr.engines.transformers import engine_of, prefill_prompt, publish_cache
from kvabr.engines.transformers.adapter_digest import CONFIG, WEIGHTS, folder_digest
from kvabr.engines.transformers.identity import adapters_digest
from kvabr.engines.transformers.publish import cache_publisher
from kvabr.engines.weights import model_name
from kvabr.publish.publisher import Slot
from kvabr.types.errors import ModelError
from tests import needs

pytestmark = [
    pytest.mark.model,
    pytest.mark.skipif(parse(peft.__version__) < parse(MIN_PEFT_VERSION), reason=needs.OLD_PEFT),
]

TOKENS = list(range(200))


@pytest.fixture
def base(folder):
    return transformers.LlamaForCausalLM.from_pretrained(folder)


def lora(**options):
    return peft.LoraConfig(**{"r": 4, "target_modules": ["k_proj", "v_proj"], "init_lora_weights": False} | options)


@pytest.fixture
def model(base):
    """With two adapters, of which none is merged."""
    torch.manual_seed(1)
    base.add_adapter(lora(), "legal")
    base.add_adapter(lora(), "medical")
    return base


def name_of(model, folder):
    return engine_of(model, folder).spec.model


def test_each_adapter_has_a_name(model, folder):
    names = {}
    for adapter in ("legal", "medical"):
        model.set_adapter(adapter)
        names[adapter] = name_of(model, folder)
    model.set_adapter(["legal", "medical"])
    names["both"] = name_of(model, folder)
    model.disable_adapters()
    names["none"] = name_of(model, folder)
    assert len(set(names.values())) == 4
    assert names["none"] == model_name(folder)
    assert all(name.startswith(names["none"]) for name in names.values())
    model.enable_adapters()
    model.set_adapter("legal")
    assert name_of(model, folder) == names["legal"]


def test_the_name_is_that_of_the_weights_whatever_the_adapter_is_called(model, folder, tmp_path):
    model.set_adapter("legal")
    model.save_pretrained(tmp_path / "legal")
    other = transformers.LlamaForCausalLM.from_pretrained(folder)
    other.load_adapter(str(tmp_path / "legal"), "something")
    other.set_adapter("something")
    assert name_of(other, folder) == name_of(model, folder)


@pytest.mark.parametrize(
    "options",
    [{}, {"use_rslora": True}, {"alpha_pattern": {"layers.1.self_attn.k_proj": 3}, "rank_pattern": {"v_proj": 2}}],
)
def test_the_digest_of_a_folder_is_that_of_the_adapter_in_memory(base, tmp_path, options):
    base.add_adapter(lora(**options), "legal")
    base.save_pretrained(tmp_path / "legal")
    assert folder_digest(tmp_path / "legal") == adapters_digest(base)
    (tmp_path / "legal").rename(tmp_path / "renamed")
    config = json.loads((tmp_path / "renamed" / CONFIG).read_text())
    assert folder_digest(tmp_path / "renamed") == adapters_digest(base)
    (tmp_path / "renamed" / CONFIG).write_text(json.dumps(config | {"lora_alpha": 5}))
    assert folder_digest(tmp_path / "renamed") != adapters_digest(base)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({CONFIG: None}, "adapter_config.json: cannot be read"),
        ({CONFIG: b"{"}, "adapter_config.json: cannot be read"),
        ({CONFIG: b"[]"}, "not the configuration of an adapter"),
        (
            {CONFIG: b'{"peft_type": "LORA", "r": 0, "lora_alpha": 8}'},
            "r and lora_alpha must be numbers, got '0' and '8'",
        ),
        ({CONFIG: b'{"r": 4, "lora_alpha": 8, "rank_pattern": {"(.*)*x": 2}}'}, "must be a plain module name"),
        ({WEIGHTS: None}, "adapter_model.safetensors: cannot be read"),
        ({WEIGHTS: b"PK\3\4"}, "save the adapter with `PeftModel.save_pretrained`"),
        ({WEIGHTS: save({"lm_head.weight": torch.ones(2)})}, "'lm_head.weight' is not a tensor of a LoRA adapter"),
        ({WEIGHTS: save({})}, "has no tensors"),
    ],
)
def test_a_folder_without_a_good_adapter_is_refused(base, tmp_path, change, why):
    base.add_adapter(lora(), "legal")
    base.save_pretrained(tmp_path)
    for name, data in change.items():
        (tmp_path / name).unlink() if data is None else (tmp_path / name).write_bytes(data)
    with pytest.raises(ModelError, match=re.escape(why)):
        folder_digest(tmp_path)


def test_a_peft_model_is_the_model_in_it(model, base, folder, tmp_path):
    model.set_adapter("legal")
    model.save_pretrained(tmp_path / "legal")
    plain = transformers.LlamaForCausalLM.from_pretrained(folder)
    wrapped = peft.PeftModel.from_pretrained(plain, str(tmp_path / "legal"))
    engine = engine_of(wrapped, folder)
    assert engine.spec == engine_of(model, folder).spec
    assert torch.equal(engine.prefill(TOKENS), engine_of(model, folder).prefill(TOKENS))


def test_a_merged_adapter_is_the_same_adapter(base, folder, tmp_path):
    wrapped = peft.get_peft_model(base, lora())
    name = name_of(wrapped, folder)
    assert name != model_name(folder)
    wrapped.merge_adapter()
    assert name_of(wrapped, folder) == name


def test_weights_that_were_merged_for_good_are_others(base, folder):
    torch.manual_seed(2)
    one = peft.get_peft_model(copy.deepcopy(base), lora()).merge_and_unload()
    two = peft.get_peft_model(copy.deepcopy(base), lora()).merge_and_unload()
    names = {name_of(each, folder) for each in (base, one, two)}
    assert len(names) == 3
    assert name_of(copy.deepcopy(one), folder) == name_of(one, folder)


@pytest.mark.parametrize("change", ["scale", "weights", "dora", "everything", "one layer"])
def test_what_an_adapter_does_is_in_the_name(model, folder, change):
    model.set_adapter("legal")
    before = name_of(model, folder)
    layer = model.model.layers[1].self_attn.k_proj
    if change == "scale":
        layer.set_scale("legal", 0.5)
    elif change == "weights":
        with torch.no_grad():
            layer.lora_A["legal"].weight[0, 0] += 1
    elif change == "one layer":
        layer.set_adapter("medical")
    else:
        options = {"use_dora": True} if change == "dora" else {"modules_to_save": ["lm_head"]}
        model.add_adapter(lora(**options), "another")
        model.set_adapter("another")
    assert name_of(model, folder) != before


def test_an_engine_of_another_adapter_neither_plays_nor_publishes(model, folder, tmp_path):
    model.set_adapter("legal")
    engine = engine_of(model, folder)
    cache = prefill_prompt(engine, TOKENS)
    publisher = cache_publisher(engine, tmp_path / "assets", tracks=["FP16"])
    model.set_adapter("medical")
    for call in (
        lambda: publish_cache(publisher, engine, cache, TOKENS[:128]),
        lambda: engine.prefill(TOKENS),
        lambda: prefill_prompt(engine, TOKENS),
    ):
        with pytest.raises(ModelError, match="have changed since this engine was created"):
            call()
    model.set_adapter("legal")
    assert publish_cache(publisher, engine, cache, TOKENS[:128]).result(300).verdict == "published"
    other = engine_of(model, folder)
    model.set_adapter("medical")
    publisher.close()
    fresh = cache_publisher(engine_of(model, folder), tmp_path / "assets", tracks=["FP16"])
    slot = fresh.reserve(TOKENS[:128])
    assert isinstance(slot, Slot)  # what the other adapter has published is not known under this name
    slot.leave()
    fresh.close()
    assert other.spec.model == engine.spec.model


def test_an_adapter_that_puts_tokens_before_prompts_is_refused(base, folder):
    wrapped = peft.get_peft_model(base, peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4))
    with pytest.raises(ModelError, match="puts its own tokens before every prompt"):
        engine_of(wrapped, folder)
