"""Recurrent and convolution states: published as snapshots, played to the bit, continued as after a cold prefill."""

from functools import partial

import pytest
import torch

from kvabr.engines.transformers import cache_publisher, prefill_prompt, publish_cache
from kvabr.engines.transformers.cache import read_cache, states_of
from kvabr.publish.encoder import compute_cache, ordered_tracks, publish
from kvabr.publish.frames import MemoryFrames
from kvabr.publish.model import answer_of, score_classes
from kvabr.server.published_assets import PublishedAssets
from kvabr.store.locations import open_asset
from kvabr.store.prompt import Prompt
from kvabr.types.cost import PrefillCost
from kvabr.types.engine import time_prefills
from kvabr.types.errors import FormatError, ModelError, PlayError, UsageError
from tests.client.virtual import virtual
from tests.engines.transformers.text import IDS, PREFIX
from tests.engines.transformers.tiny import STATES, continued, prefilled, published, tiny
from tests.engines.transformers.tiny import ready_from as play
from tests.memory_transport import Fault

pytestmark = pytest.mark.model

RECURRENT, CONVOLUTION = "state-recurrent", "state-convolution"
MIXED = {"full": (1,), CONVOLUTION: (0, 2), RECURRENT: (0, 2)}
CLASSES = {
    **dict.fromkeys(("Qwen3-Next", "Qwen3.5", "Kimi Linear", "Granite 4", "Bamba", "Nemotron-H"), MIXED),
    "Falcon-H1": {"full": (0, 1, 2), CONVOLUTION: (0, 1, 2), RECURRENT: (0, 1, 2)},
    "LFM2": {"full": (1,), CONVOLUTION: (0, 2)},
    "MiniMax": {"full": (0, 2), RECURRENT: (1,)},
    "Mamba-2": {CONVOLUTION: (0, 1), RECURRENT: (0, 1)},
}
TRACKS = ("Raw", "Int8")
COVERED = 384
"""Tokens of the prefix's last whole group that is followed by a token."""


@pytest.fixture(scope="module", params=STATES)
def engine(request):
    return tiny(request.param)


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return tmp_path_factory.mktemp("origin")


@pytest.fixture(scope="module")
def library(engine, root):
    return published(engine, root / engine.spec.model.replace("/", "-"), tracks=TRACKS)


ready_from = partial(play, policy="fixed:Raw")


def same(mine, theirs):
    """Whether two caches hold the same, to the bit."""
    one, other = states_of(mine), states_of(theirs)
    assert one.keys() == other.keys()
    for where, state in one.items():
        assert state.dtype == other[where].dtype
        assert torch.equal(state, other[where])
    for ours, wanted in zip(mine.layers, theirs.layers, strict=True):
        assert type(ours) is type(wanted)
        if getattr(wanted, "keys", None) is not None:
            assert torch.equal(ours.keys, wanted.keys)
            assert torch.equal(ours.values, wanted.values)
    return True


def test_the_classes_are_those_of_the_models_cache(engine):
    spec = engine.spec
    name = next(name for name in STATES if spec.model == f"tiny/{name.replace(' ', '-')}")
    assert {name: each.layers for name, each in zip(spec.names, spec.classes, strict=True)} == CLASSES[name]
    for each in spec.classes:
        wide = each.kind == "state" and each.role != "convolution" and name != "MiniMax"
        assert each.dtype == ("float32" if wide else "bfloat16")


def test_a_model_that_ignores_the_state_of_its_cache_is_refused():
    """With transformers 5.19: a prompt in pieces is another prompt to it, and a played cache would be ignored."""
    with pytest.raises(ModelError, match="tiny/Jamba: layer 0 computes another scan state after a cache than"):
        tiny("Jamba")


@virtual
async def test_what_is_played_is_what_the_model_made(engine, library):
    """To the bit, states in float32 as well; and what follows is the same."""
    ready = await ready_from(library, engine)
    assert (ready.tokens, ready.problem, ready.exact) == (COVERED, None, True)
    assert set(ready.played.coverage) == {"Raw"}
    own = prefilled(engine, IDS[:COVERED])
    assert same(ready.cache, own)
    ours, wanted = (continued(engine, cache, IDS[COVERED:]) for cache in (ready.cache, own))
    assert torch.equal(ours, wanted)


@virtual
async def test_a_prompt_without_a_snapshot_is_computed(engine, library):
    """One that shares 300 tokens; all but its last, which the model needs to go on."""
    ids = [*PREFIX[:300], *[7] * 40]
    ready = await ready_from(library, engine, ids)
    assert (ready.tokens, set(ready.played.coverage)) == (339, {"recomputed"})
    assert same(ready.cache, prefilled(engine, ids[:339]))
    one = await ready_from(library, engine, [5])
    assert (one.tokens, continued(engine, one.cache, [5]).shape[1]) == (0, 1)


