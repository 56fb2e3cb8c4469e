"""Sealed caches in buckets: players with a key find them by their spans, and administration needs no key."""

from __future__ import annotations

import asyncio
import json
import zlib
from dataclasses import replace

import pytest
import torch

from kvabr.cli.main import main
from kvabr.client.async_client import AsyncClient
from kvabr.client.options import PlayOptions
from kvabr.publish.publisher import Publisher
from kvabr.server.published_assets import PublishedAssets
from kvabr.store.admin.bucket_admin import BucketAdmin
from kvabr.store.admin.copying import copy_assets
from kvabr.store.admin.rewrapping import rewrap
from kvabr.store.asset_folder import FolderAsset, FolderAssetStore
from kvabr.store.locations import open_store
from kvabr.store.objects import spans
from kvabr.store.objects.bucket import Bucket
from kvabr.store.objects.layout import StoredWraps
from kvabr.types.catalog import Catalog
from kvabr.types.cost import PrefillCost
from kvabr.types.errors import PlayError, SealedError
from kvabr.types.naming import TrackNamespace, prefix_track
from kvabr.types.passage import Exact, Passage
from kvabr.types.sealing import MAX_KEYS, KeyRing, Wrap, new_key
from tests.client.classes import HYBRID, SLIDING, numbers, published
from tests.client.playing import connection
from tests.client.sealed import READER, RING, STRANGER, TOKENS, played
from tests.client.served import LIMIT_S
from tests.client.stored import memory_url
from tests.toymodel import SPEC, ToyModel, toy_asset, toy_passage

OTHERS = (*TOKENS[:100], 5, 5, 7)
"""A prompt that begins alike: it is found by the spans."""


def copied(both, url, name="sealed"):
    """Copy assets into a bucket, without a key."""
    done = copy_assets(FolderAssetStore(both / name), open_store(url, create=True))
    assert not done.failed
    return Bucket.open(url)


def objects_of(bucket, prefix=""):
    return {info.key: bytes(bucket.get_sync(info.key, limit=1 << 30)) for info in bucket.list_sync(prefix)}


async def from_bucket(url, keys, tokens=TOKENS):
    async with AsyncClient(url, keys=keys, options=PlayOptions(policy="anytime")) as client:
        return await client.play(tokens, deadline=LIMIT_S, model=SPEC)


@pytest.mark.parametrize("kind", ["memory", pytest.param("s3", marks=pytest.mark.process)])
async def test_a_bucket_plays_sealed_caches_as_it_does_open_ones(both, request, kind):
    url = memory_url() if kind == "memory" else request.getfixturevalue("seaweed").url()
    copied(both, url)
    copied(both, plain := memory_url(), "open")
    for tokens in (TOKENS, OTHERS):
        got, due = await from_bucket(url, READER, tokens), await from_bucket(plain, None, tokens)
        assert torch.equal(got.kv, due.kv)
        assert got.loss == pytest.approx(due.loss)
        with pytest.raises(PlayError, match=rf"sealed.*{RING.keys[0].id}"):
            await from_bucket(url, None, tokens)
        with pytest.raises(PlayError, match=r"sealed.*stranger"):
            await from_bucket(url, STRANGER, tokens)
    # an origin over the bucket, and the asset by its name
    async with connection(PublishedAssets(url)) as link, AsyncClient(url, keys=READER) as direct:
        client = AsyncClient(link, keys=READER)
        found = await client.find(TOKENS, model=SPEC)
        assert (await client.play_asset(found, deadline=2.0)).loss < 1
        assert (await direct.find_asset(found.catalog.namespace)).catalog == found.catalog
        await client.close()
        # what a relay over the bucket answers
        chunks = found.catalog.chunks
        space, track = TrackNamespace(SPEC.model, chunks[0]), prefix_track(chunks, 1, len(chunks))
        relayed = Catalog.loads(await (await direct.connect()).index.lookup(space, track))
        assert relayed.opened(READER).track("AC-L0").loss == found.catalog.track("AC-L0").loss


def test_nothing_of_the_losses_is_in_a_bucket(both):
    bucket = copied(both, memory_url())
    catalog = FolderAsset.open(both / "open" / "asset").catalog
    assert catalog.prefill is not None
    secret = {f"{loss}" for track in catalog.tracks for loss in track.loss} | {f"{catalog.prefill.per_token_s}"}
    for key, data in objects_of(bucket).items():
        head = spans.parse_head(data) if key.startswith("s/") else None
        texts = [data]
        if head is not None:
            texts.append(zlib.decompress(data[spans.HEADER_BYTES : head.begin]))
            assert not any(any(track.loss) for track in head.tracks)
        assert not [loss for text in texts for loss in secret if loss.encode() in text and len(loss) > 4], key
    offer = json.loads(objects_of(bucket, "o/")["o/0"])
    assert (offer["maker"], offer["prefill"], offer["loss_method"]) == (RING.keys[0].id, None, "")


