"""The transport without a network: what a link carries when, who goes first, and every way to go wrong."""

from __future__ import annotations

import asyncio

import pytest

from kvabr.moqt.codes import reason_of
from kvabr.server.publication import BytesPublication
from kvabr.transfer.interface import read_all
from kvabr.types.errors import ConnectionLostError, Reason, RequestError
from kvabr.types.naming import TrackNamespace
from tests.client.virtual import virtual
from tests.memory_transport import Fault, MemoryConnection, MemoryLink

SPACE = TrackNamespace("test/model", "ab" * 32)
DATA = bytes(range(256)) * 400


def find(namespace, track):
    if namespace != SPACE:
        return None
    return {"data": BytesPublication(DATA), "none": BytesPublication(b"")}.get(track)


def connection(path=None, fault=None, **options):
    return MemoryConnection(find, path, faults=None if fault is None else lambda _: fault, **options)


def ask(link, track="data", *, limit=102_400, **options):
    return link.fetch(SPACE, track, limit=limit, **options)


async def timed(download):
    start = asyncio.get_running_loop().time()
    data = await read_all(download)
    return data, asyncio.get_running_loop().time() - start


@virtual
async def test_the_link_is_shared_by_priority_and_equals_take_turns():
    async with connection(MemoryLink(rate=4e6)) as link:
        late, early, other = ask(link, priority=200), ask(link, priority=3), ask(link, priority=3)
        ended = []

        async def drain(name, download):
            await read_all(download)
            ended.append((name, late.stats.received))

        await asyncio.gather(drain("late", late), drain("early", early), drain("other", other))
        assert [name for name, _ in ended] == ["early", "other", "late"]
        assert ended[1][1] <= 16 << 10  # it had the link for a moment before the others had asked
        assert other.stats.first_byte_s < early.stats.done_s


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (Fault(refuse=0x9, retry_after_s=3.0), "refused, code 0x9"),
        (Fault(reset_after=1000), "reset by the publisher after 1000 bytes"),
        (Fault(reset_after=0), "reset by the publisher after 0 bytes"),
        (Fault(endless=True), "longer than"),
    ],
)
@virtual
async def test_faults_that_the_transport_sees(fault, message):
    async with connection(fault=fault) as link:
        with pytest.raises(RequestError, match=message) as caught:
            await read_all(ask(link))
        reason = Reason.WRONG if fault.endless else reason_of(fault.refuse or 0)
        assert (caught.value.reason, caught.value.retry_after_s) == (reason, fault.retry_after_s)
        assert link.downloads == 0


@virtual
async def test_faults_that_only_the_reader_can_see():
    for fault, wanted in (
        (Fault(truncate_to=77), DATA[:77]),
        (Fault(replace=b"lies"), b"lies"),
        (Fault(corrupt_at=5), DATA[:5] + bytes([DATA[5] ^ 0x10]) + DATA[6:]),
    ):
        async with connection(fault=fault) as link:
            assert await read_all(ask(link)) == wanted


@virtual
async def test_a_stall_says_nothing_and_stalls_nobody_else():
    async with MemoryConnection(find, faults=lambda ask: Fault(stall_after=500) if ask.attempt == 0 else None) as link:
        stalled = ask(link)
        assert await stalled.read() == DATA[:500]
        waiting = asyncio.create_task(stalled.read())
        assert await read_all(ask(link)) == DATA
        assert not waiting.done()
        assert link.downloads == 1
        link.lose("the publisher died")
        with pytest.raises(ConnectionLostError, match="the publisher died"):
            await waiting


@virtual
async def test_a_lost_connection_tells_every_reader_now_and_later():
    link = connection(MemoryLink(rate=1e4), lasts_s=0.02)
    downloads = [ask(link) for _ in range(3)]
    for download in downloads:
        with pytest.raises(ConnectionLostError, match="timed out"):
            await read_all(download)
    assert link.closed
    with pytest.raises(ConnectionLostError):
        await ask(link).read()
    await link.close()
    await link.close()
    assert link.downloads == 0