@virtual
async def test_a_state_that_cannot_be_had_is_computed(engine, library):
    name = engine.spec.names[-1]

    def faults(ask):
        return Fault(refuse=0x10) if ask.track.endswith(f".{name}") else None

    ready = await ready_from(library, engine, faults=faults)
    assert set(ready.played.coverage) == {"recomputed"}
    assert same(ready.cache, prefilled(engine, IDS[: ready.tokens]))
    with pytest.raises(PlayError, match=rf"missing groups: {name} #0"):
        await ready_from(library, engine, faults=faults, recompute=False)


@virtual
async def test_a_state_of_another_class_is_refused(engine, library, root):
    """A frame of one class under the name of another, and a damaged one: the next best track comes instead."""
    catalog = library.assets[0].catalog.to_play
    states = [group for group, unit in enumerate(catalog.units) if engine.spec.classes[unit.part].kind == "state"]
    name, number = catalog.address(states[-1], "Raw")
    other, first = catalog.address(0, "Raw")
    foreign = open_asset(root / engine.spec.model.replace("/", "-")).frame(first, other)
    for fault in (Fault(replace=bytes(foreign)), Fault(corrupt_at=300)):

        def faults(ask, fault=fault):
            return fault if (ask.track, ask.group) == (name, number) else None

        ready = await ready_from(library, engine, faults=faults, recompute=False)
        assert ready.played.coverage[states[-1]] == "Int8"
        assert ready.tokens == COVERED


@pytest.mark.parametrize("name", STATES)
def test_an_engine_goes_on_behind_its_own_snapshots(name):
    """The generic path: computed in pieces, each behind the state before; the times are measured so, too."""
    engine = tiny(name, dtype=torch.float32, kept="float32")
    (first, second), ids = (IDS[:256], IDS[256:300]), IDS[:300]
    before = engine.prefill_classes(first)
    more = engine.prefill_classes(second, before)
    own = read_cache(prefilled(engine, ids), engine.spec, 256, 300)
    for mine, theirs, part in zip(more, own, engine.spec.parts, strict=True):
        assert mine.shape == theirs.shape == part.shape(part.rows if part.only.kind == "state" else 44)
        assert float((mine.float() - theirs.float()).norm()) <= 1e-3 * float(theirs.norm())
    twice = tuple(
        torch.cat((torch.zeros_like(kv), kv), dim=3) if part.only.kind == "state" else kv
        for kv, part in zip(before, engine.spec.parts, strict=True)
    )
    again = engine.prefill_classes(second, twice)  # the last of several snapshots counts
    assert all(torch.equal(one, other) for one, other in zip(more, again, strict=True))
    with pytest.raises(ModelError, match="the cache does not fit"):
        engine.prefill_classes(second, tuple(kv[..., :-1, :] for kv in before))
    cost = PrefillCost.fit(time_prefills(engine, [1] * 128, repeats=1))
    assert cost.seconds(0, 100) > 0


@virtual
@pytest.mark.parametrize("name", ["Qwen3-Next", "Bamba"])
async def test_generate_takes_the_cache(name, tmp_path):
    engine = tiny(name, dtype=torch.float32, kept="float32")
    library = published(engine, tmp_path / "origin", tracks=TRACKS)
    for ids in (IDS, PREFIX):
        ready = await ready_from(library, engine, ids)
        how = {"max_new_tokens": 8, "min_new_tokens": 8, "do_sample": False}
        given = torch.tensor([ids])
        warm, cold = (
            engine.model.generate(given, attention_mask=torch.ones_like(given), past_key_values=cache, **how)
            for cache in (ready.cache, None)
        )
        assert torch.equal(warm, cold)
    # What was prefilled to be published goes to generate() as well.
    own = prefill_prompt(engine, PREFIX)
    assert torch.equal(
        engine.model.generate(given, attention_mask=torch.ones_like(given), past_key_values=own, **how), cold
    )


@virtual
async def test_snapshots_within_a_prompt(tmp_path):
    """Every 256 tokens, and behind the last whole group; an engine whose spec has another interval plays them, too."""
    engine = tiny("Granite 4", snapshots_every=256)
    ids = [*IDS, *IDS[:170]]
    library = published(engine, tmp_path / "origin", ids, tracks=TRACKS)
    catalog = library.assets[0].catalog
    assert catalog.tokens == 512
    state = next(part for part, each in enumerate(engine.spec.classes) if each.kind == "state")
    assert [unit.first for unit in catalog.units if unit.part == state] == [256, 512]
    for player in (engine, tiny("Granite 4")):
        for prompt, covered, limit in ((ids, 512, None), (ids[:400], 256, CONVOLUTION), (ids[:257], 256, None)):
            ready = await ready_from(library, player, prompt)
            assert (ready.tokens, ready.played.limited_by) == (covered, limit)
            fetched = ready.played.record.bytes_fetched
            assert fetched == sum(ready.played.catalog.track("Raw").bytes)  # of the snapshots only one
        ready = await ready_from(library, player, ids[:256])
        assert set(ready.played.coverage) == {"recomputed"}
    ready = await ready_from(library, engine, ids)
    whole = prefill_prompt(engine, ids[:513])
    assert same(ready.cache, whole)


