"""Lookups of caches with recurrent states, which can only be played where there is a snapshot."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvabr.client.async_client import AsyncClient
from kvabr.client.lookup import Found, find_prefix
from kvabr.client.options import PlayOptions
from kvabr.client.result import NothingCached, Played
from kvabr.server.published_assets import PublishedAssets
from kvabr.types.cost import PrefillCost
from kvabr.types.kv import KVSpec, LayerClass
from kvabr.types.units import Span
from tests.client.classes import Computer, link, published
from tests.client.virtual import virtual

SPEC = KVSpec(
    "test/states",
    "tokenizer",
    (LayerClass("full", (0,), 1, 2, 2, "float16"), LayerClass("state", (1,), 1, 2, 2, "float16")),
    4,
)
"""With a snapshot at the end of each asset alone."""


async def found(root, tokens: list[int]) -> int:
    """How many tokens of a prompt can be played."""
    async with link(PublishedAssets(root)) as connection:
        best = await find_prefix(connection, tokens, SPEC)
        return best.catalog.tokens if isinstance(best, Found) else 0


@pytest.mark.parametrize("order", ["shorter first", "longer first"])
@virtual
async def test_a_longer_asset_without_a_snapshot_does_not_hide_one_that_can_be_played(tmp_path, order):
    """As of two turns of a chat, the first of which is answered again."""
    turns = {"one": list(range(16)), "two": list(range(40))}
    for name, tokens in sorted(turns.items(), reverse=order == "longer first"):
        published(tmp_path / name, SPEC, tokens)
    assert await found(tmp_path, [*range(16), 99, 98]) == 16
    # The longer one shares more, and nothing of it can be played.
    assert await found(tmp_path, [*range(30), 99]) == 16
    assert await found(tmp_path, [*range(40), 99]) == 40
    assert await found(tmp_path, [*range(12), 99]) == 0


@pytest.mark.parametrize("computes", [False, True])
@virtual
async def test_a_prompt_of_which_no_snapshot_is_cached_says_so(tmp_path, computes):
    published(tmp_path / "one", SPEC, list(range(16)))
    prompt, engine = [*range(12), 99], Computer(SPEC) if computes else None
    options = PlayOptions(prefill_cost=PrefillCost.from_rate(50.0))
    async with (
        link(PublishedAssets(tmp_path)) as connection,
        AsyncClient(connection, engine=engine, options=options) as client,
    ):
        assert await client.find(prompt, model=SPEC) is None
        for model in (SPEC, "test/states", "test/states"):  # the second time it is known which models there are
            played = await client.play(prompt, deadline=2.0, model=model)
            assert isinstance(played, Played if computes else NothingCached)
            assert played.limited_by == "state"
        other = await client.play([98, 99, 98, 99, 98], deadline=2.0, model=SPEC)
        assert other.limited_by is None
        if computes:
            assert played.spans == (Span(0, 13), Span(13, 2))


@virtual
async def test_snapshots_and_group_sizes_are_a_publishers_choice(tmp_path):
    """An engine finds and plays what has groups of another size, and snapshots where it keeps none itself."""
    often = replace(SPEC, group_tokens=8, classes=(SPEC.classes[0], replace(SPEC.classes[1], interval=8)))
    published(tmp_path / "often", often, list(range(40)))
    options = PlayOptions(prefill_cost=PrefillCost.from_rate(1.0))
    async with (
        link(PublishedAssets(tmp_path)) as connection,
        AsyncClient(connection, engine=Computer(SPEC), options=options) as client,
    ):
        played = await client.play([*range(30), 99], deadline=2.0)
        assert (played.tokens, played.limited_by) == (24, None)
        name = played.catalog.namespace
        again = await client.play_asset(name, deadline=2.0, tokens=list(range(40)))
        assert again.tokens == 40


@virtual
async def test_a_second_round_trip_never_makes_it_worse(tmp_path):
    """A long prompt's first lookup names only some of its groups, the second those near the end of what was found."""
    prompt = list(range(4 * 330))
    published(tmp_path / "short", SPEC, prompt[:80])
    published(tmp_path / "long", SPEC, [*prompt[:-8], *range(8)])
    assert await found(tmp_path, prompt) == 80
    published(tmp_path / "longer", SPEC, prompt[:84])
    assert await found(tmp_path, prompt) == 84
