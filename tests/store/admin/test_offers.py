"""Offers of a bucket: dead ones are collected, their numbers are used again, and what is no offer stays."""

from __future__ import annotations

import math

import pytest

import kvabr.store.objects.layout as layout_module
import kvabr.store.objects.reading as reading_module
import kvabr.store.objects.writer as writer_module
from kvabr.link.objects.index import StoreIndex
from kvabr.store.admin.opening import open_admin
from kvabr.store.admin.rules import Rules
from kvabr.store.objects.bucket import Bucket
from kvabr.store.objects.reading import read_offers
from kvabr.types.errors import AssetError
from tests.assets import digests, spec
from tests.store.admin.assets import LONG, names, new_place, publish

NOTHING_STAYS = Rules(grace_s=0.0, ttl_s=0.0)


@pytest.fixture(params=["memory", "file", "seaweed"])
def bucket_place(request, tmp_path):
    return (
        request.getfixturevalue("seaweed").url() if request.param == "seaweed" else new_place(request.param, tmp_path)
    )


async def test_offers_without_assets_make_room_for_others(bucket_place, monkeypatch):
    for module in (layout_module, reading_module, writer_module):
        monkeypatch.setattr(module, "MAX_OFFERS", 3)
    admin, bucket = open_admin(bucket_place), Bucket.open(bucket_place)
    for number in range(3):
        publish(bucket_place, LONG[number * 4 :], profile=b"profile %d" % number)
    assert len(names(bucket_place)) == 3
    with pytest.raises(AssetError, match=r"3 kinds of assets, and no room .*kvabr store gc"):
        publish(bucket_place, LONG[40:], profile=b"another")
    index = StoreIndex(bucket)
    assert (await index.find(spec(), digests(LONG[4:]), any_dtype=False)).catalog.tokens == 196
    kept = publish(bucket_place, LONG[60:80], profile=b"profile 1")
    await admin.pin(kept, 1000.0)
    rules = Rules(grace_s=0.0, ttl_s=0.0)
    assert (await admin.collect(rules, dry_run=True)).offers == 2
    done = await admin.collect(rules)
    assert (done.kept, done.offers, done.profiles) == (1, 2, 3)  # one of what was refused
    assert [key for key, offer in read_offers(bucket) if offer is None] == ["o/0.1", "o/2.1"]
    assert (await admin.collect(rules)).offers == 0
    index._offers_s = -math.inf  # as after some seconds
    assert await index.find(spec(), digests(LONG), any_dtype=False) is None
    publish(bucket_place, LONG, profile=b"another")
    assert [key for key, offer in read_offers(bucket) if offer is None] == ["o/2.1"]
    for reader in (index, StoreIndex(bucket)):
        reader._offers_s, reader._whole_s = -math.inf, -math.inf  # as after a minute
        assert (await reader.find(spec(), digests(LONG), any_dtype=False)).catalog.tokens == 200
        assert (await reader.find(spec(), digests(LONG[60:80]), any_dtype=False)).catalog.tokens == 20
    publish(bucket_place, LONG[8:], profile=b"the third")
    with pytest.raises(AssetError, match="no room"):
        publish(bucket_place, LONG[40:], profile=b"the fourth")
    await admin.collect(rules)
    assert [key for key, offer in read_offers(bucket) if offer is None] == ["o/0.2", "o/2.2"]
    assert [(await admin.verify())] == [[]]


NEWER = b'{"schema":"kvabr.offer/2","spec":"of a kind that nobody knows yet"}'


async def test_offers_of_a_newer_version_stop_nobody_and_keep_their_spans(tmp_path):
    place = new_place("memory", tmp_path)
    name = publish(place, LONG[:20])
    admin, bucket = open_admin(place), Bucket.open(place)
    await bucket.put("o/1", NEWER)
    await bucket.put("s/" + "e" * 16 + "/" + "f" * 16, b"a span of that kind")
    await bucket.put("p/" + "e" * 64, b"a profile of that kind")
    found = await admin.inventory()
    assert [each.name for each in found.holdings] == [name]
    assert "upgrade" in found.damaged["o/1"]
    assert [(each.name, each.repaired) for each in await admin.verify(repair=True)] == [("o/1", False)]
    done = await admin.collect(NOTHING_STAYS)
    assert done.waiting == 1
    assert done.spans == 1  # the one that is known
    assert "o/1" in done.damaged
    assert {found.key for found in bucket.list_sync("s/")} | {found.key for found in bucket.list_sync("p/")} == {
        "s/" + "e" * 16 + "/" + "f" * 16,
        "p/" + "e" * 64,
    }


async def test_what_is_no_offer_stays_and_stops_nobody(tmp_path):
    place = new_place("memory", tmp_path)
    publish(place, LONG[:20])
    admin, bucket = open_admin(place), Bucket.open(place)
    await bucket.put("o/mine", await bucket.get("o/0", limit=1 << 20))
    await bucket.put("o/0.5", await bucket.get("o/0", limit=1 << 20))  # left behind by a collector that was killed
    done = await admin.collect(Rules(grace_s=0.0, ttl_s=0.0))
    assert "is not the name of an offer" in done.damaged["o/mine"]
    assert done.offers == 2
    assert sorted(found.key for found in bucket.list_sync("o/")) == ["o/0", "o/mine"]
    publish(place, LONG[:20])
    assert sorted(found.key for found in bucket.list_sync("o/")) == ["o/0", "o/0.1", "o/mine"]
