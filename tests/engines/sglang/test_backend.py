"""The backend as SGLang's own factory makes it, over a real origin.

SGLang's host pool cannot be had without a GPU's libraries, so a pool of the same layouts stands in: what the backend
needs of one is its buffer, its layout and its sizes, and the flat pages that `HostKVCache` makes. Those of latents are
made by SGLang's own methods.
"""

import ast
import logging
import runpy
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("sglang", reason="SGLang is not installed: tools/engine sglang")

import sglang
import torch
from sglang.srt.mem_cache.hicache_storage import (
    HiCacheStorage,
    HiCacheStorageConfig,
    HiCacheStorageExtraInfo,
    PoolHitPolicy,
    PoolName,
    PoolTransfer,
)
from sglang.srt.mem_cache.storage.backend_factory import StorageBackendFactory

from kvabr.engines.sglang.pages import LATENT_LAYOUTS, LAYOUTS, page_view
from kvabr.types.errors import FormatError, UsageError
from tests import kvdata
from tests.engines.served import Origin

LAYERS, TOKENS, PAGE, HEADS, DIM = 3, 1024, 128, 2, 16


@dataclass
class Pool:
    """The parts of `MHATokenToKVPoolHost` that its storage backends use."""

    layout: str
    dtype: torch.dtype = torch.float16
    head_dim: int = DIM
    v_head_dim: int = DIM
    head_num: int = HEADS
    layer_num: int = LAYERS
    page_size: int = PAGE

    def __post_init__(self):
        pages = TOKENS // PAGE
        self.kv_buffer = torch.zeros(
            {
                "layer_first": (2, LAYERS, TOKENS, HEADS, DIM),
                "page_first": (2, TOKENS, LAYERS, HEADS, DIM),
                "page_first_direct": (2, pages, LAYERS, PAGE, HEADS, DIM),
                "page_head": (2, pages, HEADS, PAGE, LAYERS, DIM),
            }[self.layout],
            dtype=self.dtype,
        )

    def get_dummy_flat_data_page(self):
        return torch.zeros((2, LAYERS, PAGE, HEADS, DIM), dtype=self.dtype).flatten()

    def page(self, number):
        return page_view(self.kv_buffer, self.layout, number * PAGE, PAGE)


POOLS = Path(sglang.__file__).parent / "srt" / "mem_cache" / "pool_host"


def sglangs_own(name, methods, given):
    """Methods of a class of SGLang's host pools, whose modules need a GPU's libraries when they are imported."""
    path = POOLS / "mla.py"
    kept = next(each for each in ast.parse(path.read_text()).body if getattr(each, "name", None) == name)
    kept.body, kept.bases = [each for each in kept.body if getattr(each, "name", None) in methods], []
    future = ast.parse("from __future__ import annotations").body
    exec(compile(ast.Module([*future, kept], []), str(path), "exec"), given)  # noqa: S102  # the installed package's
    return given[name]


def allocated(dims, *, dtype, **_):
    return torch.zeros(dims, dtype=dtype)


MLA = sglangs_own(
    "MLATokenToKVPoolHost",
    ("init_kv_buffer", "get_data_page", "_storage_page_index", "get_dummy_flat_data_page", "set_from_flat_data_page"),
    {
        "torch": torch,
        "ALLOC_MEMORY_FUNCS": {"cpu": allocated},
        "PageUnifiedLayout": runpy.run_path(POOLS / "page_unified.py")["PageUnifiedLayout"],
    },
)
"""The pool of latents, without what moves pages to and from a GPU."""


class LatentPool(MLA):
    """A host pool of MLA: its buffer and its flat pages are made by SGLang's own methods."""

    device, pin_memory, allocator, _transfer_device = "cpu", False, None, torch.device("cpu")

    def __init__(self, layout, layer_num=LAYERS, kv_cache_dim=576, *, dcp_size=1, dtype=torch.bfloat16, page_size=PAGE):
        self.layout, self.layer_num, self.kv_cache_dim = layout, layer_num, kv_cache_dim
        self.dcp_size, self.dtype, self.page_size = dcp_size, dtype, page_size
        self.page_num = TOKENS // PAGE
        self.size = self.page_num * page_size
        self.logical_page_size, self.logical_size = page_size * dcp_size, self.size * dcp_size
        self.kv_buffer = self.init_kv_buffer()

    def page(self, number):
        return page_view(self.kv_buffer, self.layout, number * self.page_size, self.page_size, latent=True)

    def content(self, number):
        dice = torch.Generator().manual_seed(number)
        return torch.randn((self.layer_num, 1, 1, self.page_size, self.kv_cache_dim), generator=dice).to(self.dtype)


