"""LMCache itself, on the CPU: its engine stores and retrieves over a real origin, with kvabr as its remote storage."""

import asyncio
import os
import threading

import pytest

pytest.importorskip("lmcache", reason="LMCache is not installed: tools/engine lmcache")

os.environ.setdefault("PYTHONHASHSEED", "0")
os.environ.setdefault("LMCACHE_TRACK_USAGE", "false")

import torch
from lmcache.utils import CacheEngineKey
from lmcache.v1.cache_engine import LMCacheEngineBuilder
from lmcache.v1.config import LMCacheEngineConfig
from lmcache.v1.gpu_connector import GPUConnectorInterface
from lmcache.v1.metadata import LMCacheMetadata

from kvabr.engines.lmcache.chunks import as_kv
from kvabr.store.locations import open_asset
from tests import kvdata
from tests.engines.served import Origin

LAYERS, HEADS, DIM, CHUNK = 4, 3, 64, 256
PREFIX = "remote_storage_plugin.kvabr."


class OnCpu(GPUConnectorInterface):
    """Moves chunks between LMCache and an engine's cache, [K/V, layer, token, head x dim]; of latents K/V is 1."""

    def __init__(self, latent=None):
        self.latent = latent

    def from_gpu(self, chunk, start, end, **kwargs):
        chunk.tensor.copy_(kwargs["cache"][:, :, start:end])

    def to_gpu(self, chunk, start, end, **kwargs):
        kwargs["cache"][:, :, start:end].copy_(chunk.tensor)

    def batched_from_gpu(self, chunks, starts, ends, **kwargs):
        for one in zip(chunks, starts, ends, strict=True):
            self.from_gpu(*one, **kwargs)

    def batched_to_gpu(self, chunks, starts, ends, **kwargs):
        for one in zip(chunks, starts, ends, strict=True):
            self.to_gpu(*one, **kwargs)

    def get_shape(self, tokens):
        return torch.Size([2, LAYERS, tokens, HEADS * DIM] if self.latent is None else [1, LAYERS, tokens, self.latent])


@pytest.fixture(scope="module")
def origin(tmp_path_factory):
    made = Origin(tmp_path_factory.mktemp("origin"))
    yield made
    made.close()


@pytest.fixture
def engine():
    """Make LMCache engines: ``engine(dtype=..., url=..., ...)``, with kvabr's options by keyword."""
    names = []

    def build(*, dtype=torch.float16, model="test/model", layers=LAYERS, latent=None, rank=(0, 1), **options):
        extra = {f"{PREFIX}module_path": "kvabr.engines.lmcache.connector", f"{PREFIX}class_name": "KvabrAdapter"}
        extra |= {f"{PREFIX}{key}": value for key, value in options.items()}
        config = LMCacheEngineConfig.from_defaults(
            chunk_size=CHUNK, local_cpu=False, max_local_cpu_size=0.25, remote_serde="naive", save_unfull_chunk=True,
            remote_storage_plugins=["kvabr"], extra_config=extra,
        )  # fmt: skip
        shape = (layers, 2, CHUNK, HEADS, DIM) if latent is None else (layers, 1, CHUNK, 1, latent)
        worker, workers = rank
        metadata = LMCacheMetadata(model, workers, workers, worker, worker, dtype, shape, use_mla=latent is not None)
        name = f"engine-{len(names)}"
        names.append(name)
        made = LMCacheEngineBuilder.get_or_create(
            name, config, metadata, OnCpu(latent), lambda _tensor, _source: None, lambda thing, _source: thing
        )
        made.post_init()
        return made

    yield build
    for name in names:
        LMCacheEngineBuilder.destroy(name)


def cache(tokens, dtype=torch.float16, seed=0):
    dice = torch.Generator().manual_seed(seed)
    return torch.randn((2, LAYERS, tokens, HEADS * DIM), generator=dice).to(dtype)


def retrieve(engine, tokens, dtype=torch.float16):
    into = torch.zeros((2, LAYERS, len(tokens), HEADS * DIM), dtype=dtype)
    return engine.retrieve(tokens=tokens, cache=into), into


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_what_is_put_is_got_to_the_byte(origin, engine, dtype):
    tokens, kv = torch.arange(600) + 1000 * dtype.itemsize + (dtype == torch.float16), cache(600, dtype)
    before = len(origin.holdings.assets)
    exact = "fixed:FP16" if dtype == torch.float16 else "fixed:BF16"
    options = {"url": origin.url, "fingerprint": origin.fingerprint, "deadline_s": 10.0}
    one = engine(dtype=dtype, publish=str(origin.root), policy=exact, **options)
    one.store(tokens=tokens, cache=kv)
    origin.look(before + 3)  # 256, 256 and 88 tokens
    other = engine(dtype=dtype, policy=exact, **options)
    assert other.lookup(tokens) == 600
    mask, into = retrieve(other, tokens, dtype)
    assert bool(mask.all())
    assert torch.equal(into, kv)
    # Another ending: what is shared is there.
    longer = torch.cat([tokens[:512], torch.arange(300) + 50_000])
    assert other.lookup(longer) == 512
    mask, into = retrieve(other, longer, dtype)
    assert int(mask.sum()) == 512
    assert torch.equal(into[:, :, :512], kv[:, :, :512])
    # What was fetched before is in memory.
    retrieve(other, tokens, dtype)
    metrics = connector(other).metrics
    assert metrics.value("kvabr_client_groups_total", source="network") == 5
    assert metrics.value("kvabr_client_groups_total", source="memory") >= 5


