"""The backend as SGLang's own factory makes it, over a real origin.

SGLang's host pool cannot be had without a GPU's libraries, so a pool of the same layouts stands in: what the backend
needs of one is its buffer, its layout and its sizes, and the flat pages that `HostKVCache` makes.
"""

from __future__ import annotations

from dataclasses import dataclass

import pytest

pytest.importorskip("sglang", reason="SGLang is not installed: tools/engine-sglang makes its environment")

import torch
from sglang.srt.mem_cache.hicache_storage import HiCacheStorage, HiCacheStorageConfig
from sglang.srt.mem_cache.storage.backend_factory import StorageBackendFactory

from kvabr.engines.sglang import ADAPTER
from kvabr.engines.sglang.pages import LAYOUTS, page_view
from tests.engines.served import Origin
from tests.engines.sglang.test_pages import SHAPES

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

    def build(pool, rank=0, **options):
        extra = {"backend_name": "kvabr", "module_path": "kvabr.engines.sglang.backend", "class_name": "KvabrStorage"}
        config = HiCacheStorageConfig(
            rank, 2, 0, 1, 0, 1, False, False, False, "test/model", extra_config=extra | {"kvabr": options}
        )
        storage = StorageBackendFactory.create_backend("dynamic", config, pool)
        storage.register_mem_pool_host(pool)
        made.append(storage)
        return storage

    yield build
    for storage in made:
        storage.close()


def test_this_version_is_one_that_is_tested():
    assert ADAPTER.check(), ADAPTER.installed


def test_the_layouts_are_those_of_the_pages():
    assert set(SHAPES) == set(LAYOUTS)


@pytest.mark.parametrize("tokens", [PAGE // 2, 2 * PAGE])
def test_what_is_no_whole_page_is_none(origin, backend, tokens):
    before, pool, keys = len(origin.holdings.assets), Pool("layer_first"), [f"{tokens} tokens"]
    reach = {"url": origin.url, "fingerprint": origin.fingerprint, "quic": "aioquic", "deadline_s": 20.0}
    storage = backend(pool, publish=str(origin.root), policy="fixed:FP16", **reach)
    store, _ = storage._started
    kv = torch.ones(LAYERS, 2, HEADS, tokens, DIM, dtype=torch.float16)
    assert store.put(storage._name(keys[0]), kv).result(300.0)
    origin.look(before + 1)
    assert storage.batch_get_v1(keys, indices(3)) == [False]
    assert storage.get(keys[0], pool.get_dummy_flat_data_page()) is None
    assert not pool.page(3).any()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_pages_come_back_to_the_byte(origin, backend, layout):
    before = len(origin.holdings.assets)
    reach = {"url": origin.url, "fingerprint": origin.fingerprint, "quic": "aioquic", "deadline_s": 20.0}
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
    assert torch.equal(other._flat_view(flat), content(1))
    assert other.batch_get(["nothing"]) == [None]
    assert one.set(f"{layout}-flat", flat)
    origin.look(before + 4)
    assert torch.equal(other._flat_view(other.get(f"{layout}-flat")), content(1))


def test_ranks_and_kinds_of_caches_do_not_mix(origin, backend):
    before = len(origin.holdings.assets)
    reach = {"url": origin.url, "fingerprint": origin.fingerprint, "quic": "aioquic"}
    pool = Pool("layer_first")
    backend(pool, publish=str(origin.root), **reach).batch_set_v1(["mixed"], indices(0))
    origin.look(before + 1)
    assert backend(Pool("page_first"), **reach).exists("mixed")
    assert not backend(pool, rank=1, **reach).exists("mixed")
    assert not backend(Pool("layer_first", torch.bfloat16), **reach).exists("mixed")


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
