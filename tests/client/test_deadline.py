"""Without an engine a play ends at its deadline: complete, or with what is missing and the groups before it."""

import asyncio
import random
import threading

import pytest
import torch

from kvabr.client.async_client import AsyncClient
from kvabr.client.engine_work import THREADS
from kvabr.client.result import FORMAT, IncompleteError, listed, save
from kvabr.data import default_catalog
from kvabr.player.assembler import Assembler
from kvabr.publish.publisher import Publisher
from kvabr.server.published_assets import PublishedAssets
from kvabr.types.cost import PrefillCost
from kvabr.types.errors import ModelError, PlayError
from kvabr.types.kv import KVSpec, RopeSpec
from tests.client.playing import play, play_asset
from tests.client.test_faults import level
from tests.client.test_play import close
from tests.client.virtual import Hang, virtual
from tests.memory_transport import Fault
from tests.toymodel import SPEC, ToyModel, prompt

TOKENS = prompt(70).tokens
LATE_S = 0.1
"""Most seconds that a play may take beyond its deadline."""


async def incomplete(link, deadline=2.0, **options):
    """Play without an engine; return how it ended, and after how many seconds."""
    loop = asyncio.get_running_loop()
    start = loop.time()
    with pytest.raises(IncompleteError) as caught:
        await play(link, TOKENS, **({"deadline": deadline, "spec": SPEC} | options))
    assert link.downloads == 0
    return caught.value, loop.time() - start


@virtual
async def test_what_came_before_the_first_missing_group_can_be_used(origin, short, tmp_path):
    async with origin(rate=short.track("FP16").total_bytes / 3.0) as link:
        error, took_s = await incomplete(link, policy="fixed:FP16")
    assert 1.9 < took_s <= 2.0 + LATE_S
    first = error.missing[0]
    assert 0 < first < 5
    assert error.missing == tuple(range(first, 5))
    prefix = error.prefix
    assert prefix.tokens == 16 * first
    assert prefix.coverage == ("FP16",) * first
    assert close(prefix.kv, TOKENS[: 16 * first], 1e-5)
    assert prefix.catalog.groups == first
    assert not prefix.met
    assert prefix.loss < 1e-3
    assert f"missing groups: {listed(map(str, error.missing))}; in place before" in str(error)
    assert error.record.gave_up == error.reason
    save(prefix, tmp_path / "c.safetensors")
    assert FORMAT.encode() in (tmp_path / "c.safetensors").read_bytes()


@virtual
async def test_a_byte_now_and_then_is_no_reason_to_wait(origin):
    async with origin() as quick, AsyncClient(quick, model=SPEC) as client:
        found = await client.find(TOKENS, within_s=60)
    async with origin(rate=10.0) as link:
        loop = asyncio.get_running_loop()
        start = loop.time()
        with pytest.raises(IncompleteError, match="missing groups: 0, 1, 2, 3, 4"):
            await play_asset(link, found, deadline=1.5)
        assert loop.time() - start <= 1.5 + LATE_S


@virtual
async def test_a_lookup_that_takes_nearly_all_of_the_deadline(origin):
    def faults(ask):
        return Fault(stall_after=0) if level(ask) else Fault(first_byte_s=0.97)

    async with origin(rtt_s=0.0, faults=faults) as link:
        error, took_s = await incomplete(link, 1.0)
    assert took_s <= 1.0 + LATE_S
    assert error.missing == (0, 1, 2, 3, 4)


@virtual
async def test_a_decoder_that_hangs_does_not_hold_the_play(origin, monkeypatch):
    put = Assembler.put_many
    over = threading.Event()
    with Hang() as hang:

        def stuck(self, groups):
            if all(group != 3 for group, _ in groups):
                return put(self, groups)
            hang.wait()
            try:
                return put(self, groups)
            finally:
                over.set()

        monkeypatch.setattr(Assembler, "put_many", stuck)
        out = torch.zeros(SPEC.shape(70))
        async with origin() as link:
            error, took_s = await incomplete(link, 1.0, policy="fixed:FP16", out=out)
        assert took_s <= 1.0 + LATE_S
        assert error.missing[0] <= 3
        before = out.clone()
    assert over.wait(300.0)  # the thread goes on
    assert torch.equal(out, before)