def indices(*pages):
    return torch.cat([torch.arange(PAGE) + page * PAGE for page in pages])


def content(number, dtype=torch.float16):
    return torch.randn((LAYERS, 2, HEADS, PAGE, DIM), generator=torch.Generator().manual_seed(number)).to(dtype)


@pytest.fixture(scope="module")
def origin(tmp_path_factory):
    made = Origin(tmp_path_factory.mktemp("origin"))
    yield made
    made.close()


@pytest.fixture
def backend():
    made = []

    def build(pool, rank=0, *, cp=(0, 1), dcp=(0, 1), model="test/model", **options):
        extra = {"backend_name": "kvabr", "module_path": "kvabr.engines.sglang.backend", "class_name": "KvabrStorage"}
        latent, (place, size) = isinstance(pool, LatentPool), dcp
        config = HiCacheStorageConfig(
            rank, 2, 0, 1, *cp, latent, False, False, model, extra_config=extra | {"kvabr": options},
            dcp_rank=place, dcp_size=size, logical_page_size=PAGE,
        )  # fmt: skip
        storage = StorageBackendFactory.create_backend("dynamic", config, pool)
        storage.register_mem_pool_host(pool)
        made.append(storage)
        return storage

    yield build
    for storage in made:
        storage.close()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_pages_come_back_to_the_byte(origin, backend, layout):
    before = len(origin.holdings.assets)
    reach = {"url": origin.url, "fingerprint": origin.fingerprint, "deadline_s": 20.0}
    keys = [f"{layout}-{number}" for number in range(3)]
    pool = Pool(layout)
    for number in range(3):
        pool.page(number).copy_(content(number))
    one = backend(pool, publish=str(origin.root), queue=2, **reach)
    assert isinstance(one, HiCacheStorage)
    assert one.batch_set_v1(keys, indices(0, 1, 2)) == [True] * 3
    assert one.batch_set_v1(keys[:1], indices(0)) == [True]  # it is there already
    origin.look(before + 3)
    into = Pool(layout)
    other = backend(into, policy="fixed:FP16", **reach)
    assert other.batch_exists([*keys, "nothing"]) == 3
    assert other.batch_exists(["nothing", *keys]) == 0
    assert other.exists(keys[0])
    assert other.batch_get_v1([*keys, "nothing"], indices(5, 2, 7, 0)) == [True, True, True, False]
    for number, place in enumerate((5, 2, 7)):
        assert torch.equal(into.page(place), content(number))
    assert not into.page(0).any()
    # The same through the interface for flat pages.
    flat = other.get(keys[1], into.get_dummy_flat_data_page())
    assert torch.equal(other._pool().pages.flat(flat), content(1))
    assert other.batch_get(["nothing"]) == [None]
    assert one.set(f"{layout}-flat", flat)
    origin.look(before + 4)
    assert torch.equal(other._pool().pages.flat(other.get(f"{layout}-flat")), content(1))


SHAPE = kvdata.spec(LAYERS, HEADS, DIM)


@pytest.fixture
def profile(tmp_path):
    path = tmp_path / "profile.safetensors"
    path.write_bytes(kvdata.profile(SHAPE).to_bytes())
    return str(path)