async def test_publishers_share_a_bucket_and_each_reader_plays_its_own(both, tmp_path):
    """The first key of a ring makes the keys of assets, so two rings share no spans; one ring shares them."""
    prior, url = FolderAsset.open(both / "open" / "asset").catalog, memory_url()
    more = KeyRing((*RING.keys, new_key("third")))
    rings = [(None, 96), (STRANGER, 160), (RING, 128), (more, 144)]
    for ring, count in rings:
        publisher = Publisher(url, SPEC, prior=prior, tracks=("FP16",), keys=ring)
        slot = publisher.reserve(TOKENS[:count])
        slot.fill(ToyModel().prefill(TOKENS[:count]), lambda _: None)
        publisher.close()
    bucket = Bucket.open(url)
    assert len(objects_of(bucket, "o/")) == 3
    for keys, count in ((None, 96), (STRANGER, 160), (READER, 128), (KeyRing(more.keys[2:]), 128)):
        async with AsyncClient(url, keys=keys) as client:
            found = (await client.find((*TOKENS[:count], 1, 2, 3), model=SPEC)).catalog
            assert found.tokens == count
            assert any(found.track("FP16").loss)


async def test_keys_of_a_bucket_are_rotated_and_its_administration_needs_none(both, tmp_path, capsys):
    url = f"file://{tmp_path}/bucket?layout=objects"
    bucket = copied(both, url)
    admin = BucketAdmin(bucket)
    assert await admin.verify(deep=True) == []
    new = new_key("next")
    (ring := tmp_path / "ring").write_text(f"{new.line()}\n{RING.keys[0].line()}\n")
    (key,) = objects_of(bucket, "k/")
    await bucket.delete([key])
    assert [damage.name for damage in await admin.verify()] == [
        info.name for info in (await admin.inventory()).holdings
    ]
    for told in ("1 asset wrapped anew; 0 had these keys", "0 assets wrapped anew; 1 had these keys"):
        assert main(["keys", "rewrap", url, "--keys", str(ring)]) == 0
        assert told in capsys.readouterr().out
    assert main(["keys", "list", str(ring), url]) == 0
    told = capsys.readouterr().out.splitlines()
    assert told[0] == f"{new.id}  next  (first: makes the keys of assets)"
    assert told[2].endswith(": next, ours")
    assert await admin.verify(deep=True) == []
    for tokens in (TOKENS, OTHERS):
        assert (await from_bucket(url, KeyRing((new,)), tokens)).loss < 1
        with pytest.raises(PlayError, match=r"sealed.*next|sealed"):
            await from_bucket(url, READER, tokens)
    with pytest.raises(SealedError, match="it is sealed for the keys"):
        rewrap(open_store(url), STRANGER)
    (held,) = (await admin.inventory()).holdings
    await admin.remove([held.name])
    assert not objects_of(bucket, "s/")
    assert not objects_of(bucket, "k/")


def test_who_was_left_out_while_a_publisher_began_does_not_come_back(both, monkeypatch):
    """Keys are rotated between a publisher's look at who opens its spans and its own addition."""
    url, prior = memory_url(), FolderAsset.open(both / "open" / "asset").catalog
    more, left = KeyRing((RING.keys[0], new_key("third"))), KeyRing((RING.keys[0], new_key("next")))

    def publish(ring, count):
        publisher = Publisher(url, SPEC, prior=prior, tracks=("FP16",), keys=ring)
        publisher.reserve(TOKENS[:count]).fill(ToyModel().prefill(TOKENS[:count]), lambda _: None)
        publisher.close()

    publish(RING, 128)
    bucket = Bucket.open(url)
    (key,) = objects_of(bucket, "k/")
    get, seen = Bucket.get_sync, []

    def get_slowly(self, name, **how):
        data = get(self, name, **how)
        if name == key and not seen:
            seen.append(name)
            rewrap(open_store(url), left)
        return data

    monkeypatch.setattr(Bucket, "get_sync", get_slowly)
    publish(more, 160)
    wraps = {wrap["key"] for wrap in json.loads(objects_of(bucket, "k/")[key])["wraps"]}
    assert seen
    assert wraps == {key.id for key in (*left.keys, more.keys[1])}


