"""A peer that is lost, silent or leaving in the middle of a play: the connection is dialled again."""

import asyncio

import pytest

from kvabr.client.async_client import AsyncClient
from kvabr.client.options import PlayOptions
from kvabr.transfer.interface import read_all
from kvabr.transfer.peer import Peer
from kvabr.types.cost import PrefillCost
from kvabr.types.errors import ConnectionLostError, PlayError, TransportError
from kvabr.types.naming import TrackNamespace
from tests.client.playing import play
from tests.client.test_play import close
from tests.client.virtual import virtual
from tests.memory_transport import Dials, Fault, MemoryConnection
from tests.toymodel import SPEC, ToyModel, prompt

TOKENS = prompt(70).tokens
SLOW = PrefillCost.from_rate(20.0)


class Dialled:
    """A peer that can be dialled again and again; every connection it makes is kept."""

    names, max_connections = ("lost:1",), 1

    def __init__(self, origin, *, fails=0, **options):
        self._origin, self._fails, self._options = origin, fails, options
        self.made = []
        self.refused = 0

    async def dial(self):
        await asyncio.sleep(0.02)
        if self._fails:
            self._fails -= 1
            self.refused += 1
            raise TransportError("nobody answers")
        self.made.append(self._origin(**self._options))
        return self.made[-1]

    async def connection(self):
        peer = Peer(self)
        await peer.connected()
        return peer

    def down(self):
        self._fails = 10**9
        self.made[-1].lose("the origin was killed")


@virtual
async def test_an_origin_that_never_comes_back_ends_the_play_by_the_deadline(origin):
    peer = Dialled(origin, rate=1e4)
    async with await peer.connection() as link:
        loop = asyncio.get_running_loop()
        loop.call_later(0.9, peer.down)
        start = loop.time()
        with pytest.raises(PlayError, match=r"not in place.*connection lost: the origin was killed"):
            await play(link, TOKENS, deadline=2.0, spec=SPEC)
        assert loop.time() - start <= 2.01
        assert peer.refused > 2


@virtual
async def test_with_a_dead_origin_a_play_ends_that_has_all_it_needs(origin, short):
    peer = Dialled(origin, rate=short.track("Int4").total_bytes)
    async with await peer.connection() as link:
        loop, lines = asyncio.get_running_loop(), []

        def in_place(line):
            lines.append(line)
            if len({each.group for each in lines if each.name == "decoded"}) == short.groups and peer._fails == 0:
                loop.call_later(0.2, peer.down)

        start = loop.time()
        played = await play(link, TOKENS, deadline=30.0, spec=SPEC, log=in_place, time_price=1e-6)
        took_s = loop.time() - start
    assert peer.refused >= 2
    assert close(played.kv)
    assert played.met
    assert took_s < 10.0


@pytest.mark.parametrize("prefix", [True, False], ids=["prefix", "hole"])
@virtual
async def test_an_engine_computes_the_rest_soon_after_the_origin_is_gone(origin, short, prefix):
    """The deadline is far, and the engine would be in time much later; waiting for the peer would gain nothing."""
    peer = Dialled(origin, rate=short.track("FP16").total_bytes / 2)
    async with await peer.connection() as link:
        loop = asyncio.get_running_loop()
        loop.call_later(0.9, peer.down)
        if prefix:
            async with AsyncClient(link, model=SPEC, options=PlayOptions(policy="fixed:FP16", patience=1.0)) as client:
                found = await client.find(TOKENS, within_s=60)
                played = await client.play_prefix(found, deadline=30.0, cost=SLOW)
            took_s = played.seconds
            assert 0 < played.tokens < played.requested
            assert "connection lost" in played.cut
        else:
            lines = []
            played = await play(
                link, TOKENS, deadline=30.0, engine=ToyModel(), prefill_cost=SLOW, policy="fixed:FP16", log=lines.append
            )
            took_s = played.ttft_s
            assert played.coverage[-1] == "recomputed"
            assert close(played.kv)
    assert took_s < 5.0