def test_pages_have_the_ac_tracks_of_their_place(origin, backend, profile, caplog):
    reach = {"url": origin.url, "fingerprint": origin.fingerprint, "deadline_s": 20.0}
    kv, before, pool = kvdata.cache(SHAPE, 5 * PAGE).half(), set(origin.holdings.assets), Pool("page_first")
    keys = [f"page {number} of a prompt" for number in range(5)]
    for number in range(5):
        pool.page(number).copy_(kv[:, :, :, number * PAGE : (number + 1) * PAGE])
    one = backend(pool, publish=str(origin.root), profile=profile, queue=2, **reach)
    # SGLang writes a node of its tree at a time, behind those above it.
    assert all(one.batch_set_v1(keys[:2], indices(0, 1), HiCacheStorageExtraInfo(prefix_keys=[])))
    assert all(one.batch_set_v1(keys[2:], indices(2, 3, 4), HiCacheStorageExtraInfo(prefix_keys=keys[:2])))
    origin.look(len(before) + 5)
    catalogs = [asset.catalog for asset in origin.holdings.assets if asset not in before]
    assert sorted(each.position for each in catalogs) == [0, 128, 256, 384, 512]
    assert all("AC-L3" in each.by_name for each in catalogs)
    into = Pool("page_head")
    other = backend(into, policy="fixed:AC-L0", **reach)
    # When it reads, it leaves out the keys of the node that the prompt matches, here of two pages, or says nothing.
    for prefix in (keys[:3], keys[:1], [], None):
        into.kv_buffer.zero_()
        info = HiCacheStorageExtraInfo(prefix_keys=prefix)
        assert other.batch_exists(keys[3:], info) == 2
        assert other.batch_get_v1(keys[3:], indices(6, 1), info) == [True, True]
        for number, place in ((3, 6), (4, 1)):
            assert kvdata.is_base_of(into.page(place), kv[:, :, :, number * PAGE : (number + 1) * PAGE])
    into.kv_buffer.zero_()
    with caplog.at_level(logging.WARNING, "kvabr.engines.chunk_store"):
        behind = HiCacheStorageExtraInfo(prefix_keys=keys[:4])
        assert other.batch_exists(keys[3:], behind) == 0
        assert other.batch_get_v1(keys[3:], indices(6, 1), behind) == [False, False]
    assert not into.kv_buffer.any()
    assert "token 384 of a prompt, wanted is one of 512, 640" in caplog.text


def test_ranks_and_kinds_of_caches_do_not_mix(origin, backend):
    before = len(origin.holdings.assets)
    reach = {"url": origin.url, "fingerprint": origin.fingerprint}
    pool = Pool("layer_first")
    backend(pool, publish=str(origin.root), **reach).batch_set_v1(["mixed"], indices(0))
    origin.look(before + 1)
    assert backend(Pool("page_first"), **reach).exists("mixed")
    assert not backend(pool, rank=1, **reach).exists("mixed")
    assert not backend(Pool("layer_first", torch.bfloat16), **reach).exists("mixed")


def test_after_clear_no_page_of_the_old_weights_is_played(origin, backend):
    before = len(origin.holdings.assets)
    reach = {"url": origin.url, "fingerprint": origin.fingerprint, "deadline_s": 20.0}
    pool = Pool("layer_first")
    pool.page(0).copy_(content(1))
    pool.page(1).copy_(content(2))
    one = backend(pool, publish=str(origin.root), policy="fixed:FP16", **reach)
    assert one.batch_set_v1(["cleared"], indices(0)) == [True]
    origin.look(before + 1)
    assert one.batch_exists(["cleared"]) == 1
    assert one.clear()
    assert one.batch_exists(["cleared"]) == 0
    assert one.batch_get_v1(["cleared"], indices(3)) == [False]
    assert one.batch_set_v1(["cleared"], indices(1)) == [True]
    origin.look(before + 2)
    assert one.batch_get_v1(["cleared"], indices(3)) == [True]
    assert torch.equal(pool.page(3), content(2))
    into = Pool("layer_first")  # of an engine that has the old weights
    assert backend(into, policy="fixed:FP16", **reach).batch_get_v1(["cleared"], indices(3)) == [True]
    assert torch.equal(into.page(3), content(1))


def test_no_origin_and_no_folder(backend):
    pool = Pool("layer_first")
    lost = backend(pool, url="moqt://127.0.0.1:9/", lookup_s=0.3)
    assert lost.batch_exists(["a", "b"]) == 0
    assert lost.batch_get_v1(["a", "b"], indices(0, 1)) == [False, False]
    assert lost.batch_set_v1(["a", "b"], indices(0, 1)) == [False, False]


