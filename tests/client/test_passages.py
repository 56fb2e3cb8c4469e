"""Passages and prompts side by side in one store: nobody is given the one for the other."""

import asyncio
from dataclasses import replace
from functools import partial

import pytest

from kvabr.client.lookup import fetch_catalog, fetch_view, find_prefix
from kvabr.client.origins import dialling
from kvabr.client.passages import find_passages
from kvabr.client.result import NothingCached
from kvabr.server.grants import EVERYTHING
from kvabr.server.published_assets import PublishedAssets
from kvabr.store.locations import open_asset
from kvabr.transfer.interface import read_all
from kvabr.types.digests import has_digest
from kvabr.types.errors import FormatError, NotFoundError, UsageError
from kvabr.types.naming import TrackNamespace, prefix_track
from kvabr.types.passage import Passage, PassageNotes
from tests import assets
from tests.client.playing import play, play_asset
from tests.client.stored import memory_url, put_asset
from tests.client.virtual import virtual
from tests.memory_transport import Fault, MemoryConnection, MemoryLink

IDS = tuple(range(100, 118))
NOTES = PassageNotes("alone")
SPEC = assets.spec()
NAME = Passage(IDS).name(SPEC)


def connection(root):
    return MemoryConnection(partial(PublishedAssets(root).find, EVERYTHING))


@pytest.fixture
def both(tmp_path):
    """A store with a passage, and with a prompt that begins with the first eight of its tokens."""
    assets.make_asset(tmp_path / "passage", IDS, passage=NOTES)
    assets.make_asset(tmp_path / "prompt", IDS[:8])
    return tmp_path


@virtual
async def test_a_lookup_of_a_prompt_never_finds_a_passage(both):
    async with connection(both) as link:
        assert (await find_prefix(link, IDS, SPEC)).catalog.tokens == 8
        found = await fetch_catalog(link, NAME)
        assert found.catalog.passage == NOTES
        # Not even if the passage's own digests are asked for as if they were a prompt's.
        digests = assets.digests(IDS, passage=True)
        with pytest.raises(NotFoundError):
            await fetch_view(link, TrackNamespace(SPEC.model, digests[0]), prefix_track(digests), 1 << 20)


@virtual
async def test_nobody_plays_a_passage_as_a_prompt(tmp_path):
    assets.make_asset(tmp_path / "passage", IDS, passage=NOTES)

    async with connection(tmp_path) as link:
        assert isinstance(await play(link, IDS, deadline=5.0, spec=SPEC), NothingCached)
        for tokens in ((), IDS):
            with pytest.raises(UsageError, match="play it as a part"):
                await play_asset(link, NAME, deadline=5.0, tokens=tokens)


@virtual
async def test_tenants_do_not_see_each_others_passages(tmp_path):
    assets.make_asset(tmp_path / "mine", IDS, passage=NOTES, salt=b"mine")

    async with connection(tmp_path) as link:
        assert (await fetch_catalog(link, Passage(IDS).name(SPEC, b"mine"))).catalog.tokens == len(IDS)
        for salt in (b"", b"theirs"):
            with pytest.raises(NotFoundError):
                await fetch_catalog(link, Passage(IDS).name(SPEC, salt))


FIVE = [Passage(range(100 * n, 100 * n + 9 + n)) for n in range(5)]


@pytest.fixture
def five(tmp_path):
    for number, passage in enumerate(FIVE):
        assets.make_asset(tmp_path / f"passage-{number}", passage.ids, passage=NOTES)
    return tmp_path


@virtual
async def test_five_passages_are_found_in_one_round_trip(five):
    path = MemoryLink(1e9, 0.2)
    async with MemoryConnection(partial(PublishedAssets(five).find, EVERYTHING), path) as link:
        begun_s = link.loop.time()
        found = await find_passages(link, [*FIVE, FIVE[0], Passage((9, 9, 9))], SPEC)
        assert link.loop.time() - begun_s == pytest.approx(0.2, abs=0.01)
        assert link.requests == 6
        assert [found[passage].catalog.tokens for passage in FIVE] == [9, 10, 11, 12, 13]
        assert Passage((9, 9, 9)) not in found


@pytest.mark.parametrize("scheme", ["file", "memory"])
def test_five_passages_are_found_in_a_bucket_with_a_get_each(five, tmp_path, scheme):
    url = memory_url() if scheme == "memory" else f"file://{tmp_path / 'bucket'}"
    for number in range(5):
        put_asset(url, open_asset(five / f"passage-{number}"))
    assets.make_asset(tmp_path / "prompt", FIVE[1].ids)
    put_asset(url, open_asset(tmp_path / "prompt"))

    async def check():
        async with dialling(url) as link:
            store, gets = link.finder._store, []
            read = store.get
            store.get = lambda *name, **how: (gets.append(name), read(*name, **how))[1]
            found = await find_passages(link, FIVE, SPEC)
            assert [found[passage].catalog.passage for passage in FIVE] == [NOTES] * 5
            assert len(gets) == 5
            # And each group is one range of one object.
            for passage in FIVE:
                track = found[passage].catalog.track("FP16")
                data = await read_all(link.fetch(passage.name(SPEC), "FP16", 1, limit=track.bytes[1]))
                assert has_digest(track.digests[1], data)
            # A prompt of the same tokens is found as a prompt, and is not the passage.
            prompt = await find_prefix(link, FIVE[1].ids, SPEC)
            assert prompt.catalog.passage is None
            assert prompt.catalog.namespace != found[FIVE[1]].catalog.namespace
            assert await find_prefix(link, FIVE[2].ids, SPEC) is None

    asyncio.run(check())


@virtual
async def test_what_is_not_the_passage_is_left_out(five, tmp_path):
    """An origin that answers with other passages, or with prompts, under the names that are asked for."""
    other = assets.make_asset(tmp_path / "elsewhere", range(700, 709), passage=NOTES)
    prompt = assets.make_asset(tmp_path / "a-prompt", FIVE[1].ids)

    true = open_asset(five / "passage-0").catalog
    lies = {
        FIVE[0]: other.catalog,
        FIVE[1]: replace(prompt.catalog, namespace=FIVE[1].name(SPEC)),
        FIVE[2]: replace(true, namespace=FIVE[2].name(SPEC), chunks=(*true.chunks[:-1], FIVE[2].name(SPEC).prompt)),
        FIVE[3]: replace(true, namespace=FIVE[3].name(SPEC)),
    }
    answers = {passage.name(SPEC): catalog.dumps().encode() for passage, catalog in lies.items()}

    def fault(ask):
        return Fault(replace=answers[ask.namespace]) if ask.namespace in answers else None

    async with MemoryConnection(partial(PublishedAssets(five).find, EVERYTHING), faults=fault) as link:
        told = {}
        assert list(await find_passages(link, FIVE, SPEC, refused=told.__setitem__)) == [FIVE[4]]
        assert set(told) == set(FIVE[:4])
        assert "is of another prompt" in str(told[FIVE[3]])
        with pytest.raises(FormatError):
            await find_passages(link, FIVE[:4], SPEC)
        assert list(await find_passages(link, [FIVE[4]], SPEC)) == [FIVE[4]]
        assert not await find_passages(link, [FIVE[4]], SPEC, salt=b"another tenant")
