"""Many players at once: through one relay, and on one connection."""

from __future__ import annotations

import asyncio

import pytest

from kvabr.client.result import NothingCached
from tests.client.playing import play
from tests.faults.common import LIMIT_S, SPEC, TOKENS, Log, right, shaped

pytestmark = pytest.mark.process


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
