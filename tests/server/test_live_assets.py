"""What an origin serves of assets that are being prefilled, and what it makes of producers that fail."""

import asyncio
import hashlib
import shutil
from dataclasses import replace

import pytest
import structlog
from structlog.testing import capture_logs

from kvabr.moqt.codes import RequestCode
from kvabr.server import live_assets
from kvabr.server.grants import EVERYTHING, Grant, Grants
from kvabr.server.live_assets import FollowedAsset, LiveAssets
from kvabr.server.published_assets import PublishedAssets
from kvabr.store import live as store_live
from kvabr.store.live import LIVE_NAME, LiveFollower, LiveWriter, new_key
from kvabr.store.local import LocalStore
from kvabr.store.store_tree import StoreTree
from kvabr.types.errors import FormatError
from kvabr.types.live import LiveCatalog, LiveEnd
from kvabr.types.naming import EDGE_TRACK, LIVE_TRACK
from tests.assets import live_folders, whole
from tests.faults.common import QUIET
from tests.faults.test_guests import until
from tests.server.live import SPACE, decoder, live_origin
from tests.server.relays import sent
from tests.server.test_relay_live import chain
from tests.store.test_live import GROUPS, final, frame, live, news, publish, written

socketed = pytest.mark.process


TOKEN = "t"  # noqa: S105  # of a test


def grants(pattern):
    return Grants([Grant("team", (pattern,), token_sha256=hashlib.sha256(TOKEN.encode()).hexdigest())])


@socketed
async def test_those_who_may_not_read_an_asset_do_not_learn_of_it(root, tls):
    """Not even what they began to wait for while they might."""
    key = new_key()
    (root / "team-a").mkdir()
    async with live_origin(root, tls, grants=grants("team-b/*")) as server, decoder(server, token=TOKEN) as player:
        with written(root / "team-a") as writer:
            writer.begin_live(live(key))
            publish(writer, 0, key)
            await until(lambda: server.source.live.assets and server.source.live.assets[0].chunks)
            for track in (LIVE_TRACK, EDGE_TRACK, "FP16"):
                assert (await player.get(track)).code == RequestCode.DOES_NOT_EXIST
            assert await player.lookups() == [None, None]
            server.source.regrant(grants("team-a/*"))
            assert (await player.get("FP16")).data == frame(0, "FP16")
            assert LiveCatalog.loads((await player.lookups())[0]) == live(key)
            waiting = [player.wait(track, 1) for track in (EDGE_TRACK, "FP16")]
            (peer,) = server.peers
            await until(lambda: len(peer._subscriptions) == 2)
            server.source.regrant(grants("team-b/*"))
            for number in waiting:
                refused = await player.answer(number)
                assert refused.code == RequestCode.DOES_NOT_EXIST
                assert "no longer gives access to it" in refused.reason
            assert (await player.get("FP16")).code == RequestCode.DOES_NOT_EXIST
    await until(lambda: server.requests == 0)


@socketed
async def test_a_group_that_the_producer_left_out_is_refused_at_once(root, tls):
    key = new_key()
    async with live_origin(root, tls) as server, decoder(server) as player:
        with written(root) as writer:
            writer.begin_live(live(key))
            await player.found()
            for group in (0, 1):
                publish(writer, group, key)
            publish(writer, 2, key, ["FP16"])
            assert (await player.news(2)).frames.keys() == {"FP16"}
            refused = await player.get("Int4", 2)
            assert (refused.code, refused.reason) == (RequestCode.DOES_NOT_EXIST, "the producer left out group 2")
            assert (await player.get("Int4", 1)).data == frame(1, "Int4")
            # It is no level of the complete asset, but those who began before go on with what there is of it.
            made = final()
            writer.commit(replace(made, tracks=made.tracks[:1]))
            writer.announce(LiveEnd(key))
            await player.complete()
            assert (await player.get("Int4", 1)).data == frame(1, "Int4")


# ------------------------------------------------------------------ producers that fail


KEY = "0" * 16
HUGE = final().spec.max_frame_bytes + 1
WRONG = {
    "another prefill": ([news(0, "1" * 16)], "the message belongs to another prefill of this prompt", 0),
    "out of order": ([news(0), news(2)], "received group 2, expected 1", 1),
    "another digest later": ([news(0), replace(news(0), frames=news(1).frames)], "received group 0, expected 1", 1),
    "longer than the catalog": ([*map(news, range(GROUPS + 1))], "received group 3, but the live catalog has 3", 3),
    "no base": ([news(0, names=())], "group 0 has no track that stands alone", 0),
    "an unknown track": (
        [replace(news(0), frames={**news(0).frames, "more": (1, "0" * 64)})],
        "group 0 has tracks that the live catalog lacks: more",
        0,
    ),
    "a group that no cache needs": (
        [replace(news(0), frames={"FP16": (HUGE, "0" * 64)})],
        f"edge message: track FP16: a group has {HUGE} bytes, more than a cache can need ({HUGE - 1})",
        0,
    ),
    "ended too early": ([news(0), LiveEnd(KEY)], "it ended before its last 2 groups", 1),
    "gave up": ([news(0), LiveEnd(KEY, "out of memory")], "out of memory", 1),
}


