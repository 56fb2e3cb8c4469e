"""Options of the real vLLM: with each, published caches are played, and the text equals that of computing.

What needs more has a file of its own: pipelines (test_pipeline), two engines (test_two_engines), FP8 (test_config).
"""

import shutil

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed: tools/engine vllm")

from tests.engines.served import assets_of
from tests.engines.vllm.engine import TEXT, RealEngine, transfer_of
from tests.engines.vllm.other import OtherEngine
from tests.engines.vllm.tinies import tiny_adapter, tiny_llama
from tests.engines.vllm.world import SMALL, VllmWorld

pytestmark = pytest.mark.model

IDS = list(TEXT[:4000].encode())
PROMPT, SAID = IDS[:500], 16
OPTIONS = {
    "as usual": {},
    "chunked prefill": {"max_num_batched_tokens": 64},
    "asynchronous scheduling": {"async_scheduling": True},
    "no prefix caching": {"enable_prefix_caching": False},
    "priorities": {"scheduling_policy": "priority"},
    "two tensor-parallel ranks": {"tensor_parallel_size": 2},
}


class World(VllmWorld):
    """A cache that one engine has published; other engines start, play it and stop."""

    engine = None

    def __init__(self, folder):
        super().__init__(folder)
        self.folder, self.model = folder, tiny_llama(folder / "model")
        producer = OtherEngine(self.model, self.publishing("FP16"), "kv_producer", **SMALL)
        self.cold = producer.generate(PROMPT, SAID)
        producer.close()
        self.origin.wait_for_assets()

    def start(self, transfer=None, **options):
        self.engine = RealEngine(self.model, self.playing(), "kv_consumer", transfer=transfer, **SMALL | options)

    def close(self):
        self.origin.close()


@pytest.fixture
def started(world):
    yield world
    if world.engine is not None:
        world.engine.close()
        world.engine = None


@pytest.mark.parametrize("option", OPTIONS)
def test_the_text_is_that_of_computing(started, option):
    started.start(**OPTIONS[option])
    cold, counted = started.says(PROMPT, SAID, play=False)
    assert "plays" not in counted
    text, counted = started.says(PROMPT, SAID)
    assert text == cold
    ranks = OPTIONS[option].get("tensor_parallel_size", 1)
    assert counted["plays"] == ranks
    assert counted["tokens_loaded"] == ranks * 384


def test_requests_that_vllm_preempts_say_the_same(started):
    """There are blocks for two and a half of four requests."""
    prompts = [PROMPT[:400] + IDS[at : at + 60] for at in (1000, 1100, 1200, 1300)]
    started.start(num_gpu_blocks_override=48)
    cold = [started.says(prompt, 64, play=False)[0] for prompt in prompts]
    started.engine.forget()
    texts = started.engine.generate(prompts, 64, kv_transfer_params={"publish": False})
    assert [list(text) for text in texts] == cold


def test_an_adapter_has_caches_of_its_own(started):
    """What one publishes is played for the same adapter under another name, and for no other, nor the base."""
    from vllm.lora.request import LoRARequest

    folders = [tiny_adapter(started.folder / name, seed) for name, seed in (("one", 1), ("other", 2))]
    shutil.copytree(folders[0], started.folder / "renamed")
    names = ("one", "other", "renamed")
    one, other, renamed = (LoRARequest(name, i + 1, str(started.folder / name)) for i, name in enumerate(names))
    loras = {"enable_lora": True, "max_lora_rank": 8, "max_loras": 3}
    started.start(transfer_of(started.playing() | started.publishing("FP16")), **loras)
    base, _ = started.says(PROMPT, SAID, play=False)
    cold = {}
    for lora in (one, other):
        cold[lora.lora_name], counted = started.says(PROMPT, SAID, lora=lora, play=False, publish=lora is one)
        assert counted.get("published", 0) == (lora is one)
    assert len({tuple(text) for text in (base, *cold.values())}) == 3
    started.origin.wait_for_assets(len(assets_of(started.assets)))
    for lora, text, tokens in [(renamed, cold["one"], 384), (other, cold["other"], 0), (one, cold["one"], 384)]:
        said, counted = started.says(PROMPT, SAID, lora=lora)
        assert (said, counted.get("tokens_loaded", 0)) == (text, tokens)
    said, counted = started.says(PROMPT, SAID)
    assert (said, counted["tokens_loaded"]) == (base, 384)


def test_what_is_published_behind_the_last_request_is_counted(started):
    """vLLM takes counters with its steps: it has to go on with them until this one is there."""
    extra = started.publishing("FP16", publish=str(started.folder / "published"))
    engine = started.engine = RealEngine(started.model, extra, "kv_producer", **SMALL)
    engine.generate([PROMPT], 1)
    while engine.scheduler.has_requests():
        engine.llm.llm_engine.step()
    assert engine.counted()["published"] == 1


@pytest.mark.parametrize("first", [True, False])
def test_another_connector_beside_it(started, first):
    """vLLM's MultiConnector looks kvabr's up by its name when it counts."""
    from vllm.config import KVTransferConfig

    own = {
        "kv_connector": "KvabrConnector",
        "kv_connector_module_path": "kvabr.engines.vllm",
        "kv_role": "kv_consumer",
        "kv_connector_extra_config": started.playing(),
    }
    other = {
        "kv_connector": "ExampleConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"shared_storage_path": str(started.folder / f"other {first}")},
    }
    both = KVTransferConfig(
        kv_connector="MultiConnector",
        kv_role="kv_both",
        kv_load_failure_policy="recompute",
        kv_connector_extra_config={"connectors": [own, other] if first else [other, own]},
    )
    started.start(transfer=both)
    text, counted = started.says(PROMPT, SAID)
    assert counted["plays"] == 1
    assert counted["tokens_loaded"] == 384
    assert text == started.cold
    # The other one keeps what was played: nothing that loses more than vLLM's own prefix cache may have.
    assert started.engine.worker._max_loss == started.engine.worker._settings.keep_loss


def test_speculation(world):
    """In a process of its own: with it vLLM loads numba, after which it can start no other engine in the same one."""
    how = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 4}
    engine = OtherEngine(world.model, world.playing(), "kv_consumer", speculative_config=how, **SMALL)
    cold = engine.generate(PROMPT, SAID, play=False)
    engine.begin(PROMPT, SAID)
    said = engine.end()
    engine.close()
    assert said["text"] == cold
    assert said["counted"]["plays"] == 1
    assert said["counted"]["tokens_loaded"] == 384