MANY = KVSpec.uniform("test/long", "test", 1, 1, 8, "float16", RopeSpec(10000.0, 8), group_tokens=16)
MANY_TOKENS = [random.Random(1).randrange(1000) for _ in range(16 * 400)]


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    folder = tmp_path_factory.mktemp("long")
    publisher = Publisher(folder, MANY, prior=default_catalog(), tracks=("FP16", "Int8", "Int4"))
    kv = torch.randn(MANY.shape(len(MANY_TOKENS)), generator=torch.Generator().manual_seed(1)).half()
    publisher.reserve(MANY_TOKENS).fill((kv,), lambda _: None)
    publisher.close()
    return PublishedAssets(folder)


@virtual
async def test_a_play_that_ends_requests_nothing_more(library_origin):
    """At the deadline the requests under way are cancelled; those that were to follow must not begin then."""
    asked_s = []

    def faults(ask):
        if level(ask):
            asked_s.append(link.loop.time() - began_s)

    async with library_origin(rate=4e5, rtt_s=0.3, faults=faults) as link:
        began_s = link.loop.time()
        with pytest.raises(IncompleteError):
            await play(link, MANY_TOKENS, deadline=0.9, spec=MANY)
        assert 0.6 < max(asked_s) < 0.8
        assert link.downloads == 0


COST = PrefillCost(0.001, 0.002)


async def cancelled_after(seconds, work):
    task = asyncio.create_task(work)
    await asyncio.sleep(seconds)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


@virtual
async def test_cancelling_a_play_leaves_nothing(origin):
    async with origin(rate=5e3) as link:
        for seconds in (0.0, 0.01, 0.3, 0.9):
            await cancelled_after(seconds, play(link, TOKENS, deadline=3.0, spec=SPEC))
            assert link.downloads == 0
        assert (await play(link, TOKENS, deadline=8.0, spec=SPEC)).met  # the connection is as good as new


@virtual
async def test_cancelling_does_not_wait_for_an_engine(origin):
    with Hang() as hang:

        class Stuck(ToyModel):
            def prefill(self, tokens, before=None):
                hang.wait()
                return super().prefill(tokens, before)

        engine = Stuck()
        async with origin(rate=1.0) as link:
            await cancelled_after(1.5, play(link, TOKENS, deadline=2.0, engine=engine, prefill_cost=COST))
            await cancelled_after(0.5, play(link, range(50), deadline=2.0, engine=engine, prefill_cost=COST))
            assert link.downloads == 0
        assert not all(thread.wait(0.0) for thread in list(THREADS))
    for thread in list(THREADS):
        assert await asyncio.to_thread(thread.wait, 300.0)


@virtual
async def test_cancelling_one_of_many_plays_leaves_the_others_alone(origin, short):
    async with origin(rate=6 * short.track("Int4").total_bytes) as link:
        tasks = [asyncio.create_task(play(link, TOKENS, deadline=3.0, spec=SPEC)) for _ in range(6)]
        await asyncio.sleep(0.4)
        for task in tasks[::2]:
            task.cancel()
        results = await asyncio.gather(*tasks, return_exceptions=True)
    assert all(isinstance(result, asyncio.CancelledError) for result in results[::2])
    assert all(close(result.kv) for result in results[1::2])


@virtual
async def test_an_engine_that_hangs_ends_the_play_within_bounds(origin):
    loop = asyncio.get_running_loop()
    with Hang() as hang:

        class Stuck(ToyModel):
            def prefill(self, tokens, before=None):
                hang.wait()
                raise ModelError("released")

        async with origin(faults=lambda ask: Fault(stall_after=0) if level(ask) else None) as link:
            start = loop.time()
            with pytest.raises(PlayError, match="not in place"):
                await play(link, TOKENS, deadline=1.0, engine=Stuck(), prefill_cost=COST, patience=2.0)
            assert loop.time() - start < 2.6
            start = loop.time()
            with pytest.raises(ModelError, match="did not end within"):
                await play(link, range(50), deadline=1.0, engine=Stuck(), prefill_cost=COST, patience=2.0)
            assert loop.time() - start < 2.6
