"""Draft heads and models: their layers, their part in cache names, and blocks that they lack."""

import json
import shutil
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from kvabr.engines.vllm.caches import UnknownCacheError
from kvabr.engines.vllm.config import ServedModel
from kvabr.engines.vllm.drafts import DraftCaches, draft_of
from kvabr.types.kv import KVSpec
from tests import tinymodels
from tests.engines.vllm.test_caches import FULL, caches, group, spec


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A model, a draft, the same draft elsewhere, one with other weights, and one with another tokenizer."""
    root = tmp_path_factory.mktemp("drafts")
    for name, layers in (("model", 2), ("draft", 1)):
        tinymodels.save(root / name, num_hidden_layers=layers)
    shutil.copytree(root / "draft", root / "elsewhere" / "draft")
    tinymodels.save(root / "tuned" / "draft", num_hidden_layers=1, initializer_range=0.3)
    shutil.copytree(root / "draft", root / "other words" / "draft")
    path = root / "other words" / "draft" / "tokenizer.json"
    words = json.loads(path.read_text())
    vocabulary = words["model"]["vocab"]
    vocabulary["A"], vocabulary["B"] = vocabulary["B"], vocabulary["A"]
    path.write_text(json.dumps(words))
    return root


def engine(folders, draft="draft", method="eagle", modules=1, tokens=1, ranks=(1, 1), stages=1, how=None, **more):
    """The part of vLLM's configuration that kvabr reads."""
    told = SimpleNamespace(
        method=method,
        draft_model_config=SimpleNamespace(
            model=str(folders / draft), quantization=how, hf_config=SimpleNamespace(num_nextn_predict_layers=modules)
        ),
        num_speculative_tokens=tokens,
        draft_tensor_parallel_size=ranks[1],
        uses_draft_kv_cache=lambda: method not in ("ngram", "medusa"),
        use_eagle=lambda: method in ("eagle", "eagle3", "mtp"),
        use_multi_module_mtp=lambda: method == "mtp" and min(modules, tokens) > 1,
        **more,
    )
    parallel = SimpleNamespace(tensor_parallel_size=ranks[0], pipeline_parallel_size=stages)
    model = SimpleNamespace(model=str(folders / "model"))
    return SimpleNamespace(speculative_config=told, parallel_config=parallel, model_config=model)


def test_a_name_tells_of_the_weights_of_a_draft(folders):
    usual = draft_of(engine(folders)).facts
    assert draft_of(engine(folders, "elsewhere/draft")).facts == usual
    assert draft_of(engine(folders, "other words/draft")).facts == usual  # it is given the model's ids
    words = {"method": "draft_model", "use_heterogeneous_vocab": True}
    others = [
        draft_of(engine(folders, "tuned/draft")),
        draft_of(engine(folders, method="draft_model")),
        draft_of(engine(folders, "model", method="mtp")),
        draft_of(engine(folders, **words)),
        draft_of(engine(folders, "other words/draft", **words)),
        draft_of(engine(folders, how="fp8")),
    ]
    assert len({usual, *(each.facts for each in others)}) == 7
    assert others[2].facts == ("mtp", None)  # its weights are the model's
    for nothing in (SimpleNamespace(), SimpleNamespace(speculative_config=None), engine(folders, method="ngram")):
        assert draft_of(nothing) == DraftCaches()


@pytest.mark.parametrize(
    ("more", "why"),
    [
        ({"method": "dflash"}, "drafts of the kind dflash"),
        ({"stages": 2}, "without pipeline stages"),
        ({"ranks": (2, 1)}, "with as many ranks as its model"),
        ({"draft": "nowhere"}, "its draft model has no name"),
    ],
)
def test_drafts_that_are_not_exchanged(folders, more, why):
    with pytest.raises(UnknownCacheError, match=why):
        caches(group([0, 1, 2], FULL), layers=2, draft=draft_of(engine(folders, **more)))


def test_layers_of_a_draft_have_a_role():
    own = SimpleNamespace(
        layer_names=["model.layers.0.attn", "model.layers.1.attn", "draft_model.layers.0.attn", "mtp.layers.1.attn"],
        kv_cache_spec=FULL,
    )
    latent = spec("MLAAttentionSpec", num_kv_heads=1, head_size=24, head_size_v=0)
    found = caches(own, group([2], latent), layers=2, draft=DraftCaches(("eagle", "x"), 1))
    assert [(one.role, one.kind, one.layers) for one in found.classes] == [
        ("", "full", (0, 1)),
        ("draft", "full", (0, 1)),
        ("draft", "latent", (2,)),
    ]
    with pytest.raises(UnknownCacheError, match="keeps 3 caches for 3 of 2 layers"):
        caches(group([0, 1, 2], FULL), layers=2)
    whole = KVSpec("m", "t", found.classes)
    model = ServedModel(whole, torch.bfloat16, found, tuple(range(one.heads) for one in found.classes))
    assert [one.role for one in model.undrafted.classes] == [""]
    assert model.specs == (whole,)
    named = replace(
        model, named="m", without_draft=True, facts={"draft": ["eagle", "x"]}, spec=replace(whole, model="m~1")
    )
    assert [(each.model, len(each.classes)) for each in named.specs] == [("m~1", 3), ("m", 1)]
