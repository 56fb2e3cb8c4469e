"""Assets that are being prefilled, played through relays: each byte leaves the origin once, each end is passed on."""

import asyncio
import contextlib
import hashlib
import json
import shutil

import pytest

from kvabr.moqt.codes import RequestCode
from kvabr.server import relay_live
from kvabr.server.grants import Grant, Grants
from kvabr.store.live import new_key
from kvabr.store.names import group_name
from kvabr.types.live import LiveCatalog, LiveEnd
from kvabr.types.naming import EDGE_TRACK, LIVE_TRACK
from tests.assets import live_folders
from tests.faults.test_guests import until
from tests.server.live import SPACE, decoder, live_origin
from tests.server.relays import relay_before, sent
from tests.store.test_live import GROUPS, TRACKS, final, frame, live, publish, written

pytestmark = pytest.mark.process
TOKEN = "of the relay"  # noqa: S105  # of a test
EVERYTHING = {(group, track.name): frame(group, track.name) for group in range(GROUPS) for track in TRACKS}


def grants(pattern):
    return Grants([Grant("relay", (pattern,), token_sha256=hashlib.sha256(TOKEN.encode()).hexdigest())])


@contextlib.asynccontextmanager
async def chain(root, tls, *, relays=1, token=None, grants=None):
    """An origin and relays behind each other; yields the origin and the last relay."""
    async with contextlib.AsyncExitStack() as stack:
        first = server = await stack.enter_async_context(live_origin(root, tls, grants=grants))
        for _ in range(relays):
            server = await relay_before(stack, server, tls, token=token)
            token = None
        yield first, server


def subscriptions(server):
    """The tracks that each peer of a server subscribes to."""
    found = [[one.track for one in peer._subscriptions] for peer in server.peers]
    return [sorted(tracks) for tracks in found if tracks]


@pytest.mark.parametrize("relays", [0, 1, 2])
async def test_each_group_leaves_when_it_is_published_and_the_origin_once(root, tls, relays, fresh):
    """For two who play at the edge, for one who comes late, and for one who comes when it is complete."""
    key = new_key()
    async with (
        chain(root, tls, relays=relays) as (origin, relay),
        decoder(relay) as one,
        decoder(relay) as two,
        decoder(relay) as late,
    ):
        assert (await late.get(EDGE_TRACK)).code == RequestCode.DOES_NOT_EXIST
        with written(root) as writer:
            writer.begin_live(live(key))
            assert await one.found() == await two.found() == live(key)
            growing, ordinary = await one.lookups()
            assert (LiveCatalog.loads(growing), ordinary) == (live(key), None)
            following = [asyncio.ensure_future(player.follow()) for player in (one, two)]
            # One subscription for each track, however many there are at the relay.
            playing = [["FP16", EDGE_TRACK]]
            await until(lambda: subscriptions(relay) == 2 * playing)
            await until(lambda: not relays or subscriptions(origin) == playing)
            publish(writer, 0, key)
            assert (await late.news(0)).group == 0
            following.append(asyncio.ensure_future(late.follow()))
            for group in (1, 2):
                publish(writer, group, key)
                assert (await one.news(group)).group == group
            writer.commit(final())
            assert json.loads(await late.complete()) == final().to_json()
            writer.announce(LiveEnd(key))
            for frames, reason in await asyncio.gather(*following):
                assert (frames, reason) == (EVERYTHING, "")
        # Those who began before go on; others find both, of which the ordinary one is as good.
        for group in range(GROUPS):
            for track in TRACKS:
                assert (await late.get(track.name, group)).data == frame(group, track.name)
        growing, ordinary = await late.lookups()
        assert LiveCatalog.loads(growing).catalog.namespace == SPACE
        assert json.loads(ordinary) == final().to_json()
        ended = await late.get(EDGE_TRACK, GROUPS + 1)
        assert (ended.code, ended.reason) == (RequestCode.INVALID_RANGE, f"the track has {GROUPS + 1} groups")
        if not relays:
            return
        counts = sent(origin)
        assert {name: counts[name] for name in ("FP16", "Int4")} == {"FP16": GROUPS, "Int4": GROUPS}
        assert counts[EDGE_TRACK] == GROUPS + 1
        assert counts[LIVE_TRACK] == 1
        await until(lambda: not subscriptions(origin))
        all_of_them = origin.metrics.value("kvabr_bytes_sent_total")
        async with decoder(origin) as alone:
            await alone.found()
            assert await alone.follow() == (EVERYTHING, "")
            await alone.complete()
            await alone.lookups()
        one_alone = origin.metrics.value("kvabr_bytes_sent_total") - all_of_them
        assert all_of_them <= 1.01 * one_alone
        assert not relay.source.groups._expected
        await until(lambda: not relay.source.groups)


async def test_the_end_of_a_producer_is_passed_on(root, tls):
    key = new_key()
    async with chain(root, tls) as (_, relay), decoder(relay) as player:
        with written(root) as writer:
            writer.begin_live(live(key))
            await player.found()
            following = asyncio.ensure_future(player.follow())
            publish(writer, 0, key)
            await player.news(0)
            waiting = player.wait("FP16", 2)
            writer.announce(LiveEnd(key, "out of memory"))
            frames, reason = await following
            assert (len(frames), reason) == (2, "out of memory")
            assert (await player.answer(waiting)).reason == "out of memory"
            assert (await player.get("FP16")).data == frame(0, "FP16")
            assert (await player.get("FP16", 1)).code is not None


