"""A play whose groups come from several sources: each its own connection and its own estimate."""

import asyncio
import gc
import json
import random
import socket
from dataclasses import replace

import pytest
from safetensors.torch import load_file

from kvabr.cli.main import main
from kvabr.client import sources as play_sources
from kvabr.client.async_client import AsyncClient
from kvabr.client.lookup import Found
from kvabr.client.options import Limits, PlayOptions
from kvabr.client.peers import ClientPeer
from kvabr.client.result import NothingCached
from kvabr.client.sources import _same_tracks
from kvabr.moqt.codes import RequestCode
from kvabr.transfer.peer import Peer
from kvabr.types.errors import TransportError
from kvabr.types.events import CacheDelivered, RequestCancelled, RequestFailed, RequestSent, SourceLeftOut
from kvabr.types.peer import PeerOptions
from tests.client.served import LIMIT_S, Served
from tests.client.test_play import TOKENS, close
from tests.client.virtual import virtual
from tests.memory_transport import Dials, Fault
from tests.toymodel import prompt

LONG = prompt(160).tokens
TCP = PeerOptions(insecure=True, transport="tcp", timeout_s=LIMIT_S)
"""A port that nobody serves refuses at once; any other peer has all the time that a busy machine needs."""


@pytest.fixture
def origins(root, tmp_path):
    made = [Served(root / "short", tmp_path / name) for name in ("one", "other") if not (tmp_path / name).mkdir()]
    yield made
    for each in made:
        each.close()


def of(events, kind):
    return [event for event in events if isinstance(event, kind)]


async def test_what_an_origin_does_not_have_is_not_cached_though_another_is_gone(origins):
    gone = origins[0].url
    origins[0].kill()
    for urls in ([gone, origins[1].url], [origins[1].url, gone]):
        async with AsyncClient(urls, TCP) as client:
            assert isinstance(await client.play(TOKENS[::-1], deadline=LIMIT_S), NothingCached)
            assert (await client.play(TOKENS, deadline=LIMIT_S)).tokens == len(TOKENS)


async def test_a_lookup_that_is_not_waited_for_ends_with_the_call(origins):
    told = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: told.append(context))
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as nobody:
        nobody.bind(("127.0.0.1", 0))
        silent = f"moqt://127.0.0.1:{nobody.getsockname()[1]}/"
        async with AsyncClient() as client:
            peers = [
                client.peer(origins[0].url, TCP),
                client.peer(silent, PeerOptions(insecure=True, transport="quic", timeout_s=0.3)),
            ]
            assert await client.find(TOKENS, peer=peers) is not None
            await asyncio.sleep(0)
            assert not [task for task in asyncio.all_tasks() if "ClientPeer.find" in repr(task)]
            with pytest.raises(TransportError):
                await peers[1].peer.connected()
            gc.collect()
    assert not told


@pytest.mark.parametrize("sources", [1, 2])
async def test_closing_a_client_that_dials_ends_its_lookups_and_cancels_nobody(sources):
    with (
        socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as nobody,
        socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as no,
    ):
        for one in (nobody, no):
            one.bind(("127.0.0.1", 0))
        urls = [f"moqt://127.0.0.1:{one.getsockname()[1]}/" for one in (nobody, no)]
        client = AsyncClient(urls[:sources], PeerOptions(insecure=True, transport="quic", timeout_s=LIMIT_S))
        asked = [asyncio.create_task(client.find(TOKENS)), asyncio.create_task(client.connect())]
        await asyncio.sleep(0.05)
        await client.close()
        for task in asked:
            with pytest.raises(TransportError, match="closed"):
                await task
        with pytest.raises(TransportError, match="closed"):
            await client.find(TOKENS)


async def test_a_play_of_what_was_found_asks_a_source_that_is_gone_for_no_groups_until_it_is_back(origins):
    sent, urls = [], [each.url for each in origins]
    options, limits = PlayOptions(policy="fixed:FP16", log=sent.append), Limits(memory_bytes=1)
    async with AsyncClient(urls, TCP, options=options, limits=limits) as client:
        found = await client.find(TOKENS)
        gone = client._origins[0].peer
        await asyncio.gather(*(each.peer.connected() for each in client._origins))
        origins[0].kill()
        while not gone.unreachable:
            await client.find(TOKENS)
            await asyncio.sleep(0.02)
        sent.clear()
        await client.play_coded(found, deadline=LIMIT_S)
        assert {event.source for event in of(sent, RequestSent)} == {1}
        origins[0].start()
        while gone.unreachable:  # plays alone bring it back
            await client.play_coded(found, deadline=LIMIT_S)
            await asyncio.sleep(0.02)


