"""Many players at once: through one relay, and on one connection."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack

import pytest

from kvabr.client.result import NothingCached
from tests.client.playing import play
from tests.faults.common import GROUPS, LIBRARIES, LIMIT_S, SPEC, TOKENS, Log, relaying, right, shaped

pytestmark = pytest.mark.process

PLAYERS = 20


async def test_many_players_through_one_relay(origin, tls):
    """All are served, and the origin sends each group once."""
    async with origin(library="aioquic") as served, relaying(served, tls) as relay, AsyncExitStack() as stack:
        libraries = [LIBRARIES[number % 2] for number in range(PLAYERS)]
        connections = [await stack.enter_async_context(relay.connect(library)) for library in libraries]
        played = await asyncio.gather(
            *(play(one, TOKENS, deadline=LIMIT_S, policy="fixed:Int8", spec=SPEC) for one in connections)
        )
        assert served.metrics.value("kvabr_groups_sent_total", track="Int8") == GROUPS
        assert served.metrics.value("kvabr_connections") == 1
    for one in played:
        assert right(one)
        assert one.met


async def test_many_plays_on_one_connection(origin):
    """One cancelled, one that wants what is not there, and the others none the worse for it."""
    async with origin() as served:
        with shaped(served.address, [3e6], rtt_s=0.01) as link:
            async with served.connect(at=link.address) as connection:
                log = Log()

                def playing(tokens=TOKENS, **options):
                    return play(connection, tokens, deadline=LIMIT_S, policy="fixed:Int4", spec=SPEC, **options)

                unwanted = asyncio.create_task(playing(log=log))
                tasks = [asyncio.create_task(playing()) for _ in range(12)]
                elsewhere = asyncio.create_task(playing(TOKENS[::-1]))
                await log.seen("first_byte")
                unwanted.cancel()
                results = await asyncio.gather(*tasks)
                assert isinstance(await elsewhere, NothingCached)
        await served.empty()
    assert all(map(right, results))
    assert unwanted.cancelled()
