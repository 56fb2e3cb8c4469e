"""Offers of a bucket: there is room for some, and those of newer versions stop nobody."""

from __future__ import annotations

import pytest

import kvabr.store.objects.reading as reading_module
import kvabr.store.objects.writer as writer_module
from kvabr.link.objects.index import StoreIndex
from kvabr.store.admin.opening import open_admin
from kvabr.store.objects.bucket import Bucket
from kvabr.types.errors import AssetError
from tests.assets import digests, spec
from tests.store.admin.assets import LONG, names, new_place, publish


async def test_a_tenant_has_room_for_some_offers(store_url, monkeypatch):
    for module in (reading_module, writer_module):
        monkeypatch.setattr(module, "MAX_OFFERS", 3)
    for number in range(3):
        publish(store_url, LONG[number * 4 :], profile=b"profile %d" % number)
    assert len(names(store_url)) == 3
    with pytest.raises(AssetError, match="3 kinds of assets, and no room"):
        publish(store_url, LONG[40:], profile=b"another")
    publish(store_url, LONG[60:80], profile=b"profile 1")
    index = StoreIndex(Bucket.open(store_url))
    assert (await index.find(spec(), digests(LONG[4:]), any_dtype=False)).catalog.tokens == 196


@pytest.mark.parametrize("key", ["o/1", "o/mine"])
async def test_what_cannot_be_read_as_an_offer_is_named_and_stops_nobody(tmp_path, key):
    place = new_place("memory", tmp_path)
    name = publish(place, LONG[:20])
    admin, bucket = open_admin(place), Bucket.open(place)
    await bucket.put(key, b'{"schema":"kvabr.offer/2","spec":"of a kind that nobody knows yet"}')
    found = await admin.inventory()
    assert [each.name for each in found.holdings] == [name]
    assert found.damaged.keys() == {key}
    publish(place, LONG[:30], profile=b"another")
    assert len(names(place)) == 2