async def test_a_prompt_that_is_prefilled_again_after_its_producer_died(root, tls):
    first, second = new_key(), new_key()
    async with chain(root, tls) as (_, relay), decoder(relay) as player:
        with written(root) as writer:
            writer.begin_live(live(first))
            await player.found()
            writer.announce(LiveEnd(first, "out of memory"))
            assert await player.news(0) == LiveEnd(first, "out of memory")
            player.forget()
        with written(root) as writer:
            writer.begin_live(live(second))
            while (await player.found()).key != second:
                pass  # the first answer is repeated for two seconds
            publish(writer, 0, second)
            assert (await player.news(0)).key == second
            assert (await player.get("FP16")).data == frame(0, "FP16")


@pytest.mark.parametrize("how", ["narrowed", "removed"])
async def test_what_the_origin_takes_back_is_taken_back_here(root, tls, how):
    key = new_key()
    (root / "team").mkdir()
    async with chain(root, tls, token=TOKEN, grants=grants("team/*")) as (origin, relay), decoder(relay) as player:
        with written(root / "team") as writer:
            writer.begin_live(live(key))
            await player.found()
            publish(writer, 0, key)
            await player.news(0)
            assert (await player.get("FP16")).data == frame(0, "FP16")
            waiting = [player.wait(track, 1) for track in (EDGE_TRACK, "FP16")]
            await until(lambda: subscriptions(relay) == [["FP16", EDGE_TRACK]])
            if how == "narrowed":
                origin.source.regrant(grants("b/*"))
            else:
                shutil.rmtree(next(iter(live_folders(root))))
            for number in waiting:
                assert (await player.answer(number)).code == RequestCode.DOES_NOT_EXIST
            for track in (LIVE_TRACK, EDGE_TRACK, "FP16"):
                assert (await player.get(track)).code == RequestCode.DOES_NOT_EXIST
            assert len(relay.source.live._assets) == 0


async def test_an_ended_asset_is_refused_once_the_origin_has_removed_it(root, tls, stale):
    """The relay asks for its live catalog again, as an ordinary one has never been there."""
    key = new_key()
    async with chain(root, tls) as (_, relay), decoder(relay) as player:
        with written(root) as writer:
            writer.begin_live(live(key))
            await player.found()
            publish(writer, 0, key)
            await player.news(0)
            writer.announce(LiveEnd(key, "out of memory"))
            assert await player.news(1) == LiveEnd(key, "out of memory")
            assert (await player.get("FP16")).data == frame(0, "FP16")
            shutil.rmtree(next(iter(live_folders(root))))
            while (answer := await player.get("FP16")).data is not None:
                pass
            assert answer.code == RequestCode.DOES_NOT_EXIST
            assert (await player.get(EDGE_TRACK)).code == RequestCode.DOES_NOT_EXIST
            assert len(relay.source.live._assets) == 0


async def test_a_group_that_is_not_what_the_news_say_is_passed_to_nobody(root, tls):
    key = new_key()
    async with chain(root, tls) as (origin, relay), decoder(relay) as player:
        with written(root) as writer:
            writer.begin_live(live(key))
            await player.found()
            waiting = player.wait("FP16")
            await until(lambda: subscriptions(origin) == [["FP16", EDGE_TRACK]])
            (asset,) = origin.source.live.assets
            take = asset.take

            def spoil(message):
                path = asset.follower.store.path(group_name(message.frames["FP16"][1]))
                path.write_bytes(bytes(path.stat().st_size))
                take(message)

            asset.take = spoil
            publish(writer, 0, key)
            answer = await player.answer(waiting)
            assert answer.data is None
            assert (await player.get("Int4")).data == frame(0, "Int4")


async def test_an_origin_that_is_started_again_while_something_grows(root, tls):
    key = new_key()
    async with contextlib.AsyncExitStack() as stack:
        with written(root) as writer:
            async with live_origin(root, tls) as origin:
                port = origin.address[1]
                relay = await relay_before(stack, origin, tls)
                player = await stack.enter_async_context(decoder(relay))
                writer.begin_live(live(key))
                await player.found()
                following = asyncio.ensure_future(player.follow())
                publish(writer, 0, key)
                await player.news(0)
            publish(writer, 1, key)
            async with live_origin(root, tls, port=port):
                publish(writer, 2, key)
                writer.commit(final())
                writer.announce(LiveEnd(key))
                assert await following == (EVERYTHING, "")


async def test_an_asset_that_nobody_asks_for_is_forgotten(root, tls, monkeypatch):
    key = new_key()
    monkeypatch.setattr(relay_live, "IDLE_S", 2.0)
    async with chain(root, tls) as (_, relay), decoder(relay) as player:
        with written(root) as writer:
            writer.begin_live(live(key))
            await player.found()
            publish(writer, 0, key)
            await player.news(0)
            assert len(relay.source.live._assets) == 1
            player.forget()
            monkeypatch.setattr(relay_live, "IDLE_S", 0.0)
            await until(lambda: len(relay.source.live._assets) == 0)
            monkeypatch.setattr(relay_live, "IDLE_S", 60.0)
            with monkeypatch.context() as full:
                full.setattr(relay_live, "MAX_LIVE", 0)
                assert (await player.get(EDGE_TRACK)).code == RequestCode.EXCESSIVE_LOAD
            assert (await player.news(0)).group == 0
