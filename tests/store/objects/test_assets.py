"""Assets in object stores: what is published is listed, read, shared, and survives publishers that race or die."""

from __future__ import annotations

import itertools
import json
import multiprocessing
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest

from kvabr.store.locations import open_asset, open_store
from kvabr.store.objects import spans
from kvabr.store.objects.bucket import Bucket
from kvabr.store.objects.layout import StoreOffer, pointer_key, span_key, span_names
from kvabr.store.objects.reading import read_catalog, read_head, read_offers
from kvabr.types.errors import AssetError, FormatError, UsageError
from tests.assets import whole
from tests.client.classes import HYBRID, INDEXED, SLIDING, WINDOWS
from tests.store.objects.publishing import PLAIN, check, put

TOKENS = list(range(700))
STATES = replace(HYBRID, classes=(*HYBRID.classes[:2], replace(HYBRID.classes[2], interval=64)))


def keys(url):
    return sorted(one.key for one in Bucket.open(url).list_sync(""))


@pytest.mark.parametrize("spec", [PLAIN, SLIDING, INDEXED, WINDOWS, HYBRID, STATES], ids=lambda spec: spec.model[5:])
@pytest.mark.parametrize("tokens", [5, 256, 300])
def test_what_is_published_is_read(tmp_path, spec, tokens):
    url = f"file://{tmp_path}/objects?layout=objects"
    catalog, writer = put(url, spec, TOKENS[:tokens])
    assert writer.published
    store = open_store(url)
    name = catalog.namespace.prompt
    assert store.list().versions == {name: store.version(name)}
    asset = store.open(name)
    assert check(asset) == catalog
    assert asset.is_current()
    track, number = catalog.address(0, "FP16")
    assert whole(asset.open_frame(number, track)) == asset.frame(number, track)
    with pytest.raises(AssetError, match="do not keep the token ids"):
        asset.prompt()
    assert open_asset(asset.location).catalog == catalog
    assert open_asset(url).catalog == catalog  # the only one
    assert open_store(asset.location).list().versions.keys() == {"."}


def test_prompts_share_spans_and_a_longer_one_adds_only_its_own(store_url):
    first, writer = put(store_url, PLAIN, TOKENS[:512])
    assert writer.reused == 0
    before = keys(store_url)
    second, writer = put(store_url, PLAIN, TOKENS[:512] + TOKENS[:100], loss=0.7)
    assert writer.reused == 2
    added = set(keys(store_url)) - set(before)
    assert sorted(key[0] for key in added) == ["a", *"i" * 7, "s"]
    listed = check(open_store(store_url).open(second.namespace.prompt))
    assert listed.tracks[0].loss == (*first.tracks[0].loss[:32], *(0.7,) * 7)  # what is there is listed as it is
    assert check(open_store(store_url).open(first.namespace.prompt)) == first
    with pytest.raises(UsageError, match="--force"):
        open_store(store_url).writer(first.namespace.prompt)


def test_a_state_at_the_end_of_one_prompt_is_not_in_the_middle_of_another(tmp_path):
    url = f"file://{tmp_path}/objects?layout=objects"
    for tokens in (512, 700, 300, 256):
        put(url, HYBRID, TOKENS[:tokens])
    store = open_store(url)
    assert {check(store.open(name)).tokens for name in store.list().versions} == {512, 700, 300, 256}
    ends = [key for key in keys(url) if key.endswith(".end")]
    assert len(ends) == 4


