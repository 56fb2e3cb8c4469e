"""Prompts of passages for engines that continue a prefix: joined without a gap, from the engine's own cache on."""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch

from kvabr.client.async_client import AsyncClient
from kvabr.client.joined_prefix import find_joined
from kvabr.client.options import PlayOptions
from kvabr.codec.rope import rotate
from kvabr.server.grants import EVERYTHING
from kvabr.server.published_assets import PublishedAssets
from kvabr.types.cost import PrefillCost
from kvabr.types.errors import FormatError, TransportError, UsageError
from kvabr.types.kv import KVSpec
from kvabr.types.passage import Exact, Passage
from tests.client.virtual import virtual
from tests.memory_transport import Fault, MemoryConnection, MemoryLink
from tests.toymodel import SPEC, ToyModel, prompt, toy_asset, toy_base, toy_passage

IDS = prompt(200).tokens
SYSTEM, BETWEEN, QUESTION = Exact(prompt(70).tokens), Exact(IDS[90:93]), Exact(IDS[190:200])
ONE, OTHER, ABSENT, BARE = Passage(IDS[11:60]), Passage(IDS[60:90]), Passage(IDS[140:170]), Passage(IDS[100:120])
PARTS = (SYSTEM, ONE, OTHER, QUESTION)
SLOW = PrefillCost.from_rate(1.0)


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    root = tmp_path_factory.mktemp("passages")
    toy_asset(root / "system", ("FP16", "Int4"))
    toy_passage(root / "one", ONE.ids, fusion=((0.0, 0.05),))
    toy_passage(root / "other", OTHER.ids, ("FP16", "Int4"), fusion=((0.0, 0.02), (0.2, 0.01)))
    toy_passage(root / "bare", BARE.ids, fusion=())
    toy_passage(root / "salted", ONE.ids, salt=b"secret")
    return PublishedAssets(root)


@pytest.fixture
def origin(library):
    def make(**options):
        return MemoryConnection(partial(library.find, EVERYTHING), MemoryLink(1e8, 0.02), **options)

    return make


def wanted():
    """The cache of the system prompt, of its own, and of both passages at their places."""
    kv = [ToyModel().prefill(SYSTEM.ids)]
    for passage, place in ((ONE, 70), (OTHER, 119)):
        own = toy_base(passage.ids).kv.clone()
        own[:, 0] = rotate(own[:, 0], SPEC.rope, place)
        kv.append(own)
    return torch.cat(kv, dim=3)


async def played(link, found, **more):
    async with AsyncClient(link, options=PlayOptions(policy="fixed:FP16", patience=1.0)) as client:
        return await client.play_prefix(found, deadline=2.0, cost=SLOW, **more)


def near(kv, exact):
    return kv.shape == exact.shape and torch.allclose(kv.float(), exact, rtol=4e-3, atol=4e-3)


@virtual
async def test_a_text_and_the_passages_behind_it_are_one_prefix(origin):
    async with origin() as link:
        found = await find_joined(link, PARTS, SPEC)
        assert link.requests == 3
        prefix = await played(link, found, block=8)
    assert (prefix.first, prefix.tokens) == (0, 144)  # whole blocks of 149
    assert near(prefix.kv, wanted()[:, :, :, :144])
    assert prefix.loss == pytest.approx(0.07, rel=0.3)  # what joining costs, mostly


@pytest.mark.parametrize("had", [70, 72, 86, 130])
@virtual
async def test_what_the_engine_has_is_not_fetched(origin, had):
    asked = []
    async with origin(faults=lambda ask: asked.append((ask.namespace.prompt, ask.group))) as link:
        found = await find_joined(link, PARTS, SPEC)
        asked.clear()
        prefix = await played(link, found, skip=found.catalog.group_at(had))
    first = max(start for start in (70, 86, 102, 118, 119) if start <= had)
    assert (prefix.first, prefix.first + prefix.tokens) == (first, 149)
    assert near(prefix.kv, wanted()[:, :, :, first:])
    assert {name for name, _ in asked} <= {passage.name(SPEC).prompt for passage in (ONE, OTHER)}


