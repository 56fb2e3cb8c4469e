"""Rates that servers announce: measured while the path is the limit, per block of addresses, bounded, and a prior."""

from functools import partial

import pytest

from kvabr.client.async_client import AsyncClient
from kvabr.client.options import Limits, PlayOptions
from kvabr.link.moqt.connect import connect
from kvabr.moqt.session import MoqtSession
from kvabr.moqt.setup_options import SetupOptions
from kvabr.server.addresses import block_of
from kvabr.server.announced_rates import AnnouncedRates, SiteRate
from kvabr.server.client_connection import ClientConnection
from kvabr.store.locations import open_asset
from kvabr.types.events import DecisionMade
from kvabr.types.naming import CATALOG_TRACK, MAX_RATE_KBPS
from kvabr.types.peer import PeerOptions
from tests.assets import make_asset
from tests.server.relays import LONG_S, chain_of, dialled, get, origin, play, url_of
from tests.toymodel import toy_asset

MBIT = 1e6 / 8
"""Bytes per second."""


class Clock:
    now = 1000.0

    def __call__(self):
        return self.now


def sends(site, clock, rate, seconds, *, by="c", limited=True, round_s=0.02):
    """Deliver for some seconds at a rate, as acknowledgements of every ten milliseconds do."""
    for _ in range(round(seconds / 0.01)):
        clock.now += 0.01
        site.note(by, round(rate * 0.01), round_s, clock.now, limited=limited)


def test_a_rate_is_measured_only_while_there_is_more_to_send():
    clock, site = Clock(), SiteRate()
    site.note("c", 0, 0.02, clock.now, limited=True)
    sends(site, clock, 80 * MBIT, 1.0)
    assert site.rate == pytest.approx(80 * MBIT, rel=0.01)
    site.note("c", 0, 0.02, clock.now, limited=False)
    sends(site, clock, 1 * MBIT, 20.0, limited=False)  # a player that asks for little
    clock.now += 1e4
    site.note("c", 0, 0.02, clock.now, limited=True)
    assert site.rate == pytest.approx(80 * MBIT, rel=0.01)
    sends(site, clock, 20 * MBIT, 5.0)
    assert site.rate == pytest.approx(20 * MBIT, rel=0.1)


def test_slow_start_ends_with_its_last_rate_and_several_connections_are_one_path():
    clock, site = Clock(), SiteRate()
    for name in ("a", "b"):
        site.note(name, 0, 0.02, clock.now, limited=True)
    for rate in (1, 2, 4, 8, 16, 32, 32, 32):
        for name in ("a", "b"):
            site.note(name, 0, 0.02, clock.now, limited=True)
        for _ in range(10):
            clock.now += 0.01
            for name in ("a", "b"):
                site.note(name, round(rate * MBIT * 0.01), 0.02, clock.now, limited=True)
    assert site.rate == pytest.approx(64 * MBIT, rel=0.1)


def test_a_block_shares_its_rates_for_a_day_and_no_other_has_them():
    clock = Clock()
    rates = AnnouncedRates(clock)

    def reach(address, rate):
        site = rates.site(address)
        site.note(address, 0, 0.02, clock.now, limited=True)
        sends(site, clock, rate, 1.0, by=address)
        site.note(address, 0, 0.02, clock.now, limited=False)

    reach("192.0.2.7", 8 * MBIT)
    assert rates.of("192.0.2.200") == rates.of("::ffff:192.0.2.1") == 8192
    assert rates.of("192.0.3.7") == 0
    for host, rate in (("8", 100 * MBIT), ("9", 120 * MBIT)):
        reach(f"192.0.2.{host}", rate)
    assert rates.of("192.0.2.7") == 131072  # the median, rounded to a power of two
    reach("2001:db8:0:12ff::1", 8 * MBIT)
    assert rates.of("2001:db8:0:1200::5%eth0") == 8192
    assert rates.of("2001:db8:0:1300::5") == 0
    clock.now += 86_000
    assert rates.of("192.0.2.7") == 131072
    clock.now += 1_000
    assert rates.of("192.0.2.7") == 0


def test_blocks_and_rates_are_bounded():
    clock = Clock()
    rates = AnnouncedRates(clock)
    for number in range(10_000):
        rates.site(f"10.{number % 250}.{number // 250}.1")
    assert len(rates._blocks) == 4096
    site = rates.site("192.0.2.1")
    site.note("c", 0, 0.0, clock.now, limited=True)
    clock.now += 1e-9
    site.note("c", 1 << 40, 0.0, clock.now, limited=True)
    assert rates.of("192.0.2.1") == MAX_RATE_KBPS
    assert block_of("not an address") == "not an address"


