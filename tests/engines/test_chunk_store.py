"""Caches that go by a key: what is published comes back, and what is of another length or place does not."""

import asyncio
import logging
from dataclasses import replace

import pytest
import torch

from kvabr.client import memory
from kvabr.client.blocking import LoopThread
from kvabr.engines import origin_pause
from kvabr.engines.chunk_store import ChunkStore, KeyedOrigin, KeyedSettings, profile_for, spec_of
from kvabr.types.errors import AssetError, ForeignError, FormatError, TransportError
from kvabr.types.naming import LAYERS as AC_TRACKS
from tests import kvdata
from tests.engines.served import Origin

LAYERS, HEADS, DIM = 2, 2, 16
SPEC = spec_of("test/model", "engine", LAYERS, HEADS, DIM, torch.float16)


@pytest.fixture
def origin(tmp_path):
    made = Origin(tmp_path)
    yield made
    made.close()


def test_what_is_shorter_or_longer_than_its_key_stands_for_is_not_there(origin):
    reach = {"url": origin.url, "fingerprint": origin.fingerprint, "deadline_s": 20.0}
    loop = LoopThread()

    async def put():
        store = ChunkStore(SPEC, KeyedSettings(**reach, publish=origin.root), "a cache of a test", max_tokens=300)
        for tokens in (128, 200, 256, 300):
            store.put(f"{tokens} tokens", torch.randn(LAYERS, 2, HEADS, tokens, DIM).half())
        await store.close()

    async def played(least, most):
        store = ChunkStore(SPEC, KeyedSettings(**reach), "", min_tokens=least, max_tokens=most)
        found = {tokens: await store.play(f"{tokens} tokens") for tokens in (128, 200, 256, 300)}
        await store.close()
        return {tokens: came.kv.shape[-2] for tokens, came in found.items() if came is not None}

    loop.call(put())
    origin.look(4)
    try:
        assert loop.call(played(256, 256)) == {256: 256}
        assert loop.call(played(1, 256)) == {128: 128, 200: 200, 256: 256}
    finally:
        loop.close()


def test_what_loses_more_than_the_engine_may_keep_is_not_used(origin, loop, caplog):
    reach = {"url": origin.url, "fingerprint": origin.fingerprint, "deadline_s": 20.0}

    async def put():
        settings = KeyedSettings(**reach, publish=origin.root, tracks=["Int4"])
        store = ChunkStore(SPEC, settings, "a cache of a test", max_tokens=300)
        store.put("lossy", torch.randn(LAYERS, 2, HEADS, 256, DIM).half())
        await store.close()

    async def played(**more):
        store = ChunkStore(SPEC, KeyedSettings(**reach, policy="fixed:Int4", **more), "", max_tokens=300)
        came = await store.play("lossy")
        await store.close()
        return came

    loop.call(put())
    origin.look(1)
    came = loop.call(played())
    assert came.loss > 0.001
    assert loop.call(played(keep_loss=came.loss)) is not None
    with caplog.at_level(logging.WARNING):
        assert loop.call(played(keep_loss=0.001)) is None
    assert "a cache is not used: its expected loss is" in caplog.text


def said(caplog):
    return [record.message for record in caplog.records if record.name == "kvabr.engines.chunk_store"]


SHAPE = kvdata.spec(LAYERS, HEADS, DIM)
KV = kvdata.cache(SHAPE, 1024).half()
"""Cache of a prompt; caches that go by a key are pieces of it."""


@pytest.fixture
def profile(tmp_path):
    """File with a codec profile, whose model has other names than the engine gives."""
    path = tmp_path / "profile.safetensors"
    path.write_bytes(kvdata.profile(SHAPE).to_bytes())
    return path


@pytest.fixture
def loop():
    made = LoopThread()
    yield made
    made.close()


