"""A model with recurrent states in the real vLLM: a small random Qwen3-Next (gated delta), in bfloat16.

vLLM's kernels for CPUs run it in no other type. Its states are float32, as vLLM chooses by itself on some processors.
"""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("vllm", reason="vLLM is not installed: tools/engine-vllm")

from kvabr.types.errors import PlayError, UsageError
from tests.engines.vllm.test_hybrid import World
from tests.engines.vllm.tinies import tiny_delta
from tests.engines.vllm.world import harmed, zeroed

pytestmark = [pytest.mark.model, pytest.mark.usefixtures("settled")]


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    folder = tmp_path_factory.mktemp("delta")
    model = tiny_delta(folder / "model")
    try:
        types = {"dtype": "bfloat16", "mamba_ssm_cache_dtype": "float32"}
        world = World(folder, model, block=128, length=500, shared=300, most=768, exact="Raw", **types)
    except UsageError as error:
        if "'amx'" not in str(error):
            raise
        pytest.skip(f"on processors with AMX: {error}")
    yield world
    world.close()


def test_states_have_tables_of_their_own(world):
    assert world.model.spec.names == ("state-convolution", "state-recurrent", "full")
    assert [one.dtype for one in world.model.spec.classes] == ["bfloat16", "float32", "bfloat16"]
    assert len(world.model.caches.states) == 2


def test_what_was_published_is_played(world):
    text, counted = world.played()
    assert text == world.cold
    assert counted["lookups_hit"] == counted["plays"] == 1
    assert counted["tokens_loaded"] == world.last == 384
    assert "tokens_missed" not in counted


@pytest.mark.parametrize("part", [1, 2])
def test_the_text_depends_on_the_states(world, part, monkeypatch):
    """What is checked here by texts would be noticed: without one class's cache the text right behind it is another.

    That of a convolution, three tokens, changes too little of it, and further on so does a recurrent state.
    """
    prompt = world.prompt[: world.last + 1]
    cold = world.computed(prompt)
    zeroed(monkeypatch, world.engine.worker.blocks, part)
    text, counted = world.played(prompt)
    assert counted["tokens_loaded"] == world.last
    assert text != cold


@pytest.mark.parametrize("part", [0, 1, 2])
@pytest.mark.parametrize("harm", ["corrupt", "missing"])
def test_whatever_is_lost_the_text_stays(world, part, harm):
    name = world.model.spec.names[part]
    frame = max((world.asset / "groups" / f"Raw.{name}").glob("*.kvg"))
    with harmed(frame, harm):
        text, counted = world.played(deadline_s=30.0)
    assert text == world.cold
    assert not counted.get("tokens_loaded")
    assert counted["plays_cut"] == counted["lookups_hit"] == 1


def test_a_copy_that_fails_is_computed(world, monkeypatch):
    def failing(*_):
        raise PlayError("a test")

    monkeypatch.setattr(type(world.engine.worker.blocks), "places", failing)
    text, counted = world.played()
    assert text == world.cold
    assert counted["plays_failed"] == 1


def test_a_prompt_without_a_state_at_its_end_is_computed(world):
    text, counted = world.played(world.other)
    assert text == world.other_cold
    assert "plays" not in counted


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
