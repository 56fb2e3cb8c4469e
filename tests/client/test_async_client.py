"""Many plays of one client: no group is fetched twice, the earliest deadline goes first, and nothing is left over."""

import asyncio
import gc
import os
import time

import pytest

from kvabr.client.async_client import AsyncClient
from kvabr.client.options import Limits, PlayOptions
from kvabr.client.peers import ClientPeer
from kvabr.client.sources import PlaySources
from kvabr.store.files import STALE_S
from kvabr.store.group_cache import GroupCache
from kvabr.telemetry.client_metrics import ClientMetrics
from kvabr.transfer.interface import cancel_all, read_all
from kvabr.transfer.peer import Peer
from kvabr.types.cost import PrefillCost
from kvabr.types.errors import BusyError, ConnectionLostError, PlayError, UsageError
from kvabr.types.peer import PeerOptions
from tests.client.playing import play
from tests.client.test_play import close
from tests.client.virtual import virtual
from tests.memory_transport import Dials, Fault, MemoryConnection
from tests.toymodel import SPEC, ToyModel, prompt

TOKENS, LONG = prompt(70).tokens, prompt(160).tokens
COST = PrefillCost(0.001, 0.001)


def soon(coroutine):
    return asyncio.get_running_loop().create_task(coroutine)


@virtual
async def test_plays_of_one_prompt_make_one_download(origin, long):
    async with origin(folder="long", rate=long.fp16_bytes / 2) as link, AsyncClient() as client:
        plays = [play(client, LONG, peer=link, deadline=2.0 + number / 8, spec=SPEC) for number in range(6)]
        done = await asyncio.gather(*plays)
        asked = {(track, group) for (_, track, group) in link._asked if not track.startswith("kvabr")}
        assert all(link._asked[key] == 1 for key in link._asked)
        assert link.downloads == 0
    assert all(played.met and close(played.kv, LONG) for played in done)
    sources = ("network", "joined", "memory")
    network, joined, memory = (client.metrics.value("kvabr_client_groups_total", source=source) for source in sources)
    # What is asked for while it is being checked comes from neither: it is counted as joined.
    assert network == len([key for key in asked if not key[0].startswith(("prefix.", "live."))])
    assert joined + memory >= 5 * long.groups
    assert client.metrics.value("kvabr_client_plays_total", result="met") == 6


@virtual
async def test_what_came_before_comes_from_memory(origin, short):
    async with origin(rate=short.track("Int8").total_bytes) as link, AsyncClient() as client:
        first = await play(client, TOKENS, peer=link, deadline=2.0, spec=SPEC)
        again = await play(client, TOKENS, peer=link, deadline=0.8, spec=SPEC)
        alone = await play(link, TOKENS, deadline=0.8, spec=SPEC, patience=3.0)
    assert first.met
    assert again.met
    assert again.loss <= first.loss < alone.loss
    assert close(again.kv)
    # What the first play had is there at once; only what betters it comes over the network.
    assert again.record.bytes_held_up["kept"] == sum(
        short.track(name).bytes[group] for group, name in enumerate(first.coverage)
    )
    assert client.metrics.value("kvabr_client_bytes_total", source="memory") > 0


@virtual
async def test_what_is_at_hand_says_nothing_about_the_link(origin, short):
    async with origin(rate=short.fp16_bytes) as link, AsyncClient() as client:
        await play(client, TOKENS, peer=link, deadline=2.0, spec=SPEC, policy="fixed:Int4")
        seen = []
        await play(client, TOKENS, peer=link, deadline=2.0, spec=SPEC, watch=seen.append)
    assert seen
    assert all(snapshot.rate < 2 * short.fp16_bytes for snapshot in seen)


@virtual
async def test_the_play_that_is_due_first_is_served_first(origin, short):
    size = short.track("FP16").total_bytes
    async with origin(folder=".", rate=size / 0.5) as link, AsyncClient() as client:
        patient = soon(play(client, LONG, peer=link, deadline=3.0, spec=SPEC, policy="fixed:FP16"))
        await asyncio.sleep(0.1)
        urgent = await play(client, TOKENS, peer=link, deadline=0.75, spec=SPEC, policy="fixed:FP16", patience=9.0)
        slow = await patient
    assert slow.met
    assert urgent.met