def test_no_reader_is_left_out_in_silence():
    asset = RING.asset_key("0" * 64)
    wraps = [asset.wraps[0], *(Wrap(f"{number:016x}", asset.wraps[0].wrapped) for number in range(1, MAX_KEYS))]
    full, another = StoredWraps(tuple(wraps)), StoredWraps((Wrap("f" * 16, asset.wraps[0].wrapped),))
    assert full.joined(StoredWraps(full.wraps[:2])) == full
    with pytest.raises(SealedError, match=r"at most 64 open one beginning.*kvabr keys rewrap"):
        full.joined(another)


def test_a_cache_whose_keys_an_older_version_rotated_keeps_no_publisher_out(tmp_path):
    """Its first wrap is not of the key that made its own, and the catalog does not tell which did."""
    asset = toy_asset(tmp_path / "old" / "asset", ("FP16",), tokens=160, keys=RING)
    next_ = new_key("next")
    seal = asset.catalog.seal
    for ring in (KeyRing((next_, RING.keys[0])), KeyRing((next_,))):  # the key that made it is in the ring, or is not
        wraps = ring.wrapped(RING.unwrap(seal.wraps)).wraps
        path = tmp_path / "old" / "asset" / "catalog.json"
        path.write_text(replace(asset.catalog, seal=replace(seal, wraps=wraps, maker=None, runs=())).dumps())
        assert rewrap(FolderAssetStore(tmp_path / "old"), ring).wrapped == 1
        url = memory_url()
        copied(tmp_path, url, "old")
        prior = asset.catalog.opened(RING)
        publisher, done = Publisher(url, SPEC, prior=prior, tracks=("FP16",), keys=ring), []
        publisher.reserve(TOKENS[:128]).fill(ToyModel().prefill(TOKENS[:128]), done.append)
        publisher.close()
        assert [outcome.verdict for outcome in done] == ["published"]


SNAPSHOTS = replace(HYBRID, classes=(*HYBRID.classes[:2], replace(HYBRID.classes[2], interval=64)))


@pytest.mark.parametrize("spec", [SLIDING, SNAPSHOTS], ids=["sliding", "snapshots"])
async def test_classes_of_layers_and_states_are_found_by_sealed_spans(tmp_path, spec):
    """Where a state has no snapshot at the end of what is shared, the prefix is shorter than its last span."""
    found = []
    for name, keys in (("open", None), ("sealed", RING)):
        published(tmp_path / name, spec, list(range(330)), keys)
        copied(tmp_path, url := memory_url(), name)
        async with AsyncClient(url, keys=keys and READER) as client:
            for tokens in (range(330), [*range(300), *range(2000, 2020)], [*range(330), 7, 8]):
                answer = await client.find(list(tokens), model=spec)
                found.append(answer and (answer.catalog.tokens, [each.loss for each in answer.catalog.tracks]))
            got = await client.play(list(range(330)), deadline=LIMIT_S, model=spec)
            for kv, whole, span in zip(got.parts, numbers(spec, list(range(330))), got.catalog.spans, strict=True):
                seen = kv[:, :, :, -span.tokens :].float()
                assert (seen - whole[:, :, :, -span.tokens :]).abs().max() <= 1.5
    assert found[:3] == found[3:]
    assert [tokens for tokens, _ in found[:3]] == ([330, 288, 330] if spec is SLIDING else [330, 256, 330])


async def test_sealed_passages_are_played_from_a_bucket(tmp_path):
    passage = Passage(TOKENS[32:60])
    made = toy_passage(tmp_path / "sealed" / "one", passage.ids, ("FP16", "Int4"), keys=RING).catalog.opened(READER)
    bucket = copied(tmp_path, url := memory_url())
    async with AsyncClient(url, keys=READER) as client:
        found, refused = await client.find_joined((Exact(TOKENS[:32]), passage), SPEC)
        assert not refused
        how = {"cost": PrefillCost.from_rate(1.0), "options": PlayOptions(policy="fixed:FP16")}
        prefix = await client.play_prefix(found, deadline=LIMIT_S, skip=found.catalog.group_at(32), **how)
    assert found.catalog.sources[0].at(0) == made
    assert prefix.tokens == 28
    assert await BucketAdmin(bucket).verify(deep=True) == []


def test_caches_move_between_folder_and_bucket_without_a_key(both, tmp_path):
    url = memory_url()
    copied(both, url)
    copy_assets(open_store(url), FolderAssetStore(tmp_path / "back"))
    (name,) = FolderAssetStore(tmp_path / "back").list().versions
    back, was = (
        FolderAsset.open(tmp_path / "back" / name).catalog,
        FolderAsset.open(both / "sealed" / "asset").catalog,
    )
    assert back.opened(READER) == was.opened(RING)
    got = asyncio.run(played(tmp_path / "back", READER, "fixed:FP16"))
    assert got.loss == asyncio.run(played(both / "open", None, "fixed:FP16")).loss
