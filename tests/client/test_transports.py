"""`transport="auto"` measures both transports to a peer while nothing is played, and takes what is clearly better."""

from __future__ import annotations

import asyncio

import pytest

from kvabr.client import async_client
from kvabr.client.async_client import AsyncClient
from kvabr.client.options import PlayOptions
from kvabr.client.shared_bandwidth import PeerHistory
from kvabr.types.events import PlayStarted
from tests.client.served import LIMIT_S, Served
from tests.toymodel import prompt

LONG = prompt(160).tokens
pytestmark = pytest.mark.process


@pytest.fixture
def served(root, tmp_path, monkeypatch):
    monkeypatch.setattr(async_client, "IDLE_S", 0.0)
    monkeypatch.setattr("kvabr.client.transports._PATIENCE_S", LIMIT_S)
    monkeypatch.setattr("kvabr.client.transports._MOST_S", LIMIT_S)
    monkeypatch.setattr("kvabr.client.transports._LEAST_BYTES", 1)
    made = Served(root / "long", tmp_path)
    yield made
    made.close()


def a_client(served, log=None, **how):
    options = PlayOptions(policy="fixed:FP16", log=log)
    return AsyncClient(served.url, fingerprint=served.fingerprint, timeout_s=LIMIT_S, options=options, **how)


async def test_both_are_measured_after_the_first_play(served, tmp_path):
    sent = []
    async with a_client(served, sent.append, cache=tmp_path / "cache") as client:
        (peer,) = client.origins
        assert (await client.play(LONG, deadline=LIMIT_S)).met
        await client._measuring
        rates = [client._history.rate(name) for name in peer.transfers.source.peers[:2]]
        assert min(rates) > 0
        kept = PeerHistory(tmp_path / "cache" / "peers.json")  # for other processes
        assert [kept.rate(name) for name in peer.transfers.source.peers[:2]] == rates
        assert not client._transports.due(peer)  # they are known now
        connection = peer.transfers.connection
        assert connection.peer == peer.transfers.source.name_of("tcp" if connection.backend == "tcp" else "quic")
        sent.clear()
        await client.play(LONG, deadline=LIMIT_S)
    (started,) = (event for event in sent if isinstance(event, PlayStarted))
    assert "quic" in started.trace
    assert "tcp" in started.trace
    assert started.trace.count("Mbit/s") == 2


@pytest.mark.parametrize("better", ["tcp", "quic"])
async def test_what_is_clearly_better_replaces_the_connection(served, monkeypatch, better):
    async def seconds(connection, wanted):
        assert wanted
        return 1.0 if ("tcp" in connection.backend) == (better == "tcp") else 2.0

    monkeypatch.setattr("kvabr.client.transports._seconds", seconds)
    monkeypatch.setattr("kvabr.link.moqt.connect.SHORT_S", 1e-9 if better == "tcp" else LIMIT_S)
    async with a_client(served) as client:
        (peer,) = client.origins
        await client.connect()
        first = peer.transfers.connection.backend
        assert (first == "tcp") == (better == "quic")
        assert (await client.play(LONG, deadline=LIMIT_S)).met
        await client._measuring
        connection = peer.transfers.connection
        assert (connection.backend == "tcp") == (better == "tcp")
        assert connection.peer == peer.transfers.source.name_of(better)
        assert (await client.play(LONG[:80], deadline=LIMIT_S)).met


@pytest.mark.parametrize("used_s", [1e-3, LIMIT_S])
async def test_what_is_so_slow_that_it_is_not_waited_for_is_known(served, monkeypatch, used_s):
    """Unless the time left was less than what the connection in use took."""

    async def seconds(connection, wanted):
        if connection is used:
            return used_s
        await asyncio.sleep(0.01)
        raise TimeoutError  # as when there is no time left

    monkeypatch.setattr("kvabr.client.transports._seconds", seconds)
    async with a_client(served) as client:
        (peer,) = client.origins
        await client.connect()
        used = peer.transfers.connection
        assert (await client.play(LONG, deadline=LIMIT_S)).met
        await client._measuring
        here, there = map(peer.transfers.source.name_of, peer.transfers.source.other)
        if used_s < 0.01:
            assert 0 < client._history.rate(there) <= client._history.rate(here) / 10
        else:
            assert not client._history.rate(there)
        assert peer.transfers.connection is used


async def test_a_play_ends_a_measurement(served, monkeypatch):
    begun = asyncio.Event()

    async def seconds(connection, wanted):
        begun.set()
        await asyncio.Event().wait()

    monkeypatch.setattr("kvabr.client.transports._seconds", seconds)
    async with a_client(served) as client:
        await client.play(LONG, deadline=LIMIT_S)
        measuring = client._measuring
        await begun.wait()
        assert (await client.play(LONG, deadline=LIMIT_S)).met
        await asyncio.wait({measuring})
        assert measuring.cancelled()


async def test_of_plays_that_end_together_one_measurement_is_left(served, monkeypatch):
    """It ends with the client."""
    monkeypatch.setattr(async_client, "IDLE_S", LIMIT_S)
    before = asyncio.all_tasks()
    async with a_client(served) as client:
        await asyncio.gather(*(client.play(LONG, deadline=LIMIT_S) for _ in range(3)))
    left = [task for task in asyncio.all_tasks() - before if "_measure" in repr(task.get_coro())]
    assert not left


async def test_nobody_is_measured_who_was_asked_for_one_transport(served):
    async with a_client(served, transport="tcp") as client:
        assert (await client.play(LONG, deadline=LIMIT_S)).met
        assert client._measuring is None
