"""Everything that can go wrong between a play and its origin: never a hole, never a hang, always a reason."""

from __future__ import annotations

import asyncio
import threading
from dataclasses import replace

import pytest

from kvabr.client.resources import decoders
from kvabr.client.result import NothingCached
from kvabr.quic.reconnect import RedialledConnection
from kvabr.server.publication import BytesPublication
from kvabr.types.cost import PrefillCost
from kvabr.types.errors import ConnectionLostError, FormatError, ModelError, PlayError, TransportError
from kvabr.types.naming import CATALOG_TRACK, PREFIX_TRACK, TrackNamespace
from tests import kvdata
from tests.client.playing import play, play_asset
from tests.client.test_play import close
from tests.client.virtual import Hang, virtual
from tests.memory_transport import Fault, MemoryConnection
from tests.toymodel import SPEC, ToyModel, prompt

TOKENS = prompt(70).tokens
COST = PrefillCost(0.001, 0.002)


def level(ask):
    return ask.track in {"FP16", "Int8", "Int4"}


def on_first(fault, group=2):
    """The fault, for the first request of one group."""
    asked = []

    def faults(ask):
        if level(ask) and ask.group == group:
            asked.append(ask)
            return fault if len(asked) == 1 else None
        return None

    return faults


async def played_with(origin, faults, *, rate=2e4, **options):
    lines = []
    async with origin(rate=rate, faults=faults) as link:
        result = await play(link, TOKENS, **({"deadline": 2.0, "spec": SPEC, "log": lines.append} | options))
        assert link.downloads == 0
    return result, lines


@virtual
async def test_a_stalled_download_is_asked_for_again(origin):
    played, lines = await played_with(origin, on_first(Fault(stall_after=300)))
    assert played.met
    assert close(played.kv)
    assert any(line.name == "failed" and line.reason == "it has stalled" for line in lines)


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        (Fault(truncate_to=500), "500 bytes came, the catalog says 2714"),
        (Fault(endless=True), "longer than the 2714 bytes"),
        (Fault(corrupt_at=2000), "checksum is wrong"),
        (Fault(replace=b"\0" * 2714), "starts with"),
        (Fault(reset_after=100), "reset by the publisher"),
        (Fault(refuse=0x0), "refused, code 0x0"),
        (Fault(refuse=0x9, retry_after_s=0.1), "refused, code 0x9"),
    ],
)
def test_a_lie_is_refused_with_its_reason_and_asked_for_again(origin, fault, reason):
    @virtual
    async def check():
        played, lines = await played_with(origin, on_first(fault))
        assert played.met
        assert close(played.kv)
        failures = [line for line in lines if line.name == "failed"]
        assert len(failures) == 1
        assert reason in failures[0].reason
        assert failures[0].group == 2

    check()


@virtual
async def test_a_frame_of_another_model_or_prompt_is_foreign(origin, libraries, long):
    other = libraries["long"].assets[0].frame(3, "Int4")

    played, lines = await played_with(origin, on_first(Fault(replace=other)))
    reasons = [line.reason for line in lines if line.name == "failed"]
    assert len(reasons) == 1
    assert "it belongs to something else" in reasons[0]
    assert close(played.kv)


@virtual
async def test_a_track_that_is_always_bad_is_left_for_another(origin):
    played, _ = await played_with(origin, lambda ask: Fault(truncate_to=9) if ask.track == "Int4" else None)
    assert "Int4" not in played.coverage
    assert close(played.kv)


@virtual
async def test_a_publisher_that_lies_always_ends_the_play_with_the_reason(origin):
    start = asyncio.get_running_loop().time()
    with pytest.raises(PlayError, match=r"failed on every track.*9 bytes came, the catalog says") as caught:
        await played_with(origin, lambda ask: Fault(truncate_to=9) if level(ask) else None)
    assert "no engine" in str(caught.value)
    assert asyncio.get_running_loop().time() - start <= 2.0