@pytest.mark.parametrize("told", WRONG.values(), ids=WRONG)
async def test_what_a_producer_may_do_wrong_ends_the_tracks_with_a_reason(root, told):
    messages, reason, groups = told
    source = LiveAssets(StoreTree(root), QUIET)
    with written(root) as writer:
        writer.begin_live(live(KEY))
        await source.scan()
        (asset,) = source.assets
        for message in messages:
            writer.announce(message)
        source.poll()
        assert (asset.over, asset.chunks, asset.edge.groups) == (True, groups, groups + 1)
        for track in (asset.edge, *asset.levels.values()):
            assert (track.growing, track.failure) == (False, reason)
        source.poll()
        await source.check()
        assert not asset.settled  # its producer lives, and may still make it an asset
    await source.check()
    assert asset.settled


async def test_what_a_killed_producer_has_published_is_read_before_its_asset_ends(root, monkeypatch):
    monkeypatch.setattr(store_live, "BATCH_MESSAGES", 1)
    source = LiveAssets(StoreTree(root), QUIET)
    with written(root) as writer:
        writer.begin_live(live(KEY))
        for group in range(GROUPS - 1):
            publish(writer, group, KEY)
        await source.scan()
        (asset,) = source.assets
        assert asset.chunks == 1
        asset.follower.has_writer = lambda: False
        await source.check()
        assert (asset.chunks, asset.edge.failure) == (GROUPS - 1, "its process is gone")


async def test_a_folder_of_nonsense_is_left_out_and_told_of_once(root):
    path = root / "l" / "0123"
    path.mkdir(parents=True)
    (path / LIVE_NAME).write_text("{}")
    with capture_logs() as entries:
        source = LiveAssets(StoreTree(root), structlog.get_logger())
        await source.scan()
        await source.scan()
        assert source.assets == ()
        assert [entry["event"] for entry in entries] == ["live asset left out"]
        assert "live catalog" in entries[0]["error"]
    shutil.rmtree(path)
    await source.scan()
    assert source._refused == set()


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda it: {"tracks": (replace(it.tracks[0], name="kvabr.edge"), it.tracks[1])}, r"kvabr\.edge. is reserved"),
        (lambda it: {"chunks": (it.chunks[0], "x", it.chunks[2])}, "must have 64 hex digits, got 'x'"),
    ],
)
async def test_a_catalog_that_names_what_cannot_be_served(root, change, says):
    begun = live(new_key())
    with written(root) as writer:
        writer.begin_live(replace(begun, catalog=replace(begun.catalog, **change(begun.catalog))))
        (path,) = live_folders(root)
        follower = LiveFollower(LocalStore(root), path.name)
        with pytest.raises(FormatError, match=says):
            FollowedAsset(follower, "")
        source = LiveAssets(StoreTree(root), QUIET)
        await source.scan()
        assert source.assets == ()


@socketed
async def test_a_producer_that_announces_and_never_publishes(root, tls):
    """Those who fetch hear so at once, those who subscribe once the origin has given it up."""
    async with live_origin(root, tls) as server, decoder(server) as player:
        with written(root) as writer:
            writer.begin_live(live(new_key()))
            await player.found()
            for track in (EDGE_TRACK, "FP16"):
                refused = await player.get(track)
                assert (refused.code, refused.reason) == (RequestCode.INVALID_RANGE, "the track has 0 groups so far")
            (asset,) = server.source.live.assets
            asset.changed_s -= live_assets.STALLED_S
            await until(lambda: asset.over)
            assert (await player.news(0)).reason == "its producer has published nothing for 600 s"
            assert (await player.get("FP16")).code == RequestCode.INVALID_RANGE


async def test_of_two_producers_of_one_name_the_first_is_heard_until_it_ends(root):
    source, everyone = LiveAssets(StoreTree(root), QUIET), Grant("everyone")

    def served():
        return LiveCatalog.loads(bytes(source.find(everyone, SPACE, LIVE_TRACK)[1].open(0).data)).key

    with written(root) as one, written(root) as two:
        one.begin_live(live("1" * 16))
        await source.scan()
        two.begin_live(live("2" * 16))
        await source.scan()
        publish(two, 0, "2" * 16)
        publish(one, 0, "1" * 16)
        source.poll()
        assert served() == "1" * 16
        one.announce(LiveEnd("1" * 16, "stopped"))
        source.poll()
        assert served() == "2" * 16
        publish(two, 1, "2" * 16)
        source.poll()
        assert source.find(everyone, SPACE, EDGE_TRACK)[1].groups == 2


