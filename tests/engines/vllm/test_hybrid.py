"""Models with windows in the real vLLM, whose hybrid memory allocator gives their layers several block tables.

A small random model always runs, and again with a cache that vLLM quantises to FP8. With KVABR_GEMMA, a folder that
tools/gemma-model made, so does Gemma 3 270M.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed: tools/engine-vllm")

from kvabr.types.catalog import Catalog
from kvabr.types.errors import PlayError
from tests.engines.vllm.engine import NEEDS_FP8, TEXT, RealEngine
from tests.engines.vllm.tinies import tiny_gemma
from tests.engines.vllm.world import SMALL, VllmWorld, harmed, zeroed
from tests.needs import GEMMA as NEEDS_GEMMA

pytestmark = [pytest.mark.model, pytest.mark.usefixtures("settled")]

GEMMA = os.environ.get("KVABR_GEMMA")


class World(VllmWorld):
    """An engine, an origin, one published prompt, and what vLLM says when it computes everything."""

    def __init__(self, folder, model, *, block, length, shared, most, exact="FP16", **options):
        from tokenizers import Tokenizer

        super().__init__(folder)
        tracks = self.publishing(exact, "Int8" if exact == "FP16" else "Int4")
        options |= SMALL | {"max_model_len": most, "block_size": block}
        self.exact = exact
        self.engine = RealEngine(model, self.playing(policy=f"fixed:{exact}") | tracks, **options)
        ids = Tokenizer.from_file(str(model / "tokenizer.json")).encode(TEXT).ids
        self.prompt, self.shared = ids[:length], shared
        self.other = [*ids[:shared], *ids[length : length + 200]]
        self.cold = self.computed(self.prompt, publish=True)
        self.other_cold = self.computed(self.other)
        self.model = self.engine.half._model
        self.origin.wait_for_assets()
        (self.asset,) = (path.parent for path in self.assets.glob("*/catalog.json"))
        self.last = (length - 1) // self.model.block * self.model.block
        self.last = min(self.last, Catalog.read(self.asset / "catalog.json").tokens)

    def computed(self, prompt, *, publish=False):
        """What vLLM says without any cache."""
        text, _ = self.says(prompt, play=False, publish=publish)
        self.engine.forget()
        return text

    def played(self, prompt=None, **more):
        return self.says(self.prompt if prompt is None else prompt, **more)


@pytest.fixture(
    scope="module",
    params=[
        "tiny",
        pytest.param("fp8", marks=NEEDS_FP8),
        pytest.param("gemma", marks=pytest.mark.skipif(not GEMMA, reason=NEEDS_GEMMA)),
    ],
)
def world(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    small = {"block": 32, "length": 500, "shared": 300, "most": 768}
    if request.param == "tiny":
        world = World(folder, tiny_gemma(folder / "model"), **small)
    elif request.param == "fp8":
        world = World(folder, tiny_gemma(folder / "model"), **small, exact="Raw", kv_cache_dtype="fp8")
    else:
        world = World(folder, Path(GEMMA), block=128, length=1200, shared=800, most=2048)
    yield world
    world.close()


def test_windows_have_tables_of_their_own(world):
    caches = world.model.caches
    assert [one.kind for one in caches.classes] == ["window", "full"]
    assert len(caches.passing) > 1
    assert world.model.waits
    groups = world.engine.scheduler.kv_cache_config.kv_cache_groups
    assert {type(each.kv_cache_spec).__name__ for each in groups} == {"SlidingWindowSpec", "FullAttentionSpec"}


def test_what_was_published_is_played(world):
    text, counted = world.played()
    assert text == world.cold
    assert counted["lookups_hit"] == counted["plays"] == 1
    assert counted["tokens_loaded"] == world.last
    assert "tokens_missed" not in counted
    window, full = world.model.spec.parts
    seen = 2 * (full.elements_per_token * world.last + window.elements_per_token * (window.only.window + 256))
    assert counted["bytes_fetched"] < 1.1 * seen + 20_000  # not the groups that no window sees


@pytest.mark.parametrize("part", [0, 1])
def test_the_text_depends_on_every_class(world, part, monkeypatch):
    """What is checked here by texts would be noticed: without one class's cache the text is another."""
    zeroed(monkeypatch, world.engine.worker.blocks, part)
    text, counted = world.played()
    assert counted["tokens_loaded"] == world.last
    assert text != world.cold


def test_int8_says_the_same(world, monkeypatch):
    if len(world.prompt) < 1000:
        pytest.skip("random weights have no text that small changes leave alone")
    settings = world.engine.worker._settings
    monkeypatch.setattr(world.engine.worker, "_settings", settings.model_copy(update={"policy": "fixed:Int8"}))
    text, counted = world.played()
    assert counted["tokens_loaded"] == world.last
    assert text == world.cold


def test_a_prompt_that_goes_on_elsewhere(world):
    text, counted = world.played(world.other)
    assert text == world.other_cold
    assert counted["tokens_loaded"] == world.shared // 128 * 128


def test_behind_what_vllm_has_itself(world):
    world.engine.forget()
    world.engine.generate([world.prompt[:300]], 1, kv_transfer_params={"play": False, "publish": False})
    text, counted = world.played(forget=False)
    assert text == world.cold
    assert counted["tokens_loaded"] == world.last - 300 // world.model.block * world.model.block


@pytest.mark.parametrize("part", [0, 1])
@pytest.mark.parametrize("harm", ["corrupt", "missing"])
def test_whatever_is_lost_the_text_stays(world, part, harm):
    name = world.model.spec.names[part]
    group = world.last // 128 - 1
    frame = world.asset / "groups" / f"{world.exact}.{name}" / f"{group:05d}.kvg"
    with harmed(frame, harm):
        text, counted = world.played(deadline_s=30.0)
    assert text == world.cold
    assert counted.get("tokens_loaded", 0) < world.last
    assert counted["plays_cut"] == counted["lookups_hit"] == 1


def test_a_copy_that_fails_is_computed(world, monkeypatch):
    engine = world.engine.worker.blocks

    def failing(*_):
        raise PlayError("a test")

    monkeypatch.setattr(type(engine), "places", failing)
    text, counted = world.played()
    assert text == world.cold
    assert counted["plays_failed"] == 1
    assert not counted.get("tokens_loaded")


def test_what_was_computed_behind_an_exact_cache_is_published(world):
    """Its windows were kept when the beginning was computed here."""
    world.engine.worker.lossy.clear()  # vLLM's own cache is empty: nothing of another test is in it
    before = set(world.assets.iterdir())
    longer = [*world.prompt, 7 if world.engine.half._promises else 11, *world.other[-150:]]
    cold = world.computed(longer)
    text, counted = world.played(longer, publish=True)
    assert text == cold
    assert counted["tokens_loaded"] > 0
    assert len(set(world.assets.iterdir()) - before) == 1
