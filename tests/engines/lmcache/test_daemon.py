"""LMCache's multi-process daemon, on the CPU: its storage manager stores and prefetches over a real origin."""

from __future__ import annotations

import argparse
import json
import logging
import os
import socket
import threading
import time

import pytest

pytest.importorskip("lmcache", reason="LMCache is not installed: tools/engine-lmcache")

os.environ.setdefault("LMCACHE_TRACK_USAGE", "false")

import torch
from lmcache.v1.distributed.api import GroupedObjectKeys, MemoryLayoutDesc, ObjectKey, PrefetchTaskSpec
from lmcache.v1.distributed.config import add_storage_manager_args, parse_args_to_config
from lmcache.v1.distributed.storage_manager import StorageManager
from lmcache.v1.multiprocess.token_hasher import TokenHasher

from kvabr.engines.lmcache.chunks import PLACES
from kvabr.engines.lmcache.daemon import KvabrL2
from kvabr.types.errors import UsageError
from tests import kvdata
from tests.engines.served import Origin

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

    def build(**params):
        spec = {"type": "plugin", "module_path": "kvabr.engines.lmcache.daemon", "class_name": "KvabrL2"}
        parser = argparse.ArgumentParser()
        add_storage_manager_args(parser)
        given = json.dumps({**spec, "adapter_params": params})
        arguments = ["--l1-size-gb", "0.2", "--eviction-policy", "noop", "--l2-adapter", given]
        made.append(StorageManager(parse_args_to_config(parser.parse_args(arguments))))
        return made[-1]

    yield build
    for each in made:
        each.close()


def reach(origin, **more):
    return {"url": origin.url, "fingerprint": origin.fingerprint, "quic": "aioquic", "deadline_s": 20.0, **more}


def keys_of(tokens, **more):
    """The keys of a prompt's chunks, hashed as the daemon does."""
    hashed = TokenHasher(CHUNK).compute_chunk_hashes(list(tokens))
    return [ObjectKey(one, "test/model", **{"kv_rank": RANK, **more}) for one in hashed]


def store(manager, keys, chunks, layout=LAYOUT):
    """Write objects to the daemon's memory, from where its controller stores them."""
    objects = manager.reserve_write(keys, layout)
    assert len(objects) == len(keys)
    for key, chunk in zip(keys, chunks, strict=True):
        objects[key].tensor.copy_(chunk)
    manager.finish_write(keys)


def fetch(manager, rows, layout=LAYOUT):
    """Prefetch objects, and return of each row of keys which came, and all that came by key."""
    groups = [GroupedObjectKeys(row, row[0].object_group_id, layout) for row in rows]
    handle = manager.submit_prefetch_task(PrefetchTaskSpec(groups))
    assert manager.wait_prefetch_status(handle, LIMIT_S)
    result = manager.query_prefetch_status(handle)
    came = [[key for place, key in enumerate(row) if hits.test(place)] for row, hits in zip(rows, result.hit_cells)]
    every = [key for row in came for key in row]
    got = {}
    if every:
        with manager.read_prefetched_results(every) as objects:
            got = {key: one.tensor.clone() for key, one in zip(every, objects, strict=True)}
        manager.finish_read_prefetched(every)
    return came, got


def adapter(manager):
    return manager.l2_adapters()[0][1]


def settled(manager):
    """Wait until the daemon has stored everything."""
    end = time.monotonic() + LIMIT_S
    while time.monotonic() < end:
        status = manager.report_status()["store_controller"]
        if not status["pending_keys_count"] and not status["in_flight_task_count"] and not adapter(manager)._running:
            return
        time.sleep(0.02)
    raise AssertionError("the daemon does not end storing")


def chunks_of(count, dtype=torch.float16, seed=0, shape=LAYOUT.shapes[0]):
    dice = torch.Generator().manual_seed(seed)
    return list(torch.randn((count, *shape), generator=dice).to(dtype))


def test_what_a_daemon_stores_another_loads_to_the_byte(origin, daemon):
    """Of two ranks, a longer prompt: what is there of both comes, a prefix of the same length."""
    before = len(origin.holdings.assets)
    ranks = [ObjectKey.ComputeKVRank(2, rank, 2, rank) for rank in (0, 1)]
    rows = [keys_of(range(1100), kv_rank=rank) for rank in ranks]
    held = {key: chunk for seed, row in enumerate(rows) for key, chunk in zip(row, chunks_of(4, seed=seed))}
    one = daemon(publish=str(origin.root), policy="fixed:FP16", **reach(origin))
    store(one, [*rows[0], *rows[1][:3]], [held[key] for key in [*rows[0], *rows[1][:3]]])
    settled(one)
    origin.look(before + 7)
    usage = adapter(one).get_usage()
    assert usage.total_bytes_used == sum(asset.catalog.bytes_of_all for asset in ()) or usage.total_bytes_used > 0
    other = daemon(policy="fixed:FP16", **reach(origin))
    came, got = fetch(other, rows)
    assert came == [row[:3] for row in rows]
    assert all(torch.equal(got[key], held[key]) for row in came for key in row)
    # Another tenant has nothing of it.
    assert fetch(other, [keys_of(range(1100), kv_rank=ranks[0], cache_salt="else")]) == ([[]], {})