@virtual
async def test_a_late_play_is_not_left_behind_for_ever(origin, short):
    size = short.track("Int4").total_bytes
    async with origin(rate=size / 0.5) as link, AsyncClient(limits=Limits(memory_bytes=0)) as client:

        async def one(policy):
            return await play(client, TOKENS, peer=link, deadline=1.0, spec=SPEC, policy=policy, patience=100.0)

        others = []
        large = soon(one("fixed:FP16"))  # takes 1.5 s alone
        for _ in range(20):
            others.append(soon(one("fixed:Int4")))
            await asyncio.sleep(0.5)
        assert large.done()
        assert not (await large).met
        assert (await large).ttft_s < 6
        await asyncio.gather(*others)


@virtual
async def test_a_damaged_group_is_not_kept(origin, short):
    def faults(ask):
        return Fault(corrupt_at=100) if ask.group == 1 and ask.attempt == 0 else None

    async with origin(faults=faults) as link, AsyncClient() as client:
        plays = [play(client, TOKENS, peer=link, deadline=2.0, spec=SPEC, policy="fixed:Int8") for _ in range(3)]
        done = await asyncio.gather(*plays)
        assert client.metrics.value("kvabr_client_downloads_total", result="damaged") == 1
        assert link._asked[short.namespace, "Int8", 1] == 2
    assert all(played.met and close(played.kv) for played in done)


@virtual
async def test_memory_stays_within_its_bound(origin, short, long):
    bound = short.track("Int8").total_bytes
    async with origin(folder=".") as link, AsyncClient(limits=Limits(memory_bytes=bound)) as client:
        for tokens, policy in ((TOKENS, "fixed:FP16"), (LONG, "fixed:Int4"), (LONG, "fixed:FP16")):
            assert (await play(client, tokens, peer=link, deadline=2.0, spec=SPEC, policy=policy)).met
            assert 0 < client.store.total_bytes <= bound
        assert client.metrics.value("kvabr_client_store_evicted_total", tier="memory") > 0


async def test_what_a_killed_client_left_half_written_goes_with_the_next_one(tmp_path):
    profiles = tmp_path / "profiles"
    profiles.mkdir()
    names = (tmp_path / ".peers.json.0123456789abcdef.partial", profiles / ".ab.safetensors.0123456789abcdef.partial")
    for path in names:
        path.write_bytes(b"half")
    async with AsyncClient(cache=tmp_path):
        assert all(path.exists() for path in names), "somebody may still be writing"
    for path in names:
        os.utime(path, (time.time() - 2 * STALE_S,) * 2)
    async with AsyncClient(cache=tmp_path):
        assert not any(path.exists() for path in names)


@virtual
async def test_too_many_plays_wait_or_are_refused(origin, short):
    rate = short.track("FP16").total_bytes
    async with origin(rate=rate) as link, AsyncClient(limits=Limits(plays=1, waiting=1, memory_bytes=0)) as client:
        first = soon(play(client, TOKENS, peer=link, deadline=9.0, spec=SPEC, policy="fixed:FP16"))
        waits = soon(play(client, TOKENS, peer=link, deadline=9.0, spec=SPEC, policy="fixed:FP16"))
        await asyncio.sleep(0)
        with pytest.raises(BusyError, match="compute this prompt"):
            await play(client, TOKENS, peer=link, deadline=9.0, spec=SPEC)
        one, two = await first, await waits
    assert one.ttft_s < two.ttft_s
    assert two.lookup_s > one.ttft_s  # what it waited counts
    assert client.metrics.value("kvabr_client_plays_total", result="refused") == 1
    assert client.metrics.value("kvabr_client_refused_total", reason="full") == 1