def store(loop, *, spec=SPEC, **settings):
    async def open_store():
        return ChunkStore(spec, KeyedSettings(**settings), "a test", max_tokens=256, unplaced="nobody knows")

    return loop.call(open_store())


async def has_profile(store, key):
    """Look up a cache, and wait for what that begins."""
    assert await store.find(key) is not None
    await asyncio.gather(*store._profiles.values())


def piece(first):
    return KV[:, :, :, first : first + 256]


def test_what_has_a_position_has_layers_and_is_refused_elsewhere(origin, profile, loop, caplog):
    reach = {"url": origin.url, "fingerprint": origin.fingerprint, "deadline_s": 20.0}
    one = store(loop, publish=origin.root, profile=profile)
    assert one.put("later", piece(512), 512).result(300.0)
    assert one.put("first", piece(0), 0).result(300.0)
    loop.call(one.close())
    origin.look(2)
    catalogs = {asset.catalog.position: asset.catalog for asset in origin.holdings.assets}
    assert sorted(catalogs) == [0, 512]
    assert all(
        [track.name for track in each.tracks] == ["FP16", "Int8", "Int4", *AC_TRACKS] for each in catalogs.values()
    )
    # Who reads needs no profile, and need not know the position.
    memory._profiles.clear()  # those of this process
    other = store(loop, policy="fixed:AC-L0", **reach)
    loop.call(has_profile(other, "later"))
    for key, first in (("later", 512), ("first", 0)):
        for positions in (None, range(first, first + 1), range(0, 1 << 32, 256)):
            kv = loop.call(other.play(key, positions)).kv
            assert kvdata.is_base_of(kv, piece(first))
    assert said(caplog) == []
    with caplog.at_level(logging.WARNING, "kvabr.engines.chunk_store"):
        for elsewhere in (range(256, 257), range(768, 1 << 32, 256), range(500, 501)):
            assert loop.call(other.find("later", elsewhere)) is None
            assert loop.call(other.play("later", elsewhere)) is None
        assert loop.call(other.leading(["first", "later"], [range(1), range(256, 257)])) == 1
    assert loop.call(other.leading(["first", "later"], [range(1), range(512, 513)])) == 2
    assert said(caplog) == ["kvabr: the origin's cache has another position: token 512 of a prompt, expected 256"]
    loop.call(other.close())


def test_without_a_position_there_are_plain_tracks_and_the_log_says_why_once(origin, profile, loop, caplog):
    one = store(loop, publish=origin.root, profile=profile)
    with caplog.at_level(logging.WARNING, "kvabr.engines.chunk_store"):
        for key, first in (("a", 256), ("b", 512)):
            assert one.put(key, piece(first)).result(300.0)
    loop.call(one.close())
    assert said(caplog) == ["kvabr: caches are published without AC-L0, AC-L1, AC-L2, AC-L3: nobody knows"]
    origin.look(2)
    for asset in origin.holdings.assets:
        assert [track.name for track in asset.catalog.tracks] == ["FP16", "Int8", "Int4"]
    # The position of what needs none is nobody's concern, unless the key stands for several.
    reach = {"url": origin.url, "fingerprint": origin.fingerprint, "deadline_s": 20.0}
    other = store(loop, policy="fixed:FP16", **reach)
    assert torch.equal(loop.call(other.play("b", range(512, 513))).kv, piece(512))
    assert loop.call(other.play("b", range(0))) is None
    loop.call(other.close())


def test_caches_of_another_rotary_embedding_are_of_another_kind(origin, tmp_path, profile, loop):
    shape = SHAPE.changed(rope=replace(SHAPE.rope, theta=500.0))
    foreign = tmp_path / "foreign.safetensors"
    foreign.write_bytes(kvdata.profile(shape).to_bytes())
    reach = {"url": origin.url, "fingerprint": origin.fingerprint, "deadline_s": 20.0}
    one = store(loop, publish=origin.root, profile=profile)
    assert one.put("a", piece(0), 0).result(300.0)
    origin.look(1)
    other = store(loop, publish=tmp_path / "own", profile=foreign, **reach)
    assert loop.call(other.find("a")) is None
    for each in (one, other):
        loop.call(each.close())