@virtual
async def test_a_publisher_that_lies_always_does_not_matter_to_an_engine(origin):
    played, _ = await played_with(
        origin, lambda ask: Fault(truncate_to=9) if level(ask) else None, engine=ToyModel(), prefill_cost=COST
    )
    assert set(played.coverage) == {"recomputed"}
    assert played.met
    assert close(played.kv, error=1e-5)


@virtual
async def test_a_refusal_that_asks_for_time_gets_it(origin):
    asked = {}

    def busy(ask):
        if level(ask):
            times = asked.setdefault(ask.group, [])
            times.append(asyncio.get_running_loop().time())
            return Fault(refuse=0x9, retry_after_s=0.2) if len(times) == 1 else None
        return None

    played, _ = await played_with(origin, busy)
    assert played.met
    assert all(times[1] - times[0] >= 0.2 for times in asked.values())


@virtual
async def test_silence_from_the_first_byte_on_ends_by_the_deadline(origin):
    start = asyncio.get_running_loop().time()
    with pytest.raises(PlayError, match="5 of 5 groups are still not in place, and nothing has come for"):
        await played_with(origin, lambda ask: Fault(stall_after=0) if level(ask) else None)
    assert asyncio.get_running_loop().time() - start <= 2.01


@virtual
async def test_silence_in_the_middle_is_filled_by_the_engine_in_time(origin):
    played, _ = await played_with(
        origin,
        lambda ask: Fault(stall_after=100) if level(ask) and ask.group >= 2 else None,
        engine=ToyModel(),
        prefill_cost=PrefillCost(0.001, 0.01),
    )
    assert played.coverage[2:] == ("recomputed",) * 3
    assert played.met
    assert close(played.kv)


@pytest.mark.parametrize("silent", [{1}, {1, 3}, {0, 2, 4}])
def test_holes_that_stay_silent_are_filled_by_the_engine_in_time(origin, silent):
    @virtual
    async def check():
        played, _ = await played_with(
            origin,
            lambda ask: Fault(stall_after=0) if level(ask) and ask.group in silent else None,
            engine=ToyModel(),
            prefill_cost=PrefillCost(0.001, 0.01),
        )
        assert {group for group, track in enumerate(played.coverage) if track == "recomputed"} >= silent
        assert played.met
        assert close(played.kv)

    check()


# ---------------------------------------------------------- connection lost


class Peer:
    """A peer that can be dialled again and again; every connection it makes is kept."""

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
        return RedialledConnection(await self.dial(), self.dial)

    def down(self):
        """From now on nobody answers."""
        self._fails = 10**9
        self.made[-1].lose("the origin was killed")


@virtual
async def test_a_lost_connection_is_dialled_again_and_the_play_goes_on_from_what_it_has(origin, short):
    rate = short.track("Int4").total_bytes / 1.0
    peer = Peer(origin, rate=rate)
    async with await peer.connection() as link:
        loop = asyncio.get_running_loop()
        loop.call_later(0.9, lambda: peer.made[0].lose("the origin was killed"))
        lines = []
        played = await play(link, TOKENS, deadline=2.5, spec=SPEC, log=lines.append, policy="fixed:Int4")
        assert link.dials == 1
        assert link.stats().bytes_received > 0
    assert played.met
    assert close(played.kv)
    assert any("connection lost: the origin was killed" in getattr(line, "reason", "") for line in lines)
    # What was in place when the connection went was not fetched again.
    counts = [sum(line.name == "request" and line.group == group for line in lines) for group in range(5)]
    assert counts[0] == 1
    assert sum(counts) < 10
    assert all(made.closed and not made.downloads for made in peer.made)


@virtual
async def test_dialling_goes_on_until_somebody_answers(origin):
    peer = Peer(origin, rate=2e4)
    async with await peer.connection() as link:
        peer._fails = 3
        peer.made[0].lose("cut")
        played = await play(link, TOKENS, deadline=3.0, spec=SPEC)
    assert played.met
    assert peer.refused == 3