@virtual
async def test_a_peer_that_cannot_be_reached_leaves_it_to_the_engine(tmp_path):
    async with AsyncClient() as client:
        peer = client.peer("moqt://127.0.0.1:1/", PeerOptions(ca=tmp_path / "none.pem"))
        played = await play(client, TOKENS, peer=peer, deadline=2.0, engine=ToyModel(), prefill_cost=COST)
        assert set(played.coverage) == {"recomputed"}
        slow = PrefillCost(0.1, 0.02)
        played = await play(client, TOKENS, peer=peer, deadline=2.0, engine=ToyModel(), prefill_cost=slow)
        assert set(played.coverage) == {"recomputed"}
        with pytest.raises(PlayError, match=r"none\.pem"):
            await play(client, TOKENS, peer=peer, deadline=2.0, spec=SPEC)
        with pytest.raises(PlayError, match="not connected yet"):
            await play(client, TOKENS, peer="moqt://127.0.0.1:1/", deadline=0.5, spec=SPEC)
        assert client.metrics.value("kvabr_client_dials_failed_total") >= 2


@virtual
async def test_closing_ends_every_play_and_no_task_that_one_runs_in(origin, short):
    link = origin(rate=short.fp16_bytes / 5)
    client = AsyncClient(limits=Limits(plays=1))

    async def serve():
        with pytest.raises(PlayError, match="closed"):
            await play(client, TOKENS, peer=link, deadline=2.0, spec=SPEC)
        await asyncio.sleep(1.0)
        return asyncio.current_task().cancelling()

    serving, waiting = soon(serve()), soon(play(client, TOKENS, peer=link, deadline=2.0, spec=SPEC))
    await asyncio.sleep(0.2)
    await client.close()
    assert not serving.done()
    assert await serving == 0
    with pytest.raises(BusyError, match="closing"):
        await waiting
    with pytest.raises(BusyError, match="closing"):
        await play(client, TOKENS, peer=link, deadline=2.0, spec=SPEC)
    assert link.downloads == 0
    await link.close()


@virtual
async def test_closing_ends_a_play_whose_turn_comes_in_that_moment(origin, short):
    async with origin(rate=short.fp16_bytes) as link:
        client = AsyncClient(link, model=SPEC, limits=Limits(plays=1))
        first = soon(client.play(TOKENS, deadline=2.0))
        second = soon(client.play(prompt(40).tokens, deadline=60.0))
        assert (await first).met
        await client.close()
        with pytest.raises(PlayError, match="closed"):
            await asyncio.wait_for(second, 1.0)
        assert client.metrics.value("kvabr_client_plays_total", result="aborted") == 1


@virtual
async def test_closing_goes_on_if_another_peer_is_named_meanwhile(origin):
    class SlowToClose(MemoryConnection):
        async def close(self):
            await asyncio.sleep(1.0)

    async def dial():
        return SlowToClose(lambda *_: None)

    async with origin() as link, origin() as other:
        client = AsyncClient(link)
        slow = ClientPeer("slow to close", Peer(Dials(dial)), client.store, client.metrics, own=True)
        peer = client._peers["slow to close"] = slow
        await client.connect(peer)
        closing = soon(client.close())
        await asyncio.sleep(0.5)
        await client.connect(other)
        await closing


async def test_arguments_that_make_no_sense():
    for wrong in ({"memory_bytes": -1}, {"plays": 0}, {"waiting": -1}, {"disk_bytes": -1}):
        with pytest.raises(UsageError, match=next(iter(wrong))):
            Limits(**wrong)
    async with AsyncClient() as client:
        with pytest.raises(UsageError, match="deadline"):
            await play(client, TOKENS, peer="moqt://origin.example/", deadline=0.0, spec=SPEC)
        with pytest.raises(UsageError, match="moqt://"):
            client.peer("ftp://origin.example/")
        with pytest.raises(TypeError, match="tokn"):
            client.peer("moqt://origin.example/", tokn="x")
        peer = client.peer("moqt://origin.example/", PeerOptions(token="x"))  # noqa: S106
        assert client.peer("moqt://origin.example/", PeerOptions(token="x")) is peer  # noqa: S106
        assert client.peer("moqt://origin.example/") is not peer


async def test_what_an_engine_has_computed_before_a_lookup_needs_no_peer(tmp_path):
    async with AsyncClient("moqt://127.0.0.1:1/", PeerOptions(ca=tmp_path / "none.pem")) as client:
        fast = PlayOptions(prefill_cost=PrefillCost(0.02, 1e-6))
        played = await client.play(TOKENS, deadline=4.0, engine=ToyModel(), options=fast)
        assert client.metrics.value("kvabr_client_dials_failed_total") == 0
        slow = PlayOptions(prefill_cost=PrefillCost(0.1, 0.02))
        later = await client.play(TOKENS, deadline=4.0, engine=ToyModel(), options=slow)
        assert client.metrics.value("kvabr_client_dials_failed_total") == 1
    assert close(played.kv)
    assert close(later.kv)
    assert played.tokens == later.tokens == len(TOKENS)


