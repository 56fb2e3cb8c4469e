"""FP8 caches in the real vLLM, with a checkpoint that scales them: what is played is code by code what is computed.

Three engines after one another: one that keeps numbers, one with scales, and one with others.
"""

import pytest
import torch

pytest.importorskip("vllm", reason="vLLM is not installed: tools/engine vllm")

from kvabr.codec.quantised import numbers_of, scales_of
from kvabr.engines.transformers import model_loader
from tests.engines.served import assets_of
from tests.engines.vllm.engine import NEEDS_FP8, TEXT, RealEngine
from tests.engines.vllm.tinies import tiny_llama, tiny_scaled
from tests.engines.vllm.world import SMALL, VllmWorld

pytestmark = [pytest.mark.model, NEEDS_FP8]

SCALES, OTHERS = ((0.037, 0.013), (0.5, 0.02)), ((0.037, 0.013), (0.5, 0.03))
PROMPT, OTHER = list(TEXT.encode()[:500]), list(TEXT.encode()[5000:5500])
NAMED = {"model": "tiny", "tokenizer": "bytes"}
LAST = 384
"""Tokens in whole groups."""


class World(VllmWorld):
    engine = None

    def start(self, model, *tracks, **more):
        self.end()
        extra = self.playing(policy="fixed:Raw", **NAMED, **more) | self.publishing(*tracks)
        self.engine = RealEngine(model, extra, kv_cache_dtype="fp8" if model.name != "plain" else "auto", **SMALL)

    def end(self):
        if self.engine is not None:
            self.engine.close()
            self.engine = None

    def published(self, prompt, **more):
        """The engine's text, and the cache that it publishes meanwhile, as read from its blocks."""
        text, counted, given = self.watched("read", prompt, publish=True, **more)
        assert counted["published"] == 1
        self.origin.wait_for_assets(len(assets_of(self.assets)))
        return text, given[0][1][0]

    def played(self, prompt, **more):
        """The engine's text, its counters, and the contents of the played blocks."""
        text, counted, given = self.watched("places", prompt, **more)
        if not given:
            return text, counted, None
        spec, (*_, runs) = self.engine.half._model.spec, given[0]
        kv = torch.empty(spec.shape(len(runs[0]) * SMALL["block_size"]), dtype=spec.torch_dtype)
        self.engine.worker.blocks.read(runs, [kv])
        return text, counted, kv

    def watched(self, name, prompt, **more):
        """The engine's text, its counters, and the arguments of calls to a method of its blocks."""
        kind, given = type(self.engine.worker.blocks), []
        method = getattr(kind, name)

        def watching(blocks, *arguments):
            given.append(arguments)
            return method(blocks, *arguments)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(kind, name, watching)
            text, counted = self.says(prompt, **more)
        return text, counted, given


def same(one, other):
    return torch.equal(one.view(torch.uint8), other.view(torch.uint8))


@pytest.fixture
def world(tmp_path):
    made = World(tmp_path)
    yield made
    made.end()
    made.origin.close()


def test_an_fp8_cache_with_scales(world, tmp_path, monkeypatch):
    plain, scaled = tiny_llama(tmp_path / "plain"), tiny_scaled(tmp_path / "scaled", SCALES)
    with monkeypatch.context() as patch:  # to the bit, as codes are compared
        patch.setattr(model_loader, "asset_dtype", lambda _: "float32")
        world.start(plain, "Raw")
    _, numbers = world.published(OTHER)

    world.start(scaled, "Raw", "Int4", plain_caches=True)
    spec = world.engine.half._model.spec
    assert spec == world.engine.worker._model.spec
    assert spec.only.scales == pytest.approx([scale for pair in SCALES for scale in pair])
    cold, codes = world.published(PROMPT)
    text, counted, kv = world.played(PROMPT)
    assert (text, counted["tokens_loaded"]) == (cold, LAST)
    assert same(kv, codes[:, :, :, :LAST])
    (catalog,) = (each.catalog for each in assets_of(world.assets) if each.catalog.spec == spec)
    assert [track.name for track in catalog.tracks] == ["Raw", "Int4"]
    worker = world.engine.worker
    worker._settings = worker._settings.model_copy(update={"policy": "fixed:Int4"})
    _, counted, kv = world.played(PROMPT)
    assert counted["tokens_loaded"] == LAST
    near, exact = (numbers_of(each[:, :, :, :LAST], spec) for each in (kv, codes))
    assert 0 < (near - exact).abs().mean() < 0.15 * exact.abs().mean()
    worker._settings = worker._settings.model_copy(update={"policy": "fixed:Raw"})

    # Numbers of an engine without quantisation: its first layer's are those that are computed here.
    text, counted, kv = world.played(OTHER, publish=True)
    assert counted["tokens_loaded"] == LAST
    assert counted["publish_dropped_lossy"] == 1
    world.engine.worker.lossy.clear()
    world.engine.forget()
    _, own = world.published(OTHER, play=False)
    assert same(kv[0], own[0, :, :, :LAST])
    scales = scales_of(spec)
    given = numbers[:, :, :, :LAST].clamp(-448 * scales, 448 * scales)
    step = torch.maximum(given.abs() / 8, scales / 512)  # of E4M3, whichever way the kernel rounds
    assert bool(((numbers_of(kv, spec) - given).abs() <= step).all())

    world.start(tiny_scaled(tmp_path / "others", OTHERS), "Raw")
    _, counted, kv = world.played(PROMPT)
    assert kv is None
    assert counted["lookups_refused"] == 1
