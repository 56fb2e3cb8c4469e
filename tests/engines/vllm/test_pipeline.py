"""Pipeline parallelism in the real vLLM: two stages, each a process with half of the layers.

vLLM's CPU backend runs stages only where the model is traced: without that, it does not make the buffers that a stage
receives (vLLM 0.32, `CPUModelRunner.warming_up_model`).
"""

from __future__ import annotations

import json
import time

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed: tools/engine-vllm makes an environment that has it")

from tests.engines.vllm.engine import TEXT, RealEngine
from tests.engines.vllm.origin import ServedFolder
from tests.engines.vllm.other import OtherEngine
from tests.engines.vllm.tinies import tiny_gemma

pytestmark = pytest.mark.model


class World:
    def __init__(self, folder):
        self.model = tiny_gemma(folder / "model")
        self.assets = folder / "assets"
        self.assets.mkdir()
        self.origin = ServedFolder(self.assets, folder)
        self.extra = {
            "url": f"moqt://127.0.0.1:{self.origin.port}/",
            "fingerprint": self.origin.fingerprint,
            "publish": str(self.assets),
            "deadline_s": 60.0,
            "tracks": ["FP16"],
            "policy": "fixed:FP16",
            "quic": "qh3",
            "prefill_rate": 100.0,
            "store_mib": 0,
        }
        self.options = {
            "max_model_len": 768,
            "block_size": 32,
            "skip_tokenizer_init": True,
            "max_num_batched_tokens": 256,
        }
        self.engine = RealEngine(
            self.model,
            self.extra,
            pipeline_parallel_size=2,
            enforce_eager=False,
            compilation_config={"mode": 2, "backend": "eager"},
            **self.options,
        )
        ids = list(TEXT[:2000].encode())
        self.prompt, self.other = ids[:500], ids[700:1200]

    def says(self, prompt, **params):
        self.engine.forget()
        self.engine.counted()
        given = {"publish": False} | params
        (text,) = self.engine.generate([prompt], 16, kv_transfer_params=given)
        self.engine.settle()
        return list(text), self.engine.counted()

    def wait_for_assets(self, count):
        end_s = time.monotonic() + 300
        while self.origin.log().count("asset added") < count:
            assert time.monotonic() < end_s
            time.sleep(0.05)

    def close(self):
        self.engine.close()
        self.origin.close()


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    world = World(tmp_path_factory.mktemp("world"))
    yield world
    world.close()


@pytest.fixture(scope="module")
def cold(world):
    """The text of a prompt that both stages have published."""
    text, _ = world.says(world.prompt, play=False, publish=True)
    world.wait_for_assets(2)
    return text


def test_each_stage_publishes_its_own_layers(world, cold):
    catalogs = [json.loads(path.read_text()) for path in world.assets.glob("*/catalog.json")]
    name = world.engine.half._model.spec.model
    told = sorted(str(catalog) for catalog in catalogs)
    assert len(told) == 2
    assert any(f"{name}+layers0-3" in each for each in told)
    assert any(f"{name}+layers4-7" in each for each in told)
    assert len(cold) == 16


@pytest.mark.parametrize("mode", ["play-first", "promise-first"])
def test_stages_play_what_stages_have_published(world, cold, mode):
    world.engine.use(mode)
    text, counted = world.says(world.prompt)
    assert text == cold
    assert counted["lookups_hit"] == 1
    assert counted["plays"] == 2
    assert counted["tokens_loaded"] == 2 * 384  # in each stage


@pytest.mark.parametrize("mode", ["play-first", "promise-first"])
def test_one_stage_lacks_a_group(world, cold, mode):
    world.engine.use(mode)
    paths = [path for path in world.assets.iterdir() if "+layers4-7" in (path / "catalog.json").read_text()]
    (frame,) = (paths[0] / "groups" / "FP16.full").glob("00001.kvg")
    data = frame.read_bytes()
    frame.unlink()
    try:
        text, counted = world.says(world.prompt, deadline_s=30.0)
    finally:
        frame.write_bytes(data)
    assert text == cold
    assert counted["plays_cut"] >= 1


def test_stages_play_what_an_engine_with_all_layers_has_published(world, cold):
    other = OtherEngine(world.model, {"publish": str(world.assets), "tracks": ["FP16"]}, "kv_producer", **world.options)
    said = other.generate(world.other, 16)
    other.close()
    world.wait_for_assets(3)
    text, counted = world.says(world.other)
    assert text == said
    assert counted["tokens_loaded"] == 2 * 384
