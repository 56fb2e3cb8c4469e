"""LMCache's multi-process daemon, on the CPU: its storage manager stores and prefetches over a real origin."""

import argparse
import json
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time

import pytest

pytest.importorskip("lmcache", reason="LMCache is not installed: tools/engine lmcache")

os.environ.setdefault("LMCACHE_TRACK_USAGE", "false")

import torch
from lmcache.v1.distributed.api import GroupedObjectKeys, MemoryLayoutDesc, ObjectKey, PrefetchTaskSpec
from lmcache.v1.distributed.config import add_storage_manager_args, parse_args_to_config
from lmcache.v1.distributed.internal_api import L2AdapterListener
from lmcache.v1.distributed.storage_manager import StorageManager
from lmcache.v1.multiprocess.custom_types import IPCCacheServerKey, RegisterEngineDrivenContextPayload
from lmcache.v1.multiprocess.token_hasher import TokenHasher
from lmcache.v1.multiprocess.transfer_context.base import EngineDrivenContextMetadata
from lmcache.v1.multiprocess.transfer_context.pickle import EngineDrivenContextPickle
from lmcache.v1.multiprocess.transport.factory import RequestClientFactory

from tests import kvdata
from tests.engines.served import Origin, harmed

LAYERS, HEADS, DIM, CHUNK = 4, 3, 64, 256
LAYOUT = MemoryLayoutDesc([torch.Size([2, LAYERS, CHUNK, HEADS * DIM])], [torch.float16])
RANK = ObjectKey.ComputeKVRank(1, 0, 1, 0)
LIMIT_S = 300.0


@pytest.fixture(scope="module")
def origin(tmp_path_factory):
    made = Origin(tmp_path_factory.mktemp("origin"))
    yield made
    made.close()


@pytest.fixture
def daemon():
    """Make storage managers as the daemon does, from its arguments: ``daemon(url=..., ...)``, kvabr's by keyword."""
    made = []

    def build(*, module="daemon", cls="KvabrL2", serde=None, **params):
        spec = {"type": "plugin", "module_path": f"kvabr.engines.lmcache.{module}", "class_name": cls}
        parser = argparse.ArgumentParser()
        add_storage_manager_args(parser)
        given = json.dumps({**spec, "adapter_params": params, "serde": serde})
        arguments = ["--l1-size-gb", "0.2", "--eviction-policy", "noop", "--l2-adapter", given]
        config = parse_args_to_config(parser.parse_args(arguments))
        config.l1_manager_configs[0].memory_config.shm_name = ""  # by default, all in this process share it
        made.append(StorageManager(config))
        return made[-1]

    yield build
    for each in made:
        each.close()


def reach(origin, **more):
    return {"url": origin.url, "fingerprint": origin.fingerprint, "deadline_s": 20.0, **more}


def keys_of(tokens, **more):
    """The keys of a prompt's chunks, hashed as the daemon does."""
    hashed = TokenHasher(CHUNK).compute_chunk_hashes(list(tokens))
    return [ObjectKey(one, "test/model", **{"kv_rank": RANK, **more}) for one in hashed]


class Stored(L2AdapterListener):
    def __init__(self, keys):
        self.missing, self.all = set(keys), threading.Event()

    def on_l2_keys_stored(self, keys, sizes):
        self.missing -= set(keys)
        if not self.missing:
            self.all.set()

    def on_l2_keys_accessed(self, keys):
        pass

    def on_l2_keys_deleted(self, keys):
        pass


def store(manager, keys, chunks, layout=LAYOUT):
    """Write objects to the daemon's memory, from where its controller stores them, and wait until it has."""
    stored = Stored(keys)
    manager.register_l2_listener(stored)
    objects = manager.reserve_write(keys, layout)
    assert len(objects) == len(keys)
    for key, chunk in zip(keys, chunks, strict=True):
        objects[key].tensor.copy_(chunk)
    manager.finish_write(keys)
    assert stored.all.wait(LIMIT_S)


