"""Ranks that share out the tokens of every block: each keeps its own of one published cache, bit for bit."""

import os
import subprocess
import sys
from contextlib import closing
from importlib.util import find_spec
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from kvabr.data import default_catalog
from kvabr.engines.layouts import BlockLayout, keys_and_values
from kvabr.engines.vllm.caches import UnknownCacheError, engine_caches
from kvabr.engines.vllm.config import VllmSettings, served_model
from kvabr.engines.vllm.drafts import DraftCaches
from kvabr.engines.vllm.interleaving import WHOLE, Interleaving, interleaving_of
from kvabr.publish.publisher import Publisher
from kvabr.types.errors import UsageError
from kvabr.types.kv import KVSpec
from tests.client.classes import numbers
from tests.client.served import Served
from tests.engines.vllm.halves import Bench, request
from tests.engines.vllm.test_caches import spec

TOKENS, BLOCK = list(range(140)), 16


def latent(dim, **more):
    return spec("MLAAttentionSpec", num_kv_heads=1, head_size=dim, head_size_v=0, dcp_sharded=True, **more)


SHAPES = {
    "deepseek": [("model.layers.0", latent(24)), ("model.layers.1", latent(24))],
    "glm": [
        ("model.layers.0", latent(20)),
        ("model.layers.0.indexer", latent(8, cache_role=SimpleNamespace(value="indexer"))),
    ],
    "kimi": [
        ("model.layers.0", latent(28)),
        ("model.layers.1", latent(28)),
        ("model.layers.2", spec("FullAttentionSpec", dcp_sharded=False)),  # an EAGLE head, whose cache every rank has
    ],
}
"""What vLLM keeps of tiny models with the layers of these."""


def kept(shape, interleaving):
    """A table for each kind of layers."""
    groups = {}
    for name, one in SHAPES[shape]:
        groups.setdefault(type(one).__name__, []).append((name, one))
    config = SimpleNamespace(
        kv_cache_groups=[
            SimpleNamespace(
                layer_names=[name for name, _ in own], kv_cache_spec=SimpleNamespace(kv_cache_specs=dict(own))
            )
            for own in groups.values()
        ]
    )
    layers = 1 if shape == "glm" else 2
    return engine_caches(
        config,
        layers=range(layers),
        dtype="float16",
        held=torch.bfloat16,
        draft=DraftCaches(("eagle",)),
        interleaving=interleaving,
    )


