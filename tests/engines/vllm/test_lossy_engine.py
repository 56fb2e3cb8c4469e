"""A lossy play does not outlive its request in the real vLLM's prefix cache: later requests get exact text."""

import os
from pathlib import Path

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed: tools/engine vllm")

from tests.engines.smollm2_folder import smollm2_folder
from tests.engines.vllm.engine import TEXT, RealEngine
from tests.engines.vllm.world import VllmWorld

pytestmark = [pytest.mark.model, pytest.mark.usefixtures("settled")]

SAID = 32


class World(VllmWorld):
    """An engine that plays its own caches on Int4, and its text when it computes everything."""

    def __init__(self, folder):
        super().__init__(folder)
        model = Path(os.environ.get("KVABR_SMOLLM2") or folder / "smollm2")
        extra = self.playing(policy="fixed:Int4", **smollm2_folder(model)) | self.publishing("FP16", "Int4")
        self.engine = RealEngine(model, extra)
        tokens = self.engine.tokens(TEXT)
        self.prompt = tokens[:700]
        self.cold, _ = self.says(self.prompt, SAID, play=False, publish=True)
        self.origin.wait_for_assets(1)


def test_later_requests_are_not_served_from_a_lossy_prefix(world):
    lossy, counted = world.says(world.prompt, SAID, forget=True)
    assert counted["tokens_loaded"] == 640
    assert counted["plays_not_kept"] == 1
    (served,) = world.engine.served
    assert served["loss"] > 0.001
    assert served["tokens_loaded"] == 640
    exact, counted = world.says(world.prompt, SAID, forget=False, play=False)
    assert exact == world.cold
    assert world.engine.served == [None]
    # What was computed behind the lossy blocks, and what was said, is not there either.
    exact, _ = world.says([*world.prompt, *lossy], SAID, forget=False, play=False)
    world.engine.forget()
    assert world.says([*world.prompt, *lossy], SAID, play=False)[0] == exact


def test_a_request_that_wants_everything_computed_gets_that_beside_a_lossy_one(world):
    from vllm import SamplingParams

    world.engine.forget()
    world.engine.counted()
    engine = world.engine.llm.llm_engine

    def ask(name, **params):
        own = SamplingParams(
            temperature=0,
            max_tokens=SAID,
            ignore_eos=True,
            extra_args={"kv_transfer_params": params | {"publish": False}},
        )
        engine.add_request(name, {"prompt_token_ids": world.prompt}, own)

    ask("lossy")
    said = {}
    while len(said) < 2:
        for out in engine.step():
            if out.request_id == "lossy" and len(out.outputs[0].token_ids) == 4:
                ask("exact", play=False)
            if out.finished:
                said[out.request_id] = list(out.outputs[0].token_ids)
    assert said["exact"] == world.cold
    assert world.engine.counted()["requests_spared"] == 1
    assert world.says(world.prompt, SAID, forget=False, play=False)[0] == world.cold


def test_a_bound_of_a_request_holds_for_its_play_and_for_kept_blocks(world, monkeypatch):
    exact, counted = world.says(world.prompt, SAID, forget=True, max_loss=1e-9)
    assert exact == world.cold
    assert "tokens_loaded" not in counted
    monkeypatch.setattr(world.engine.half._kept, "_limit", 1.0)  # as `keep_loss` does
    lossy, counted = world.says(world.prompt, SAID, forget=True, max_loss=1.0)
    assert counted["tokens_loaded"] == 640
    assert lossy != world.cold
    again, counted = world.says(world.prompt, SAID, forget=False, max_loss=1.0)
    assert again == lossy
    assert "tokens_loaded" not in counted  # vLLM has kept them
    exact, counted = world.says(world.prompt, SAID, forget=False, max_loss=1e-9)
    assert exact == world.cold
    assert counted["requests_spared"] == 1
    assert world.engine.served == [None]
