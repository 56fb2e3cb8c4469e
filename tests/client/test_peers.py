"""Plays that share a link: each knows its share of it, and none takes the others for a slow link."""

import asyncio
import time

import pytest

from kvabr.abr.estimators import BUILTIN
from kvabr.client.memory import PeerHistory
from kvabr.client.peers import ClientPeer, link_of
from kvabr.store.group_cache import GroupCache
from kvabr.telemetry.client_metrics import ClientMetrics
from tests.client.virtual import virtual
from tests.memory_transport import MemoryConnection, MemoryLink


class Peered(MemoryConnection):
    """A connection that knows its peer."""

    peer = "origin.test:443"


def connection(cls=MemoryConnection):
    return cls(lambda *_: None, MemoryLink())


def peer(connection):
    return ClientPeer("a peer", connection, GroupCache(1 << 20), ClientMetrics())


def fresh(name="harmonic"):
    estimator = BUILTIN[name]()
    estimator.start(4.0)
    return estimator


async def received(link, plays, seconds, begin_s, each_s=0.05):
    """Let plays ``{share: bytes per second}`` receive side by side for a while; the time at the end.

    Those that receive nothing wait for their turn.
    """
    now = begin_s
    for _ in range(round(seconds / each_s)):
        await asyncio.sleep(each_s)
        now += each_s
        for rate in plays.values():
            link.received(int(rate * each_s))
        for share, rate in plays.items():
            if rate:
                share.sample(rate * each_s, each_s, now)
            else:
                share.waited(now)
    return now


@virtual
async def test_two_see_the_whole_link_and_reckon_with_half():
    link = link_of(connection())
    with link.joined(fresh()) as one, link.joined(fresh()) as other:
        await received(link, {one: 7e5, other: 3e5}, 3.0, 0.0)
        assert one.link_rate() == pytest.approx(1e6, rel=0.05)
        assert other.link_rate() == pytest.approx(1e6, rel=0.05)
        assert one.rate() == pytest.approx(5e5, rel=0.05)


@virtual
async def test_one_that_waits_behind_the_other_takes_it_for_no_slow_link():
    link = link_of(connection())
    alone = fresh()
    with link.joined(fresh()) as urgent, link.joined(fresh()) as waiting:
        now = await received(link, {urgent: 5e5, waiting: 5e5}, 2.0, 0.0)
        for tick in range(20):
            alone.sample(5e5 * 0.05, 0.05, tick * 0.05 + 0.05)
        await received(link, {urgent: 1e6, waiting: 0.0}, 1.0, now)
        for tick in range(20, 40):
            alone.sample(0.0, 0.05, tick * 0.05 + 0.05)
        assert waiting.rate() == pytest.approx(5e5, rel=0.1)
        assert alone.rate() < 1e5


@virtual
async def test_when_one_begins_or_ends_the_others_know_at_once():
    link = link_of(connection())
    with link.joined(fresh("tracking")) as one:
        now = await received(link, {one: 1e6}, 2.0, 0.0)
        with link.joined(fresh("tracking")) as other:
            other.start(4.0)
            assert other.rate() == pytest.approx(5e5, rel=0.05)  # before it has seen a byte
            now = await received(link, {one: 5e5, other: 5e5}, 1.0, now)
            assert one.rate() == pytest.approx(5e5, rel=0.1)
        assert one.rate() == pytest.approx(1e6, rel=0.1)


@virtual
async def test_what_a_play_found_out_is_known_to_the_next():
    priors = PeerHistory()
    first = peer(connection(Peered))
    with first.estimating(fresh("tracking"), priors) as share:
        assert share.rate() == 0.0
        await received(first.link, {share: 1e6}, 2.0, 0.0)
        share.first_byte(0.05)
    again = BUILTIN["tracking"]()
    with peer(connection(Peered)).estimating(again, priors) as share:
        share.start(4.0)
        assert share.rate() == pytest.approx(1e6, rel=0.01)
        assert share.ttfb() == pytest.approx(0.05)
    with peer(connection()).estimating(fresh("tracking"), priors) as share:
        assert share.rate() == 0.0


@virtual
async def test_samples_of_plays_that_take_turns_measure_the_link_and_not_more():
    """One play's bytes come in two lumps, between which the other has short samples of its own."""
    link = link_of(connection())
    with link.joined(fresh()) as one, link.joined(fresh()) as other:
        now = 0.0
        for turn in range(200):
            await asyncio.sleep(0.01)
            now += 0.01
            link.received(10_000)
            if turn % 20 < 18:
                other.sample(0.0 if turn % 2 else 10_000.0, 0.01, now)
            elif turn % 20 == 19:
                one.sample(20_000.0, 0.2, now)
        assert one.link_rate() == pytest.approx(1e6, rel=0.05)
        assert other.link_rate() == pytest.approx(1e6, rel=0.05)


@virtual
async def test_what_was_received_long_ago_is_forgotten():
    link = link_of(connection())
    for _ in range(40_000):
        await asyncio.sleep(0.002)
        link.received(2000)
    assert link.bytes_within(1.0) == pytest.approx(1e6, rel=0.01)
    assert link.bytes_within(1e6) <= 32_768 * 2000


@virtual
async def test_a_play_that_received_nothing_makes_no_old_news_fresh():
    priors = PeerHistory()
    long_ago = time.time() - 7200
    priors.record(Peered.peer, 1e6, 0.05, long_ago)
    before = priors.of(Peered.peer)
    with peer(connection(Peered)).estimating(BUILTIN["tracking"](), priors) as share:
        share.start(4.0)
        assert share.link_rate() == pytest.approx(1e6)
    after = priors.of(Peered.peer)
    assert (after.rate, after.ttfb_s) == (before.rate, before.ttfb_s)
    assert after.weight == pytest.approx(before.weight, rel=0.01)


class Moody(BUILTIN["harmonic"]):
    """Fails where it was not expected to be asked."""

    def rate(self):
        raise RuntimeError("not now")

    def prime(self, prior):
        raise RuntimeError("no news, please")


@virtual
async def test_what_is_wrong_with_one_estimator_is_no_concern_of_other_plays():
    link = link_of(connection())
    with link.joined(Moody()) as moody, link.joined(fresh()):
        moody.sample(1e5, 0.1, 0.1)
        assert moody.link_rate() == 0.0
        with link.joined(fresh()) as third:
            assert third.rate() == 0.0
