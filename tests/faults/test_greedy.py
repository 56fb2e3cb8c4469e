"""Clients that take all they can get: what they hold stays within the budgets, and others are served."""

import asyncio
from contextlib import AsyncExitStack

import pytest

from kvabr.link.moqt.endpoint import StreamTransport
from kvabr.link.quic.backend import REQUESTS_CONNECTION_WINDOW, REQUESTS_STREAM_WINDOW
from kvabr.moqt.events import Ready
from kvabr.moqt.wire import Parameters
from kvabr.store import asset
from tests.assets import open_files
from tests.faults.common import LIBRARIES, serving
from tests.faults.rude import rude_client
from tests.faults.test_guests import ask, others_are_served, refusals, until

pytestmark = pytest.mark.process

LITTLE = {
    "memory_per_connection": 60_000, "memory_per_address": 100_000, "memory": 150_000,
    "in_flight_per_connection": 300_000, "in_flight_per_address": 400_000, "in_flight": 500_000,
}  # fmt: skip


async def connected(stack, served, **how):
    end = await stack.enter_async_context(rude_client(served.address, **how))
    await until(lambda: any(isinstance(event, Ready) for event in end.events))
    return end


@pytest.mark.parametrize("library", LIBRARIES)
async def test_clients_that_begin_everything_and_finish_nothing(root, tls, fingerprint, catalog, library, monkeypatch):
    """They raise the priority of each request in turn, and some read nothing more."""
    monkeypatch.setattr(asset, "LOADED_BYTES", 1000)  # so that every frame is read from an open file,
    monkeypatch.setattr(StreamTransport, "piece", 5000)  # and sent in pieces
    async with serving(root, tls, fingerprint, library=library, **LITTLE) as served, AsyncExitStack() as stack:
        budgets, seen = served.server.budgets, []
        ends = [await connected(stack, served) for _ in range(6)]

        async def watch():
            while True:
                seen.append((open_files(root), budgets.total.memory))
                await asyncio.sleep(0.001)

        watching = asyncio.create_task(watch())
        numbers = {end: [ask(end, catalog, group=number % 6) for number in range(40)] for end in ends}
        for deaf in ends[:3]:
            deaf.transport.flush()
            asyncio.get_running_loop()._remove_reader(
                deaf.transport.driver._transport.get_extra_info("socket").fileno()
            )
        for turn in range(40):
            for end in ends:
                end.session.requester.update(numbers[end][turn], Parameters(priority=127 - turn))
                end.settle_and_send()
            await asyncio.sleep(0)
        await others_are_served(served)
        watching.cancel()
        most = [max(column) for column in zip(*seen, strict=True)]
        assert 0 < most[0] <= len(ends) + 1  # of each connection one
        assert most[1] <= 100_000
        for peer in list(served.server.peers):
            peer.say_goodbye()
        await served.empty()
        assert budgets.total.memory == budgets.total.in_flight == len(budgets._waiting) == 0
        assert not budgets.addresses
        assert open_files(root) == 0


async def test_too_many_requests_in_all_leave_everybody_some(root, tls, fingerprint, catalog):
    async with serving(root, tls, fingerprint, requests=30) as served:
        async with AsyncExitStack() as stack:
            ends = [await connected(stack, served) for _ in range(2)]
            for end in ends:
                for _ in range(60):
                    ask(end, catalog)
                end.transport.flush()
            await until(lambda: all(refusals(end) for end in ends))
            assert all("the server is busy" in refusal.reason for end in ends for refusal in refusals(end))
            await others_are_served(served)
        await served.empty()


@pytest.mark.parametrize("library", LIBRARIES)
async def test_a_server_keeps_little_of_what_it_cannot_read_yet(root, tls, fingerprint, library):
    """A client may leave gaps in what it sends, and QUIC keeps what comes behind them."""
    async with serving(root, tls, fingerprint, library=library) as served, AsyncExitStack() as stack:
        end = await connected(stack, served)
        assert end.transport.quic._remote_max_data <= REQUESTS_CONNECTION_WINDOW == 1 << 20
        assert end.transport.quic._remote_max_stream_data_bidi_remote <= REQUESTS_STREAM_WINDOW == 1 << 18
        await others_are_served(served)


@pytest.mark.parametrize("library", LIBRARIES)
async def test_streams(root, tls, fingerprint, library):
    """Those that a client begins and never ends are no more than QUIC allows, which is not raised for them."""
    async with serving(root, tls, fingerprint, library=library) as served, AsyncExitStack() as stack:
        end = await connected(stack, served)
        for begin in (end.session._channel.open_bidi, end.session._channel.open_uni):
            for _ in range(120):
                end.transport.write(begin(), b"\x40")
        end.transport.flush()
        await others_are_served(served)
        most = end.transport.quic._remote_max_streams_bidi, end.transport.quic._remote_max_streams_uni
        assert most == {"aioquic": (128, 128), "qh3": (100, 103)}[library]
