"""The relay: real sockets towards players; origins on moq-rs, on aioquic, and in memory where they must misbehave."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import hashlib
import json
import random
import shlex
import sys
import time
from asyncio.subprocess import PIPE

import pytest
import structlog
from kvabr.server.relay_cache import GroupCache
from kvabr.server.relay_check import check_small
from kvabr.server.relay_small import SmallTracks
from kvabr.server.upstream import bring

from kvabr.cli.relay import parse_size
from kvabr.moqt.codes import RequestCode
from kvabr.quic import connect as quic
from kvabr.quic.connect import asset_of, connect
from kvabr.quic.interface import read_all
from kvabr.quic.reconnect import RedialledConnection
from kvabr.server.certificates import check, development
from kvabr.server.limits import ServerLimits
from kvabr.server.memory import Fault, MemoryConnection, MemoryLink
from kvabr.server.metrics import Metrics
from kvabr.server.published_assets import PublishedAssets
from kvabr.server.relay import Relay
from kvabr.server.server import Server
from kvabr.store.grants import EVERYTHING
from kvabr.types.errors import ConnectionLostError, FormatError, NotFoundError, RequestError, TransportError, UsageError
from kvabr.types.naming import CATALOG_TRACK, PROFILE_TRACK, TrackNamespace, chain, prefix_track
from tests.assets import make_asset
from tests.moqbed import LOG, dialled, options, origin

pytestmark = pytest.mark.process

BIG = 1 << 24
SOON_S = 8.0
ELSEWHERE = TrackNamespace("other/model", "0" * 64)


@pytest.fixture
def asset(tmp_path):
    return make_asset(tmp_path / "asset", list(range(32)), frame_bytes=300_000)


@pytest.fixture(scope="module")
def tls():
    with development() as made:
        yield made


@contextlib.asynccontextmanager
async def relaying(upstream, tls, **more):
    """A relay in front of a connection."""
    async with Relay(upstream, "127.0.0.1", 0, tls, ServerLimits(), LOG, Metrics(), **more) as relay:
        relay.fingerprint = check(tls).fingerprint
        yield relay


@contextlib.asynccontextmanager
async def chain_of(kind, asset, tls, **more):
    """An origin of one kind, and a relay in front of it."""
    if kind == "qh3":
        started = origin(asset.path, tls=tls)
    else:
        started = Server(
            PublishedAssets(asset.path), "127.0.0.1", 0, tls, ServerLimits(), LOG, Metrics(), library_name=kind
        )
    async with started as server:
        to_origin = connect(f"moqt://localhost:{server.address[1]}/", fingerprint=check(tls).fingerprint, quic=kind)
        async with to_origin as upstream, relaying(upstream, tls, **more) as relay:
            yield server, relay


def in_memory(asset, **more):
    """A connection to an asset in this process."""
    return MemoryConnection(functools.partial(PublishedAssets(asset.path).find, EVERYTHING), **more)


def sent(server):
    """How many groups of each track the origin has sent."""
    samples = [sample for metric in server.metrics.groups_sent_total.collect() for sample in metric.samples]
    return {sample.labels["track"]: sample.value for sample in samples if sample.name == "kvabr_groups_sent_total"}


async def play(dial, relay, asset, track="FP16"):
    """Fetch a catalog and all groups of a track, and check them."""
    async with await dial(options(relay)) as connection:
        namespace = asset.catalog.namespace
        catalog = await read_all(connection.fetch(namespace, CATALOG_TRACK, limit=BIG))
        assert catalog == (asset.path / "catalog.json").read_bytes()
        groups = range(asset.catalog.groups)
        downloads = [connection.fetch(namespace, track, group, limit=BIG) for group in groups]
        got = await asyncio.gather(*(read_all(download) for download in downloads))
        assert got == [asset.frame(group, track) for group in groups]


@pytest.mark.parametrize("kind", ["qh3", "aioquic"])
async def test_many_players_one_fetch(kind, asset, tls, monkeypatch):
    monkeypatch.setattr(SmallTracks, "FRESH_S", 60.0)  # the machine may be slow
    async with chain_of(kind, asset, tls) as (server, relay):
        aioquic = functools.partial(quic.dial, library_name="aioquic")
        dials = [quic.dial] * 20 + [aioquic] * 2
        await asyncio.gather(*(play(dial, relay, asset) for dial in dials))
        assert sent(server) == {CATALOG_TRACK: 1, "FP16": asset.catalog.groups}
        assert relay.cache.bytes >= sum(len(asset.frame(group, "FP16")) for group in range(asset.catalog.groups))
        assert relay.fetches == 0


@pytest.mark.parametrize("draft", ["moqt-18", "moqt-16"])
@pytest.mark.parametrize("names", ["draft", "split"])
async def test_players_may_speak_moqt(draft, names, asset, tls):
    def dial(chosen):
        return quic.dial(quic_options(chosen), "aioquic")

    def quic_options(chosen):
        return type(chosen)(chosen.host, chosen.port, fingerprint=chosen.fingerprint, drafts=(draft,), names=names)

    async with chain_of("qh3", asset, tls) as (_, relay):
        await play(dial, relay, asset)
        async with await dial(options(relay)) as connection:
            for namespace, track, group in (
                (asset.catalog.namespace, "FP16", 8),
                (asset.catalog.namespace, "AC-5x", 0),
                (ELSEWHERE, CATALOG_TRACK, 0),
                (ELSEWHERE, "FP16", 0),
            ):
                with pytest.raises(NotFoundError) as missing:
                    await asyncio.wait_for(read_all(connection.fetch(namespace, track, group, limit=BIG)), SOON_S)
                assert missing.value.code in (RequestCode.DOES_NOT_EXIST, RequestCode.INVALID_RANGE)


async def test_lookups_pass_through(asset, tls):
    spec = asset.catalog.spec
    digests = chain(list(range(48)), model=spec.model, tokenizer=spec.tokenizer, group_tokens=spec.group_tokens)
    async with chain_of("qh3", asset, tls) as (_, relay), await dialled(relay) as connection:
        namespace = TrackNamespace(spec.model, digests[0])
        found = await read_all(connection.fetch(namespace, prefix_track(digests), limit=BIG))
        assert found == (asset.path / "catalog.json").read_bytes()


async def test_an_origin_that_stays_away_is_told(asset, tls, monkeypatch):
    monkeypatch.setattr("kvabr.server.upstream.PATIENCE_S", 0.2)
    first = in_memory(asset)

    async def dial():
        raise TransportError("nobody there")

    redialled = RedialledConnection(first, dial, patience_s=0.1)
    async with redialled as upstream, relaying(upstream, tls) as relay, await dialled(relay) as connection:
        namespace = asset.catalog.namespace
        assert await read_all(connection.fetch(namespace, "FP16", 0, limit=BIG))
        first.lose("killed")
        with pytest.raises(RequestError):
            await asyncio.wait_for(read_all(connection.fetch(namespace, "FP16", 1, limit=BIG)), SOON_S)
        again = await dialled(relay)
        async with again:
            assert await read_all(again.fetch(namespace, "FP16", 0, limit=BIG)) == asset.frame(0, "FP16")


async def test_it_survives_the_origin(asset, tls):
    fingerprint = check(tls).fingerprint
    async with contextlib.AsyncExitStack() as stack:
        server = await stack.enter_async_context(origin(asset.path, tls=tls))
        port = server.address[1]
        url = f"moqt://localhost:{port}/"
        upstream = await stack.enter_async_context(connect(url, fingerprint=fingerprint, quic="qh3"))
        relay = await stack.enter_async_context(relaying(upstream, tls))
        connection = await stack.enter_async_context(await dialled(relay))
        namespace = asset.catalog.namespace
        assert await read_all(connection.fetch(namespace, "FP16", 0, limit=BIG)) == asset.frame(0, "FP16")
        await server.close()
        async with await dialled(relay) as another:
            assert await read_all(another.fetch(namespace, "FP16", 0, limit=BIG)) == asset.frame(0, "FP16")
        waiting = asyncio.create_task(read_all(connection.fetch(namespace, "FP16", 1, limit=BIG)))
        await asyncio.wait({waiting}, timeout=0.3)
        assert not waiting.done()
        second = await stack.enter_async_context(origin(asset.path, tls=tls, port=port))
        assert await asyncio.wait_for(waiting, SOON_S) == asset.frame(1, "FP16")
        assert sent(second)["FP16"] == 1


async def test_a_transfer_that_breaks_off_breaks_off_here(asset, tls):
    upstream = in_memory(asset, faults=lambda ask: Fault(reset_after=150_000) if ask.track == "FP16" else None)
    async with upstream, relaying(upstream, tls) as relay, await dialled(relay) as connection:
        with pytest.raises(RequestError):
            await asyncio.wait_for(read_all(connection.fetch(asset.catalog.namespace, "FP16", 0, limit=BIG)), SOON_S)
        assert relay.cache.bytes < 100_000


async def test_memory_has_a_bound(tmp_path, tls):
    asset = make_asset(tmp_path / "asset", list(range(120)), frame_bytes=300_000)
    most = 8_000_000
    async with chain_of("qh3", asset, tls, memory_bytes=most) as (_, relay):
        seen = []
        shrink = relay.cache._shrink

        def shrunk():
            shrink()
            seen.append(relay.cache.bytes + relay.cache._reserved)

        relay.cache._shrink = shrunk
        async with await dialled(relay) as connection:
            namespace = asset.catalog.namespace
            for track in ("FP16", "Int4"):
                for group in range(30):
                    data = await read_all(connection.fetch(namespace, track, group, limit=BIG))
                    assert data == asset.frame(group, track)
        assert most - 1_000_000 < max(seen) <= most
        assert relay.cache._reserved == 0


async def test_an_asset_that_is_replaced_is_seen(asset, tmp_path, tls, monkeypatch):
    monkeypatch.setattr(SmallTracks, "FRESH_S", 0.05)
    namespace = asset.catalog.namespace
    async with chain_of("qh3", type(asset)(tmp_path, asset.catalog), tls) as (_, relay):
        old_catalog, old = (asset.path / "catalog.json").read_bytes(), asset.frame(0, "FP16")
        async with await dialled(relay) as connection:
            assert await read_all(connection.fetch(namespace, CATALOG_TRACK, limit=BIG)) == old_catalog
            assert await read_all(connection.fetch(namespace, "FP16", limit=BIG)) == old
        asset.path.rename(tmp_path / ".old")
        new = make_asset(tmp_path / "asset", list(range(32)), frame_bytes=200, seed=2)
        assert new.catalog.namespace == namespace
        end_s = time.monotonic() + SOON_S
        catalog = old_catalog
        while catalog == old_catalog and time.monotonic() < end_s:
            async with await dialled(relay) as connection:
                catalog = await read_all(connection.fetch(namespace, CATALOG_TRACK, limit=BIG))
        assert catalog == (new.path / "catalog.json").read_bytes()
        async with await dialled(relay) as connection:
            assert await read_all(connection.fetch(namespace, "FP16", limit=BIG)) == new.frame(0, "FP16")


async def test_draining_finishes_what_is_under_way(asset, tls):
    upstream = in_memory(asset, path=MemoryLink(rate=3e6))
    async with upstream, relaying(upstream, tls) as relay, await dialled(relay) as connection:
        download = connection.fetch(asset.catalog.namespace, "FP16", 0, limit=BIG)
        got = await asyncio.wait_for(download.read(), SOON_S)
        draining = asyncio.create_task(relay.drain(SOON_S))
        await asyncio.sleep(0)
        with pytest.raises((ConnectionLostError, RequestError)):
            await asyncio.wait_for(read_all(connection.fetch(asset.catalog.namespace, "FP16", 1, limit=BIG)), SOON_S)
        got = await asyncio.wait_for(read_all(download), SOON_S)
        assert got == asset.frame(0, "FP16")
        await asyncio.wait_for(draining, SOON_S)


# ---------------------------------------------------------------- an origin that lies


WRONG = {
    "one bit": Fault(corrupt_at=1000),
    "short": Fault(truncate_to=299_000),
    "another group": Fault(replace=b"x" * 300_001),
    "more": Fault(endless=True),
}


@pytest.mark.parametrize("wrong", WRONG)
async def test_a_wrong_group_is_broken_off_and_not_kept(wrong, asset, tls):
    upstream = in_memory(asset, faults=lambda ask: WRONG[wrong] if ask.track == "FP16" and ask.attempt == 0 else None)
    async with upstream, relaying(upstream, tls) as relay:
        namespace = asset.catalog.namespace
        async with await dialled(relay) as connection:
            with pytest.raises(RequestError):
                await asyncio.wait_for(read_all(connection.fetch(namespace, "FP16", 3, limit=BIG)), SOON_S)
            assert relay.cache.bytes < 100_000
            again = await asyncio.wait_for(read_all(connection.fetch(namespace, "FP16", 3, limit=BIG)), SOON_S)
            assert again == asset.frame(3, "FP16")
        before = upstream.requests
        async with await dialled(relay) as other:
            assert await read_all(other.fetch(namespace, "FP16", 3, limit=BIG)) == asset.frame(3, "FP16")
        assert upstream.requests == before


async def test_a_catalog_that_is_wrong_is_refused_and_not_kept(asset, tmp_path, tls, monkeypatch):
    elsewhere = make_asset(tmp_path / "elsewhere", list(range(100, 132)))
    lies = [b"{}", b"no JSON", (elsewhere.path / "catalog.json").read_bytes(), b""]

    def fault(ask):
        return Fault(replace=lies[ask.attempt]) if ask.track == CATALOG_TRACK and ask.attempt < len(lies) else None

    upstream = in_memory(asset, faults=fault)
    async with upstream, relaying(upstream, tls) as relay, await dialled(relay) as connection:
        namespace = asset.catalog.namespace
        for _ in lies:
            with pytest.raises(RequestError):
                await asyncio.wait_for(read_all(connection.fetch(namespace, CATALOG_TRACK, limit=BIG)), SOON_S)
            assert relay.small.bytes == 0
        good = await asyncio.wait_for(read_all(connection.fetch(namespace, CATALOG_TRACK, limit=BIG)), SOON_S)
        assert good == (asset.path / "catalog.json").read_bytes()


async def test_a_profile_that_is_wrong_is_refused(tmp_path, tls):
    asset = make_asset(tmp_path / "asset", list(range(32)), profile=b"a profile")
    fault = Fault(replace=b"another one")
    upstream = in_memory(asset, faults=lambda ask: fault if ask.track == PROFILE_TRACK and not ask.attempt else None)
    name = TrackNamespace(asset.catalog.spec.model, asset.catalog.profile)
    async with upstream, relaying(upstream, tls) as relay, await dialled(relay) as connection:
        with pytest.raises(RequestError):
            await asyncio.wait_for(read_all(connection.fetch(name, PROFILE_TRACK, limit=BIG)), SOON_S)
        assert await read_all(connection.fetch(name, PROFILE_TRACK, limit=BIG)) == b"a profile"


@pytest.mark.parametrize(
    ("track", "change", "words"),
    [
        (CATALOG_TRACK, lambda value: value["chunks"].reverse(), "another prompt"),
        (CATALOG_TRACK, lambda value: value["tracks"][0]["digests"].__setitem__(0, "z" * 64), "digest that is none"),
        (CATALOG_TRACK, lambda value: value["tracks"][0]["digests"].__setitem__(0, "00"), "digest that is none"),
        ("prefix.", lambda value: value["chunks"].__setitem__(0, "00" * 32), "another prompt"),
    ],
)
def test_what_a_catalog_must_say(asset, track, change, words):
    data = (asset.path / "catalog.json").read_bytes()
    namespace = asset.catalog.namespace
    if track != CATALOG_TRACK:
        namespace = TrackNamespace(namespace.model, asset.catalog.chunks[0])
    facts = check_small(namespace, track, data)
    assert facts.expected("Int4", 2) == (
        len(asset.frame(2, "Int4")), hashlib.sha256(asset.frame(2, "Int4")).digest(),
    )  # fmt: skip
    value = json.loads(data)
    change(value)
    with pytest.raises(FormatError, match=words):
        check_small(namespace, track, json.dumps(value).encode())


# ---------------------------------------------------------------- an origin that is away


@pytest.mark.parametrize("kind", ["qh3", "aioquic"])
async def test_what_is_kept_is_served_while_the_origin_is_away(kind, asset, tls, monkeypatch):
    """Also to players that come only then, by name and by prompt; and the log says so, once."""
    monkeypatch.setattr(SmallTracks, "FRESH_S", 0.05)
    spec = asset.catalog.spec
    digests = chain(list(range(48)), model=spec.model, tokenizer=spec.tokenizer, group_tokens=spec.group_tokens)
    lookup = TrackNamespace(spec.model, digests[0]), prefix_track(digests)
    catalog = (asset.path / "catalog.json").read_bytes()
    with structlog.testing.capture_logs() as logs:
        async with chain_of(kind, asset, tls) as (server, relay):
            async with await dialled(relay) as connection:
                assert await read_all(connection.fetch(*lookup, limit=BIG)) == catalog
            await play(quic.dial, relay, asset)
            await server.close()
            await asyncio.sleep(0.06)  # nothing is fresh any more
            await asyncio.wait_for(play(quic.dial, relay, asset), SOON_S)
            async with await dialled(relay) as connection:
                assert await asyncio.wait_for(read_all(connection.fetch(*lookup, limit=BIG)), SOON_S) == catalog
    away = [line for line in logs if line["event"] == "origin away"]
    assert len(away) == 1
    assert away[0]["log_level"] == "warning"


def small_tracks(upstream, **more):
    return SmallTracks(upstream, lambda _: None, LOG, **more)


async def test_an_origin_that_says_nothing_is_waited_for_a_moment(asset, monkeypatch):
    monkeypatch.setattr(SmallTracks, "FRESH_S", 0.0)
    monkeypatch.setattr(SmallTracks, "PATIENCE_S", 0.05)
    silent = Fault(stall_after=0)
    upstream = in_memory(asset, faults=lambda ask: silent if ask.attempt else None)
    async with upstream:
        small = small_tracks(upstream)
        first = await small.get(asset.catalog.namespace, CATALOG_TRACK)
        for _ in range(3):
            assert await asyncio.wait_for(small.get(asset.catalog.namespace, CATALOG_TRACK), 1.0) == first
        assert upstream.requests == 2
        small.close()


async def test_a_catalog_in_doubt_is_asked_for_anew_and_kept_while_the_origin_is_away(asset):
    """As after a group that was wrong: then the origin lies, or has another asset by that name."""
    away = Fault(refuse=int(RequestCode.GOING_AWAY))
    upstream = in_memory(asset, faults=lambda ask: away if ask.attempt == 1 else None)
    async with upstream:
        small, namespace = small_tracks(upstream), asset.catalog.namespace
        facts = await small.facts(namespace)
        small.doubt(namespace)
        assert await small.facts_of_old(namespace) is facts
        assert upstream.requests == 2
        assert await small.facts_of_old(namespace) is facts  # still in doubt, so asked for again
        assert upstream.requests == 3
        assert await small.facts_of_old(namespace) is facts
        assert upstream.requests == 3
        small.close()


async def test_a_lookup_that_had_to_go_takes_nothing_with_it(asset):
    spec = asset.catalog.spec
    digests = chain(list(range(48)), model=spec.model, tokenizer=spec.tokenizer, group_tokens=spec.group_tokens)
    gone = Fault(refuse=int(RequestCode.DOES_NOT_EXIST))
    upstream = in_memory(asset, faults=lambda ask: gone if ask.track != CATALOG_TRACK and ask.attempt else None)
    async with upstream:
        small, namespace = small_tracks(upstream), asset.catalog.namespace
        lookup = TrackNamespace(spec.model, digests[0]), prefix_track(digests)
        facts = await small.facts(namespace)
        await small.get(*lookup)
        for kept in small._kept.values():
            kept.asked_s -= small.FRESH_S
        with pytest.raises(NotFoundError):
            await small.get(*lookup)
        assert await small.facts_of_old(namespace) is facts
        small.close()


async def test_a_group_of_a_silent_origin_is_asked_for_again_and_then_told(asset, monkeypatch):
    monkeypatch.setattr("kvabr.server.upstream._SILENCE_S", 0.05)
    monkeypatch.setattr("kvabr.server.upstream.PATIENCE_S", 0.2)
    stalled = Fault(stall_after=100_000)
    upstream = in_memory(asset, faults=lambda ask: stalled if ask.group == 1 or ask.attempt == 0 else None)
    async with upstream:
        got = bytearray()
        name = asset.catalog.namespace, "FP16"
        await asyncio.wait_for(bring(upstream, *name, 0, got.extend, priority=0, limit=BIG), SOON_S)
        assert got == asset.frame(0, "FP16")
        with pytest.raises(RequestError, match="the origin fell silent"):
            await asyncio.wait_for(bring(upstream, *name, 1, lambda _: None, priority=0, limit=BIG), SOON_S)
        assert upstream.downloads == 0


async def test_small_tracks_have_a_bound(tmp_path):
    assets = [make_asset(tmp_path / str(at), list(range(at, at + 400))) for at in range(6)]
    size = (assets[0].path / "catalog.json").stat().st_size
    async with MemoryConnection(functools.partial(PublishedAssets(tmp_path).find, EVERYTHING)) as upstream:
        small = small_tracks(upstream, limit=3 * size)
        for asset in assets:
            assert await small.get(asset.catalog.namespace, CATALOG_TRACK)
            assert 0 < small.bytes <= 3 * size
        last = upstream.requests
        assert await small.facts(assets[-1].catalog.namespace)
        assert upstream.requests == last
        assert await small.facts(assets[0].catalog.namespace)  # which had to go
        assert upstream.requests == last + 1
        tight = small_tracks(upstream, limit=size // 2)
        with pytest.raises(RequestError, match="no room"):
            await tight.get(assets[0].catalog.namespace, CATALOG_TRACK)
        assert tight.bytes == tight._coming == 0


# ---------------------------------------------------------------- what it keeps


class Producer:
    """Stands for a group in the hands of moq-rs."""

    gone = False

    def abort(self, _code):
        self.gone = True


class Track:
    def __init__(self, name):
        self.namespace, self.name = ELSEWHERE, name


async def test_the_oldest_groups_go_first():
    cache = GroupCache(1000, Metrics())
    track, producers = Track("FP16"), [Producer() for _ in range(5)]
    for producer in producers:
        cache.add(track, 0, producer, 300, None)
    assert [producer.gone for producer in producers] == [True, True, False, False, False]
    await cache.reserve(300, 0)
    assert [producer.gone for producer in producers] == [True, True, True, False, False]
    cache.release(300)
    cache.forget(lambda owner: owner is track)
    assert all(producer.gone for producer in producers)
    assert cache.bytes == 0


async def test_groups_on_their_way_wait_for_room_the_most_urgent_first():
    cache, track = GroupCache(2000, Metrics()), Track("FP16")
    cache.add(track, 0, Producer(), 600, None)
    await cache.reserve(600, 128)
    order = []

    async def ask(name, priority):
        await cache.reserve(600, priority)
        order.append(name)

    priorities = {"later": 200, "urgent": 1, "gone": 0}
    asking = [asyncio.create_task(ask(name, priority)) for name, priority in priorities.items()]
    await asyncio.sleep(0)
    asking[2].cancel()
    await asyncio.sleep(0)
    cache.release(600)
    await asking[1]
    assert order == ["urgent"]
    cache.release(600)
    await asking[0]
    assert order == ["urgent", "later"]


async def test_what_is_to_be_kept_for_a_moment_goes_then():
    cache, producer = GroupCache(1000, Metrics()), Producer()
    cache.add(Track(CATALOG_TRACK), 0, producer, 10, 0.01)
    end_s = time.monotonic() + SOON_S
    while cache.bytes and time.monotonic() < end_s:  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    assert producer.gone


async def test_random_use_keeps_to_the_bound():
    dice = random.Random(1)
    cache, tracks = GroupCache(10_000, Metrics()), [Track("FP16"), Track("Int4")]
    for track in tracks:
        cache.add(track, 0, Producer(), 400, None)
    held = []
    for _ in range(500):
        if held and dice.random() < 0.6:
            size = held.pop(dice.randrange(len(held)))
            cache.release(size)
            cache.add(dice.choice(tracks), 0, Producer(), size, None)
        elif len(held) < 10:
            held.append(dice.randrange(1, 400))
            await asyncio.wait_for(cache.reserve(held[-1], 0), 1.0)
        assert cache.bytes + cache._reserved <= 10_000


# ---------------------------------------------------------------- the command


@pytest.mark.parametrize(
    ("text", "size"), [("67108864", 1 << 26), ("800MiB", 800 << 20), ("4g", 4 << 30), ("1TiB", 1 << 40)]
)
def test_sizes(text, size):
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "lots", "1.5GiB", "-1", "1MiB", "12XiB"])
def test_sizes_that_are_none(text):
    with pytest.raises(UsageError, match="--memory"):
        parse_size(text)


async def test_the_command(asset, tls):
    namespace = asset.catalog.namespace
    async with origin(asset.path, tls=tls) as server:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "kvabr", "relay", "--upstream",
            f"moqt://localhost:{server.address[1]}/#kvcache:{namespace.model}/{namespace.prompt}",
            "--upstream-fingerprint", server.fingerprint, "--bind", "127.0.0.1:0", "--dev", "--memory", "64MiB",
            stdout=PIPE, stderr=PIPE,
        )  # fmt: skip
        try:
            lines = [(await asyncio.wait_for(process.stdout.readline(), 30)).decode() for _ in range(3)]
            fingerprint = lines[1].split()[-1]
            assert lines[0].strip() in lines[2]
            words = shlex.split(lines[2].partition(": ")[2])
            assert words[:2] == ["kvabr", "fetch"]
            assert asset_of(words[2]) == namespace
            assert words[words.index("--fingerprint") + 1] == fingerprint
            async with connect(words[2], fingerprint=fingerprint, quic="qh3") as connection:
                data = await read_all(connection.fetch(namespace, "FP16", 3, limit=BIG))
                assert data == asset.frame(3, "FP16")
            process.terminate()
            _, log = await asyncio.wait_for(process.communicate(), 30)
            assert process.returncode == 0, log
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
