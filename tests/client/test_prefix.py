"""Plays for engines that compute whatever they are not given: what is in place before the first miss counts."""

from __future__ import annotations

import asyncio

import pytest
import torch

from kvabr.abr.policy import Decision, Policy
from kvabr.client.async_client import AsyncClient
from kvabr.client.options import PlayOptions
from kvabr.types.cost import PrefillCost
from kvabr.types.errors import UsageError
from tests.client.conftest import libraries, long, origin, root, short  # noqa: F401
from tests.client.virtual import virtual
from tests.memory_transport import Fault
from tests.toymodel import SPEC, ToyModel, prompt

TOKENS = prompt(70).tokens
SLOW = PrefillCost.from_rate(1.0)
"""An engine that is of no help."""


def exact(first=0):
    return ToyModel().prefill(TOKENS)[:, :, :, first:]


async def played(link, deadline=2.0, cost=SLOW, policy="fixed:FP16", **more):
    options = PlayOptions(policy=policy, patience=1.0)
    async with AsyncClient(link, model=SPEC, options=options) as client:
        found = await client.find(TOKENS, within_s=60)
        return await client.play_prefix(found, deadline=deadline, cost=cost, **more)


def near(kv, wanted):
    return kv.shape == wanted.shape and torch.allclose(kv.float(), wanted, rtol=2e-3, atol=2e-3)


@virtual
async def test_all_of_it(origin):  # noqa: F811
    async with origin() as link:
        prefix = await played(link)
    assert (prefix.first, prefix.tokens, prefix.wanted, prefix.cut) == (0, 70, 70, None)
    assert prefix.coverage == ("FP16",) * 5
    assert near(prefix.kv, exact())


@virtual
async def test_what_the_engine_has_is_not_fetched(origin):  # noqa: F811
    asked = []
    async with origin(faults=lambda ask: asked.append((ask.track, ask.group))) as link:
        prefix = await played(link, skip=3)
    assert (prefix.first, prefix.tokens) == (48, 22)
    assert near(prefix.kv, exact(48))
    assert {group for track, group in asked if track == "FP16"} == {3, 4}


@pytest.mark.parametrize("lost", [0, 2, 4])
@virtual
async def test_a_group_that_cannot_be_had_ends_the_prefix(origin, lost):  # noqa: F811
    def faults(ask):
        return Fault(corrupt_at=100) if ask.group == lost and ask.track == "FP16" else None

    async with origin(faults=faults) as link:
        prefix = await played(link)
    assert prefix.tokens == 16 * lost
    assert prefix.coverage == ("FP16",) * lost
    assert near(prefix.kv, exact()[:, :, :, : 16 * lost])
    assert prefix.cut is not None
    assert prefix.seconds < 1.0  # there is nothing to wait for


@virtual
async def test_an_engine_that_is_quick_is_left_the_rest_early(origin, short):  # noqa: F811
    quick = PrefillCost.from_rate(1000.0)
    async with origin(rate=short.track("FP16").total_bytes / 100) as link:
        prefix = await played(link, deadline=2.0, cost=quick, behind=100)
    assert prefix.cut is not None
    assert prefix.seconds < 2.0 - 0.1  # the 100 tokens behind the cache take so long


class Earlier(Policy):
    """Fetches all groups but the last, and leaves what is behind the second to the engine."""

    def decide(self, view):
        if (first := view.first_missing()) is not None and first < 4:
            return Decision.fetch(first, "FP16", "in order")
        if view.solid < 4:
            return Decision.wait("on its way")
        return Decision.recompute(2, "what they would bring out costs more")


@virtual
async def test_a_cut_in_front_of_what_is_in_place_leaves_that_to_the_engine(origin, short):  # noqa: F811
    async with origin() as link:
        prefix = await played(link, policy=f"{__file__}:Earlier")
    assert (prefix.tokens, prefix.coverage) == (32, ("FP16",) * 2)
    assert prefix.bytes_fetched - prefix.bytes_wasted == sum(short.track("FP16").bytes[:2]) < prefix.bytes_fetched / 1.9
    assert prefix.cut == "groups 2 to 4 are better computed than fetched"
    assert near(prefix.kv, exact()[:, :, :, :32])


@virtual
async def test_a_peer_that_falls_silent(origin):  # noqa: F811
    async with origin(faults=lambda ask: Fault(stall_after=0) if ask.group >= 2 else None) as link:
        prefix = await played(link)
    assert prefix.tokens == 32
    assert prefix.seconds <= 2.1


@virtual
async def test_cancelling_it_cancels_its_downloads(origin):  # noqa: F811
    async with origin(rate=1000.0) as link:
        task = asyncio.ensure_future(played(link, deadline=50.0))
        await asyncio.sleep(20.0)
        assert link.downloads > 0
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert link.downloads == 0


@virtual
async def test_arguments_that_make_no_sense(origin):  # noqa: F811
    async with origin() as link:
        with pytest.raises(UsageError, match="leaves nothing to play"):
            await played(link, skip=5)
