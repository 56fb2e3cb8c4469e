"""A prefill of transformers that is published while it runs: the same asset as one that is published at its end."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvabr.engines.transformers import cache_publisher, prefill_live, publish_cache
from kvabr.engines.transformers.publish import runs
from kvabr.publish.live_publisher import LivePublisher, LiveSlot
from kvabr.store.locations import open_asset
from kvabr.types.cost import PrefillCost
from kvabr.types.errors import ModelError, UsageError
from tests.engines.transformers.text import IDS, PREFIX
from tests.engines.transformers.tiny import tiny

pytestmark = pytest.mark.model
PACE = PrefillCost.from_rate(1000.0)
LIMIT_S = 300


def published(engine, root, cache, ids, tracks):
    made = cache_publisher(engine, root, tracks=tracks)
    outcome = publish_cache(made, engine, cache, ids).result(LIMIT_S)
    made.close()
    assert outcome.verdict == "published", outcome.why
    catalog = open_asset(root).catalog
    return replace(catalog, tracks=tuple(replace(track, packs=()) for track in catalog.tracks))


@pytest.mark.parametrize("name", ["Llama", "Gemma3", "Qwen3-Next"])
@pytest.mark.parametrize("run_tokens", [128, 200, 512])
def test_the_asset_is_that_of_the_cache_that_is_returned(name, run_tokens, tmp_path, engine):
    model, ids, tracks = engine if name == "Llama" else tiny(name), PREFIX[:384], ("FP16", "Int8")
    live = LivePublisher(cache_publisher(model, tmp_path / "live", tracks=tracks))
    slots, seen = [], []
    cache, done = prefill_live(
        live, model, ids, pace=PACE, run_tokens=run_tokens, begun=slots.append,
        progress=lambda *how_far: seen.append(how_far),
    )  # fmt: skip
    outcome = done.result(LIMIT_S)
    live.close()
    assert (outcome.verdict, outcome.tokens) == ("published", 384), outcome.why
    asset = open_asset(tmp_path / "live")
    asset.check_parts()
    assert isinstance(slots[0], LiveSlot)
    assert slots[0].chunks == asset.catalog.chunks
    assert seen[-1] == (384, 384)
    assert asset.catalog == published(model, tmp_path / "once", cache, ids, tracks)


def test_an_interrupted_prefill_leaves_a_shorter_prompt(tmp_path, engine):
    live = LivePublisher(cache_publisher(engine, tmp_path))
    slots = []

    def interrupt(done, _total):
        if done >= 256:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        prefill_live(live, engine, PREFIX, pace=PACE, run_tokens=128, begun=slots.append, progress=interrupt)
    live.close()
    outcome = slots[0].production.outcome
    assert (outcome.verdict, outcome.why, outcome.tokens) == ("failed", "KeyboardInterrupt", 256)
    assert open_asset(tmp_path).catalog.tokens == 256


def test_what_is_known_is_computed_and_not_published(tmp_path, engine):
    live = LivePublisher(cache_publisher(engine, tmp_path))
    first, done = prefill_live(live, engine, PREFIX)  # the pace is timed
    assert done.result(LIMIT_S).verdict == "published"
    again, done = prefill_live(live, engine, PREFIX, pace=PACE)
    assert done.result(LIMIT_S).verdict == "known"
    assert again.get_seq_length() == first.get_seq_length() == len(PREFIX)
    live.close()


def test_prompts_that_cannot_be_computed_are_not_announced(tmp_path, engine):
    live = LivePublisher(cache_publisher(engine, tmp_path))
    with pytest.raises(ModelError, match="fit"):
        prefill_live(live, engine, IDS * 3, pace=PACE)
    with pytest.raises(UsageError, match="runs of 0 tokens"):
        prefill_live(live, engine, PREFIX, pace=PACE, run_tokens=0)
    live.close()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("tokens", "most", "marks", "ends"),
    [
        (2048, 512, (), [512, 1024, 1536, 1792, 1920, 2048]),
        (2000, 512, (), [512, 1024, 1536, 1792, 1920, 2000]),
        (2048, 4096, (), [1024, 1536, 1792, 1920, 2048]),
        (128, 512, (), [128]),
        (100, 512, (), [100]),
        (300, 1, (), [128, 256, 300]),
        (600, 512, (128, 384, 600), [128, 384, 512, 600]),
    ],
)
def test_runs_become_shorter_towards_the_end(tokens, most, marks, ends):
    assert runs(tokens, most, 128, marks) == ends
