"""Models with windows or states in the real vLLM, whose hybrid memory allocator gives layers several block tables.

A small random Gemma 3 always runs, and again with a cache that vLLM quantises to FP8; with KVABR_GEMMA, a folder that
tools/gemma-model made, so does Gemma 3 270M. A small random Qwen3-Next (gated delta) has states: in bfloat16, since
vLLM's kernels for CPUs run it in no other type, with states in float32, as vLLM chooses itself on some processors.
"""

import os
from pathlib import Path

import pytest
import torch

pytest.importorskip("vllm", reason="vLLM is not installed: tools/engine vllm")

from kvabr.store.locations import open_asset
from kvabr.types.errors import PlayError, UsageError
from tests.engines.served import assets_of, harmed
from tests.engines.vllm.engine import NEEDS_FP8, TEXT, RealEngine
from tests.engines.vllm.tinies import tiny_delta, tiny_gemma
from tests.engines.vllm.world import SMALL, VllmWorld, zeroed
from tests.needs import GEMMA as NEEDS_GEMMA

pytestmark = [pytest.mark.model, pytest.mark.usefixtures("settled")]

GEMMA = os.environ.get("KVABR_GEMMA")


class World(VllmWorld):
    """An engine, an origin, one published prompt, and vLLM's text when it computes everything."""

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
        self.asset = open_asset(self.assets)
        self.last = (length - 1) // self.model.block * self.model.block
        self.last = min(self.last, self.asset.catalog.tokens)

    def computed(self, prompt, *, publish=False):
        """vLLM's text without any cache."""
        text, _ = self.says(prompt, play=False, publish=publish)
        self.engine.forget()
        return text

    def played(self, prompt=None, **more):
        return self.says(self.prompt if prompt is None else prompt, **more)


