"""Two engines that differ in anything that changes KV have different names for their caches, and equal ones the same.

Each kind of configuration is a table: for every thing that can differ, its values, the usual one first. A test draws a
configuration, changes one thing, and compares the names. The objects stand in for those of engines, of which only the
fields are read.
"""

import json
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvabr.engines.chunk_store import STEP_TOKENS, KeyedSettings, key_digests, spec_of
from kvabr.engines.generation import Generation
from kvabr.engines.lmcache import chunks
from kvabr.engines.sglang import names as sglang
from kvabr.engines.vllm import config as vllm
from kvabr.engines.vllm.requests import salt_of
from kvabr.engines.weights import model_name
from kvabr.publish.publisher import with_heads, with_layers
from kvabr.types.naming import chain, with_facts

PAIRS = 200
RAW_NAMES = ("org/model", "通义千问", "深度求索", "qwen:base", "qwen-base", "m@main", "m-main", "m main", "/m", "m")
URL = {"url": "moqt://origin.example/"}


# ------------------------------------------------------------------ SGLang

SGLANG = {
    "model_name": RAW_NAMES,
    "declared": (None, "declared", "declared:2"),
    "dtype": (torch.bfloat16, torch.float16, torch.float32),
    "tp": ((0, 1), (0, 2), (1, 2), (0, 4)),
    "pp": ((0, 1), (0, 2), (1, 2)),
    "attn_cp": ((0, 1), (0, 2), (1, 2), (1, 4)),
    "dcp": ((0, 1, None), (0, 2, 128), (1, 2, 128), (1, 2, 256)),
    "quantization": (None, "fp8", "awq"),
    "json_model_override_args": ("{}", '{"rope_scaling": {"factor": 2}}', '{"sliding_window": 512}'),
    "revision": (None, "a", "b"),
    "torchao_config": ("", "int8wo"),
    "load_format": ("auto", "dummy"),
    "weight_version": ("default", "1", "2"),
    "key": ("6f1d", "6f1e"),
}


def sglang_name(monkeypatch, one):
    arguments = {name: one[name] for name in ("quantization", "json_model_override_args", "revision", "torchao_config")}
    server = SimpleNamespace(model_path="org/none", load_format=one["load_format"], **arguments)
    context = SimpleNamespace(
        get_server_args=lambda: server, get_serving=lambda: SimpleNamespace(weight_version=one["weight_version"])
    )
    monkeypatch.setitem(__import__("sys").modules, sglang._CONTEXT, context)
    parts = ((0, "rank"), (1, "size"))
    ranks = {f"{name}_{part}": one[name][at] for name in ("tp", "pp", "attn_cp", "dcp") for at, part in parts}
    config = SimpleNamespace(model_name=one["model_name"], logical_page_size=one["dcp"][2], **ranks)
    given = KeyedSettings(**URL, model=one["declared"])
    name = sglang.name_of(config, given, one["dtype"])
    generation = Generation(sglang.weight_version).name
    spec = spec_of(name, "sglang", 2, 2, 16, one["dtype"])
    return tuple(key_digests(spec, f"{name}{generation}{sglang.page_key(config, one['key'])}", 128))


# ----------------------------------------------------------------- LMCache

LMCACHE = {
    "model_name": RAW_NAMES,
    "declared": (None, "declared", "declared:2"),
    "worker": ((0, 1), (0, 2), (1, 2)),
    "shape": ((2, 2, 256, 4, 16), (1, 2, 256, 4, 16), (2, 2, 256, 2, 16)),
    "rest": ("abc@half", "abc@bfloat16", "abd@half", "abc@half@tenant%a"),
}


def lmcache_name(_monkeypatch, one):
    rank, size = one["worker"]
    metadata = SimpleNamespace(model_name=one["model_name"], kv_shape=one["shape"], world_size=size)
    given = KeyedSettings(**URL, model=one["declared"])
    key = SimpleNamespace(
        model_name=one["model_name"], to_string=lambda: f"{one['model_name']}@{size}@{rank}@{one['rest']}"
    )
    name = chunks.name_of(given, metadata)
    return tuple(key_digests(chunks.spec_of(name, one["shape"], torch.float16), name + chunks.chunk_key(key), 256))


# ------------------------------------------------------------------- vLLM

VLLM = {
    "declared": ("declared", "declared 2", "declared-2"),
    "tokenizer": ("t", "u"),
    "cache_dtype": ("auto", "fp8", "fp8_e5m2"),
    "hf_overrides": ({}, {"rope_parameters": {"factor": 2.0}}, {"sliding_window": 512}),
    "quantization": (None, "fp8", "bitsandbytes"),
    "quantization_config": (None, {"bits": 4}),
    "hf_config_path": (None, "/other"),
    "model_weights": ("", "s3://weights"),
    "disable_sliding_window": (False, True),
    "load_format": ("auto", "dummy"),
    "max_model_len": (4096, 8192),
    "heads": (range(4), range(2), range(2, 4)),
    "layers": (range(4), range(2), range(2, 4)),
    "generation": (None, "1", "2"),
    "cache_salt": (None, "tenant", "tenant-2"),
    "group_tokens": (128, 64),
}


