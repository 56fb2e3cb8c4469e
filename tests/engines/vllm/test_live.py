"""One vLLM prefills and publishes step by step, and another, in this process, plays meanwhile. Both are real."""

from __future__ import annotations

import time

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed: tools/engine-vllm makes an environment that has it")

from tests.engines.vllm.engine import TEXT, RealEngine
from tests.engines.vllm.origin import ServedFolder
from tests.engines.vllm.other import OtherEngine
from tests.engines.vllm.tinies import tiny_gemma

pytestmark = pytest.mark.model

IDS = list(TEXT[:4000].encode())
SAID = 16


class World:
    """A producer with layers of windows and of full attention, an origin, and a consumer."""

    def __init__(self, folder):
        model, self.assets = tiny_gemma(folder / "model"), folder / "assets"
        self.assets.mkdir()
        self.origin = ServedFolder(self.assets, folder)
        options = {"max_model_len": 768, "block_size": 32, "skip_tokenizer_init": True, "max_num_batched_tokens": 64}
        publishing = {"publish": str(self.assets), "tracks": ["FP16"], "publish_live": True}
        self.producer = OtherEngine(model, publishing, "kv_producer", **options)
        playing = {
            "url": f"moqt://127.0.0.1:{self.origin.port}/",
            "fingerprint": self.origin.fingerprint,
            "deadline_s": 60.0,
            "policy": "fixed:FP16",
            "quic": "qh3",
            "prefill_rate": 10.0,
            "store_mib": 0,
        }
        self.engine = RealEngine(model, playing, "kv_consumer", **options)

    def close(self):
        self.producer.close()
        self.engine.close()
        self.origin.close()


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    world = World(tmp_path_factory.mktemp("world"))
    yield world
    world.close()


@pytest.mark.parametrize("mode", ["play-first", "promise-first"])
def test_both_say_the_same(world, mode):
    world.engine.use(mode)
    prompt = IDS[:700] if mode == "play-first" else IDS[800:1500]
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