@pytest.mark.parametrize("lost", [0, 2])
@virtual
async def test_a_group_that_is_lost_ends_it(origin, lost):
    name = ONE.name(SPEC)

    def faults(ask):
        return Fault(corrupt_at=100) if (ask.namespace, ask.group, ask.track) == (name, lost, "FP16") else None

    async with origin(faults=faults) as link:
        prefix = await played(link, await find_joined(link, PARTS, SPEC))
    assert prefix.tokens == 70 + 16 * lost
    assert near(prefix.kv, wanted()[:, :, :, : prefix.tokens])


@pytest.mark.parametrize(
    ("parts", "runs"),
    [
        ((SYSTEM, ONE, ABSENT, OTHER, QUESTION), {0: 119, 119: None, 149: 179}),
        ((SYSTEM, ONE, BETWEEN, OTHER), {0: 119, 119: None, 122: 152}),
        ((Exact(SYSTEM.ids[:20]), Exact(SYSTEM.ids[20:]), ONE), {0: 119}),
        ((Exact((*SYSTEM.ids[:64], 5, 5, 5)), ONE), {0: 64, 64: None, 67: 116}),  # it begins like what is cached
        ((BETWEEN, ONE), {0: None, 2: None, 3: 52}),
        ((ONE, OTHER), {0: None, 49: 79}),  # a passage that begins a prompt has no sink before it
        ((SYSTEM, QUESTION, ABSENT), {0: 70}),
    ],
)
@virtual
async def test_gaps_end_what_can_be_played(origin, parts, runs):
    async with origin() as link:
        catalog = (await find_joined(link, parts, SPEC)).catalog
    for token, end in runs.items():
        run = catalog.run(token)
        assert (None if run is None else run.first_token + run.tokens) == end


@virtual
async def test_without_any_part_there_is_nothing(origin):
    async with origin() as link:
        assert await find_joined(link, (BETWEEN, ABSENT, QUESTION), SPEC) is None
        assert await find_joined(link, (ABSENT,), SPEC) is None
        assert await find_joined(link, (SYSTEM, ONE), SPEC, salt=b"other") is None
        salted = await find_joined(link, (SYSTEM, ONE), SPEC, salt=b"secret")
    assert (salted.catalog.run(0), salted.catalog.run(70).tokens) == (None, 49)


@pytest.mark.parametrize(("limit", "end", "said"), [(0.07, 149, 0), (0.069, 119, 1), (0.05, 119, 1), (0.01, 70, 1)])
@virtual
async def test_the_limit_of_what_joining_may_cost(origin, limit, end, said):
    reasons = []
    async with origin() as link:
        found = await find_joined(link, PARTS, SPEC, max_loss=limit, refused=lambda *why: reasons.append(why))
    assert found.catalog.run(0).tokens == end
    assert len(reasons) == said
    assert all("max_loss" in why for _, why in reasons)


@pytest.mark.parametrize("limit", [0.5, math.inf])
@virtual
async def test_nobody_knows_what_joining_it_costs(origin, limit):
    reasons = []
    async with origin() as link:
        parts = (SYSTEM, BARE, ONE)
        found = await find_joined(link, parts, SPEC, max_loss=limit, refused=lambda *why: reasons.append(why))
    assert found.catalog.run(0).tokens == (70 if limit < 1 else 139)
    assert [(passage, "not measured" in why) for passage, why in reasons] == ([(BARE, True)] if limit < 1 else [])


@pytest.mark.parametrize("lost", ["text", "passages", "all"])
@virtual
async def test_what_cannot_be_asked_for_is_left_out(origin, lost):
    def faults(ask):
        return Fault(refuse=0) if lost == "all" or ask.track.startswith("prefix") == (lost == "text") else None

    async with origin(faults=faults) as link:
        if lost == "all":
            with pytest.raises(TransportError):
                await find_joined(link, PARTS, SPEC)
            return
        catalog = (await find_joined(link, PARTS, SPEC)).catalog
    if lost == "text":
        assert (catalog.run(0), catalog.run(70).tokens) == (None, 79)
    else:
        assert (catalog.sources, catalog.tokens) == ((), 70)  # an ordinary prefix


@virtual
async def test_models_and_parts_that_cannot_be(origin):
    unturned = KVSpec.uniform("toy", "bytes", 2, 2, 8, "float16")
    async with origin() as link:
        with pytest.raises(FormatError, match="cannot be moved"):
            await find_joined(link, PARTS, unturned)
        with pytest.raises(UsageError, match="made of"):
            await find_joined(link, (), SPEC)