def test_profiles_fit_by_their_shape(tmp_path, profile):
    settings = KeyedSettings(publish=tmp_path, profile=profile)
    bfloat = spec_of("m", "engine", LAYERS, HEADS, DIM, torch.bfloat16)
    made = profile_for(bfloat, settings)
    assert made.spec == bfloat.changed(rope=SHAPE.rope)
    made.check(made.spec)
    assert made.digest != kvdata.profile(SHAPE).digest
    with pytest.raises(ForeignError, match="calibrated for"):
        profile_for(spec_of("m", "engine", LAYERS, HEADS // 2, DIM, torch.float16), settings)
    with pytest.raises(AssetError, match="kvabr calibrate"):
        profile_for(SPEC, KeyedSettings(publish=tmp_path, profile=tmp_path / "none"))
    (tmp_path / "text").write_text("this is no profile")
    with pytest.raises(FormatError, match="text: profile"):
        profile_for(SPEC, KeyedSettings(publish=tmp_path, profile=tmp_path / "text"))


def test_a_profile_that_does_not_come_leaves_the_plain_tracks(origin, profile, loop, caplog):
    reach = {"url": origin.url, "fingerprint": origin.fingerprint, "deadline_s": 20.0}
    one = store(loop, publish=origin.root, profile=profile)
    assert one.put("a", piece(256), 256).result(300.0)
    loop.call(one.close())
    (path,) = origin.root.glob("p/*")
    origin.look(1)
    path.unlink()
    memory._profiles.clear()
    other = store(loop, policy="fixed:FP16", **reach)
    with caplog.at_level(logging.WARNING, "kvabr.engines.chunk_store"):
        loop.call(has_profile(other, "a"))
    assert torch.equal(loop.call(other.play("a")).kv, piece(256))
    assert "the codec profile could not be fetched" in caplog.text
    loop.call(other.close())


def reach_of(origin):
    return {"url": origin.url, "fingerprint": origin.fingerprint, "deadline_s": 20.0}


def test_after_a_signal_nothing_old_is_played_and_what_is_new_is_published(origin, loop):
    """The weights of one engine change; another has the old ones, and keeps its caches."""
    old, new = piece(0), piece(512)
    one = store(loop, publish=origin.root, policy="fixed:FP16", **reach_of(origin))
    other = store(loop, policy="fixed:FP16", **reach_of(origin))
    assert one.put("page", old).result(300.0)
    origin.look(1)
    assert torch.equal(loop.call(one.play("page")).kv, old)
    one.generation.changed()
    assert loop.call(one.leading(["page"])) == 0
    assert loop.call(one.play("page")) is None
    assert one.put("page", new).result(300.0)  # and not: it is known
    origin.look(2)
    assert torch.equal(loop.call(one.play("page")).kv, new)
    assert torch.equal(loop.call(other.play("page")).kv, old)
    one.generation.changed()
    assert loop.call(one.play("page")) is None
    for each in (one, other):
        loop.call(each.close())


def test_a_play_that_a_signal_comes_in_between_brings_nothing(origin, loop):
    one = store(loop, publish=origin.root, policy="fixed:FP16", **reach_of(origin))
    assert one.put("page", piece(0)).result(300.0)
    origin.look(1)
    play = one.client.play_coded

    async def slowly(*args, **kwargs):
        played = await play(*args, **kwargs)
        one.generation.changed()
        return played

    one.client.play_coded = slowly
    assert loop.call(one.play("page")) is None
    loop.call(one.close())


def test_an_origin_that_does_not_answer_costs_one_lookup_its_time(origin, loop, caplog):
    """And the caches that are here are still played. The origin comes back, and is asked again."""
    reach = reach_of(origin) | {"lookup_s": 10.0}
    one = store(loop, publish=origin.root, policy="fixed:FP16", **reach)
    for key, first in (("a", 0), ("b", 256), ("c", 512)):
        assert one.put(key, piece(first)).result(300.0)
    origin.look(3)
    assert torch.equal(loop.call(one.play("a")).kv, piece(0))
    find, asked = one.client.find_asset, []

    async def silent(*args, within_s, **kwargs):
        asked.append(args)
        await asyncio.sleep(0)  # as if that were over
        raise TransportError(f"no answer within {within_s:g} s")

    answers, alive = origin_pause.answers, asyncio.Event()

    async def probed(client, within_s):
        await alive.wait()
        return await answers(client, within_s)

    one.client.find_asset, origin_pause.answers = silent, probed
    try:
        with caplog.at_level(logging.WARNING, "kvabr.engines.chunk_store"):
            for number in range(8):
                assert loop.call(one.leading([f"new {number}", "b"])) == 0
        assert len(asked) == 2  # both keys of the first lookup
        assert "no further requests until it answers" in caplog.text
        assert torch.equal(loop.call(one.play("a")).kv, piece(0))  # found before, and its groups are in memory
        one.client.find_asset = find

        async def back():
            alive.set()
            while one._pause.active:  # noqa: ASYNC110
                await asyncio.sleep(0.01)

        loop.call(asyncio.wait_for(back(), 60.0))
        assert torch.equal(loop.call(one.play("b")).kv, piece(256))
    finally:
        origin_pause.answers = answers
        loop.call(one.close())


def test_who_does_not_know_the_heads_takes_any_of_the_same_width(origin, loop):
    """And is told which are there, also behind a gap."""
    one = store(loop, publish=origin.root)
    for key, first in (("a", 0), ("c", 512)):
        assert one.put(key, piece(first)).result(300.0)
    origin.look(2)
    bare = spec_of(SPEC.model, SPEC.tokenizer, LAYERS, 1, HEADS * DIM, torch.float16)
    narrow = spec_of(SPEC.model, SPEC.tokenizer, LAYERS, 1, HEADS * DIM - 1, torch.float16)

    async def opened(spec, *, any_heads):
        settings = KeyedSettings(policy="fixed:FP16", **reach_of(origin))
        return ChunkStore(spec, settings, "a test", max_tokens=256, any_heads=any_heads)

    some, any_, other = (
        loop.call(opened(spec, any_heads=wanted)) for spec, wanted in ((bare, False), (bare, True), (narrow, True))
    )
    assert loop.call(some.offered(["a", "b", "c"])) == loop.call(other.offered(["a", "b", "c"])) == [False] * 3
    assert loop.call(any_.offered(["a", "b", "c"])) == [True, False, True]
    played = loop.call(any_.play("a"))
    assert played.spec.kv_heads == HEADS
    assert torch.equal(played.kv, piece(0))
    for each in (one, some, any_, other):
        loop.call(each.close())


def test_stores_share_an_origin_and_what_is_known_of_it(loop):
    """One that does not answer costs the lookup of one of them."""

    async def opened():
        settings = KeyedSettings(url="moqt://127.0.0.1:9/", lookup_s=0.3)
        shared = KeyedOrigin(settings)
        return shared, [ChunkStore(SPEC, settings, "a test", max_tokens=256, origin=shared) for _ in range(2)]

    shared, (one, other) = loop.call(opened())
    assert loop.call(one.leading(["a"])) == 0
    assert shared.pause.active
    asked = []
    shared.client.find_asset = lambda *args, **_: asked.append(args)
    assert loop.call(other.leading(["b"])) == 0
    assert not asked
    loop.call(one.close())
    assert loop.call(other.leading(["c"])) == 0  # the origin outlives a store
    loop.call(other.close())
    loop.call(shared.close())