def fetch(manager, rows, layout=LAYOUT):
    """Prefetch objects, and return of each row of keys which came, and all that came by key."""
    groups = [GroupedObjectKeys(row, row[0].object_group_id, layout) for row in rows]
    handle = manager.submit_prefetch_task(PrefetchTaskSpec(groups))
    assert manager.wait_prefetch_status(handle, LIMIT_S)
    result = manager.query_prefetch_status(handle)
    came = [
        [key for place, key in enumerate(row) if hits.test(place)]
        for row, hits in zip(rows, result.hit_cells, strict=True)
    ]
    every = [key for row in came for key in row]
    got = {}
    if every:
        with manager.read_prefetched_results(every) as objects:
            got = {key: one.tensor.clone() for key, one in zip(every, objects, strict=True)}
        manager.finish_read_prefetched(every)
    return came, got


def adapter(manager):
    return manager.l2_adapters()[0][1]


def chunks_of(count, seed=0, layout=LAYOUT):
    dice = torch.Generator().manual_seed(seed)
    return list(torch.randn((count, *layout.shapes[0]), generator=dice).to(layout.dtypes[0]))


LATENT = 576
MLA = MemoryLayoutDesc([torch.Size([1, LAYERS, CHUNK, LATENT])], [torch.bfloat16])
"""The shape of DeepSeek's, GLM's and Kimi's latents: 512 numbers, and 64 that rotate."""


@pytest.mark.parametrize(("layout", "exact"), [(LAYOUT, "FP16"), (MLA, "BF16")], ids=["heads", "mla"])
def test_what_a_daemon_stores_another_loads_to_the_byte(origin, daemon, layout, exact):
    """Of two ranks, a longer prompt: what is there of both comes, a prefix of the same length."""
    before = set(origin.holdings.assets)
    ranks = [ObjectKey.ComputeKVRank(2, rank, 2, rank) for rank in (0, 1)]
    rows = [keys_of(range(1100), kv_rank=rank) for rank in ranks]
    held = {
        key: chunk
        for seed, row in enumerate(rows)
        for key, chunk in zip(row, chunks_of(4, seed=seed, layout=layout), strict=True)
    }
    stored = [*rows[0], *rows[1][:3]]
    one = daemon(publish=str(origin.root), policy=f"fixed:{exact}", **reach(origin))
    store(one, stored, [held[key] for key in stored], layout)
    origin.look(len(before) + 7)
    new = [asset.catalog for asset in origin.holdings.assets if asset not in before]
    assert adapter(one).get_usage().total_bytes_used == sum(
        track.total_bytes for catalog in new for track in catalog.tracks
    )
    other = daemon(policy=f"fixed:{exact}", **reach(origin))
    came, got = fetch(other, rows, layout)
    assert came == [row[:3] for row in rows]
    assert all(torch.equal(got[key], held[key]) for row in came for key in row)
    # Another tenant has nothing of it.
    assert fetch(other, [keys_of(range(1100), kv_rank=ranks[0], cache_salt="else")], layout) == ([[]], {})


def test_a_damaged_object_ends_the_prefix_and_no_more(origin, daemon, caplog):
    before = set(origin.holdings.assets)
    one = daemon(publish=str(origin.root), tracks=["FP16"], **reach(origin))
    keys, chunks = keys_of(range(60_000, 61_024)), chunks_of(4, seed=7)
    store(one, keys, chunks)
    origin.look(len(before) + 4)
    (asset,) = (each for each in origin.holdings.assets if each not in before and each.catalog.position == 512)
    other = daemon(store_mib=0, **reach(origin, deadline_s=3.0))
    with harmed(asset, 0, "FP16", "corrupt"), caplog.at_level(logging.WARNING, "kvabr.engines.chunk_store"):
        came, got = fetch(other, [keys])
    assert came == [keys[:2]]
    assert all(torch.equal(got[key], chunk) for key, chunk in zip(keys[:2], chunks, strict=False))