def vllm_name(_monkeypatch, one):
    fields = ("hf_overrides", "quantization", "quantization_config", "hf_config_path", "model_weights")
    model = SimpleNamespace(
        model="org/none", hf_config=SimpleNamespace(), seed=0, **{name: one[name] for name in fields}
    )
    longrope = {"rope_type": "longrope", "original_max_position_embeddings": 4096}
    model.hf_text_config, model.max_model_len = SimpleNamespace(rope_parameters=longrope), one["max_model_len"]
    model.disable_sliding_window = one["disable_sliding_window"]
    config = SimpleNamespace(
        model_config=model,
        cache_config=SimpleNamespace(cache_dtype=one["cache_dtype"]),
        load_config=SimpleNamespace(load_format=one["load_format"]),
    )
    user = vllm.VllmSettings(**URL, model=one["declared"], tokenizer=one["tokenizer"])
    name, told, tokenizer = vllm._names(model, user, vllm.facts_of(config))
    whole = spec_of(with_facts(name, told), tokenizer, 4, 4, 16, torch.float16)
    shard = with_heads(with_layers(whole, one["layers"]), one["heads"])
    salt = salt_of(SimpleNamespace(cache_salt=one["cache_salt"]), Generation(lambda: one["generation"]).salt(b""))
    named = {"model": shard.model, "tokenizer": tokenizer, "group_tokens": one["group_tokens"]}
    return tuple(chain(range(256), salt=salt, **named))


KINDS = {"sglang": (SGLANG, sglang_name), "lmcache": (LMCACHE, lmcache_name), "vllm": (VLLM, vllm_name)}
UNTOLD = {"lmcache": {"shape"}}
"""Things that a usual configuration has no part of in its name: the shape of the only worker is the model's."""


def different(one, other):
    """Whether two configurations are of different KV, as the operator has declared it."""
    declared = one.get("declared") is not None and one["declared"] == other["declared"]
    changed = {name for name in one if one[name] != other[name]}
    return changed - ({"model_name"} if declared else set())


@pytest.mark.parametrize("kind", KINDS)
def test_one_thing_makes_another_name(kind):
    table, name_of = KINDS[kind]

    @settings(max_examples=PAIRS, deadline=None)
    @given(st.data())
    def check(data):
        # Most are usual in most things, as in life.
        usual = {name: values[0] for name, values in table.items()}
        one = {name: data.draw(st.just(usual[name]) | st.sampled_from(values), name) for name, values in table.items()}
        thing = data.draw(st.sampled_from(sorted(table)), "thing")
        other = one | {thing: data.draw(st.sampled_from(table[thing]), "other")}
        if thing in UNTOLD.get(kind, ()) and one["worker"][1] == 1:
            return
        with pytest.MonkeyPatch.context() as patch:
            names = [name_of(patch, each) for each in (one, other)]
        assert (names[0] != names[1]) == bool(different(one, other))

    check()


def test_every_pair_of_values_has_two_names(monkeypatch):
    """Each thing for itself, all its values: more pairs than can be drawn by chance."""
    pairs = 0
    for kind, (table, name_of) in KINDS.items():
        usual = {name: values[0] for name, values in table.items()}
        for thing, values in table.items():
            if thing in UNTOLD.get(kind, ()):
                usual = usual | {"worker": (0, 2)}
            names = [name_of(monkeypatch, usual | {thing: value}) for value in values]
            assert len(set(names)) == len(values), (kind, thing)
            pairs += len(values) * (len(values) - 1) // 2
    assert pairs > 150


def test_folders_of_models_have_names_by_their_weights(tmp_path, monkeypatch):
    """The same path with other weights, as after a deployment, in each engine."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "user"))
    folder, seen = tmp_path / "model", []
    folder.mkdir()
    (folder / "tokenizer.json").write_text("{}")
    for number in range(2):
        (folder / "config.json").write_text(json.dumps({"model_type": "llama"}))
        (folder / "model.safetensors").write_bytes(bytes([number]) * 1000)
        given = KeyedSettings(**URL)
        page = SimpleNamespace(model_name=str(folder), tp_size=1, tp_rank=0, pp_size=1, pp_rank=0)
        chunk = SimpleNamespace(model_name=str(folder), world_size=1, kv_shape=(2, 2, 256, 4, 16))
        served = SimpleNamespace(model=str(folder), revision=None)
        names = [
            model_name(folder),
            vllm._names(served, vllm.VllmSettings(**URL), {})[0],
            sglang.name_of(page, given, torch.bfloat16),
            chunks.name_of(given, chunk),
        ]
        assert names[0] == names[1]
        seen += names[1:]
    assert len(set(seen)) == 6 - 2  # SGLang and LMCache call it alike


# ------------------------------------------------------- usual names


@pytest.mark.parametrize(
    ("told", "tokens"), [(4096, 4096), (-1, STEP_TOKENS), (None, STEP_TOKENS), ("4096", STEP_TOKENS)]
)
def test_a_step_of_sglang_has_the_tokens_that_it_was_told(told, tokens):
    context = SimpleNamespace(get_server_args=lambda: SimpleNamespace(chunked_prefill_size=told))
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(__import__("sys").modules, sglang._CONTEXT, context)
        assert sglang.step_tokens() == tokens