@virtual
async def test_an_origin_that_never_comes_back_ends_the_play_by_the_deadline(origin):
    peer = Peer(origin, rate=1e4)
    async with await peer.connection() as link:
        loop = asyncio.get_running_loop()
        loop.call_later(0.9, peer.down)
        start = loop.time()
        with pytest.raises(PlayError, match=r"not in place.*connection lost: the origin was killed"):
            await play(link, TOKENS, deadline=2.0, spec=SPEC)
        assert loop.time() - start <= 2.01
        assert peer.refused > 2


@virtual
async def test_an_origin_that_never_comes_back_does_not_matter_to_an_engine(origin):
    peer = Peer(origin, rate=1e4)
    async with await peer.connection() as link:
        asyncio.get_running_loop().call_later(0.9, peer.down)
        played = await play(link, TOKENS, deadline=2.0, engine=ToyModel(), prefill_cost=COST)
        assert "recomputed" in played.coverage
        assert played.met
        assert close(played.kv)


@virtual
async def test_a_lookup_that_fails_is_recomputed_or_said(origin):
    peer = Peer(origin)
    async with await peer.connection() as link:
        peer.down()
        played = await play(link, TOKENS, deadline=2.0, engine=ToyModel(), prefill_cost=COST)
        assert set(played.coverage) == {"recomputed"}
        assert played.met
        with pytest.raises(PlayError, match="cannot be played"):
            await play(link, TOKENS, deadline=2.0, spec=SPEC)
    with pytest.raises(PlayError, match="this side closed the connection"):
        await play(link, TOKENS, deadline=2.0, spec=SPEC)


@virtual
async def test_goaway_sends_new_requests_elsewhere_and_lets_old_ones_finish(origin):
    peer = Peer(origin, rate=5e4)
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
    peer = Peer(origin)
    async with await peer.connection() as link:
        original = peer.dial

        async def dial():
            made = await original()
            made.go_away()
            return made

        link._dial = dial
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
    async with RedialledConnection(lost, dial, patience_s=1.0) as link:
        download = link.fetch(TrackNamespace("m", "0" * 64), "t", limit=1)
        with pytest.raises(ConnectionLostError, match="dialling again failed: nobody answers"):
            await download.read()
        download.cancel()


# -------------------------------------------------------------- the catalog


def answering(short, change):
    """Find as the library does, but with another catalog."""

    def find(library_find):
        def changed(namespace, track):
            if track == CATALOG_TRACK or track.startswith(PREFIX_TRACK):
                return BytesPublication(change(short))
            return library_find(namespace, track)

        return changed

    return find


def other_spec(catalog):
    return replace(catalog, spec=kvdata.spec(layers=3, group_tokens=16)).dumps().encode()


def other_model(catalog):
    return replace(catalog, spec=replace(catalog.spec, model="other")).dumps().encode()


def huge(catalog):
    track = replace(catalog.tracks[0], bytes=(1 << 39,) * catalog.groups)
    return replace(catalog, tracks=(track,)).dumps().encode()


def unknown_codec(catalog):
    return replace(catalog, tracks=(replace(catalog.tracks[0], name="FP1"),)).dumps().encode()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda _: b"{}", "is this a catalog"),
        (lambda _: b"\xff" * 100, "not JSON"),
        (other_spec, "cannot be mixed"),
        (other_model, "cannot be mixed"),
        (huge, "no cache needs"),
        (unknown_codec, "can be decoded here"),
    ],
)
def test_a_catalog_that_cannot_be_is_refused(origin, short, change, message):
    @virtual
    async def check():
        async with origin() as link:
            link.find = answering(short, change)(link.find)
            with pytest.raises(PlayError, match=message):
                await play(link, TOKENS, deadline=2.0, spec=SPEC)
            played = await play(link, TOKENS, deadline=2.0, engine=ToyModel(), prefill_cost=COST)
            assert set(played.coverage) == {"recomputed"}
            if "mixed" not in message:
                with pytest.raises(FormatError, match=message):
                    await play_asset(link, short.namespace, deadline=2.0)

    check()