@pytest.mark.parametrize(
    ("layout", "why"),
    [
        (MemoryLayoutDesc(MLA.shapes, [torch.float8_e4m3fn]), "quantises"),
        (MemoryLayoutDesc([*LAYOUT.shapes, *MLA.shapes], [torch.float16, torch.bfloat16]), "one kind of layers, got 2"),
        (MemoryLayoutDesc([torch.Size([3, LAYERS, CHUNK, 64])], [torch.float16]), "must have keys and values, or"),
    ],
)
def test_objects_that_kvabr_has_no_tracks_for_are_left_to_others(origin, daemon, caplog, layout, why):
    one = daemon(publish=str(origin.root), **reach(origin))
    before, keys = len(origin.holdings.assets), keys_of(range(256))
    with caplog.at_level(logging.WARNING, "kvabr.engines.chunk_store"):
        one.reserve_write(keys, layout)
        one.finish_write(keys)
        end = time.monotonic() + LIMIT_S
        while "neither stored nor loaded" not in caplog.text and time.monotonic() < end:
            time.sleep(0.02)
        one.clear(force=True)
        assert fetch(one, [keys], layout) == ([[]], {})
    assert why in caplog.text
    assert caplog.text.count("neither stored nor loaded") == 1
    origin.look(before)


def test_the_serde_codes_what_lmcaches_own_store_keeps(daemon, tmp_path):
    """A folder: objects with layers take as much as Int4 does. A damaged file is a miss, and its prefix comes."""
    shape = kvdata.spec(LAYERS, HEADS, DIM)
    (tmp_path / "profile").write_bytes(kvdata.profile(shape).to_bytes())
    folder = tmp_path / "folder"
    coded = {"module": "serde", "cls": "CodedL2", "type": "fs", "base_path": str(folder)}
    coded["serde"] = {"type": "kvabr", "profile": str(tmp_path / "profile")}
    one = daemon(**coded)
    keys = keys_of(range(1024))
    kv = kvdata.cache(shape, 1024).permute(1, 0, 3, 2, 4).flatten(3).half()
    chunks = list(kv.split(CHUNK, 2))
    store(one, keys, chunks)
    files = sorted(folder.iterdir())
    assert len(files) == 4
    assert len({each.stat().st_size for each in files}) == 1
    assert files[0].stat().st_size < 0.3 * chunks[0].nbytes
    other = daemon(**coded)
    came, got = fetch(other, [keys])
    assert came == [keys]
    for key, chunk in zip(keys, chunks, strict=True):
        error = (got[key].float() - chunk.float()).square().mean() / chunk.float().var()
        assert 0 < float(error) < 0.03
    # LMCache loads all objects of a request or none, where a serde fails.
    name = next(each for each in files if keys[2].chunk_hash.hex() in each.name)
    name.write_bytes(name.read_bytes()[:1000] + bytes(name.stat().st_size - 1000))
    other.clear(force=True)
    assert fetch(daemon(**coded), [keys]) == ([[]], {})
    assert fetch(daemon(**coded), [keys[:2]])[0] == [keys[:2]]


def test_the_serde_keeps_what_kvabr_has_no_tracks_for_as_it_is(daemon, tmp_path):
    """An object of two kinds of layers, such as latents and the packed keys of an indexer."""
    layout = MemoryLayoutDesc([*MLA.shapes, torch.Size([1, LAYERS, CHUNK, 132])], [torch.bfloat16, torch.uint8])
    coded = {"module": "serde", "cls": "CodedL2", "type": "fs", "base_path": str(tmp_path), "serde": {"type": "kvabr"}}
    one, keys = daemon(**coded), keys_of(range(512))
    dice = torch.Generator().manual_seed(5)
    parts = [
        (torch.randn(layout.shapes[0], generator=dice).bfloat16(), torch.randint(256, layout.shapes[1], generator=dice))
        for _ in keys
    ]
    stored = Stored(keys)
    one.register_l2_listener(stored)
    objects = one.reserve_write(keys, layout)
    for key, (latents, packed) in zip(keys, parts, strict=True):
        objects[key].get_tensor(0).copy_(latents)
        objects[key].get_tensor(1).copy_(packed)
    one.finish_write(keys)
    assert stored.all.wait(LIMIT_S)
    other = daemon(**coded)
    handle = other.submit_prefetch_task(PrefetchTaskSpec([GroupedObjectKeys(keys, 0, layout)]))
    assert other.wait_prefetch_status(handle, LIMIT_S)
    assert other.query_prefetch_status(handle).l2_hit_count == 2
    with other.read_prefetched_results(keys) as got:
        for held, (latents, packed) in zip(got, parts, strict=True):
            assert torch.equal(held.get_tensor(0), latents)
            assert torch.equal(held.get_tensor(1).long(), packed)
    other.finish_read_prefetched(keys)


