"""Small tracks of a relay: what is believed, how long it is repeated, and how much of it is kept."""

import asyncio
import hashlib
import json

import pytest

from kvabr.moqt.codes import RequestCode
from kvabr.server.grants import EVERYTHING
from kvabr.server.relay_catalogs import Catalogs, check_small
from kvabr.types.errors import FormatError, RequestError
from kvabr.types.naming import CATALOG_TRACK, MODELS_TRACK, PROFILE_TRACK, TrackNamespace, prefix_track
from tests.assets import make_asset
from tests.hostile import DOCUMENTS
from tests.memory_transport import Fault
from tests.server.relays import LOG, dialled, get, in_memory, relaying


async def test_names_that_do_not_exist_leave_no_state(asset, tls):
    async with in_memory(asset) as upstream, relaying(upstream, tls) as server:
        relay, spec = server.source, asset.catalog.spec
        for number in range(300):
            digest = hashlib.sha256(b"%d" % number).hexdigest()
            namespace = TrackNamespace(spec.model, digest)
            for track in (CATALOG_TRACK, prefix_track([digest, digest]), "FP16", PROFILE_TRACK):
                assert await relay.find_soon(EVERYTHING, namespace, track) is None
        assert len(relay.catalogs._answers) == relay.catalogs._answers.currsize == 0
        assert not relay.groups
        assert len(relay.store) == 0
        assert upstream.downloads == 0


@pytest.mark.slow
async def test_names_that_exist_stay_within_the_bound(tmp_path):
    made = make_asset(tmp_path / "asset", list(range(64)))
    spec = made.catalog.spec
    catalog = made.catalog_bytes()
    limit = 200 * (len(catalog) + 8192)
    async with in_memory(made) as upstream:
        catalogs = Catalogs(upstream, LOG, limit=limit)
        first = made.catalog.chunks[0]
        for number in range(1500):
            other = hashlib.sha256(b"%d" % number).hexdigest()
            lookup = TrackNamespace(spec.model, first), prefix_track([first, other])
            assert (await catalogs.get(*lookup)).publication.open(0).data == catalog
            assert 0 < catalogs._answers.currsize <= limit
        assert 20 < len(catalogs._answers) < 400
        catalogs.close()
        assert catalogs._answers.currsize == 0


async def test_a_wrong_catalog_is_refused_and_not_kept(asset, tmp_path, tls, stale):
    elsewhere = make_asset(tmp_path / "elsewhere", list(range(100, 132)))
    lies = [b"{}", b"no JSON", elsewhere.catalog_bytes(), b""]

    def fault(ask):
        return Fault(replace=lies[ask.attempt]) if ask.track == CATALOG_TRACK and ask.attempt < len(lies) else None

    upstream = in_memory(asset, faults=fault)
    async with upstream, relaying(upstream, tls) as relay, await dialled(relay) as connection:
        namespace = asset.catalog.namespace
        for _ in lies:
            with pytest.raises(RequestError):
                await get(connection, namespace, CATALOG_TRACK)
            assert relay.source.catalogs._answers.currsize == 0
        assert await get(connection, namespace, CATALOG_TRACK) == asset.catalog_bytes()


async def test_a_wrong_profile_is_refused(tmp_path, tls):
    asset = make_asset(tmp_path / "asset", list(range(32)), profile=b"a profile")
    fault = Fault(replace=b"another one")
    upstream = in_memory(asset, faults=lambda ask: fault if ask.track == PROFILE_TRACK and not ask.attempt else None)
    name = TrackNamespace(asset.catalog.spec.model, asset.catalog.profile)
    async with upstream, relaying(upstream, tls) as relay, await dialled(relay) as connection:
        with pytest.raises(RequestError):
            await get(connection, name, PROFILE_TRACK)
        assert await get(connection, name, PROFILE_TRACK) == b"a profile"


