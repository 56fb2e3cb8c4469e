"""What an origin has of a prompt: the longest prefix, in as few round trips as it takes, and nothing on trust."""

import asyncio
import contextlib
import random
from dataclasses import replace
from functools import partial

import pytest

from kvabr.client import memory
from kvabr.client.async_client import AsyncClient
from kvabr.client.lookup import catalog_limit, fetch_catalog, find_prefix, playable
from kvabr.client.memory import ProfileCache
from kvabr.server.grants import EVERYTHING
from kvabr.server.published_assets import PublishedAssets
from kvabr.store.live import LiveWriter, new_key
from kvabr.store.local import LocalStore
from kvabr.types.catalog import MAX_CATALOG_BYTES
from kvabr.types.errors import ForeignError, FormatError, RequestError
from kvabr.types.live import UNKNOWN, LiveCatalog
from kvabr.types.naming import LIVE_PREFIX_TRACK, LIVE_TRACK
from tests import assets, toymodel
from tests.client.virtual import virtual
from tests.memory_transport import Fault, MemoryConnection

SPEC = assets.spec()


def connection(root, **options):
    return MemoryConnection(partial(PublishedAssets(root).find, EVERYTHING), **options)


@pytest.mark.parametrize("groups", [3, 320, 321, pytest.param(1000, marks=pytest.mark.slow)])
@virtual
async def test_the_longest_prefix_is_found_in_two_round_trips_at_most(tmp_path, groups):
    dice = random.Random(groups)
    prompt = [dice.randrange(50_000) for _ in range(4 * groups + 3)]
    shares = sorted({1, groups // 3, groups - 1, dice.randrange(1, groups + 1)})
    for share in shares:
        assets.make_asset(tmp_path / f"shares-{share}", [*prompt[: 4 * share], *range(9)])

    async with connection(tmp_path) as link:
        found = await find_prefix(link, prompt, SPEC)
        assert found.catalog.groups == shares[-1]
        assert found.catalog.tokens == 4 * shares[-1]
        assert link.requests <= (1 if groups < 321 else 2)
        other = await find_prefix(link, [*prompt[: 4 * shares[0]], 49_999, 49_998], SPEC)
        assert other.catalog.groups == shares[0]
        assert await find_prefix(link, [49_999, *prompt], SPEC) is None
        assert await find_prefix(link, prompt, SPEC, salt=b"tenant") is None


@pytest.mark.parametrize("groups", [320, 400])
def test_of_growing_caches_too_the_one_is_found_that_shares_most(tmp_path, groups):
    prompt = [token % 50_000 for token in range(4 * groups)]
    with contextlib.ExitStack() as stack:
        # Of a prompt with more than 321 groups a lookup names every second one.
        for share in (200, 201, 202):
            made = assets.make_asset(tmp_path / f"made-{share}", [*prompt[: 4 * share], *range(9)]).catalog
            tracks = tuple(replace(track, digests=(UNKNOWN,) * made.groups) for track in made.tracks)
            writer = stack.enter_context(LiveWriter(LocalStore(tmp_path / "root"), None))
            writer.begin_live(LiveCatalog(replace(made, tracks=tracks), (0.0,) * made.groups, new_key()))
        published = PublishedAssets(tmp_path / "root")
        asyncio.run(published.live.scan())

        @virtual
        async def check():
            async with MemoryConnection(partial(published.find, EVERYTHING)) as link:
                for share in (200, 201, 202):
                    other = [*prompt[: 4 * share], *(token + 1 for token in prompt[4 * share :])]
                    found = await find_prefix(link, other, SPEC, live=True)
                    assert found.live is not None
                    assert found.catalog.tokens == 4 * share

        check()


@pytest.mark.parametrize("silent", [LIVE_TRACK, LIVE_PREFIX_TRACK])
@virtual
async def test_a_complete_asset_is_found_although_live_lookups_get_no_answer(tmp_path, silent):
    """As at a relay that has it, and an origin behind the relay that is gone."""
    made = assets.make_asset(tmp_path / "made", range(12))

    def fault(ask):
        return Fault(stall_after=0) if ask.track.startswith(silent) else None

    async with connection(tmp_path, faults=fault) as link, asyncio.timeout(60.0):
        assert (await fetch_catalog(link, made.catalog.namespace, live=True)).catalog == made.catalog
        assert (await find_prefix(link, range(12), SPEC, live=True)).catalog.tokens == 12


@virtual
async def test_a_cache_of_another_shape_is_foreign(tmp_path):
    assets.make_asset(tmp_path / "exact", range(10))

    async with connection(tmp_path) as link:
        with pytest.raises(ForeignError, match="cannot be mixed"):
            await find_prefix(link, range(10), SPEC.changed(layers=(0, 1)))


@virtual
async def test_a_catalog_may_be_as_large_as_the_prompt_allows(origin, short):
    async with origin(faults=lambda _: Fault(endless=True)) as link:
        with pytest.raises(RequestError, match=f"longer than the {catalog_limit(5)} bytes"):
            await find_prefix(link, toymodel.prompt(70).tokens, toymodel.SPEC)
        assert link.bytes_received <= catalog_limit(5)
        with pytest.raises(RequestError, match=f"longer than the {MAX_CATALOG_BYTES} bytes"):
            await fetch_catalog(link, short.namespace)


def test_only_what_can_be_decoded_is_played(long, short):
    assert playable(long, profile=True) is long
    assert "AC-5x" not in playable(long, profile=False).by_name
    strange = replace(short.tracks[0], name="MPEG")
    refining = replace(short.tracks[1], name="FP8", refines="MPEG")
    odd = replace(short, tracks=(strange, refining, short.tracks[2]))
    assert list(playable(odd, profile=False).by_name) == ["Int4"]
    with pytest.raises(FormatError, match=r"MPEG.*can be decoded here.*plug-in"):
        playable(replace(short, tracks=(strange,)), profile=True)
    with pytest.raises(FormatError, match="without its codec profile: it is too new") as caught:
        playable(replace(long, tracks=(long.by_name["AC-5x"],)), profile=False, why="it is too new")
    assert "plug-in" not in str(caught.value)


@pytest.fixture
def forgotten(monkeypatch):
    memory._profiles.clear()


@virtual
async def test_a_profile_is_fetched_once_and_kept(origin, long, forgotten, tmp_path):
    folder = tmp_path / "cache" / "profiles"
    async with origin(folder="long") as link:
        assert not ProfileCache(folder).has(long)
        first = await ProfileCache(folder).fetch(link, long)
        assert first.digest == long.profile
        assert link.requests == 1
        assert await ProfileCache(folder).fetch(link, long) is first
        memory._profiles.clear()
        assert ProfileCache(folder).has(long)
        again = await ProfileCache(folder).fetch(link, long)
        assert again.digest == long.profile
        assert link.requests == 1
        # A damaged file is as good as none.
        memory._profiles.clear()
        (file,) = folder.iterdir()
        file.write_bytes(file.read_bytes()[:-1])
        assert (await ProfileCache(folder).fetch(link, long)).digest == long.profile
        assert link.requests == 2


@virtual
async def test_plays_that_want_the_same_profile_fetch_it_once(origin, long, forgotten):
    async with origin(folder="long") as link, AsyncClient(link) as client:
        await asyncio.gather(*(client.fetch_profile(long) for _ in range(10)))
        assert memory._profiles[long.profile].digest == long.profile
        assert link.requests == 1


@virtual
async def test_a_peer_that_stalls_holds_up_no_profile_from_others(origin, long, forgotten):
    stalls = lambda _: Fault(stall_after=100)  # noqa: E731
    async with origin(folder="long", faults=stalls) as frozen, origin(folder="long") as healthy:
        waiting = asyncio.create_task(ProfileCache().fetch(frozen, long))
        await asyncio.sleep(0.1)
        began_s = asyncio.get_running_loop().time()
        assert (await ProfileCache().fetch(healthy, long)).digest == long.profile
        assert asyncio.get_running_loop().time() - began_s < 0.1
        assert not waiting.done()
        waiting.cancel()


@virtual
async def test_a_wrong_profile_from_one_peer_does_not_spoil_it_for_others(origin, long, forgotten):
    wrong = lambda _: Fault(corrupt_at=100)  # noqa: E731
    async with origin(folder="long", faults=wrong) as liar, origin(folder="long") as honest:
        told = await asyncio.gather(
            *(ProfileCache().fetch(link, long) for link in (liar, honest, liar, honest)), return_exceptions=True
        )
    assert isinstance(told[0], FormatError)
    assert [each.digest for each in told[1::2]] == [long.profile] * 2


@virtual
async def test_a_profile_that_is_not_the_one_named_is_refused(origin, long, short, forgotten):
    async with origin(folder="long", faults=lambda _: Fault(corrupt_at=100)) as link:
        with pytest.raises(FormatError, match="not the one that the catalog names"):
            await ProfileCache().fetch(link, long)
        with pytest.raises(FormatError, match="at profile"):
            await ProfileCache().fetch(link, replace(long, profile="../../etc/passwd"))
        with pytest.raises(FormatError, match="profile must have"):
            await ProfileCache().fetch(link, replace(long, profile_bytes=0))
        assert await ProfileCache().fetch(link, short) is None
        assert not memory._profiles


@virtual
async def test_the_shipped_profile_needs_no_network(origin, forgotten):
    from kvabr.data import default_catalog

    catalog = default_catalog()
    assert ProfileCache().has(catalog)
    async with origin() as link:
        assert (await ProfileCache().fetch(link, catalog)).digest == catalog.profile
        assert link.requests == 0