@pytest.mark.parametrize(
    ("model", "layers", "latent"), [("deepseek", 3, 576), ("glm", 4, 576), ("kimi", 2, 576), ("small", 5, 96)]
)
def test_latents_that_rank_0_puts_are_got_by_an_engine_of_any_number_of_ranks(origin, engine, model, layers, latent):
    """MLA: every rank of tensor parallelism has the whole cache, so LMCache asks for it once."""
    tokens, before = torch.arange(600) + 30_000, len(origin.holdings.assets)
    kv = torch.randn((1, layers, 600, latent), generator=torch.Generator().manual_seed(layers)).bfloat16()
    options = {"url": origin.url, "fingerprint": origin.fingerprint, "deadline_s": 20.0}
    options |= {"dtype": torch.bfloat16, "model": f"test/{model}", "layers": layers, "latent": latent}
    engine(rank=(0, 2), publish=str(origin.root), **options).store(tokens=tokens, cache=kv)
    origin.look(before + 3)
    other = engine(rank=(0, 1), policy="fixed:BF16", **options)
    assert other.lookup(tokens) == 600
    into = torch.zeros_like(kv)
    assert bool(other.retrieve(tokens=tokens, cache=into).all())
    assert torch.equal(into, kv)


def connector(engine):
    """The plug-in's connector, behind LMCache's instruments."""
    backend = next(b for name, b in engine.storage_manager.storage_backends.items() if name.startswith("RemoteBackend"))
    return backend.connection.getWrappedConnector()


def test_the_memory_of_a_chunk_is_kept_until_it_is_encoded(tmp_path, engine):
    conn = connector(engine(publish=str(tmp_path / "assets")))
    key = CacheEngineKey("test/model", 1, 0, 77, torch.float16)
    chunk = conn._memory.allocate(conn.meta_shapes[0], conn.meta_dtypes[0], conn.meta_fmt)
    as_kv(chunk.tensor, conn._store.spec).zero_()
    go_on = threading.Event()
    thread = conn._store.publisher._thread
    thread.submit(go_on.wait, 20.0)
    putting = asyncio.run_coroutine_threadsafe(conn.put(key, chunk), conn._loop)
    asyncio.run_coroutine_threadsafe(asyncio.sleep(0), conn._loop).result(300.0)
    putting.cancel()
    asyncio.run_coroutine_threadsafe(asyncio.sleep(0), conn._loop).result(300.0)
    assert chunk.get_ref_count() == 2
    go_on.set()
    conn._store.publisher.close()
    assert chunk.get_ref_count() == 1
    chunk.ref_count_down()


def test_what_waits_is_published_before_lmcache_frees_its_memory(tmp_path, engine):
    """Or the publisher would read memory that is gone, and end the process."""
    conn = connector(engine(publish=str(tmp_path / "assets")))
    chunk = conn._memory.allocate(conn.meta_shapes[0], conn.meta_dtypes[0], conn.meta_fmt)
    as_kv(chunk.tensor, conn._store.spec).zero_()
    go_on = threading.Event()
    conn._store.publisher._thread.submit(go_on.wait, 300.0)
    asyncio.run_coroutine_threadsafe(conn.put(CacheEngineKey("test/model", 1, 0, 78, torch.float16), chunk), conn._loop)
    asyncio.run_coroutine_threadsafe(asyncio.sleep(0), conn._loop).result(300.0)
    chunk.ref_count_down()
    threading.Timer(0.2, go_on.set).start()
    LMCacheEngineBuilder.destroy("engine-0")
    asset = open_asset(tmp_path / "assets")
    asset.check_frames()
    assert asset.catalog.groups == 2


SHAPE = kvdata.spec(LAYERS, HEADS, DIM)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_lmcaches_own_test_of_a_remote_storage(origin, monkeypatch, capsys, dtype):
    """`lmcache.v1.check`, mode test_remote: keys that are not there, puts, gets, contents, all of them right."""
    from lmcache.integration.vllm import utils
    from lmcache.v1.check.check_mode_test_remote import run_test_mode

    exact = {"float16": "FP16", "bfloat16": "BF16"}[dtype]
    config = LMCacheEngineConfig.from_defaults(
        chunk_size=512, local_cpu=False, max_local_cpu_size=0.1, remote_serde="naive",
        remote_url=origin.url.replace("moqt://", "kvabr://"), remote_storage_plugins=["kvabr"],
        extra_config={
            f"{PREFIX}module_path": "kvabr.engines.lmcache.connector", f"{PREFIX}class_name": "KvabrAdapter",
            f"{PREFIX}publish": str(origin.root), f"{PREFIX}fingerprint": origin.fingerprint,
            f"{PREFIX}policy": f"fixed:{exact}", f"{PREFIX}deadline_s": 10.0,
        },
    )  # fmt: skip
    monkeypatch.setattr(utils, "_config_instance", config)
    before, stop = len(origin.holdings.assets), False

    async def watch():
        while not stop:
            origin.holdings.refresh()
            await asyncio.sleep(0.1)

    watching = origin.loop.begin(watch())
    asyncio.run(run_test_mode("check/model", kv_dtype=dtype, num_keys=3, settle_time=2.0))
    stop = True
    watching.result(300)
    said = capsys.readouterr().out
    assert len(origin.holdings.assets) >= before + 3, said
    assert "Validation (content correct): 3/3 passed" in said
    assert "Error" not in said
    assert "failed" not in said.lower().replace("failed: 0", "")
