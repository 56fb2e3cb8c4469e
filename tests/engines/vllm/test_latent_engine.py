"""Latents (MLA) in the real vLLM: published caches return to its blocks bit for bit.

vLLM's attention for processors without AMX computes such prompts without what is cached before them, so the connector
plays nothing there; these tests have it do so all the same, and look at the blocks.
"""

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed: tools/engine vllm")

import torch

from kvabr.engines.vllm import config
from kvabr.engines.vllm.idle import IdleScheduler
from tests.engines.served import assets_of
from tests.engines.vllm.engine import TEXT, RealEngine, transfer_of
from tests.engines.vllm.tinies import tiny_latent
from tests.engines.vllm.world import SMALL, VllmWorld

pytestmark = pytest.mark.model

PROMPT, BLOCKS = list(TEXT.encode()[:500]), 384 // 16


class World(VllmWorld):
    engine = None

    def __init__(self, folder):
        super().__init__(folder)
        self.folder = folder

    def start(self, kind):
        extra = self.playing(policy="fixed:Raw") | self.publishing("Raw")
        options = SMALL | {"dtype": "bfloat16", "block_size": 16}
        model = tiny_latent(self.folder / kind, kind)
        self.engine = RealEngine(model, extra, transfer=transfer_of(extra), **options)
        self.tables = []
        finished = self.engine.half.finished
        self.engine.half.finished = lambda request, blocks: self.tables.append(blocks[0]) or finished(request, blocks)

    def held(self):
        """The contents of the engine's blocks for the prompt's first 384 tokens; then the blocks are cleared."""
        shelf = self.engine.worker._blocks._shelves[0]
        found = torch.stack([layer[self.tables[-1][:BLOCKS]] for layer in shelf.layers])
        for layer in shelf.layers:
            layer.zero_()
        return found

    def end(self):
        self.engine.close()
        self.engine = None  # which takes more away with it, and must not do that to the next one

    def close(self):
        self.origin.close()


@pytest.mark.parametrize("kind", ["deepseek", "glm"])
def test_what_is_published_comes_back_bit_for_bit(world, kind, monkeypatch):
    monkeypatch.setattr(config, "_check_playable", lambda *_: None)
    world.start(kind)
    try:
        before = len(assets_of(world.assets))
        world.says(PROMPT, play=False, publish=True)
        computed = world.held()
        world.origin.wait_for_assets(before + 1)
        _, counted = world.says(PROMPT)
        assert counted["tokens_loaded"] == 384
        assert computed.count_nonzero() > 0.9 * computed.numel()
        assert torch.equal(world.held(), computed)
    finally:
        world.end()


def test_nothing_is_played_where_vllm_would_not_look_at_it(world):
    """Without AMX; with it, prompts are computed in pieces, and a cache is played."""
    if torch.cpu._is_amx_tile_supported():
        pytest.skip("this processor has AMX")
    extra = world.playing()
    model = tiny_latent(world.folder / "refused", "deepseek")
    world.engine = RealEngine(model, None, transfer=transfer_of(extra, "kv_consumer"), **SMALL | {"dtype": "bfloat16"})
    try:
        assert isinstance(world.engine.scheduler.connector._scheduler, IdleScheduler)
        assert world.engine.generate([PROMPT])
    finally:
        world.engine.worker = None
        world.end()
