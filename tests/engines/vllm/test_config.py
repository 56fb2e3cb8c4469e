"""Engines that are set up in a way that cannot work are refused when they start, with what to do. Real vLLM objects."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed: tools/engine-vllm makes an environment that has it")

from kvabr.engines.transformers.model_loader import folder_name, folder_tokenizer
from kvabr.engines.vllm.config import VllmSettings, rope_of_config, served_model
from kvabr.types.errors import UsageError
from tests.engines.smollm2_folder import smollm2_folder
from tests.engines.vllm.engine import ENVIRONMENT, transfer

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

        given = transfer(extra, role, kv_load_failure_policy=policy)
        arguments = {"dtype": "float32", "max_model_len": 1024, "enforce_eager": True} | options
        return EngineArgs(model=str(model), kv_transfer_config=given, **arguments).create_engine_config()

    return make


def connect(made):
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole

    connector = KVConnectorFactory.create_connector(made, KVConnectorRole.SCHEDULER, None)
    connector.shutdown()
    return connector


def test_what_vllm_says_of_its_model_is_what_kvabr_publishes(config, model):
    served = served_model(config(), VllmSettings(**URL))
    spec = served.spec
    assert (spec.layers, spec.kv_heads, spec.head_dim) == (30, 3, 64)
    assert (spec.model, spec.tokenizer) == (folder_name(model), folder_tokenizer(model))
    assert (spec.rope.theta, spec.rope.layout, spec.rope.frequencies) == (100000.0, "half", None)
    assert served.heads == range(3)
    assert served.block == 128


def test_scaled_rope_is_told_from_plain_rope(config):
    made = config(hf_overrides={"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 100000.0}})
    rope = rope_of_config(made.model_config.hf_text_config)
    assert rope.frequencies is not None
    assert rope.frequencies[0] == pytest.approx(0.5)


@pytest.mark.parametrize(
    ("mode", "policy"), [("play-first", "recompute"), ("play-first", "fail"), ("promise-first", "recompute")]
)
def test_a_connector_that_is_set_up_well(config, mode, policy):
    assert connect(config(URL | {"mode": mode}, policy=policy)).requires_kv_delivery is False


@pytest.mark.parametrize(
    ("extra", "role", "policy", "options", "what"),
    [
        (URL | {"deadlin_s": 1}, "kv_consumer", "recompute", {}, "did you mean 'deadline_s'"),
        (URL | {"mode": "promise-first"}, "kv_consumer", "fail", {}, 'set kv_load_failure_policy to "recompute"'),
        (URL | {"mode": "both"}, "kv_consumer", "recompute", {}, "mode is 'both': it must be 'play-first' or"),
        ({}, "kv_consumer", "recompute", {}, 'needs "url"'),
        (URL, "kv_both", "recompute", {}, 'needs "publish"'),
        (URL, "kv_consumer", "recompute", {"kv_cache_dtype": "fp8"}, "--kv-cache-dtype auto"),
        (URL, "kv_consumer", "recompute", {"block_size": 96}, "multiple of the other"),
    ],
)
def test_one_that_is_not(config, extra, role, policy, options, what):
    made = config(extra, role, policy, **options)
    with pytest.raises(UsageError) as caught:
        connect(made)
    assert what in str(caught.value)


def test_a_model_without_a_folder_must_be_named(config):
    made = config()
    made.model_config.model = "somebody/some-model"
    with pytest.raises(UsageError, match='"tokenizer"'):
        served_model(made, VllmSettings(**URL))
    served = served_model(made, VllmSettings(**URL, model="some-model@abc", tokenizer="t"))
    assert served.spec.model == "some-model@abc"
