"""One vLLM prefills and publishes step by step, and another, in this process, plays meanwhile. Both are real."""

import time

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed: tools/engine vllm")

from tests.engines.vllm.engine import TEXT, RealEngine
from tests.engines.vllm.other import OtherEngine
from tests.engines.vllm.tinies import tiny_gemma
from tests.engines.vllm.world import SMALL, VllmWorld

pytestmark = pytest.mark.model

IDS = list(TEXT[:4000].encode())
SAID = 16


class World(VllmWorld):
    """A producer with layers of windows and of full attention, an origin, and a consumer."""

    def __init__(self, folder):
        super().__init__(folder)
        model, options = tiny_gemma(folder / "model"), SMALL | {"max_num_batched_tokens": 64}
        self.producer = OtherEngine(model, self.publishing("FP16", publish_live=True), "kv_producer", **options)
        self.engine = RealEngine(model, self.playing(prefill_rate=10.0), "kv_consumer", **options)

    def close(self):
        self.producer.close()
        super().close()


def test_both_say_the_same(world):
    world.engine.settle()
    prompt = IDS[:700]
    world.engine.counted()
    world.producer.begin(prompt, SAID)
    end_s = time.monotonic() + 300
    while not world.engine.finds(prompt):
        assert time.monotonic() < end_s
    (text,) = world.engine.generate([prompt], SAID)
    said = world.producer.end()
    world.engine.settle()
    counted = world.engine.counted()
    assert list(text) == said["text"]
    assert said["counted"]["published_live"] == 1
    assert counted["tokens_loaded"] == 640
    assert "tokens_missed" not in counted


def test_disaggregated_prefill(world):
    """As vLLM's proxy asks: the prefill node for one token, and the decode node as soon as that has answered."""
    world.engine.settle()
    prompt = IDS[1600:2300]
    cold, _ = world.says(prompt, SAID, play=False)
    world.engine.forget()
    (first,) = world.producer.generate(prompt, 1)
    text, counted = world.says(prompt, SAID, forget=False)
    assert text == cold
    assert text[0] == first
    assert counted["tokens_loaded"] == 640
    assert "tokens_missed" not in counted
