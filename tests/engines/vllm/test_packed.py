"""Caches that vLLM packs, by the halves of the connector without vLLM: bytes come back, and packings never mix."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from kvabr.data import default_catalog
from kvabr.engines.vllm.caches import EngineCaches, Pages
from kvabr.engines.vllm.config import ServedModel
from kvabr.publish.publisher import Publisher
from kvabr.types.catalog import Catalog
from kvabr.types.errors import UsageError
from kvabr.types.kv import KVSpec, LayerClass
from tests.client.served import Served
from tests.engines.vllm.halves import BLOCK, Bench, request

pytestmark = pytest.mark.process

NUMBERS = LayerClass("full", (0, 3), 2, 8, 8, "float32")
BYTES = LayerClass("full", (1, 2), 2, 11, 0, "uint8", packing="vllm-0.32,cpu,TURBOQUANT:turboquant_4bit_nc,block=8")
CLASSES = (NUMBERS, BYTES)
"""The first and last layers are left as they are, as vLLM does with TurboQuant."""


def model_of(classes=CLASSES):
    pages = [Pages(0, part, BLOCK, tuple(map(str, one.layers)), (0, 1)) for part, one in enumerate(classes)]
    heads = tuple(range(one.heads) for one in classes)
    return ServedModel(KVSpec("m", "t", classes, 16), torch.float32, EngineCaches(classes, tuple(pages)), heads)


def tensors(seed):
    dice = torch.Generator().manual_seed(seed)
    shapes = {str(layer): (40, one.heads, BLOCK, sum(one.split)) for one in CLASSES for layer in one.layers}
    return {
        name: torch.randint(0, 256, shape, dtype=torch.uint8, generator=dice)
        if name in "12"
        else torch.randn(shape, generator=dice)
        for name, shape in shapes.items()
    }


def test_the_bytes_of_a_packed_cache_come_back(tmp_path):
    assets = tmp_path / "assets"
    assets.mkdir()
    served = Served(assets, tmp_path)
    mine, theirs, how = tensors(1), tensors(2), {"policy": "fixed:Raw", "tracks": ["Raw"]}
    publishing = Bench(served, assets, caches=(model_of(), mine), **how)
    playing = Bench(served, caches=(model_of(), theirs), **how)
    other = replace(BYTES, packing=BYTES.packing.replace("4bit", "3bit"))
    elsewhere = Bench(served, caches=(model_of((NUMBERS, other)), tensors(3)), **how)
    try:
        assert publishing.scheduler.finished(request(), [list(range(3, 12))])
        publishing.steps()
        publishing.published()
        (path,) = assets.glob("*/catalog.json")
        assert Catalog.read(path).spec == publishing.model.spec
        served.look()
        before = {name: each.clone() for name, each in theirs.items()}
        assert playing.load(request(), blocks=range(20, 40)) == (64, set())
        for name, blocks in theirs.items():
            assert torch.equal(blocks[20:28], mine[name][3:11])
            assert torch.equal(blocks[:20], before[name][:20])
        assert elsewhere.matched(request()) == (0, False)
        assert elsewhere.scheduler.counts.take()["lookups_refused"] == 1
    finally:
        for bench in (publishing, playing, elsewhere):
            bench.close()
        served.close()


def test_only_raw_is_published_of_it(tmp_path):
    with pytest.raises(UsageError, match="its only track is Raw"):
        Publisher(tmp_path, model_of().spec, prior=default_catalog(), tracks=["Raw", "Int4"])
