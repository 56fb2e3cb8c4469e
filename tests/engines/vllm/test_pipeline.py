"""Pipeline parallelism in the real vLLM: two stages, each a process with half of the layers.

vLLM's CPU backend runs stages only where the model is traced: without that, it does not make the buffers that a stage
receives (vLLM 0.32, `CPUModelRunner.warming_up_model`).
"""

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed: tools/engine vllm")

from tests.engines.served import assets_of, harmed
from tests.engines.vllm.engine import TEXT, RealEngine
from tests.engines.vllm.other import OtherEngine
from tests.engines.vllm.tinies import tiny_gemma
from tests.engines.vllm.world import SMALL, VllmWorld

pytestmark = pytest.mark.model


class World(VllmWorld):
    """An engine of two stages, and an origin."""

    def __init__(self, folder):
        super().__init__(folder)
        self.model = tiny_gemma(folder / "model")
        self.engine = RealEngine(
            self.model,
            self.playing() | self.publishing("FP16"),
            pipeline_parallel_size=2,
            enforce_eager=False,
            compilation_config={"mode": 2, "backend": "eager"},
            **SMALL,
        )
        ids = list(TEXT[:2000].encode())
        self.prompt, self.other = ids[:500], ids[700:1200]


@pytest.fixture(scope="module")
def cold(world):
    """The text of a prompt that both stages have published."""
    text, _ = world.says(world.prompt, play=False, publish=True)
    world.origin.wait_for_assets(2)
    return text


def test_each_stage_publishes_its_own_layers(world, cold):
    name = world.engine.half._model.spec.model
    told = {asset.catalog.spec.model for asset in assets_of(world.assets)}
    assert told == {f"{name}+layers0-3", f"{name}+layers4-7"}
    assert len(cold) == 16


def test_stages_play_what_stages_have_published(world, cold):
    world.engine.settle()
    text, counted = world.says(world.prompt, deadline_s=30.0)
    assert text == cold
    assert counted["lookups_hit"] == 1
    assert counted["plays"] == 2
    assert counted["tokens_loaded"] == 2 * 384  # in each stage


def test_one_stage_lacks_a_group(world, cold):
    world.engine.settle()
    (asset,) = (each for each in assets_of(world.assets) if each.catalog.spec.model.endswith("+layers4-7"))
    with harmed(asset, 1, "FP16.full", "corrupt"):
        text, counted = world.says(world.prompt, deadline_s=30.0)
    assert text == cold
    assert counted["plays_cut"] >= 1


def test_stages_play_what_an_engine_with_all_layers_has_published(world, cold):
    other = OtherEngine(world.model, world.publishing("FP16"), "kv_producer", **SMALL)
    said = other.generate(world.other, 16)
    other.close()
    world.origin.wait_for_assets(3)
    text, counted = world.says(world.other)
    assert text == said
    assert counted["tokens_loaded"] == 2 * 384