def node(server, memory):
    """The client of a node that keeps its measurements of links in a folder."""
    how = PeerOptions(fingerprint=server.fingerprint, timeout_s=LONG_S)
    return AsyncClient(connect(url_of(server), how), limits=Limits(memory_bytes=0), cache=memory)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A store with an asset that takes many round trips, and one that can be decoded."""
    folder = tmp_path_factory.mktemp("folder")
    make_asset(folder / "long", list(range(32)), frame_bytes=300_000)
    toy_asset(folder / "toy", ("FP16",))
    return folder


async def played(client, asset):
    """Play an asset; return the rate with which the play began."""
    events = []
    options = PlayOptions(policy="fixed:FP16", log=events.append)
    await client.play_asset(asset.catalog.namespace, deadline=LONG_S, options=options)
    return next(event.rate for event in events if isinstance(event, DecisionMade))


@pytest.mark.process
async def test_the_first_play_of_a_node_begins_with_what_its_neighbours_reached(folder, tls, tmp_path):
    long, toy = open_asset(folder / "long"), open_asset(folder / "toy")
    async with origin(folder, tls) as server:
        async with node(server, tmp_path / "first") as first:
            assert await played(first, toy) == 0.0
        async with await dialled(server) as neighbour:
            while not server.rates.of("127.0.0.1"):
                await play(neighbour, long)
        announced = server.rates.of("127.0.0.1") * 1000 / 8
        async with node(server, tmp_path / "second") as second:
            assert await played(second, toy) == announced
        async with node(server, tmp_path / "first") as first:
            own = await played(first, toy)  # it remembers its own play
            assert own > 0
            assert own != announced


@pytest.mark.process
async def test_a_server_that_announces_no_rates_measures_none(folder, tls):
    async with origin(folder, tls, announce_rates=False) as server, await dialled(server) as connection:
        assert server.rates is None
        await play(connection, open_asset(folder / "long"))
        await get(connection, open_asset(folder / "toy").catalog.namespace, CATALOG_TRACK)
        assert connection.announced_rate == 0.0


@pytest.mark.process
async def test_a_relay_announces_its_own_rates_and_passes_on_none(small, tls):
    namespace = small.catalog.namespace
    async with chain_of(small.store.folder, tls) as (server, relay):
        known = server.rates.site("127.0.0.1")
        known.rate, known.at_s = 8 * MBIT, server.rates.clock()
        async with await dialled(server) as straight, await dialled(relay) as behind:
            for connection in (straight, behind):
                assert await get(connection, namespace, CATALOG_TRACK) == small.catalog_bytes()
            assert (straight.announced_rate, behind.announced_rate) == (8192 * 125.0, 0.0)
            own = relay.rates.site("127.0.0.1")
            own.rate, own.at_s = 2 * MBIT, relay.rates.clock()
            await get(behind, namespace, CATALOG_TRACK)
            assert behind.announced_rate == 2048 * 125.0
            own.rate = 0.0
            await get(behind, namespace, CATALOG_TRACK)
            assert behind.announced_rate == 0.0


class Foreign(ClientConnection):
    """A server that is not kvabr's, such as a relay that passes on an origin's properties."""

    def make_session(self, draft):
        super().make_session(draft)
        return MoqtSession(draft, client=False, options=SetupOptions(implementation=b"another"))


class Lying(AnnouncedRates):
    lie = 0

    def of(self, _):
        return self.lie


@pytest.mark.process
async def test_a_rate_that_is_absurd_or_not_from_this_server_is_ignored(small, tls):
    async with origin(small.store.folder, tls) as server:
        server.rates = Lying()
        for kind, lie, heard in (
            (ClientConnection, 1, 125.0),
            (ClientConnection, MAX_RATE_KBPS, 125.0 * MAX_RATE_KBPS),
            (ClientConnection, MAX_RATE_KBPS + 1, 0.0),
            (ClientConnection, (1 << 62) - 1, 0.0),
            (Foreign, 1000, 0.0),
        ):
            server.make_peer, server.rates.lie = partial(kind, server), lie
            async with await dialled(server) as connection:
                await get(connection, small.catalog.namespace, CATALOG_TRACK)
                assert connection.announced_rate == heard