def test_a_prompt_is_encoded_with_measured_losses():
    """As `kvabr encode` does: the losses of every level of every state are measured, and the exact one has none."""
    engine = tiny("Qwen3-Next")
    tracks = ordered_tracks(["Raw", "BF16", "FP8", "Int8", "Int4"])
    assert "Raw" in ordered_tracks(None, engine.spec)
    prompt = Prompt(tuple(IDS[:200]), tuple(IDS[200:230]))
    how = {"max_passes": 40, "snapshots_every": 128}
    catalog = publish(engine, prompt, tracks, None, MemoryFrames(), **how)
    part = engine.spec.names.index(RECURRENT)
    assert [unit.first for unit in catalog.units if unit.part == part] == [128, 200]
    early, state = (index for index, unit in enumerate(catalog.units) if unit.part == part)
    quality = {track.name: track.measured.kl for track in catalog.tracks}
    assert quality["Raw"] <= 1e-9
    assert quality["Raw"] <= quality["Int8"] < quality["Int4"]
    assert catalog.track("Int4").loss[state] > 0
    assert catalog.track("Int4").loss[early] == 0  # what comes after the prompt does not see it
    shorter = catalog.prefix(1)
    there = next(index for index, unit in enumerate(shorter.units) if unit.part == part)
    assert shorter.track("Int4").loss[there] == catalog.track("Int4").loss[state]
    with pytest.raises(FormatError, match="snapshots every 100 tokens do not match groups of 128"):
        publish(engine, prompt, tracks, None, MemoryFrames(), snapshots_every=100)
    with pytest.raises(UsageError, match="tiny/Mistral has no recurrent states"):
        publish(tiny("Mistral"), prompt, tracks, None, MemoryFrames(), snapshots_every=128)


def test_what_cannot_be_published(tmp_path):
    engine = tiny("Bamba")
    publisher = cache_publisher(engine, tmp_path / "out")
    late = prefilled(engine, IDS, whole=True)
    with pytest.raises(UsageError, match=r"none between token 128 and 400: prefill .* `prefill_prompt`"):
        publish_cache(publisher, engine, late, PREFIX)
    with pytest.raises(UsageError, match="none between token 128 and 128"):
        publish_cache(publisher, engine, prefill_prompt(engine, IDS[:128]), IDS[:128])
    with pytest.raises(ModelError, match="a tuple is not a cache"):
        publish_cache(publisher, engine, (), PREFIX)
    with pytest.raises(ModelError, match="the cache has 2 layers, but"):
        publish_cache(publisher, engine, prefill_prompt(tiny("Mamba-2"), IDS), IDS)
    other = tiny("Qwen3-Next")
    with pytest.raises(ModelError, match=r"must have a convolution state of .* another model"):
        publish_cache(publisher, engine, prefill_prompt(other, IDS), IDS)
    # What ends where the prompt does is published as it is.
    assert publish_cache(publisher, engine, late, IDS).result(60).verdict == "published"
    publisher.close()
    names = [track.name for track in PublishedAssets(tmp_path / "out").assets[0].catalog.tracks]
    assert names == ["Raw", "FP16", "Int8", "Int4"]


QUESTION = IDS[300:307]


@pytest.mark.parametrize(("name", "tails"), [("Gemma3", (9, 133)), ("Qwen3-Next", (9,))])
def test_what_is_left_is_measured_as_far_as_a_tail_can_be_computed(name, tails):
    engine = tiny(name)
    exact = compute_cache(engine, IDS[:200])
    said = answer_of(engine, exact, QUESTION, 8)
    scores = score_classes(engine, exact, [*QUESTION, *said])[len(QUESTION) - 1 : -1]
    taken = scores.gather(1, scores.new_tensor(said).long()[:, None])[:, 0]
    assert (scores.max(dim=1).values - taken).max() < 1e-3  # the likeliest, but for rounding
    prompt = Prompt(tuple(IDS[:200]), tuple(IDS[200:230]))
    catalog = publish(engine, prompt, ("BF16", "Int4", "FP4"), None, MemoryFrames(), questions=[QUESTION, IDS[400:407]])
    for track in catalog.tracks:
        assert tuple(tail.tokens for tail in track.tails) == tails
        assert all(tail.spread > 0 for tail in track.tails)
    assert catalog.asked == ()  # of several layer classes
    int4 = catalog.track("Int4")
    assert catalog.with_tail(len(catalog.chunks), 9).track("Int4").total_loss == pytest.approx(
        sum(catalog.to_play.track("Int4").loss) * int4.tails[0].share
    )
