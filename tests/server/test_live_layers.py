"""What an origin and a relay serve of groups that are announced with their base alone."""

from __future__ import annotations

import asyncio
import hashlib

import pytest
from kvabr.store.live_folder import LiveFolderWriter, new_key

from kvabr.moqt.codes import RequestCode
from kvabr.server.live_assets import LiveAssets
from kvabr.types.live import LiveEnd, PublishedFrames
from tests.faults.common import QUIET
from tests.faults.test_guests import until
from tests.server.live import decoder
from tests.server.relays import sent
from tests.server.test_relay_live import chain
from tests.store.test_live_folder import GROUPS, frame, live

socketed = pytest.mark.process


def news(group, names, key, rest_s=None):
    data = {name: frame(group, name) for name in names}
    frames = {name: (len(one), hashlib.sha256(one).hexdigest()) for name, one in data.items()}
    return PublishedFrames(key, group, float(group), frames, rest_s)


def publish(writer, group, names, key, rest_s=None):
    for name in names:
        writer.frame(group, name, frame(group, name))
    writer.tell(news(group, names, key, rest_s))


async def test_a_level_grows_in_order_whatever_order_its_groups_are_made_in(root):
    key, source = new_key(), LiveAssets(root, QUIET)
    with LiveFolderWriter(root / "asset") as writer:
        writer.begin(live(key))
        await source.look()
        (asset,) = source.assets

        def groups():
            source.poll()
            return asset.chunks, asset.levels["Int4"].groups, asset.levels["FP16"].groups

        publish(writer, 0, ["Int4"], key, 0.5)
        assert groups() == (1, 1, 0)
        publish(writer, 1, ["Int4", "FP16"], key)
        assert groups() == (2, 2, 0)
        publish(writer, 0, ["FP16"], key)
        assert groups() == (2, 2, 2)
        assert [level.has(0) for level in asset.levels.values()] == [True, True]
        publish(writer, 2, ["Int4"], key, 0.5)
        assert groups() == (3, 3, 2)
        assert [(one.group, sorted(one.frames)) for one in asset.news()] == [
            (0, ["FP16", "Int4"]), (1, ["FP16", "Int4"]), (2, ["Int4"])
        ]  # fmt: skip
        writer.tell(LiveEnd(key))
        assert groups() == (3, 3, 3)
        assert not asset.levels["FP16"].has(2)
        assert (asset.over, asset.edge.failure, asset.edge.groups) == (True, "", 5)


async def test_what_will_not_follow_after_all_is_left_out(root):
    key, source = new_key(), LiveAssets(root, QUIET)
    with LiveFolderWriter(root / "asset") as writer:
        writer.begin(live(key))
        await source.look()
        (asset,) = source.assets
        publish(writer, 0, ["Int4"], key, 0.5)
        publish(writer, 0, [], key)
        source.poll()
        assert asset.levels["FP16"].groups == 1
        assert not asset.levels["FP16"].has(0)
        publish(writer, 0, ["FP16"], key)
        source.poll()
        assert asset.edge.failure == "group 0 came, 1 is next"


@socketed
@pytest.mark.parametrize("relays", [0, 1, 2])
async def test_who_waits_for_a_layer_has_it_once_it_is_made(root, tls, relays):
    key = new_key()
    async with chain(root, tls, relays=relays) as (origin, server), decoder(server) as player:
        with LiveFolderWriter(root / "asset") as writer:
            writer.begin(live(key))
            await player.found()
            waiting = [player.ask("FP16", group) for group in range(GROUPS)]
            for group in range(GROUPS):
                publish(writer, group, ["Int4"], key, 0.5)
                assert (await player.news(group)).rest_s == 0.5
                assert (await player.get("Int4", group)).data == frame(group, "Int4")
            assert [player.answered(number) for number in waiting] == [None] * GROUPS
            for group in reversed(range(1, GROUPS)):
                publish(writer, group, ["FP16"], key)
                await player.news(2 * GROUPS - 1 - group)
                assert player.answered(waiting[group]) is None
            publish(writer, 0, ["FP16"], key)
            for group in range(GROUPS):
                assert (await player.answer(waiting[group])).data == frame(group, "FP16")
            writer.tell(LiveEnd(key))
            assert await player.news(2 * GROUPS) == LiveEnd(key)
            late = asyncio.ensure_future(player.get("FP16", 0))
            assert (await late).data == frame(0, "FP16")
        await until(lambda: origin.source.live.assets[0].over)
        if relays:
            assert [sent(origin)[name] for name in ("FP16", "Int4")] == [GROUPS, GROUPS]


@socketed
async def test_who_waits_for_a_layer_that_will_not_be_made_hears_so(root, tls):
    key = new_key()
    async with chain(root, tls, relays=1) as (_, server), decoder(server) as player:
        with LiveFolderWriter(root / "asset") as writer:
            writer.begin(live(key))
            await player.found()
            publish(writer, 0, ["Int4"], key, 0.5)
            await player.news(0)
            waiting = player.ask("FP16", 0)
            writer.tell(LiveEnd(key, "killed"))
            assert (await player.answer(waiting)).code == RequestCode.DOES_NOT_EXIST