@pytest.mark.parametrize(("shape", "ranks", "turn"), [("deepseek", 2, 1), ("glm", 4, 4), ("kimi", 2, 16)])
def test_each_rank_has_its_tokens_of_a_cache_that_was_published_as_one(tmp_path, shape, ranks, turn):
    whole = KVSpec(f"test/{shape}", "t", kept(shape, WHOLE).classes, 16)
    made = Publisher(tmp_path / "assets", whole, prior=default_catalog(), tracks=["FP16"])
    exact = numbers(whole, TOKENS)
    made.reserve(TOKENS).fill(exact, lambda _: None)
    made.close()
    with closing(Served(tmp_path / "assets", tmp_path)) as served:
        for rank in range(ranks):
            caches = kept(shape, Interleaving(ranks, rank, turn))
            assert caches.classes == whole.classes
            with closing(Bench(served, spec=whole, caches=caches)) as bench:
                asked = request(tokens=TOKENS)
                count, _ = bench.matched(asked)
                assert count == 128  # whole blocks of all ranks
                tables = [[3 + 7 * place % 37 for place in range(128 // size)] for size in caches.blocks]
                bench.scheduler.allocated(asked, tables, count)
                assert bench.steps() == (set(), {"r"}, set())
                for pages in caches.pages:
                    share = ranks if pages.interleaving != WHOLE else 1
                    for name, row in zip(pages.names, pages.rows, strict=True):
                        found = bench.named[name]
                        if whole.classes[pages.part].v_dim:
                            found = torch.cat(keys_and_values(found, BlockLayout.TRANSPOSED), dim=-1)
                        wanted = torch.full_like(found, float("nan"))
                        for token in range(128):
                            block, place = divmod(token, BLOCK * share)
                            owner = [(other // turn) % share if share > 1 else rank for other in range(place + 1)]
                            if owner[-1] == rank:
                                kv = exact[pages.part][row, :, :, token]  # [K/V, head, dim]
                                at = owner.count(rank) - 1
                                wanted[tables[pages.group][block], :, at] = torch.cat(tuple(kv), dim=-1)
                        assert torch.equal(found.nan_to_num(1e9), wanted.nan_to_num(1e9)), (rank, name)


def parallel(tensor, prefill, decode, rank, turn=1):
    return SimpleNamespace(
        tensor_parallel_size=tensor,
        prefill_context_parallel_size=prefill,
        decode_context_parallel_size=decode,
        cp_kv_cache_interleave_size=turn,
        rank=rank,
        pipeline_parallel_size=1,
    )


@pytest.mark.parametrize(
    ("tensor", "prefill", "decode", "ranks"),
    [
        (4, 1, 1, [0] * 4),
        (4, 1, 2, [0, 1, 0, 1]),
        (4, 1, 4, [0, 1, 2, 3, 0, 1]),  # the last two of another stage
        (2, 2, 2, [0, 0, 1, 1]),  # of ranks 0 to 3 = (prefill 0, tensor 0), (0, 1), (1, 0), (1, 1)
        (2, 2, 4, [0, 2, 1, 3]),
    ],
)
def test_which_rank_of_context_parallelism_a_rank_is(tensor, prefill, decode, ranks):
    found = [interleaving_of(parallel(tensor, prefill, decode, rank)) for rank in range(len(ranks))]
    assert [(each.rank, each.ranks) for each in found] == [(rank, decode) for rank in ranks]


def test_what_cannot_be_shared_out():
    with pytest.raises(UsageError, match="decode_context_parallel_size 3 does not divide 4 ranks"):
        interleaving_of(parallel(4, 1, 3, 0))
    with pytest.raises(UnknownCacheError, match="not a multiple of 5 tokens: set --cp-kv-cache-interleave-size"):
        kept("deepseek", Interleaving(2, 0, 5))
    old = SimpleNamespace(
        kv_cache_groups=[SimpleNamespace(layer_names=["model.layers.0"], kv_cache_spec=spec("MLAAttentionSpec"))]
    )
    with pytest.raises(UnknownCacheError, match=r"use 0\.32 or later"):
        engine_caches(old, layers=range(1), dtype="float16", held=torch.bfloat16, interleaving=Interleaving(2))
    for prefill, decode in ((2, 1), (1, 2)):
        config = SimpleNamespace(
            model_config=None,
            cache_config=SimpleNamespace(cache_dtype="auto"),
            parallel_config=parallel(2, prefill, decode, 0),
        )
        with pytest.raises(UsageError, match=r"cannot publish.*set kv_role to kv_consumer"):
            served_model(config, None, VllmSettings(url="moqt://a:1/"), produces=True)


_TURNS = [(1, 0, 1), (2, 1, 1), (4, 2, 4), (2, 0, 16)]
_KERNEL = """
import sys, torch, triton.language
from triton.runtime.interpreter import InterpretedFunction
from vllm.v1.worker import block_table
kernel = block_table.ComputeSlotMappingKernel.kernel
kernel.__globals__["tl"] = triton.language
tokens, block, *turns = map(int, sys.argv[1:])
for ranks, rank, turn in zip(turns[::3], turns[1::3], turns[2::3]):
    slots = torch.full((tokens,), -7)
    InterpretedFunction(kernel)[(2,)](
        tokens, tokens, torch.tensor([0, tokens], dtype=torch.int32), torch.arange(tokens),
        torch.arange(5, 105, dtype=torch.int32)[None], 100, slots, KV_CACHE_BLOCK_SIZE=block, TOTAL_CP_WORLD_SIZE=ranks,
        TOTAL_CP_RANK=rank, CP_KV_CACHE_INTERLEAVE_SIZE=turn, PAD_ID=-1, BLOCK_SIZE=1024,
    )
    print(*slots.tolist())
"""
"""vLLM's own kernel, which says where a rank keeps each token, in Triton's interpreter."""


@pytest.mark.model
@pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed: tools/engine vllm")
def test_tokens_lie_where_vllm_looks_for_them():
    numbers = (200, BLOCK, *(number for turn in _TURNS for number in turn))
    command = [sys.executable, "-c", _KERNEL, *map(str, numbers)]
    told = os.environ | {"TRITON_INTERPRET": "1", "VLLM_LOGGING_LEVEL": "ERROR"}
    done = subprocess.run(command, env=told, capture_output=True, text=True, check=True)  # noqa: S603  # our own
    places = np.arange(200)
    for (ranks, rank, turn), line in zip(_TURNS, done.stdout.splitlines(), strict=True):
        own, at = Interleaving(ranks, rank, turn).own(places % (BLOCK * ranks))
        ours = np.where(own, (5 + places // (BLOCK * ranks)) * BLOCK + at, -1)
        assert [int(slot) for slot in line.split()] == ours.tolist()
