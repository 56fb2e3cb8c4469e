"""Prompts made of passages in the real vLLM: loaded, not computed, and what it says is what transformers says of them.

The passages are published by vLLM itself, behind a text that all of them have before them.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed: tools/engine-vllm")

import kvabr
from kvabr import Exact, Passage
from kvabr.engines.transformers import smollm2
from kvabr.publish.fusion import FusionLosses
from kvabr.publish.passages import free_cache, joined
from kvabr.types.catalog import Catalog
from kvabr.types.cost import PrefillCost
from tests.engines.smollm2_folder import smollm2_folder
from tests.engines.vllm.engine import TEXT, RealEngine
from tests.engines.vllm.world import VllmWorld, harmed

pytestmark = [pytest.mark.model, pytest.mark.usefixtures("engine_mode")]

BLOCK, SAID = 32, 12
NEUTRAL = "The following passages may help to answer the question that comes after them.\n\n"


class World(VllmWorld):
    """An engine that publishes and plays, the published beginning of a prompt and passages, and transformers."""

    def __init__(self, folder):
        super().__init__(folder)
        model = Path(os.environ.get("KVABR_SMOLLM2") or folder / "smollm2")
        names = smollm2_folder(model)
        self.transformers, _ = smollm2.load()
        losses = folder / "fusion.json"
        measured = FusionLosses(self.transformers.spec, 0, ((0.0, 0.06),), "of no passage of this test", "behind")
        losses.write_text(json.dumps(measured.to_json()))
        extra = self.playing(queue=32, **names) | self.publishing("FP16", fusion=str(losses))
        self.engine = RealEngine(model, extra, block_size=BLOCK)
        ids = self.engine.tokens(TEXT)
        self.system, self.question = ids[:256], ids[5000:5020]
        self.passages = [ids[first : first + length] for first, length in ((1000, 200), (3000, 150))]
        before = self.engine.tokens(NEUTRAL)
        self.engine.generate([[*self.system, *ids[9000:9010]]], tokens=1)
        for passage in self.passages:
            params = {"publish_passage": len(before)}
            self.engine.generate([[*before, *passage]], tokens=1, kv_transfer_params=params)
        self.engine.settle()
        self.origin.wait_for_assets(3)
        self.published = self.names()
        self.prompt = [*self.system, *self.passages[0], *self.passages[1], *self.question]
        self.places = [[256, 456], [456, 606]]
        self.last = 606 // BLOCK * BLOCK
        self.exact, _, self.exact_first = self.say(play=False, publish=False)
        self.engine.forget()
        self.joined, self.joined_first = self.reference()

    def names(self):
        return {path.parent.name for path in self.assets.glob("*/catalog.json")}

    def say(self, prompt=None, salt=None, **params):
        """What vLLM says, how many tokens it did not compute, and the likeliest tokens behind the prompt."""
        from vllm import SamplingParams

        sampling = SamplingParams(
            temperature=0, max_tokens=SAID, ignore_eos=True, logprobs=5, extra_args={"kv_transfer_params": params}
        )
        given = {"prompt_token_ids": prompt or self.prompt} | ({} if salt is None else {"cache_salt": salt})
        (out,) = self.engine.llm.generate([given], sampling, use_tqdm=False)
        self.engine.settle()
        first = {token: one.logprob for token, one in out.outputs[0].logprobs[0].items()}
        return list(out.outputs[0].token_ids), out.num_cached_tokens, first

    def joined_by_vllm(self, salt="blended", **more):
        self.engine.counted()
        return (*self.say(salt=salt, passages=self.places, **more), self.engine.counted())

    def reference(self):
        """The same by transformers: passages joined, none of their tokens computed again."""
        parts = [Exact(self.system), *map(Passage, self.passages), Exact(self.question)]
        cost = PrefillCost.from_rate(500.0)
        options = kvabr.PlayOptions(policy="fixed:FP16", prefill_cost=cost, max_loss=0.5, tail=0)
        url = f"moqt://127.0.0.1:{self.origin.port}/"
        with kvabr.Client(
            url, fingerprint=self.origin.fingerprint, engine=self.transformers, options=options
        ) as client:
            played = client.play(parts=parts, share=0, deadline=60.0)
        assert played.approximate
        assert played.tokens == 606
        self.cache = played.kv.float()
        kv, said = self.cache[:, :, :, : self.last], []
        rest = self.prompt[self.last :]
        first = None
        for _ in range(SAID):
            row = self.transformers.score(kv, [*rest, *said])[-1]
            first = row if first is None else first
            said.append(int(row.argmax()))
        return said, first


@pytest.fixture(autouse=True)
def nothing_kept(world):
    world.engine.forget()


def test_what_vllm_publishes_of_a_passage_is_what_transformers_computes(world):
    engine, before = world.transformers, world.engine.tokens(NEUTRAL)
    for ids, (first, end) in zip(world.passages, world.places, strict=True):
        catalog = Catalog.read(world.assets / Passage(ids).name(engine.spec).prompt / "catalog.json")
        assert (catalog.passage.base, catalog.tokens) == ("behind", len(ids))
        assert catalog.passage.fusion_loss(0.0) == 0.06
        own = joined([free_cache(engine, ids, before)], engine.spec, first)
        assert float((world.cache[:, :, :, first:end] - own).norm() / own.norm()) < 0.002


def test_passages_are_loaded_and_it_says_what_transformers_says(world):
    said, cached, first, counted = world.joined_by_vllm()
    assert cached == counted["tokens_loaded"] == world.last
    assert (counted["lookups_joined"], counted["plays"]) == (1, 1)
    errors = [abs(first[token] - float(world.joined_first[token])) for token in first]
    apart = max(abs(world.exact_first[token] - float(world.joined_first[token])) for token in world.exact_first)
    print(f"log-probabilities: {max(errors):.4f} from those of transformers; exact and joined {apart:.3f} apart")
    assert max(errors) < 0.02 < apart / 3  # or it would be the exact cache
    assert said == world.joined


def test_without_a_salt_it_is_computed_and_exact(world):
    for salt in (None, "tenant"):
        said, _, _, counted = world.joined_by_vllm(salt)
        assert "lookups_joined" not in counted
        assert said == world.exact
        world.engine.forget()


def test_nobody_else_gets_blocks_that_were_joined(world):
    world.joined_by_vllm()
    for salt in (None, "tenant"):
        said, cached, first = world.say(salt=salt, play=False, publish=False)
        assert (said, cached) == (world.exact, 0)
        assert first == pytest.approx(world.exact_first, abs=0.01)
    # Under their own salt they are the engine's own prefix.
    said, cached, _, counted = world.joined_by_vllm()
    assert said == world.joined
    assert cached >= world.last
    assert "tokens_loaded" not in counted


def test_nothing_of_it_is_published(world):
    for params in ({"passages": world.places}, {}):  # also not what a request takes from the engine's own cache
        world.engine.counted()
        world.say(salt="blended", **params)
        counted = world.engine.counted()
        assert counted["publish_skipped_blended"] == 1
        assert "published" not in counted
    assert world.names() == world.published


def test_behind_a_text_that_only_the_engine_has(world):
    """Computed by the first request with such a salt; if it fills whole blocks, the passages of the next are loaded."""
    text = world.engine.tokens(TEXT[20_000:])[: 3 * BLOCK]
    places = [[first - 256 + len(text), end - 256 + len(text)] for first, end in world.places]
    prompt = [*text, *world.prompt[256:]]
    _, cached, _ = world.say([*text, *world.question], salt="blended", publish=False)
    world.engine.counted()
    _, cached, _ = world.say(prompt, salt="blended", passages=places)
    last = places[-1][1] // BLOCK * BLOCK
    assert cached == last
    assert world.engine.counted()["tokens_loaded"] == last - len(text)


def test_a_lost_group_is_computed_with_all_behind_it(world):
    name = Passage(world.passages[1]).name(world.transformers.spec).prompt
    with harmed(world.assets / name / "groups" / "FP16" / "00000.kvg", "corrupt"):
        _, _, _, counted = world.joined_by_vllm()
    assert counted["tokens_loaded"] == 456 // BLOCK * BLOCK
    assert counted["plays_cut"] == 1


def test_another_tenant_has_no_passages(world):
    said, _, _, counted = world.joined_by_vllm("blended:other")
    assert "lookups_joined" not in counted
    assert said == world.exact
