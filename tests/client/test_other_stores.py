"""A store that obstore does not speak is one class: assets are published into it, and played from it."""

from __future__ import annotations

import asyncio
import itertools
import time
from dataclasses import dataclass

import pytest
from kvabr.store.admin.bucket_admin import BucketAdmin
from kvabr.store.objects.asset_store import ObjectAssetStore
from kvabr.store.objects.bucket import OPENED_BY
from kvabr.store.objects.protocol import PART_BYTES, Objects

from kvabr.client.async_client import AsyncClient
from kvabr.store.blocking import blocked
from kvabr.store.locations import open_asset
from kvabr.store.url import SCHEMES, StoreUrl
from kvabr.types.errors import NotFoundError, RequestError
from tests.client.served import LIMIT_S
from tests.client.test_play import close
from tests.toymodel import SPEC, prompt


@dataclass
class Item:
    """An object on a shelf."""

    key: str
    data: bytes
    etag: str
    modified_s: float

    @property
    def size(self):
        return len(self.data)


class Shelf(Objects):
    """Objects in a dictionary; every request waits for a moment."""

    def __init__(self, url):
        self.where, self.items, self._etags = StoreUrl.parse(url), {}, itertools.count()

    async def _wait(self):
        await asyncio.sleep(0)

    async def get(self, key, start=0, end=None, *, limit, wait_s=None):
        await self._wait()
        if key not in self.items:
            raise NotFoundError(f"{self.below(key)}: there is no such object")
        data = self.items[key].data[start:end]
        if len(data) > limit:
            raise RequestError(f"{self.below(key)}: too large")
        return memoryview(data)

    async def stream(self, key, start, end, *, part_bytes=PART_BYTES):
        data = await self.get(key, start, end, limit=end - start)
        for first in range(0, len(data), part_bytes):
            yield data[first : first + part_bytes]

    async def head(self, key):
        await self._wait()
        return self.items.get(key)

    async def list(self, prefix):
        for key in sorted(self.items):
            await self._wait()
            if key.startswith(prefix):
                yield self.items[key]

    async def put_new(self, key, data):
        if key in self.items:
            return False
        await self.put(key, data)
        return True

    async def put(self, key, data):
        await self._wait()
        self.items[key] = Item(key, bytes(data), str(next(self._etags)), time.time())

    async def delete(self, keys):
        await self._wait()
        for key in keys:
            self.items.pop(key, None)

    def of_tenant(self, name):
        raise NotImplementedError


@pytest.fixture
def shelf(monkeypatch):
    monkeypatch.setitem(SCHEMES, "shelf", {"tenant"})
    made = Shelf("shelf://one/models")
    monkeypatch.setitem(OPENED_BY, "shelf", lambda _url: made)
    return made


async def test_assets_are_published_played_and_managed_there(shelf, root):
    asset = open_asset(root / "long")

    def publish():
        with ObjectAssetStore(shelf.url).writer(asset.catalog.namespace.prompt) as writer:
            for name, track in asset.catalog.published.items():
                for group in range(len(track.bytes)):
                    writer.frame(group, name, asset.frame(group, name))
            if asset.catalog.profile is not None:
                writer.profile(asset.profile_bytes())
            writer.commit(asset.catalog)

    await asyncio.to_thread(publish)
    async with AsyncClient(shelf.url) as client:
        got = await client.play(prompt(160).tokens, deadline=LIMIT_S, model=SPEC)
    assert got.tokens == 160
    assert close(got.kv, prompt(160).tokens)
    (held,) = (await BucketAdmin(shelf).inventory()).holdings
    assert held.name == asset.catalog.namespace.prompt


def test_a_request_has_a_twin_that_blocks(shelf):
    assert shelf.put_new_sync("a/1", b"one")
    assert not shelf.put_new_sync("a/1", b"two")
    shelf.put_sync("a/2", b"three")
    assert bytes(shelf.get_sync("a/2", 1, 3, limit=2)) == b"hr"
    assert [each.key for each in shelf.list_sync("a/")] == ["a/1", "a/2"]
    shelf.delete_sync(["a/1"])
    assert shelf.head_sync("a/1") is None
    with pytest.raises(NotFoundError, match="shelf://one"):
        shelf.get_sync("a/1", limit=2)


async def test_twins_block_also_where_an_event_loop_runs(shelf):
    shelf.put_sync("a/1", b"one")
    assert bytes(await shelf.get("a/1", limit=3)) == b"one"


def test_errors_of_what_blocks_are_its_callers():
    async def fails():
        await asyncio.sleep(0)
        raise KeyError("x")

    with pytest.raises(KeyError):
        blocked(fails())
