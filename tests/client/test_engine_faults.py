"""Plays that are cancelled, and engines that fail or hang: nothing is left behind, and the network still helps."""

from __future__ import annotations

import asyncio
import threading

import pytest

from kvabr.types.cost import PrefillCost
from kvabr.types.errors import ModelError, PlayError
from tests.client.playing import play
from tests.client.test_faults import level
from tests.client.test_play import close
from tests.client.virtual import Hang, virtual
from tests.memory_transport import Fault
from tests.toymodel import SPEC, ToyModel, prompt

TOKENS = prompt(70).tokens
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
        threads = [thread for thread in threading.enumerate() if thread.name == "kvabr-engine"]
        assert threads
    for thread in threads:
        await asyncio.to_thread(thread.join, 300.0)
        assert not thread.is_alive()


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