def test_daemons_in_processes_of_their_own(origin, tmp_path):
    """LMCache's server as it is started, and its client: what an engine gave one, the other's engine gets."""
    tokens, before = tuple(range(90_000, 90_000 + 3 * CHUNK + 10)), len(origin.holdings.assets)
    chunks = chunks_of(3, seed=11)
    with Served(tmp_path / "one.log", publish=str(origin.root), **reach(origin)) as one:
        key = one.key(tokens, 0)
        assert one.transfer.prepare_store(key, 1) is None
        assert one.transfer.commit_store(key, 1, chunks)
        origin.look(before + 3)
    with Served(tmp_path / "other.log", policy="fixed:FP16", **reach(origin)) as other:
        assert other.hits((*tokens[: 2 * CHUNK], *range(CHUNK))) == 2
        assert other.hits(tokens) == 3
        got = other.transfer.prepare_retrieve(other.key(tokens, 0), 1)
        assert all(torch.equal(one, chunk) for one, chunk in zip(got, chunks, strict=True))


class Served:
    """LMCache's server process, and an engine's client of it that says its caches have the shape of `LAYOUT`."""

    def __init__(self, log, **params):
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        spec = {"type": "plugin", "module_path": "kvabr.engines.lmcache.daemon", "class_name": "KvabrL2"}
        command = [sys.executable, "-m", "lmcache.v1.multiprocess.server", "--port", str(self.port)]
        command += ["--l1-size-gb", "0.1", "--eviction-policy", "LRU", "--shm-name", ""]
        command += ["--supported-transfer-mode", "engine_driven", "--chunk-size", str(CHUNK)]
        command += ["--disable-observability", "--l2-adapter", json.dumps({**spec, "adapter_params": params})]
        self.log = log.open("wb")
        self.process = subprocess.Popen(command, stdout=self.log, stderr=subprocess.STDOUT)  # noqa: S603  # our own interpreter

    def __enter__(self):
        self.client = RequestClientFactory.create(f"tcp://127.0.0.1:{self.port}")
        layers, _, width = LAYOUT.shapes[0][1:]
        told = RegisterEngineDrivenContextPayload(1, "test/model", 1, CHUNK, layers, width, "float16", use_mla=False)
        self.client.register_kv_cache_engine_driven_context(told).result(timeout=LIMIT_S)
        self.transfer = EngineDrivenContextPickle(
            EngineDrivenContextMetadata(LAYOUT, CHUNK, use_mla=False), self.client, LIMIT_S
        )
        return self

    def key(self, tokens, worker):
        whole = len(tokens) // CHUNK * CHUNK
        return IPCCacheServerKey("test/model", 1, worker, tokens, 0, whole, f"request {hash(tokens)}", num_kv_readers=1)

    def hits(self, tokens):
        key = self.key(tokens, None)
        self.client.lookup(key, 1).result(timeout=LIMIT_S)
        return self.client.wait_prefetch_status(key.request_id, LIMIT_S).result(timeout=LIMIT_S)

    def __exit__(self, *_):
        self.client.close()
        self.process.send_signal(signal.SIGINT)
        assert self.process.wait(LIMIT_S) == 0
        self.log.close()