async def test_nothing_is_left_of_a_play_that_is_cancelled_as_it_ends(origins, monkeypatch):
    real = play_sources.cancel_all

    async def cancelled_meanwhile(tasks):
        playing.cancel()
        await real(tasks)

    monkeypatch.setattr(play_sources, "cancel_all", cancelled_meanwhile)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as nobody:
        nobody.bind(("127.0.0.1", 0))
        urls = [origins[0].url, f"moqt://127.0.0.1:{nobody.getsockname()[1]}/"]
        async with AsyncClient(urls, PeerOptions(insecure=True, transport="quic", timeout_s=LIMIT_S)) as client:
            playing = asyncio.create_task(client.play(TOKENS, deadline=LIMIT_S))
            with pytest.raises(asyncio.CancelledError):
                await playing
            assert not len(client._runner._schedule)
            assert not client._origins[0]._under_way
            monkeypatch.undo()


@virtual
async def test_two_links_bring_what_one_of_them_would_not_in_time(origin, short):
    size = short.track("FP16").total_bytes
    alone = []
    for links in (1, 2):
        async with origin(rate=size / 3) as one, origin(rate=size / 3) as other, AsyncClient() as client:
            played = await client.play(TOKENS, deadline=2.0, peer=[one, other][:links])
            assert played.met
            assert close(played.kv)
            alone.append(played.loss)
    assert min(one.stats().bytes_received, other.stats().bytes_received) > min(short.track("FP16").bytes)
    assert alone[1] < alone[0]


@virtual
@pytest.mark.parametrize("how", ["silent", "lost"])
async def test_the_death_of_a_source_leaves_no_hole(origin, long, how):
    """At any moment, whichever source it is."""
    size = long.track("FP16").total_bytes
    dice = random.Random(0)
    for number in range(24):
        rates = [size / dice.uniform(1, 3) for _ in range(2)]
        one, other = (origin(rate=rate, rtt_s=0.02, folder="long") for rate in rates)
        async with one, other, AsyncClient() as client:
            victim = (one, other)[number % 2]

            def kill(victim=victim):
                if how == "lost":
                    victim.lose()
                else:
                    victim.path.rate = 1e-3

            asyncio.get_running_loop().call_later(dice.uniform(0.03, 1.0), kill)
            played = await client.play(LONG, deadline=4.0, peer=[one, other])
        assert played.met
        assert None not in played.coverage
        assert close(played.kv, LONG, error=0.1)


@virtual
async def test_a_far_source_has_the_time_to_say_what_it_has(origin):
    near, far = origin(rtt_s=0.01), origin(rtt_s=0.3, folder="long")
    async with near, far, AsyncClient() as client:
        assert (await client.play(LONG, deadline=5.0, peer=[near, far])).tokens == len(LONG)


@virtual
async def test_what_was_found_is_played_although_another_source_is_silent(origin):
    near, silent = origin(rtt_s=0.01), origin(rtt_s=100.0, folder="long")
    async with near, silent, AsyncClient() as client:
        assert (await client.play(LONG, deadline=0.5, peer=[near, silent])).tokens == len(TOKENS)
        assert isinstance(await client.play(LONG[::-1], deadline=0.5, peer=[silent, near]), NothingCached)


@virtual
async def test_a_source_that_lacks_groups_or_sends_others_is_made_up_for(origin, long):
    events = []

    def refuses(ask):
        return Fault(refuse=RequestCode.DOES_NOT_EXIST) if ask.track == "FP16" and ask.group % 3 == 0 else None

    def corrupts(ask):
        return Fault(corrupt_at=200) if ask.track == "FP16" else None

    for faults, most in ((refuses, 5), (corrupts, 10)):
        events.clear()
        options = PlayOptions(policy="fixed:FP16", log=events.append)
        bad, good = (origin(rtt_s=0.02, rate=1e6, folder="long", **how) for how in ({"faults": faults}, {}))
        async with bad, good, AsyncClient(options=options) as client:
            played = await client.play(LONG, deadline=10.0, peer=[bad, good])
        assert played.coverage == ("FP16",) * 10
        assert close(played.kv, LONG, error=1e-5)
        assert 1 <= len(of(events, RequestFailed)) + len(of(events, RequestCancelled)) <= most