@pytest.fixture(scope="module")
def world(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    small = {"block": 32, "length": 500, "shared": 300, "most": 768}
    if request.param == "tiny":
        world = World(folder, tiny_gemma(folder / "model"), **small)
    elif request.param == "fp8":
        world = World(folder, tiny_gemma(folder / "model"), **small, exact="Raw", kv_cache_dtype="fp8")
    elif request.param == "gemma":
        world = World(folder, Path(GEMMA), block=128, length=1200, shared=800, most=2048)
    else:
        types = {"dtype": "bfloat16", "mamba_ssm_cache_dtype": "float32"}
        try:
            world = World(folder, tiny_delta(folder / "model"), **small | {"block": 128}, exact="Raw", **types)
        except UsageError as error:
            if "'amx'" not in str(error):
                raise
            pytest.skip(f"on processors with AMX: {error}")
    yield world
    world.close()


WINDOWS = (
    "tiny",
    pytest.param("fp8", marks=NEEDS_FP8),
    pytest.param("gemma", marks=pytest.mark.skipif(not GEMMA, reason=NEEDS_GEMMA)),
)
with_windows = pytest.mark.parametrize("world", WINDOWS, indirect=True)
with_states = pytest.mark.parametrize("world", ["delta"], indirect=True)
with_either = pytest.mark.parametrize("world", [*WINDOWS, "delta"], indirect=True)


@with_windows
def test_windows_have_tables_of_their_own(world):
    caches = world.model.caches
    assert [one.kind for one in caches.classes] == ["window", "full"]
    assert len(caches.passing) > 1
    assert world.model.waits


@with_states
def test_states_have_tables_of_their_own(world):
    assert world.model.spec.names == ("state-convolution", "state-recurrent", "full")
    assert [one.dtype for one in world.model.spec.classes] == ["bfloat16", "float32", "bfloat16"]
    assert len(world.model.caches.states) == 2


@with_either
def test_what_was_published_is_played(world):
    text, counted = world.played()
    assert text == world.cold
    assert counted["lookups_hit"] == counted["plays"] == 1
    assert counted["tokens_loaded"] == world.last
    assert "tokens_missed" not in counted
    if world.model.caches.passing:
        window, full = world.model.spec.parts
        seen = 2 * (full.elements_per_token * world.last + window.elements_per_token * (window.only.window + 256))
        assert counted["bytes_fetched"] < 1.1 * seen + 20_000  # not the groups that no window sees


@with_either
@pytest.mark.parametrize("part", [-1, -2])
def test_the_text_depends_on_every_class(world, part, monkeypatch):
    """Comparing texts finds errors: without one class's cache, the text directly after it differs.

    That of a convolution, three tokens, changes too little of it, and further on so does a recurrent state.
    """
    prompt = world.prompt[: world.last + 1]
    cold = world.computed(prompt)
    zeroed(monkeypatch, world.engine.worker.blocks, len(world.model.spec.classes) + part)
    text, counted = world.played(prompt)
    assert counted["tokens_loaded"] == world.last
    assert text != cold


@with_windows
def test_int8_says_the_same(world, monkeypatch):
    if len(world.prompt) < 1000:
        pytest.skip("random weights have no text that small changes leave alone")
    settings = world.engine.worker._settings
    monkeypatch.setattr(world.engine.worker, "_settings", settings.model_copy(update={"policy": "fixed:Int8"}))
    text, counted = world.played()
    assert counted["tokens_loaded"] == world.last
    assert text == world.cold


@with_windows
def test_a_prompt_that_goes_on_elsewhere(world):
    text, counted = world.played(world.other)
    assert text == world.other_cold
    assert counted["tokens_loaded"] == world.shared // 128 * 128


@with_states
def test_a_prompt_without_a_state_at_its_end_is_computed(world):
    text, counted = world.played(world.other)
    assert text == world.other_cold
    assert "plays" not in counted


@with_windows
def test_behind_what_vllm_has_itself(world):
    world.engine.forget()
    world.engine.generate([world.prompt[:300]], 1, kv_transfer_params={"play": False, "publish": False})
    text, counted = world.played(forget=False)
    assert text == world.cold
    assert counted["tokens_loaded"] == world.last - 300 // world.model.block * world.model.block


@with_either
@pytest.mark.parametrize("harm", ["corrupt", "missing"])
def test_whatever_is_lost_the_text_stays(world, harm):
    for name in world.model.spec.names:
        track = f"{world.exact}.{name}"
        last = len(world.asset.catalog.published_track(track).bytes) - 1
        with harmed(world.asset, last, track, harm):
            text, counted = world.played(deadline_s=30.0)
        assert text == world.cold, name
        assert counted.get("tokens_loaded", 0) < (world.last if world.model.caches.passing else 1), name
        assert counted["plays_cut"] == counted["lookups_hit"] == 1


@with_either
def test_a_copy_that_fails_is_computed(world, monkeypatch):
    def failing(*_):
        raise PlayError("a test")

    monkeypatch.setattr(type(world.engine.worker.blocks), "places", failing)
    text, counted = world.played()
    assert text == world.cold
    assert counted["plays_failed"] == 1
    assert not counted.get("tokens_loaded")


@with_windows
def test_what_was_computed_behind_an_exact_cache_is_published(world):
    """Its windows were kept when the beginning was computed here."""
    world.engine.worker.lossy.clear()  # vLLM's own cache is empty: nothing of another test is in it
    before = len(assets_of(world.assets))
    longer = [*world.prompt, 7 if world.engine.half._promises else 11, *world.other[-150:]]
    cold = world.computed(longer)
    text, counted = world.played(longer, publish=True)
    assert text == cold
    assert counted["tokens_loaded"] > 0
    assert len(assets_of(world.assets)) == before + 1


@with_states
def test_they_are_published_as_transformers_keeps_them(world):
    """Computed once more by transformers, the first layer's are the same but for rounding: no axis is exchanged.

    Those of the other layer have the same shape. Rounding may choose other experts for a token on the way there.
    """
    import transformers

    from kvabr.engines.transformers.cache import new_cache, states_of

    (kept,) = world.engine.worker._publications._states._kept.values()
    folder = world.engine.llm.llm_engine.vllm_config.model_config.model
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    cache = new_cache(model)
    with torch.inference_mode():
        model(input_ids=torch.tensor([world.prompt[:384]]), past_key_values=cache, use_cache=True)
    theirs = states_of(cache)
    for part, role in enumerate(("convolution", "recurrent")):
        for row, number in enumerate((0, 2)):
            mine, wanted = kept[part][row, 0].float(), theirs[number, role].float()
            if role == "convolution":
                mine, wanted = mine[..., 1:], wanted[..., 1:]
            assert mine.shape == wanted.shape
            assert number > 0 or float((mine - wanted).norm() / wanted.norm()) < 0.1