def test_what_cannot_be_is_refused(backend):
    with pytest.raises(Exception, match="did you mean 'url'"):
        backend(Pool("layer_first"), uri="moqt://origin.example/")
    with pytest.raises(Exception, match="quantises"):
        backend(Pool("layer_first", torch.float8_e4m3fn), publish="x")


@pytest.mark.parametrize(
    ("layout", "model", "layers", "dim"),
    [(layout, "test/deepseek", 3, 576) for layout in LATENT_LAYOUTS]
    + [("layer_first", "test/glm", 5, 576), ("page_first", "test/kimi", 2, 576), ("page_first", "test/small", 4, 96)],
)
def test_latents_that_rank_0_publishes_all_ranks_read_to_the_byte(origin, backend, layout, model, layers, dim):
    """MLA: the ranks of tensor parallelism have the same latents, and SGLang has the first one write them."""
    before, keys = len(origin.holdings.assets), [f"{layout}-{number}" for number in range(3)]
    pool, into = LatentPool(layout, layers, dim), LatentPool(layout, layers, dim)
    for number in range(3):
        pool.page(number).copy_(pool.content(number))
    one = backend(pool, publish=str(origin.root), model=model, **reach(origin))
    assert one._config.is_storage_writer
    assert one.batch_set_v1(keys, indices(0, 1, 2)) == [True] * 3
    origin.look(before + 3)
    other = backend(into, rank=1, policy="fixed:BF16", model=model, **reach(origin))
    assert not other._config.is_storage_writer
    assert other.batch_exists([*keys, "nothing"]) == 3
    assert other.batch_get_v1([*keys, "nothing"], indices(5, 2, 7, 0)) == [True, True, True, False]
    for number, place in enumerate((5, 2, 7)):
        assert torch.equal(into.page(place), pool.content(number))
    assert not into.page(0).any()
    if layout == "page_unified":  # SGLang has no flat pages of it
        return
    # The same through the interface for flat pages.
    flat = other.get(keys[1])
    assert torch.equal(flat, pool.get_data_page(PAGE))
    into.set_from_flat_data_page(3 * PAGE, flat)
    assert torch.equal(into.page(3), pool.content(1))
    assert one.set(f"{layout}-flat", pool.get_data_page(2 * PAGE))
    origin.look(before + 4)
    assert torch.equal(other.get(f"{layout}-flat"), pool.get_data_page(2 * PAGE))


def test_ranks_that_share_a_page_of_latents_have_each_its_own_part(origin, backend):
    """Decode context parallelism: the pool has half of a page's tokens, and SGLang's indices are of whole pages."""
    before, keys, half = len(origin.holdings.assets), ["shared-0", "shared-1"], PAGE // 2
    for rank in (0, 1):
        pool = LatentPool("page_first", dcp_size=2, page_size=half)
        for number in (0, 1):
            pool.page(number).copy_(pool.content(10 * rank + number))
        one = backend(pool, rank, dcp=(rank, 2), publish=str(origin.root), **reach(origin))
        assert one._config.is_storage_writer
        assert one.batch_set_v1(keys, indices(0, 1), HiCacheStorageExtraInfo(prefix_keys=[])) == [True, True]
        origin.look(before + 2 * (rank + 1))
    for rank in (0, 1):
        into = LatentPool("layer_first", dcp_size=2, page_size=half)
        other = backend(into, rank, dcp=(rank, 2), policy="fixed:BF16", **reach(origin))
        assert other.batch_get_v1(keys, indices(3, 5), HiCacheStorageExtraInfo(prefix_keys=[])) == [True, True]
        for number, place in enumerate((3, 5)):
            assert torch.equal(into.page(place), into.content(10 * rank + number))
    # An engine without has whole pages, under names of their own.
    assert backend(LatentPool("page_first"), **reach(origin)).batch_exists(keys) == 0
    with pytest.raises(FormatError, match=r"2 pages of .* do not match"):
        other.batch_get_v1(keys, indices(3))


