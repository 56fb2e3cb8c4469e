"""Passages and prompts side by side in one store: nobody is given the one for the other."""

from __future__ import annotations

from functools import partial

import pytest

from kvabr.client.lookup import fetch_catalog, fetch_small, find_prefix
from kvabr.client.result import NothingCached
from kvabr.server.grants import EVERYTHING
from kvabr.server.published_assets import PublishedAssets
from kvabr.types.errors import NotFoundError, PlayError, UsageError
from kvabr.types.naming import TrackNamespace, prefix_track
from kvabr.types.passage import Passage, PassageNotes
from tests import assets
from tests.client.playing import play, play_asset
from tests.client.virtual import virtual
from tests.memory_transport import MemoryConnection

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


def test_a_lookup_of_a_prompt_never_finds_a_passage(both):
    @virtual
    async def check():
        async with connection(both) as link:
            assert (await find_prefix(link, IDS, SPEC)).catalog.tokens == 8
            found = await fetch_catalog(link, NAME)
            assert found.catalog.passage == NOTES
            # Not even if the passage's own digests are asked for as if they were a prompt's.
            digests = assets.digests(IDS, passage=True)
            with pytest.raises(NotFoundError):
                await fetch_small(link, TrackNamespace(SPEC.model, digests[0]), prefix_track(digests), 1 << 20)

    check()


def test_nobody_plays_a_passage_as_a_prompt(tmp_path):
    assets.make_asset(tmp_path / "passage", IDS, passage=NOTES)

    @virtual
    async def check():
        async with connection(tmp_path) as link:
            assert isinstance(await play(link, IDS, deadline=5.0, spec=SPEC), NothingCached)
            for tokens, words in (((), "played as a part"), (IDS, "not those of")):
                with pytest.raises(UsageError, match=words):
                    await play_asset(link, NAME, deadline=5.0, tokens=tokens)

    check()


def test_nobody_finds_a_prompt_by_the_name_of_a_passage(tmp_path):
    assets.make_asset(tmp_path / "prompt", IDS)

    @virtual
    async def check():
        async with connection(tmp_path) as link:
            with pytest.raises(NotFoundError):
                await fetch_catalog(link, NAME)
            with pytest.raises((NotFoundError, PlayError)):
                await play_asset(link, NAME, deadline=5.0)

    check()


def test_tenants_do_not_see_each_others_passages(tmp_path):
    assets.make_asset(tmp_path / "mine", IDS, passage=NOTES, salt=b"mine")

    @virtual
    async def check():
        async with connection(tmp_path) as link:
            assert (await fetch_catalog(link, Passage(IDS).name(SPEC, b"mine"))).catalog.tokens == len(IDS)
            for salt in (b"", b"theirs"):
                with pytest.raises(NotFoundError):
                    await fetch_catalog(link, Passage(IDS).name(SPEC, salt))

    check()