@virtual
async def test_a_peer_that_is_soon_back_is_waited_for(origin, short):
    peer = Dialled(origin, rate=short.track("FP16").total_bytes / 2)
    async with await peer.connection() as link:
        loop = asyncio.get_running_loop()
        loop.call_later(0.9, peer.down)
        loop.call_later(1.4, lambda: setattr(peer, "_fails", 0))
        played = await play(link, TOKENS, deadline=30.0, engine=ToyModel(), prefill_cost=SLOW, policy="fixed:FP16")
    assert "recomputed" not in played.coverage


@virtual
async def test_goaway_sends_new_requests_elsewhere_and_lets_old_ones_finish(origin):
    peer = Dialled(origin, rate=5e4)
    async with await peer.connection() as link:
        asyncio.get_running_loop().call_later(0.15, peer.made[0].go_away)
        lines = []
        played = await play(link, TOKENS, deadline=2.0, spec=SPEC, log=lines.append)
        assert played.met
        assert len(peer.made) == 2
        assert peer.made[0].closed  # once nothing was under way on it any more
        assert [line.reason for line in lines if line.name == "failed"] == []
        assert peer.made[0].bytes_received + peer.made[1].bytes_received == link.stats().bytes_received


@virtual
async def test_a_peer_that_always_says_goodbye_is_not_hammered(origin):
    peer = Dialled(origin)
    async with await peer.connection() as link:
        original = peer.dial

        async def dial():
            made = await original()
            made.go_away()
            return made

        peer.dial = dial
        peer.made[0].go_away()
        with pytest.raises(PlayError):
            await play(link, TOKENS, deadline=2.0, spec=SPEC)
    assert 3 < len(peer.made) < 12
    assert all(made.closed for made in peer.made)


@virtual
async def test_dialling_that_fails_for_long_tells_who_waits():
    async def dial():
        raise TransportError("nobody answers")

    lost = MemoryConnection(lambda *_: None)
    lost.lose("cut")
    async with Peer(Dials(dial, first=lost), patience_s=1.0) as link:
        download = link.fetch(TrackNamespace("m", "0" * 64), "t", limit=1)
        with pytest.raises(ConnectionLostError, match="dialling again failed: nobody answers"):
            await download.read()
        download.cancel()


SILENT = Fault(stall_after=0)


@virtual
async def test_a_peer_that_answers_probes_but_no_request_is_dialled_anew(origin, short):
    peer = Dialled(origin, faults=lambda _: SILENT if len(peer.made) == 1 else None)
    async with await peer.connection() as link:
        loop, spaces = asyncio.get_running_loop(), short.namespace
        for error in (TimeoutError, ConnectionLostError):  # each waits for less than the peer is given
            asked = link.fetch(spaces, "FP16", 0, limit=1 << 20)
            with pytest.raises(error):
                await asyncio.wait_for(read_all(asked), 1.9)
        assert len(peer.made) == 2
        begun_s = loop.time()
        assert await read_all(link.fetch(spaces, "FP16", 0, limit=1 << 20))
        assert loop.time() - begun_s < 0.1
        assert link.dials == 1


@virtual
async def test_a_peer_that_is_slow_is_dialled_ever_more_rarely(origin, short):
    peer = Dialled(origin, faults=lambda _: Fault(first_byte_s=10.0))
    async with await peer.connection() as link:
        failed = 0
        while True:
            try:
                assert await read_all(link.fetch(short.namespace, "FP16", 0, limit=1 << 20))
                break
            except ConnectionLostError:
                failed += 1
        assert failed == 2  # after 3 and 6 seconds; 12 are enough


@virtual
async def test_after_an_outage_a_sender_that_waits_to_send_again_is_not_waited_for(origin, short):
    """Its window is full of what was lost; it answers probes, and sends nothing before its next retransmission."""
    peer, out = Dialled(origin), False
    peer._options["faults"] = lambda _: SILENT if out and len(peer.made) == 1 else None
    async with await peer.connection() as link:
        loop, spaces = asyncio.get_running_loop(), short.namespace
        assert await read_all(link.fetch(spaces, "FP16", 0, limit=1 << 20))

        async def never(within_s):
            await asyncio.sleep(within_s)
            return False

        async def refused():
            raise TransportError("nobody answers")

        out, original, peer.dial = True, peer.dial, refused
        answers, peer.made[0].answers = peer.made[0].answers, never
        with pytest.raises(TimeoutError):  # after a probe has found out
            await asyncio.wait_for(read_all(link.fetch(spaces, "FP16", 1, limit=1 << 20)), 0.6)
        await asyncio.sleep(4.0)
        peer.dial, peer.made[0].answers = original, answers
        begun_s = loop.time()
        with pytest.raises(ConnectionLostError, match="the peer fell silent; it answers a new connection"):
            await read_all(link.fetch(spaces, "FP16", 1, limit=1 << 20))
        assert await read_all(link.fetch(spaces, "FP16", 1, limit=1 << 20))
        assert loop.time() - begun_s < 0.8
        assert link.dials == 1