@pytest.mark.parametrize(
    ("track", "change", "words"),
    [
        (CATALOG_TRACK, lambda value: value["chunks"].reverse(), "not the one in the namespace"),
        (CATALOG_TRACK, lambda value: value["tracks"][0]["digests"].__setitem__(0, "z" * 64), "not 64 hex digits"),
        (CATALOG_TRACK, lambda value: value["tracks"][0]["digests"].__setitem__(0, "00"), "not 64 hex digits"),
        ("prefix.", lambda value: value["chunks"].__setitem__(0, "00" * 32), "another prompt"),
    ],
)
def test_what_a_catalog_must_say(asset, track, change, words):
    data = asset.catalog_bytes()
    namespace = asset.catalog.namespace
    if track != CATALOG_TRACK:
        namespace = TrackNamespace(namespace.model, asset.catalog.chunks[0])
    facts = check_small(namespace, track, data)
    assert facts.sizes["Int4"][2] == len(asset.frame(2, "Int4"))
    assert facts.digest("Int4", 2) == hashlib.sha256(asset.frame(2, "Int4")).hexdigest()
    value = json.loads(data)
    change(value)
    with pytest.raises(FormatError, match=words):
        check_small(namespace, track, json.dumps(value).encode())


@pytest.mark.parametrize("what", DOCUMENTS)
def test_a_relay_refuses_what_is_made_to_be_slow(asset, what):
    for track in (CATALOG_TRACK, MODELS_TRACK):
        with pytest.raises(FormatError):
            check_small(asset.catalog.namespace, track, DOCUMENTS[what](200_000))


async def test_an_answer_is_repeated_for_half_a_minute_at_most(asset, monkeypatch):
    async with in_memory(asset) as upstream:
        catalogs, name = Catalogs(upstream, LOG), (asset.catalog.namespace, CATALOG_TRACK)
        answer = await catalogs.get(*name)
        for took_s, fresh_s in ((0.001, 2.0), (1.0, 20.0), (100.0, 30.0)):
            answer.took_s = took_s
            for age_s, found in ((fresh_s - 0.1, answer), (fresh_s + 0.1, None)):
                with monkeypatch.context() as patch:
                    patch.setattr(asyncio.get_running_loop(), "time", lambda: answer.received_s + age_s)  # noqa: B023
                    assert catalogs.fresh(*name) is found
        catalogs.close()


async def test_an_origin_that_says_nothing_is_waited_for_a_moment(asset, stale, monkeypatch):
    monkeypatch.setattr(Catalogs, "PATIENCE_S", 0.01)
    upstream = in_memory(asset, faults=lambda ask: Fault(stall_after=0) if ask.attempt else None)
    async with upstream:
        catalogs = Catalogs(upstream, LOG)
        first = await catalogs.get(asset.catalog.namespace, CATALOG_TRACK)
        for _ in range(3):
            assert await catalogs.get(asset.catalog.namespace, CATALOG_TRACK) is first
        assert upstream.requests == 2
        catalogs.close()


async def test_a_doubted_catalog_is_asked_for_again_and_kept_while_the_origin_is_away(asset, fresh):
    """As after a group that was wrong: then the origin lies, or has another asset by that name."""
    away = Fault(refuse=int(RequestCode.GOING_AWAY))
    upstream = in_memory(asset, faults=lambda ask: away if ask.attempt == 1 else None)
    async with upstream:
        catalogs, namespace = Catalogs(upstream, LOG), asset.catalog.namespace
        facts = (await catalogs.get(namespace, CATALOG_TRACK)).facts
        catalogs.distrust(namespace)
        assert (await catalogs.get(namespace, CATALOG_TRACK)).facts is facts
        assert upstream.requests == 2
        assert (await catalogs.get(namespace, CATALOG_TRACK)).facts is facts  # still in doubt, so asked for again
        assert upstream.requests == 3
        assert (await catalogs.get(namespace, CATALOG_TRACK)).facts is facts
        assert upstream.requests == 3
        catalogs.close()


async def test_small_tracks_under_way_have_a_bound(asset):
    size = asset.catalog_size
    async with in_memory(asset) as upstream:
        catalogs = Catalogs(upstream, LOG, limit=size // 2)
        with pytest.raises(RequestError, match="no memory"):
            await catalogs.get(asset.catalog.namespace, CATALOG_TRACK)
        assert catalogs._answers.currsize == catalogs._arriving == 0