def test_further_pools_have_pages_of_their_own(origin, backend):
    """A draft model's heads beside a target's latents, and a pool of which only the last pages are wanted."""
    before, keys = len(origin.holdings.assets), [f"pooled-{number}" for number in range(4)]
    pool, draft, window = LatentPool("layer_first"), Pool("page_first"), Pool("layer_first")
    for number in range(4):
        pool.page(number).copy_(pool.content(number))
        draft.page(number).copy_(content(10 + number))
        window.page(number).copy_(content(20 + number))

    def opened(rank, *pools, **options):
        storage = backend(pools[0], rank, **options, **reach(origin))
        for name, each in zip((PoolName.KV, PoolName.DRAFT, PoolName.SWA), pools, strict=True):
            storage.register_mem_host_pool_v2(each, name)
        storage.on_host_pools_registered()
        return storage

    one = opened(0, pool, draft, window, publish=str(origin.root))
    assert one.batch_set_v1(keys, indices(0, 1, 2, 3)) == [True] * 4
    set_ = one.batch_set_v2([
        PoolTransfer(PoolName.DRAFT, indices(0, 1, 2), keys=keys[:3]),
        PoolTransfer(PoolName.SWA, indices(1, 3), keys=[keys[1], keys[3]]),
    ])  # fmt: skip
    assert set_ == {PoolName.DRAFT: [True] * 3, PoolName.SWA: [True] * 2}
    origin.look(before + 9)
    pools = LatentPool("page_first"), Pool("layer_first"), Pool("page_head")
    other = opened(0, *pools, policy="fixed:FP16")
    last = PoolTransfer(PoolName.SWA, keys=keys[:1], hit_policy=PoolHitPolicy.TRAILING_PAGES)
    for asked, kept, restorable in (
        ([], 4, [1, 2, 3, 4]),
        ([PoolTransfer(PoolName.DRAFT)], 3, [1, 2, 3]),
        ([last], 4, [2, 4]),
        ([PoolTransfer(PoolName.DRAFT), last], 2, [2]),
    ):
        found = other.batch_exists_v2([*keys, "nothing"], asked)
        assert (found.kv_hit_pages, found.restorable_prefix_pages) == (kept, restorable)
        assert found.extra_pool_hit_pages[PoolName.KV] == 4
    got = other.batch_get_v2([
        PoolTransfer(PoolName.DRAFT, indices(6, 0), keys=[keys[2], "nothing"]),
        PoolTransfer(PoolName.SWA, indices(2), keys=[keys[3]]),
    ])  # fmt: skip
    assert got == {PoolName.DRAFT: [True, False], PoolName.SWA: [True]}
    assert torch.equal(pools[1].page(6), content(12))
    assert torch.equal(pools[2].page(2), content(23))
    # The heads of another rank are others, its latents are the same.
    foreign = opened(1, *pools)
    assert foreign.batch_exists(keys) == 4
    assert foreign.batch_exists_v2(keys, [PoolTransfer(PoolName.DRAFT)]).kv_hit_pages == 0
    one.clear()
    assert one.batch_exists_v2(keys, [last]).kv_hit_pages == 0
    assert not any(one.batch_get_v2([PoolTransfer(PoolName.DRAFT, indices(0), keys=keys[:1])])[PoolName.DRAFT])


def test_pools_that_kvabr_has_no_tracks_for_end_the_start(origin, backend):
    storage = backend(LatentPool("page_first"), **reach(origin))
    for name, pool, why in (
        (PoolName.MAMBA, SimpleNamespace(page_size=1), "'mamba': .* has no keys and values"),
        (PoolName.INDEXER, LatentPool("page_first", dtype=torch.uint8, kv_cache_dim=132), "'indexer': .*quantises"),
    ):
        with pytest.raises(FormatError, match=why):
            storage.register_mem_host_pool_v2(pool, name)
    with pytest.raises(UsageError, match="no host pool 'mamba'"):
        storage.batch_get_v2([PoolTransfer(PoolName.MAMBA, indices(0), keys=["a"])])


def reach(origin):
    return {"url": origin.url, "fingerprint": origin.fingerprint, "deadline_s": 20.0}