def sharing(link):
    return ClientPeer("a peer", link, GroupCache(1 << 30), ClientMetrics())


def joining(shared):
    return PlaySources([shared])


@virtual
async def test_closing_tells_the_readers(origin, short):
    async with origin(rate=100.0) as link:
        shared = sharing(link)
        async with joining(shared) as play:
            reading = asyncio.create_task(read_all(play.fetch(short.namespace, "Int8", 0, limit=10_000)))
            await asyncio.sleep(5)
            await shared.close()
            with pytest.raises(ConnectionLostError, match="closed"):
                await reading


@virtual
async def test_one_who_joins_late_gets_all_of_it(origin, short):
    size, where = short.track("FP16").bytes[0], (short.namespace, "FP16")
    async with origin(rate=size) as link:
        shared = sharing(link)
        one, two = joining(shared), joining(shared)
        for play in (one, two):
            play.identify(*where, short.track("FP16").digests)
        early = one.fetch(*where, 0, limit=size)
        begin = await early.read()
        late = two.fetch(*where, 0, limit=size)
        whole = await read_all(late)
        assert await read_all(early) == whole
        assert begin == whole[: len(begin)]
        assert late.limit == "network"  # the end of it came over the network
        assert link.requests == 1
        # The first part of it did not.
        assert len(whole) == size == len(late.data)
        await shared.close()


@virtual
async def test_a_catalog_that_lies_about_sizes_gets_nothing_of_what_is_kept(origin, short):
    track, where = short.track("Int8"), (short.namespace, "Int8")
    async with origin() as link:
        shared = sharing(link)
        play = joining(shared)
        play.identify(*where, track.digests)
        whole = await read_all(play.fetch(*where, 0, limit=track.bytes[0]))
        assert await read_all(play.fetch(*where, 0, limit=track.bytes[0])) == whole
        assert link.requests == 1
        await read_all(play.fetch(*where, 0, limit=track.bytes[0] + 10))
        assert link.requests == 2
        # A group that is another's digest: nothing is kept under it.
        play.identify(*where, track.digests[::-1])
        await read_all(play.fetch(*where, 1, limit=track.bytes[1]))
        await read_all(play.fetch(*where, 1, limit=track.bytes[1]))  # behind the check of the first
        assert shared.metrics.value("kvabr_client_downloads_total", result="damaged") >= 1
        assert list(play.cached_groups(*where)) == [4]
        await shared.close()


@virtual
async def test_a_store_that_fails_while_it_is_looked_into_fails_its_readers_and_counts_no_download(short):
    class Failing(GroupCache):
        def __contains__(self, digest):
            return True

        async def find(self, digest):
            await asyncio.sleep(0.1)
            raise MemoryError(digest)

    metrics = ClientMetrics()
    downloads = ClientPeer("a peer", MemoryConnection(lambda *_: None), Failing(0), metrics)
    track = short.track("Int8")
    async with PlaySources([downloads]) as sources:
        sources.identify(short.namespace, "Int8", track.digests)
        gone, stays = (sources.fetch(short.namespace, "Int8", group, limit=track.bytes[group]) for group in (0, 1))
        await asyncio.sleep(0.05)
        gone.cancel()
        with pytest.raises(MemoryError):
            await read_all(stays)
    await downloads.close()
    results = ("done", "cancelled", "failed")
    assert not any(metrics.value("kvabr_client_downloads_total", result=result) for result in results)


async def test_errors_of_cancelled_tasks_are_retrieved_from_a_set_that_they_leave():
    async def fails_at_the_end():
        try:
            await asyncio.sleep(1000.0)
        finally:
            raise ValueError

    logged = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: logged.append(context))
    tasks = {soon(fails_at_the_end())}
    for task in tasks:
        task.add_done_callback(tasks.discard)
    del task
    await asyncio.sleep(0)
    await cancel_all(tasks)
    gc.collect()
    assert not logged
    assert not tasks