@virtual
async def test_a_source_with_another_asset_is_left_out(origin):
    """It has a shorter one, which begins alike; groups of the longer are only at one of them."""
    events = []
    options = PlayOptions(policy="fixed:FP16", log=events.append)
    other, right = (origin(rtt_s=0.02, folder=folder) for folder in ("short", "long"))
    async with other, right, AsyncClient(options=options) as client:
        played = await client.play(LONG, deadline=5.0, peer=[other, right])
    assert played.coverage == ("FP16",) * 10
    assert other.requests < 10
    assert [(event.source, event.reason) for event in of(events, SourceLeftOut)] == [
        (0, "it has another asset, of 70 tokens")
    ]


def test_catalogs_that_disagree_share_the_other_tracks(long):
    changed = replace(long.track("FP16"), digests=tuple(reversed(long.track("FP16").digests)))
    tracks = tuple(changed if track.name == "FP16" else track for track in long.tracks)
    same, why = _same_tracks(Found(long, ""), Found(replace(long, tracks=tracks), ""))
    assert set(same) == {track.name for track in long.tracks} - {"FP16"}
    assert why == "its catalog names other groups of FP16"


def slow_to_dial(client, connection, seconds):
    async def dial():
        await asyncio.sleep(seconds)
        if connection is None:
            raise TransportError("nobody is there")
        return connection

    return ClientPeer("far", Peer(Dials(dial)), client.store, client.metrics, own=True)


@virtual
@pytest.mark.parametrize("how", ["by prompt", "by name", "as found"])
async def test_a_source_that_is_slow_to_dial_joins_the_first_play(origin, long, how):
    size, events = long.track("FP16").total_bytes, []
    options = PlayOptions(policy="fixed:FP16", log=events.append)
    near, far = (origin(rate=size / 4, rtt_s=0.01, folder="long") for _ in range(2))
    async with near, far, AsyncClient(options=options) as client:
        peers = [slow_to_dial(client, far, 0.5), near]
        if how == "by prompt":
            played = await client.play(LONG, deadline=10.0, peer=peers)
        else:
            asset = long.namespace if how == "by name" else await client.find_asset(long.namespace, peer=near)
            played = await client.play_asset(asset, deadline=10.0, peer=peers)
        assert far.stats().bytes_received > size / 4
        await peers[0].close()
    assert played.coverage == ("FP16",) * 10
    assert of(events, CacheDelivered)[0].t < 3.95  # near alone takes 4 seconds


@virtual
async def test_a_prompt_is_found_although_the_first_source_does_not_answer(origin):
    async with origin() as near, AsyncClient() as client:
        silent = slow_to_dial(client, None, 3600.0)
        assert (await client.find(TOKENS, peer=[silent, near], within_s=60.0)).catalog.tokens == len(TOKENS)
        await silent.close()


@virtual
async def test_what_the_first_source_lacks_is_found_at_another(origin, long):
    short, whole = (origin(rtt_s=0.01, folder=folder) for folder in ("short", "long"))
    async with short, whole, AsyncClient() as client:
        nobody = slow_to_dial(client, None, 0.1)
        peers = [short, nobody, whole]
        assert (await client.find(LONG, peer=peers)).catalog.tokens == len(LONG)
        assert (await client.find_asset(long.namespace, peer=peers)).catalog.tokens == len(LONG)
        assert (await client.play_asset(long.namespace, deadline=5.0, peer=peers)).tokens == len(LONG)
        with pytest.raises(TransportError, match="nobody is there"):  # which may have it
            await client.find_asset(long.namespace, peer=[short, nobody])


def test_fetch_from_several_origins_of_which_one_is_gone(origins, tmp_path, capsys):
    out, log = tmp_path / "out.safetensors", tmp_path / "log.jsonl"
    gone = origins[0].url
    origins[0].kill()
    (tmp_path / "prompt.json").write_text(json.dumps(list(TOKENS)))
    words = ["fetch", gone, "--source", origins[1].url, "--prompt", str(tmp_path / "prompt.json"), "--insecure"]
    words += [
        "--deadline",
        "300",
        "--timeout",
        "300",
        "--transport",
        "tcp",
        "--out",
        str(out),
        "--log",
        str(log),
        "-p",
        "fixed:FP16",
    ]
    assert main(words) == 0, capsys.readouterr().err
    assert f"{gone} is not used: " in capsys.readouterr().err
    assert close(load_file(out)["kv"], error=1e-5)
    requests = [line for line in map(json.loads, log.read_text().splitlines()) if line["event"] == "request"]
    assert {line["source"] for line in requests} == {1}