def test_every_group_is_found_by_its_digest(store_url):
    catalog, _ = put(store_url, HYBRID, TOKENS[:300])
    bucket, offer = Bucket.open(store_url), StoreOffer.of(catalog)
    assert [(key, found.id) for key, found in read_offers(bucket)] == [("o/0", offer.id)]
    names = span_names(HYBRID, catalog.chunks)
    for group, digest in enumerate(catalog.chunks):
        if group == 15:
            head, _ = read_head(bucket, span_key(offer.id, names[group // 16]))
        else:
            name, head = spans.parse_pointer(bucket.get_sync(pointer_key(offer.id, digest), limit=1 << 20))
            assert name == names[group // 16]
            assert head == read_head(bucket, span_key(offer.id, name))[0]
        spans.check_span(head, offer)
        assert head.digests[group - head.first] == digest


def test_offers_are_numbered_and_those_of_newer_versions_skipped(store_url):
    bucket = Bucket.open(store_url)
    bucket.put_new_sync("o/0", json.dumps({"schema": "kvabr.offer/2"}).encode())
    catalog, _ = put(store_url, PLAIN, TOKENS[:20])
    put(store_url, HYBRID, TOKENS[:20])
    put(store_url, PLAIN, TOKENS[:30])
    put(store_url, PLAIN, TOKENS[:40], tracks=("Int8",))
    found = dict(read_offers(bucket))
    assert isinstance(found["o/0"], FormatError)
    assert [one.tracks[0].name for key, one in found.items() if key != "o/0"] == ["FP16", "FP16", "Int8"]
    assert check(open_store(store_url).open(catalog.namespace.prompt)) == catalog


def test_a_catalog_or_span_of_a_newer_version_is_named(store_url):
    catalog, _ = put(store_url, PLAIN, TOKENS[:40])
    bucket, name = Bucket.open(store_url), catalog.namespace.prompt
    key = read_catalog(bucket, name).keys[0]
    data = bytes(bucket.get_sync(f"a/{name}", limit=1 << 20))
    bucket.put_sync(f"a/{name}", data.replace(b"stored-catalog/1", b"stored-catalog/2"))
    with pytest.raises(FormatError, match=r"stored-catalog/2.*upgrade"):
        open_store(store_url).open(name)
    span = bytes(bucket.get_sync(key, limit=1 << 20))
    bucket.put_sync(key, span[:4] + b"\2" + span[5:])
    with pytest.raises(AssetError, match=r"version 2.*upgrade.*remove it"):
        put(store_url, PLAIN, TOKENS[:40], force=True)


@pytest.mark.parametrize("damage", ["flipped", "cut", "gone", "of another prompt"])
def test_an_object_that_was_replaced_under_a_reader_is_found_out(store_url, damage):
    catalog, _ = put(store_url, PLAIN, TOKENS[:40])
    other, _ = put(store_url, PLAIN, TOKENS[100:140])
    bucket, name = Bucket.open(store_url), catalog.namespace.prompt
    asset = open_store(store_url).open(name)
    key = read_catalog(bucket, name).keys[0]
    data = bytes(bucket.get_sync(key, limit=1 << 20))
    new = {"flipped": data[:-1] + bytes([data[-1] ^ 1]), "cut": data[:-1], "gone": None}.get(
        damage, bytes(bucket.get_sync(read_catalog(bucket, other.namespace.prompt).keys[0], limit=1 << 20))
    )
    bucket.delete_sync([key])
    if new is not None:
        bucket.put_sync(key, new)
    with pytest.raises(AssetError if damage == "gone" else FormatError, match=f"{name}|s/"):
        asset.frame(2, catalog.tracks[-1].name)
    if damage in ("cut", "gone"):
        with pytest.raises(AssetError):
            asset.open_frame(2, catalog.tracks[-1].name)
        with pytest.raises(AssetError, match=r"publish the asset again|has .* bytes"):
            open_store(store_url).open(name).check_parts()


def test_a_publisher_that_ends_early_leaves_nothing_that_is_listed(store_url, monkeypatch):
    put_new, left = Bucket.put_new_sync, itertools.count()

    for steps in itertools.count():
        writes = itertools.count()

        def dies(self, key, data, writes=writes, steps=steps):
            if next(writes) == steps:
                raise KeyboardInterrupt
            return put_new(self, key, data)

        Bucket.open(store_url).probe_sync()
        monkeypatch.setattr(Bucket, "put_new_sync", dies)
        try:
            catalog, _ = put(store_url, PLAIN, TOKENS[:70])
            break
        except KeyboardInterrupt:
            next(left)
            assert open_store(store_url).list().versions == {}
            assert not [key for key in keys(store_url) if key.startswith("a/")]
        monkeypatch.setattr(Bucket, "put_new_sync", put_new)
    assert next(left) > 3
    assert check(open_store(store_url).open(catalog.namespace.prompt)) == catalog


def test_a_name_that_is_no_digest_is_refused(tmp_path):
    store = open_store(f"file://{tmp_path}/objects?layout=objects")
    with pytest.raises(UsageError, match="named by their prompt digest"):
        store.writer("team/a")
    assert store.version("team/a") is None
    with pytest.raises(AssetError, match="no such folder"):
        store.list()
    store.prepare()
    with pytest.raises(AssetError, match="no such asset"):
        store.open("ab" * 32)
    with pytest.raises(AssetError, match="store is empty"):
        store.open()
    for tokens in (20, 30):
        put(store, PLAIN, TOKENS[:tokens])
    with pytest.raises(AssetError, match=r"has 2 assets .*DIGEST"):
        store.open()


def test_publishers_in_threads_agree(store_url):
    """Of the same prompt and of prompts that share spans, encoded with unlike losses."""
    store = open_store(store_url)
    store.prepare()
    prompts = [TOKENS[:300], TOKENS[:512], TOKENS[:300], TOKENS[:512] + TOKENS[:50], TOKENS[:300], TOKENS[:600]]

    def publish(one):
        number, tokens = one
        try:
            return put(store_url, PLAIN, tokens, loss=number / 8)[1].published
        except UsageError as error:  # it was there before this one began
            assert "--force" in str(error)  # noqa: PT017
            return False

    with ThreadPoolExecutor(6) as pool:
        won = list(pool.map(publish, enumerate(prompts)))
    assert sum(won) == 4
    found = store.list().versions
    assert len(found) == 4
    for name in found:
        check(store.open(name))
    assert len([key for key in keys(store_url) if key.startswith("o/")]) == 1


def _publish_in_a_process(url, number, tokens):
    put(url, PLAIN, tokens, loss=number / 8, force=number == 9)


@pytest.mark.process
@pytest.mark.slow
def test_publishers_in_processes_agree(seaweed):
    url = seaweed.url()
    open_store(url).prepare()
    prompts = [TOKENS[:300], TOKENS[:300], TOKENS[:300] + TOKENS[:300], TOKENS[:256] + TOKENS[50:90]]
    spawned = multiprocessing.get_context("spawn")
    started = [
        spawned.Process(target=_publish_in_a_process, args=(url, number, tokens))
        for number, tokens in enumerate(prompts)
    ]
    for one in started:
        one.start()
    for one in started:
        one.join(300)
    store = open_store(url)
    found = store.list().versions
    assert len(found) == 3
    for name in found:
        check(store.open(name))


@pytest.mark.process
@pytest.mark.slow
def test_a_publisher_that_is_killed_harms_nobody(seaweed):
    url = seaweed.url()
    script = (
        "import os, sys; from kvabr.store.objects.bucket import Bucket; put = Bucket.put_new_sync; left = [4]\n"
        "def dies(self, key, data):\n"
        "    left[0] -= 1 if key[:2] in ('s/', 'i/') else 0\n"
        "    if not left[0]: os.kill(os.getpid(), 9)\n"
        "    return put(self, key, data)\n"
        "Bucket.put_new_sync = dies\n"
        "from tests.store.objects.publishing import PLAIN, put as publish\n"
        "publish(sys.argv[1], PLAIN, list(range(600)))\n"
    )
    done = subprocess.run([sys.executable, "-c", script, url], env=os.environ, timeout=300, check=False)  # noqa: S603
    assert done.returncode == -9
    assert open_store(url).list().versions == {}
    catalog, writer = put(url, PLAIN, TOKENS[:600], loss=0.3)
    assert writer.published
    assert writer.reused > 0
    check(open_store(url).open(catalog.namespace.prompt))