async def test_there_is_a_bound_on_assets_that_grow(root, monkeypatch):
    monkeypatch.setattr(live_assets, "MAX_LIVE", 1)
    source = LiveAssets(StoreTree(root), QUIET)
    with written(root) as one, written(root) as two:
        one.begin_live(live("1" * 16))
        two.begin_live(live("2" * 16))
        await source.scan()
        await source.scan()
        (asset,) = source.assets
        asset.end("enough")
        await source.scan()
        assert [other is asset for other in source.assets] == [True, False]
        source.assets[1].end("enough")
        await source.scan()
        assert asset not in source.assets
        monkeypatch.setattr(live_assets, "LINGER_S", -1.0)
        await source.scan()
        assert source.assets == ()


async def test_an_older_asset_of_the_same_name_is_served_until_it_is_replaced(root):
    """Its groups have the same names, so the growing one is not shown."""
    old = make_final(root, b"old")
    source = PublishedAssets(root, None, QUIET)
    with LiveWriter(LocalStore(root), None, force=True) as writer:
        writer.begin_live(live(key := new_key()))
        publish(writer, 0, key)
        await source.live.scan()
        source.live.poll()
        assert source.find(EVERYTHING, SPACE, LIVE_TRACK) is None
        assert whole(source.find(EVERYTHING, SPACE, "FP16").open(0)) == old
        for group in (1, 2):
            publish(writer, group, key)
        writer.commit(final())
        writer.announce(LiveEnd(key))
        source.live.poll()
    await source.live.notify()
    assert source.find(EVERYTHING, SPACE, LIVE_TRACK) is not None
    assert whole(source.find(EVERYTHING, SPACE, "FP16").open(0)) == frame(0, "FP16")


def make_final(path, begins):
    """An asset whose first frame is another; returns that."""
    made = final()
    first, *others = made.tracks
    data = begins * 100
    sizes, sums = (len(data), *first.bytes[1:]), (hashlib.sha256(data).hexdigest(), *first.digests[1:])
    with written(path) as writer:
        for group in range(GROUPS):
            for track in made.tracks:
                one = data if (group, track) == (0, first) else frame(group, track.name)
                writer.frame(group, track.name, one, hashlib.sha256(one).hexdigest())
        writer.commit(replace(made, tracks=(replace(first, bytes=sizes, digests=sums), *others)))
    return data


async def test_a_level_grows_in_order_whatever_order_its_groups_are_made_in(root):
    key, source = new_key(), LiveAssets(StoreTree(root), QUIET)
    with written(root) as writer:
        writer.begin_live(live(key))
        await source.scan()
        (asset,) = source.assets

        def groups():
            source.poll()
            return asset.chunks, asset.levels["Int4"].groups, asset.levels["FP16"].groups

        publish(writer, 0, key, ["Int4"], 0.5)
        assert groups() == (1, 1, 0)
        publish(writer, 1, key, ["Int4", "FP16"])
        assert groups() == (2, 2, 0)
        publish(writer, 0, key, ["FP16"])
        assert groups() == (2, 2, 2)
        assert [level.has(0) for level in asset.levels.values()] == [True, True]
        publish(writer, 2, key, ["Int4"], 0.5)
        assert groups() == (3, 3, 2)
        writer.announce(LiveEnd(key))
        assert groups() == (3, 3, 3)
        assert not asset.levels["FP16"].has(2)
        assert (asset.over, asset.edge.failure, asset.edge.groups) == (True, "", 5)


@socketed
@pytest.mark.parametrize("relays", [0, 1, 2])
async def test_who_waits_for_a_layer_has_it_once_it_is_made(root, tls, relays):
    key = new_key()
    async with chain(root, tls, relays=relays) as (origin, server), decoder(server) as player:
        with written(root) as writer:
            writer.begin_live(live(key))
            await player.found()
            waiting = [player.wait("FP16", group) for group in range(GROUPS)]
            for group in range(GROUPS):
                publish(writer, group, key, ["Int4"], 0.5)
                assert (await player.news(group)).rest_s == 0.5
                assert (await player.get("Int4", group)).data == frame(group, "Int4")
            assert [player.answered(number) for number in waiting] == [None] * GROUPS
            for group in reversed(range(1, GROUPS)):
                publish(writer, group, key, ["FP16"])
                await player.news(2 * GROUPS - 1 - group)
                assert player.answered(waiting[group]) is None
            publish(writer, 0, key, ["FP16"])
            for group in range(GROUPS):
                assert (await player.answer(waiting[group])).data == frame(group, "FP16")
            writer.announce(LiveEnd(key))
            assert await player.news(2 * GROUPS) == LiveEnd(key)
            late = asyncio.ensure_future(player.get("FP16", 0))
            assert (await late).data == frame(0, "FP16")
        await until(lambda: origin.source.live.assets[0].over)
        if relays:
            assert [sent(origin)[name] for name in ("FP16", "Int4")] == [GROUPS, GROUPS]
