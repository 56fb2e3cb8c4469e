"""Engines that are set up in a way that cannot work are refused when they start, with what to do. Real vLLM objects."""

import os
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("vllm", reason="vLLM is not installed: tools/engine vllm")

from kvabr.engines.transformers.model_loader import folder_tokenizer
from kvabr.engines.vllm.caches import UnknownCacheError
from kvabr.engines.vllm.config import VllmSettings, _names, facts_of, served_model
from kvabr.engines.weights import model_name
from kvabr.types.errors import UsageError
from kvabr.types.naming import with_facts
from tests.engines.smollm2_folder import smollm2_folder
from tests.engines.vllm.engine import ENVIRONMENT, NEEDS_FP8, transfer_of

pytestmark = pytest.mark.model

URL = {"url": "moqt://127.0.0.1:9/"}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    os.environ.update(ENVIRONMENT)
    folder = Path(os.environ.get("KVABR_SMOLLM2") or tmp_path_factory.mktemp("model") / "smollm2")
    smollm2_folder(folder)
    return folder


@pytest.fixture
def config(model):
    """vLLM's own configuration of an engine that has not been started."""

    def make(extra=URL, role="kv_consumer", policy="recompute", **options):
        from vllm.engine.arg_utils import EngineArgs

        given = transfer_of(extra, role, kv_load_failure_policy=policy)
        arguments = {"dtype": "float32", "max_model_len": 1024, "enforce_eager": True} | options
        return EngineArgs(model=str(model), kv_transfer_config=given, **arguments).create_engine_config()

    return make


def caches(made, *, layers=30, **fields):
    """vLLM's description of the model's cache."""
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec

    plain = {"block_size": made.cache_config.block_size, "num_kv_heads": 3, "head_size": 64, "dtype": torch.float32}
    names = [f"model.layers.{layer}.self_attn.attn" for layer in range(layers)]
    return KVCacheConfig(8, [], [KVCacheGroupSpec(names, FullAttentionSpec(**plain | fields))])


def connect(made, role="SCHEDULER", **fields):
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole

    connector = KVConnectorFactory.create_connector(made, KVConnectorRole[role], caches(made, **fields))
    connector.shutdown()
    return connector


def test_what_vllm_says_of_its_model_is_what_kvabr_publishes(config, model):
    made = config()
    served = served_model(made, caches(made), VllmSettings(**URL))
    spec = served.spec
    assert (spec.layers, spec.kv_heads, spec.head_dim) == (30, 3, 64)
    assert (spec.model, spec.tokenizer) == (model_name(model), folder_tokenizer(model))
    assert (spec.rope.theta, spec.rope.layout, spec.rope.frequencies) == (100000.0, "half", None)
    assert served.heads == (range(3),)
    assert served.block == 128
    assert not served.waits
    assert served_model(made, caches(made), VllmSettings(**URL), blocks_may_fail=False).waits


def name_of(made, settings):
    return with_facts(*_names(made.model_config, settings, facts_of(made))[:2])


@pytest.mark.parametrize(
    "options",
    [
        {"hf_overrides": {"rms_norm_eps": 0.1}},
        {"load_format": "dummy"},
        {"load_format": "dummy", "seed": 3},
        pytest.param({"kv_cache_dtype": "fp8"}, marks=NEEDS_FP8),
    ],
    ids=str,
)
def test_what_changes_the_cache_of_a_model_is_in_its_name(config, model, options):
    made = config(**options)
    spec = served_model(made, caches(made), VllmSettings(**URL)) if "kv_cache_dtype" not in options else None
    name = name_of(made, VllmSettings(**URL)) if spec is None else spec.spec.model
    assert name.startswith(f"{model_name(model)}~")
    again = config(**options)
    assert name_of(again, VllmSettings(**URL)) == name


def test_a_stage_of_a_pipeline_knows_the_whole_model(config):
    made = config(pipeline_parallel_size=2)
    served = served_model(made, caches(made, layers=15), VllmSettings(**URL))
    assert served.spec == served_model(config(), caches(made), VllmSettings(**URL)).spec
    assert (served.ranks, served.layers, served.places) == (2, range(15), ((0, range(15)),))
    assert served.shard.model == f"{served.spec.model}+layers0-14"
    assert served.specs == (served.shard, served.spec)


@pytest.mark.parametrize(
    ("extra", "role", "policy", "options", "what"),
    [
        (URL | {"deadlin_s": 1}, "kv_consumer", "recompute", {}, "did you mean 'deadline_s'"),
        ({}, "kv_consumer", "recompute", {}, 'needs "url"'),
        (URL, "kv_both", "recompute", {}, 'needs "publish"'),
        (URL, "kv_consumer", "recompute", {"block_size": 96}, "multiple of the other"),
    ],
)
def test_one_that_is_not(config, extra, role, policy, options, what):
    made = config(extra, role, policy, **options)
    with pytest.raises(UsageError) as caught:
        connect(made)
    assert what in str(caught.value)