class BusyPeer(Dialled):
    """A peer that is alive, but takes most of a second for everything."""

    async def dial(self):
        await asyncio.sleep(0.8)
        made = await super().dial()

        async def answers(within_s):
            await asyncio.sleep(min(within_s, 0.7))
            return within_s >= 0.7

        made.answers = answers
        return made


@virtual
async def test_a_peer_that_is_late_with_everything_is_busy_and_not_dead(origin, short):
    peer = BusyPeer(origin, faults=lambda _: Fault(first_byte_s=8.0))
    async with await peer.connection() as link:
        assert await read_all(link.fetch(short.namespace, "FP16", 0, limit=1 << 20))
        assert link.dials == 0
        assert len(peer.made) == 2  # one dial, to find out; then it is known how long its answers take
        assert peer.made[1].closed


@virtual
async def test_a_peer_that_dies_again_and_again_is_dialled_at_once_each_time(origin, short):
    peer = Dialled(origin)
    loop = asyncio.get_running_loop()
    async with await peer.connection() as link:
        for _ in range(6):
            peer.made[-1].lose("the origin was killed")
            begun_s = loop.time()
            assert await read_all(link.fetch(short.namespace, "FP16", 0, limit=1 << 20))
            assert loop.time() - begun_s < 0.1


@virtual
async def test_nobody_dials_for_a_request_that_comes_as_the_connection_is_closed(origin, short):
    loop, dialled, closing = asyncio.get_running_loop(), [], []

    async def dial():
        dialled.append(loop.time())
        first.cancel()
        loop.call_soon(ask)
        closing.append(loop.create_task(link.close()))
        raise TransportError("nobody answers")

    def ask():
        return link.fetch(short.namespace, "Int8", 0, limit=10_000)

    link = Peer(Dials(dial), needed=False)
    first = ask()
    await asyncio.sleep(60.0)
    await closing[0]
    assert len(dialled) == 1


@virtual
async def test_requests_do_not_wait_for_ever_for_a_peer_that_sends_everybody_away(origin, short):
    peer = Dialled(origin)
    dial = peer.dial

    async def goodbye():
        connection = await dial()
        connection.go_away()
        return connection

    begun_s = asyncio.get_running_loop().time()
    async with Peer(Dials(goodbye), patience_s=5.0) as link:
        with pytest.raises(ConnectionLostError):
            await read_all(link.fetch(short.namespace, "Int8", 0, limit=10_000))
        assert asyncio.get_running_loop().time() - begun_s < 10.0
    assert 4 < len(peer.made) < 20
    assert all(each.closed for each in peer.made)


@virtual
async def test_a_request_outlasts_the_failure_of_a_dial_that_somebody_else_began(origin, short):
    """A peer that is not needed may be away at first; only who waits for the connection itself is told."""
    peer = Dialled(origin, fails=3)
    link = Peer(peer, needed=False)
    waiting = asyncio.ensure_future(link.connected())
    await asyncio.sleep(0)
    request = link.fetch(short.namespace, "Int8", 0, limit=10_000)
    with pytest.raises(TransportError):
        await waiting
    assert await read_all(request)
    await link.close()


@virtual
async def test_a_peer_that_was_closed_has_no_connection(origin):
    link = Peer(Dialled(origin))
    await link.connected()
    await link.close()
    with pytest.raises(ConnectionLostError):
        await link.connected()


@virtual
async def test_closing_that_was_cancelled_may_be_done_again(origin):
    class SlowToClose(MemoryConnection):
        async def close(self):
            await asyncio.sleep(1.0)
            await super().close()

    made = SlowToClose(lambda *_: None)
    link = Peer(Dials(None, first=made))
    await link.connected()
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(link.close(), 0.5)
    await link.close()
    assert made.closed