@virtual
async def test_a_catalog_of_another_prompt_counts_as_nothing_cached(origin, short):
    def foreign(catalog):
        chunks = tuple(f"{index:064x}" for index in range(catalog.groups))
        return replace(catalog, chunks=chunks).dumps().encode()

    async with origin() as link:
        link.find = answering(short, foreign)(link.find)
        played = await play(link, TOKENS, deadline=2.0, spec=SPEC)
        assert isinstance(played, NothingCached)
        with pytest.raises(FormatError, match="asked for the catalog"):
            await play_asset(link, short.namespace, deadline=2.0)


@virtual
async def test_a_catalog_that_does_not_come_leaves_the_engine_its_time(origin, short):
    cost = PrefillCost(0.0, 1.0 / 70)
    async with origin(faults=lambda _: Fault(stall_after=10)) as link:
        played = await play(link, TOKENS, deadline=2.0, engine=ToyModel(), prefill_cost=cost)
        assert played.lookup_s == pytest.approx(2.0 - 0.04 - 1.0, abs=0.02)
        assert set(played.coverage) == {"recomputed"}
        with pytest.raises(PlayError, match="no answer within 2"):
            await play(link, TOKENS, deadline=2.0, spec=SPEC)
        with pytest.raises(PlayError, match="did not come within the deadline"):
            await play_asset(link, short.namespace, deadline=2.0)
        assert link.downloads == 0


# ---------------------------------------------------------------- cancelling


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


# -------------------------------------------------------------------- engine


class Broken(ToyModel):
    def prefill(self, tokens, before=None):
        raise ModelError("out of memory, says the test")


class Wrong(ToyModel):
    def prefill(self, tokens, before=None):
        return super().prefill(tokens, before)[:1]


class Rude(ToyModel):
    def prefill(self, tokens, before=None):
        raise SystemExit(3)


@pytest.mark.parametrize(
    ("engine", "message"), [(Broken, "out of memory, says"), (Wrong, "is not"), (Rude, "SystemExit")]
)
def test_an_engine_that_fails_is_named_where_the_network_cannot_help(origin, engine, message):
    @virtual
    async def check():
        async with origin(faults=lambda ask: Fault(stall_after=0) if level(ask) else None) as link:
            with pytest.raises((ModelError, Exception), match=message) as caught:
                await play(link, TOKENS, deadline=2.0, engine=engine(), prefill_cost=COST)
            assert link.downloads == 0
            assert not isinstance(caught.value, PlayError)

    check()


@virtual
async def test_where_the_engine_fails_the_network_brings_what_it_still_can(origin, short):
    lines = []
    rate = short.track("Int4").total_bytes / 1.5
    cost = PrefillCost(0.001, 1.0 / 70)

    def late(ask):
        return Fault(first_byte_s=0.8) if level(ask) else None

    async with origin(rate=rate, faults=late) as link:
        played = await play(link, TOKENS, deadline=2.0, engine=Broken(), prefill_cost=cost, log=lines.append)
    assert any(line.name == "recompute_failed" for line in lines)
    assert "recomputed" not in played.coverage
    assert close(played.kv)


@virtual
async def test_an_engine_that_fails_when_nothing_is_cached(origin):
    async with origin() as link:
        with pytest.raises(ModelError, match="out of memory"):
            await play(link, range(50), deadline=2.0, engine=Broken(), prefill_cost=COST)
        with pytest.raises(ModelError, match="SystemExit"):
            await play(link, range(50), deadline=2.0, engine=Rude(), prefill_cost=COST)


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


def test_the_threads_that_decode_are_few():
    assert decoders() is decoders()
    assert decoders()._max_workers <= 4