def test_an_fp8_cache_is_one_of_codes_with_the_scales_of_the_checkpoint(config):
    made = config(kv_cache_dtype="fp8")
    of_codes = caches(made, dtype=torch.uint8, kv_quant_mode=1)
    served = served_model(made, of_codes, VllmSettings(**URL))
    assert (served.spec.dtype, served.spec.only.scales, served.quantised) == ("float8_e4m3fn", (1.0,), True)
    assert served.spec.rope.theta == 100000.0
    assert served.unquantised is None
    scales = {f"model.layers.{layer}.self_attn.attn": (0.5, 0.25) for layer in range(30)}
    settings = VllmSettings(**URL, plain_caches=True)
    scaled = served_model(made, of_codes, settings, scales=scales)
    assert scaled.spec.only.scales == (0.5, 0.25) * 30
    assert scaled.unquantised.same_cache(
        served_model(config(), caches(config()), settings).spec.changed(dtype="bfloat16")
    )
    assert scaled.specs == (scaled.spec, scaled.unquantised)
    latents = caches(made, dtype=torch.uint8, kv_quant_mode=1)
    latents.kv_cache_groups[0].kv_cache_spec = type("MLAAttentionSpec", (SimpleNamespace,), {})(
        block_size=16, num_kv_heads=1, head_size=64, head_size_v=0, dtype=torch.uint8, kv_quant_mode=1
    )
    with pytest.raises(UsageError, match=r"plain_caches is only for whole models with keys and values.* leave it out"):
        served_model(made, latents, settings)
    made.cache_config.calculate_kv_scales = True
    with pytest.raises(UsageError, match="calculate_kv_scales"):
        served_model(made, of_codes, VllmSettings(**URL))


def layer_of(scale, **fields):
    """An attention layer's description of its cache, as in vLLM."""
    scales = {"_k_scale": torch.tensor(scale), "_v_scale": torch.tensor(1.0), "_v_scale_float": 1.0}
    backend = SimpleNamespace(get_name=lambda: "CPU_ATTN")
    told = {"attn_backend": backend, "impl": None, "kv_cache_dtype": "fp8", "_k_scale_float": 1.0}
    return SimpleNamespace(**told | scales | fields)


def test_scales_of_heads_are_not_known(config):
    from kvabr.engines.vllm.connector import scales_of

    made = config(kv_cache_dtype="fp8")
    layers = made.compilation_config.static_forward_context
    layers["a"] = layer_of(1.0)
    assert scales_of(made) == {}
    layers["b"] = layer_of(0.5, _k_scale_float=0.5)
    assert scales_of(made) == {"a": (1.0, 1.0), "b": (0.5, 1.0)}
    layers["c"] = layer_of([0.5, 0.25])
    with pytest.raises(UsageError, match="c: the checkpoint has FP8 scales per head"):
        scales_of(made)


def test_a_model_without_a_folder_must_be_named(config):
    made = config()
    made.model_config.model = "somebody/some-model"
    with pytest.raises(UsageError, match='"tokenizer"'):
        served_model(made, caches(made), VllmSettings(**URL))
    served = served_model(made, caches(made), VllmSettings(**URL, model="some-model@abc", tokenizer="t"))
    assert served.spec.model == "some-model@abc"


@pytest.mark.parametrize(
    ("fields", "what"),
    [
        ({"layers": 29}, "for 29 of 30 layers of the model"),
        ({"sliding_window": 512}, "without --disable-hybrid-kv-cache-manager"),
        ({"dtype": torch.uint8}, "in uint8 instead of float32"),
    ],
)
def test_a_cache_that_kvabr_does_not_know_is_left_to_vllm(config, fields, what):
    made = config()
    with pytest.raises(UnknownCacheError, match=what):
        served_model(made, caches(made, **fields), VllmSettings(**URL))
    scheduler, worker = connect(made, **fields), connect(made, "WORKER", **fields)
    request = SimpleNamespace(request_id="r")
    scheduler.on_new_request(request)
    assert scheduler.get_num_new_matched_tokens(request, 0) == (0, False)
    scheduler.update_state_after_alloc(request, SimpleNamespace(get_block_ids=list), 0)
    output = SimpleNamespace(num_scheduled_tokens={"r": 5})
    worker.register_kv_caches({})
    worker.bind_connector_metadata(scheduler.build_connector_meta(output))
    worker.start_load_kv(None)
    worker.wait_for_save()
    results = worker.get_transfer_results({"r"})
    assert (results.finished_sending, results.finished_recving, results.failed_recving) == (set(), set(), set())
    assert worker.get_block_ids_with_load_errors() == set()
    assert worker.build_connector_worker_meta() is None
    scheduler.update_connector_output(SimpleNamespace(finished_recving=None, kv_connector_worker_meta=None))
    assert scheduler.request_finished_all_groups(request, ([],)) == (False, None)
    assert worker.get_kv_connector_stats() is None
