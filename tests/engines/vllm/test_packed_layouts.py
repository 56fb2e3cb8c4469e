"""Packed caches in vLLM's own words: its specs, the tensors that it makes of them, and bytes of its own kernel.

vLLM has no such cache on processors, so its engine does not run here: the connector's halves are called as it would.
Its TurboQuant kernel runs in Triton's interpreter; NVFP4's is not in its wheel for processors, and bytes are made up.
"""

from __future__ import annotations

import importlib
from dataclasses import replace

import pytest
import torch

pytest.importorskip("vllm", reason="vLLM is not installed: tools/engine-vllm")

from kvabr.engines.vllm.config import KeptAs, VllmSettings, served_model
from kvabr.types.errors import UsageError
from tests.client.served import Served
from tests.engines.vllm.engine import ENVIRONMENT, transfer_of
from tests.engines.vllm.halves import Bench, request
from tests.engines.vllm.tinies import tiny_llama

pytestmark = pytest.mark.model

BLOCK, BLOCKS, HEADS, DIM = 16, 24, 2, 32
NAMES = [f"model.layers.{layer}.self_attn.attn" for layer in range(2)]
URL = {"url": "moqt://127.0.0.1:9/"}
KEPT_AS = KeptAs(engine="vllm-0.32,sm100,FLASHINFER")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny_llama(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture
def config(folder, monkeypatch):
    for name, value in ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    from vllm.engine.arg_utils import EngineArgs

    def make(kind):
        arguments = {"dtype": "float32", "max_model_len": 512, "skip_tokenizer_init": True, "block_size": 32}
        made = EngineArgs(
            model=str(folder), kv_transfer_config=transfer_of(URL, "kv_consumer"), **arguments
        ).create_engine_config()
        made.cache_config.cache_dtype = kind  # vLLM refuses it on a processor
        return made

    return make


def spec_of(kind, block=BLOCK):
    """A layer's spec as vLLM's attention backend for GPUs makes it."""
    from vllm.utils.torch_utils import kv_cache_dtype_str_to_dtype, nvfp4_kv_cache_full_dim
    from vllm.v1.attention.backends.triton_attn import TritonAttentionBackend
    from vllm.v1.attention.backends.turboquant_attn import TurboQuantAttentionBackend
    from vllm.v1.kv_cache_interface import FullAttentionSpec, get_kv_quant_mode

    plain = FullAttentionSpec(
        block_size=block,
        num_kv_heads=HEADS,
        head_size=DIM,
        dtype=kv_cache_dtype_str_to_dtype(kind, None),
        kv_quant_mode=get_kv_quant_mode(kind),
    )
    if kind == "nvfp4":  # as FlashInfer's, whose package is not here
        return replace(plain, num_head_slots=2 * HEADS, state_content_bytes=nvfp4_kv_cache_full_dim(DIM))
    backend = TurboQuantAttentionBackend if kind.startswith("turboquant") else TritonAttentionBackend
    return backend.customize_spec(plain)


def tables(specs):
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec, UniformTypeKVCacheSpecs

    kept = UniformTypeKVCacheSpecs(block_size=specs[NAMES[0]].block_size, kv_cache_specs=specs)
    return KVCacheConfig(BLOCKS, [], [KVCacheGroupSpec(NAMES, kept)])


def tensors(specs, layout, *, padding=32):
    """Each layer's cache as vLLM lays it out, pages with something behind them, and the memory below."""
    from vllm.v1.kv_cache_interface import KVCacheTensor, create_kv_cache_views

    views, memory = {}, {}
    for name, spec in specs.items():
        page = spec.page_size_bytes + padding
        raw = torch.randint(0, 256, (BLOCKS * page,), dtype=torch.uint8).view(torch.int8)
        place = KVCacheTensor(len(raw), [name], layer_stride=len(raw), block_stride=page)
        (views[name],) = create_kv_cache_views(raw, spec, BLOCKS, layout, place)
        memory[name] = raw.view(BLOCKS, page)
    return views, memory


def bench_of(config, kind, layout, served, publish=None, specs=None, **more):
    """The connector's halves, vLLM's tensors, and the memory below."""
    specs = specs or dict.fromkeys(NAMES, spec_of(kind))
    model = served_model(config(kind), tables(specs), VllmSettings(**URL, group_tokens=32), kept_as=KEPT_AS)
    views, memory = tensors(specs, layout)
    how = {"policy": "fixed:Raw", "tracks": ["Raw"]} | more
    return Bench(served, publish, caches=(model, views), **how), memory


@pytest.fixture
def served(tmp_path):
    (tmp_path / "assets").mkdir()
    made = Served(tmp_path / "assets", tmp_path)
    yield made
    made.close()


def moved(publishing, playing, served):
    """Publish four blocks, play them elsewhere."""
    try:
        assert publishing.scheduler.finished(request(), [[3, 9, 4, 5, 6]])
        publishing.steps()
        publishing.published()
        served.look()
        assert playing.load(request(), blocks=[20, 1, 7, 8, 2]) == (64, set())
    finally:
        publishing.close()
        playing.close()


def interpreted(monkeypatch):
    """vLLM's function that stores keys and values for TurboQuant, in Triton's interpreter."""
    import triton
    import vllm.triton_utils
    from vllm.v1.attention.ops import triton_turboquant_store

    monkeypatch.setenv("TRITON_INTERPRET", "1")  # vLLM leaves Triton alone where there is no GPU
    monkeypatch.setattr(vllm.triton_utils, "triton", triton)
    monkeypatch.setattr(vllm.triton_utils, "tl", triton.language)
    return importlib.reload(triton_turboquant_store).triton_turboquant_store


@pytest.mark.parametrize("layout", ["LBHNC", "LBNHC"])
def test_nvfp4_blocks_are_moved_as_they_are(config, served, tmp_path, layout):
    from vllm.utils.torch_utils import nvfp4_split_data_scale
    from vllm.v1.kv_cache_layout import KVCacheLayout

    order = KVCacheLayout[layout]
    publishing, mine = bench_of(config, "nvfp4", order, served, tmp_path / "assets")
    playing, theirs = bench_of(config, "nvfp4", order, served)
    assert "nvfp4" in publishing.model.spec.only.packing
    before = {name: raw.clone() for name, raw in theirs.items()}
    moved(publishing, playing, served)
    page = spec_of("nvfp4").page_size_bytes
    for name in NAMES:
        assert torch.equal(theirs[name][[20, 1, 7, 8], :page], mine[name][[3, 9, 4, 5], :page])
        assert torch.equal(theirs[name][:, page:], before[name][:, page:])  # what is behind a page is another's
        rest = [block for block in range(BLOCKS) if block not in (20, 1, 7, 8)]
        assert torch.equal(theirs[name][rest], before[name][rest])
        for side in range(2):  # keys, values: what FlashInfer is given
            pairs = (
                nvfp4_split_data_scale(bench.named[name][:, side * HEADS : (side + 1) * HEADS])
                for bench in (publishing, playing)
            )
            for own, got in zip(*pairs, strict=True):
                assert torch.equal(own[[3, 9, 4, 5]].view(torch.uint8), got[[20, 1, 7, 8]].view(torch.uint8))


def test_turboquant_of_vllms_own_kernel_beside_layers_without(config, served, tmp_path, monkeypatch):
    from vllm.v1.attention.backends.turboquant_attn import _build_hadamard
    from vllm.v1.kv_cache_interface import FullAttentionSpec
    from vllm.v1.kv_cache_layout import KVCacheLayout

    kind, numbers = "turboquant_k8v4", {"num_kv_heads": HEADS, "head_size": DIM, "dtype": torch.float32}
    specs = {NAMES[0]: FullAttentionSpec(block_size=BLOCK, **numbers), NAMES[1]: spec_of(kind)}
    publishing, _ = bench_of(config, kind, KVCacheLayout.LBNHC, served, tmp_path / "assets", specs)
    playing, _ = bench_of(config, kind, KVCacheLayout.LBNHC, served, None, specs)
    assert [(one.dtype, one.layers) for one in playing.model.spec.classes] == [("float16", (0,)), ("uint8", (1,))]
    keys, values = torch.randn(2, 64, HEADS, DIM)
    slots = torch.tensor([3, 9, 4, 5]).repeat_interleave(BLOCK) * BLOCK + torch.arange(BLOCK).repeat(4)
    cache = publishing.named[NAMES[1]]
    interpreted(monkeypatch)(
        keys, values, cache.transpose(1, 2), slots.int(), _build_hadamard(DIM, "cpu"), torch.zeros(15),
        mse_bits=4, key_packed_size=DIM, value_quant_bits=4, key_fp8=True,
    )  # fmt: skip
    publishing.named[NAMES[0]].uniform_()
    moved(publishing, playing, served)
    got = playing.named[NAMES[1]][[20, 1, 7, 8]]
    assert torch.equal(got, cache[[3, 9, 4, 5]])
    found = got.transpose(1, 2).reshape(64, HEADS, -1)[..., :DIM].contiguous().view(torch.float8_e4m3fn).float()
    assert bool(((found - keys).abs() <= keys.abs() / 2 + 1e-2).all())  # the interpreter rounds badly
    played, published = playing.named[NAMES[0]][[20, 1, 7, 8]], publishing.named[NAMES[0]][[3, 9, 4, 5]]
    assert torch.equal(played, published.half().float())  # the type that its assets name


def test_int8_with_a_scale_for_each_token(config, served, tmp_path):
    from vllm.v1.kv_cache_layout import KVCacheLayout

    kind, order = "int8_per_token_head", KVCacheLayout.LBNHC
    publishing, mine = bench_of(config, kind, order, served, tmp_path / "assets")
    playing, theirs = bench_of(config, kind, order, served)
    assert publishing.model.spec.only.k_dim == 2 * DIM + 8  # and a scale in float32 of the key, and of the value
    moved(publishing, playing, served)
    page = spec_of(kind).page_size_bytes
    for name in NAMES:
        assert torch.equal(theirs[name][[20, 1, 7, 8], :page], mine[name][[3, 9, 4, 5], :page])


def test_what_packs_differently_is_another_cache(config):
    def spec(kind="nvfp4", block=BLOCK, **more):
        made = config(kind)
        vars(made.parallel_config).update(more)
        kept = tables(dict.fromkeys(NAMES, spec_of(kind, block)))
        return served_model(made, kept, VllmSettings(**URL, group_tokens=32), kept_as=KEPT_AS).spec

    assert spec() == spec()
    others = [spec("turboquant_4bit_nc"), spec(block=32), spec(tensor_parallel_size=2, rank=1, world_size=2)]
    assert len({each.digest() for each in [spec(), *others]}) == 4
    assert others[2].model == f"{spec().model}+rank1of2"
    with pytest.raises(UsageError, match='set "group_tokens" to 64 or a multiple'):
        spec(block=64)
    settings = VllmSettings(**URL, plain_caches=True)
    with pytest.raises(UsageError, match="does not make nvfp4 of the numbers"):
        served_model(config("nvfp4"), tables(dict.fromkeys(NAMES, spec_of("nvfp4"))), settings)


def test_the_scheduler_is_told_what_workers_know(config):
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorHandshakeMetadata, KVConnectorRole

    from kvabr.engines.vllm.connector import KvabrKeptAs
    from kvabr.engines.vllm.idle import IdleScheduler

    made = config("nvfp4")
    made.kv_transfer_config.kv_connector_extra_config["group_tokens"] = 32
    kept = tables(dict.fromkeys(NAMES, spec_of("nvfp4")))
    connector = KVConnectorFactory.create_connector(made, KVConnectorRole.SCHEDULER, kept)
    try:
        told = {(1, 0): KvabrKeptAs(KeptAs(engine="another-stage")), (0, 1): KvabrKeptAs(KEPT_AS)}
        connector.set_xfer_handshake_metadata_pp_aware({(0, 0): type("Foreign", (KVConnectorHandshakeMetadata,), {})()})
        assert "unknown:nvfp4" in connector._scheduler._model.spec.only.packing
        connector.set_xfer_handshake_metadata_pp_aware(told)
        assert f"{KEPT_AS.engine}:nvfp4" in connector._scheduler._model.spec.only.packing
        connector.set_xfer_handshake_metadata({0: KvabrKeptAs(KeptAs(engine="not a name"))})
        assert isinstance(connector._scheduler, IdleScheduler)  # as the worker is, or its loads would never end
    finally:
        connector.shutdown()
