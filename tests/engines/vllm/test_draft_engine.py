"""Models with drafts in the real vLLM: with a played cache as many tokens are accepted as with a computed one."""

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed: tools/engine vllm")

from tests.engines.served import assets_of
from tests.engines.vllm.engine import TEXT, RealEngine, transfer_of
from tests.engines.vllm.tinies import tiny_draft, tiny_eagle, tiny_llama
from tests.engines.vllm.world import SMALL, VllmWorld

pytestmark = pytest.mark.model

PROMPT, OTHER, SAID = list(TEXT.encode()[:500]), list(TEXT.encode()[5000:5500]), 96


class World(VllmWorld):
    """Subsequent engines of one model with different drafts, which all publish and play."""

    engine = None

    def __init__(self, folder):
        super().__init__(folder)
        self.folder = folder

    def start(self, target, **draft):
        extra = self.playing(without_draft=True) | self.publishing("FP16")
        options = SMALL | ({"speculative_config": {"num_speculative_tokens": 3} | draft} if draft else {})
        self.engine = RealEngine(target, extra, transfer=transfer_of(extra), **options)

    def end(self):
        if self.engine is not None:
            self.engine.close()
            self.engine = None

    def accepted(self, prompt, **params):
        """The engine's text, kvabr's counters, and the share of proposed tokens that was accepted."""
        before = self.drafted()
        text, counted = self.says(prompt, SAID, **params)
        proposed, accepted = (now - then for now, then in zip(self.drafted(), before, strict=True))
        return text, counted, accepted / proposed

    def drafted(self):
        told = {each.name: getattr(each, "value", 0) for each in self.engine.llm.get_metrics()}
        return [told[f"vllm:spec_decode_num_{kind}_tokens"] for kind in ("draft", "accepted")]

    def close(self):
        self.end()
        self.origin.close()


@pytest.fixture(autouse=True)
def ended(world):
    yield
    world.end()


@pytest.mark.parametrize("method", ["draft_model", "eagle"])
def test_as_many_tokens_are_accepted_as_behind_a_computed_cache(world, method):
    folder = world.folder / method
    folder.mkdir()
    if method == "eagle":
        model, draft = tiny_eagle(folder)
    else:
        model = tiny_llama(folder / "target")
        draft = tiny_draft(folder / "draft", model)
    # Without a draft the same model has other caches; with one it plays them, too, and its draft sees nothing of them.
    world.start(model)
    cold, _ = world.says(OTHER, SAID, publish=True)
    world.end()
    assets = len(assets_of(world.assets))
    world.origin.wait_for_assets(assets)
    world.start(model, method=method, model=str(draft))
    text, _, cold_rate = world.accepted(OTHER, play=False)
    assert text == cold
    text, counted, blind_rate = world.accepted(OTHER, publish=True)
    block = 0 if method == "draft_model" else 32  # the draft knows the last token of what is shared by the next one
    assert (text, counted["tokens_loaded"], counted["publish_dropped_lossy"]) == (cold, 384 - block, 1)
    # With it as many tokens are accepted as behind a computed cache.
    cold, counted, rate = world.accepted(PROMPT, play=False, publish=True)
    assert counted["published"] == 1
    world.origin.wait_for_assets(assets + 1)
    text, counted, warm_rate = world.accepted(PROMPT)
    assert (text, counted["tokens_loaded"]) == (cold, 384 - block)
    assert abs(warm_rate - rate) <= 0.02 * rate
    assert blind_rate < 0.9 * cold_rate  # or the draft would not mind what it sees
