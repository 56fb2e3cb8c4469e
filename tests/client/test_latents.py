"""Latents (MLA) as engines keep them, in 16 bits or in FP8: published by an engine's publisher, served, and played."""

from dataclasses import replace
from functools import partial

import pytest
import torch

from kvabr.client.async_client import AsyncClient
from kvabr.client.options import PlayOptions
from kvabr.client.result import save
from kvabr.codec.base import GroupContext
from kvabr.codec.group import decode_group, encode_group
from kvabr.codec.quantised import codes_of
from kvabr.player.assembler import Assembler
from kvabr.server.grants import EVERYTHING
from kvabr.server.published_assets import PublishedAssets
from kvabr.types.cost import PrefillCost
from kvabr.types.errors import ForeignError, PlayError, UsageError
from kvabr.types.kv import KVSpec, LayerClass
from tests.client.classes import Computer, numbers
from tests.client.virtual import virtual
from tests.memory_transport import MemoryConnection, MemoryLink
from tests.store.publishing import outcome_of, publisher

LATENT = LayerClass("latent", (0, 1, 2), 1, 576, 0, "bfloat16")
"""512 dims of the compressed keys and values, 64 that are rotated; one head."""
INDEXER = LayerClass("latent", (0, 1, 2), 1, 128, 0, "bfloat16", role="indexer")
MLA = KVSpec("test/mla", "tokenizer", (LATENT,), 32)
SPARSE = KVSpec("test/mla-sparse", "tokenizer", (LATENT, INDEXER), 32)
SCALES = (0.0625, 0.01, 0.3)
MLA_FP8 = KVSpec("test/mla", "tokenizer", (replace(LATENT, dtype="float8_e4m3fn", scales=SCALES),), 32)
SPARSE_FP8 = KVSpec("test/mla-sparse", "tokenizer", (*MLA_FP8.classes, INDEXER), 32)
GQA_FP8 = KVSpec(
    "test/gqa", "tokenizer", (LayerClass("full", (0, 1), 2, 32, 32, "float8_e5m2", scales=(0.5, 1.0, 2.0, 4.0)),), 32
)
SPECS = {"mla": MLA, "sparse": SPARSE, "mla fp8": MLA_FP8, "sparse fp8": SPARSE_FP8, "gqa fp8": GQA_FP8}
TOKENS = list(range(70))


def cache_of(spec):
    """A tensor per class, in its own type."""
    dice = torch.Generator().manual_seed(1)
    tensors = []
    for part in spec.parts:
        numbers = torch.randn(part.shape(len(TOKENS)), generator=dice)
        # Codes of FP8 mean as much as the scales say; here that is not the numbers drawn.
        tensors.append((numbers * (1.0 if part.only.scales is None else 40.0)).to(part.torch_dtype))
    return tuple(tensors)


def published(root, spec, **options):
    made = publisher(root, spec, **options)
    assert outcome_of(made, made.reserve(TOKENS), cache_of(spec)).verdict == "published"
    return PublishedAssets(root)


async def play(library, model, *, track, **options):
    link = MemoryConnection(partial(library.find, EVERYTHING), MemoryLink(1e7, 0.02))
    how = PlayOptions(policy=f"fixed:{track}", **options)
    async with link as connection, AsyncClient(connection, options=how) as client:
        return await client.play(TOKENS, deadline=5.0, model=model)


def through(spec, track):
    """What a codec makes of the cache, group by group."""
    outs = tuple(torch.zeros_like(part) for part in cache_of(spec))
    for index in range(spec.groups(len(TOKENS))):
        for number, part in enumerate(spec.parts):
            first, last = spec.group_range(index, len(TOKENS))
            context = GroupContext(part, first, last - first)
            kv, out = (each[number][:, :, :, first:last] for each in (cache_of(spec), outs))
            decode_group(encode_group(kv, track, context, "ab" * 32, index), track, context, "ab" * 32, index, out)
    return outs


def same(one, other):
    return one.dtype == other.dtype and torch.equal(one.view(torch.uint8), other.view(torch.uint8))


@pytest.fixture(scope="module", params=SPECS)
def on_every_level(request, tmp_path_factory):
    """A cache of each kind on all levels but AC's."""
    spec = SPECS[request.param]
    return published(
        tmp_path_factory.mktemp("levels"), spec, tracks=["Raw", "FP16", "BF16", "FP8", "Int8", "Int4"]
    ), spec


@pytest.mark.parametrize("track", ["Raw", "BF16", "FP8", "Int8", "Int4"])
@virtual
async def test_a_tensor_comes_for_every_class_in_the_engines_own_type(on_every_level, tmp_path, track):
    library, spec = on_every_level
    played = await play(library, spec, track=track)
    assert set(played.coverage) == {track}
    assert [(span.first, span.tokens) for span in played.spans] == [(0, 70)] * len(spec.parts)
    for kv, wanted, exact in zip(played.parts, through(spec, track), cache_of(spec), strict=True):
        assert same(kv, wanted)
        assert same(kv, exact) or track not in ("Raw", "BF16")
    save(played, tmp_path / "cache.safetensors")


@pytest.mark.parametrize("name", ["mla fp8", "sparse fp8", "gqa fp8"])
def test_a_quantised_cache_is_published_as_it_is_and_smaller(tmp_path, name):
    spec = SPECS[name]
    (asset,) = published(tmp_path, spec).assets
    catalog = asset.catalog
    assert {"Raw", "Int4"} <= set(catalog.by_name)
    assert set(catalog.by_name).isdisjoint({"FP16", "BF16", "FP8", "Int8"})
    own = sum(part.numel() * part.element_size() for part in cache_of(spec))
    assert own <= catalog.track("Raw").total_bytes <= own + 200 * catalog.groups
    assert catalog.track("Int4").total_bytes < 0.8 * own
    assert catalog.track("Raw").loss == (0.0,) * catalog.groups


@virtual
async def test_a_cache_with_other_scales_is_refused(tmp_path):
    library = published(tmp_path, MLA_FP8)
    other = MLA_FP8.changed(scales=(1.0,))
    with pytest.raises(PlayError, match="cannot be mixed") as caught:
        await play(library, other, track="Raw")
    assert isinstance(caught.value.__cause__, ForeignError)
    link = MemoryConnection(partial(library.find, EVERYTHING), MemoryLink(1e7, 0.02))
    async with link as connection, AsyncClient(connection) as client:
        with pytest.raises(ForeignError, match="scales"):
            await client.find(TOKENS, model=other, any_dtype=True)
        found = await client.find(TOKENS, model=MLA, any_dtype=True)
        assert found.catalog.spec == MLA_FP8


def test_the_assembler_takes_its_own_codes_or_numbers_and_no_others(tmp_path):
    asset = published(tmp_path, GQA_FP8).assets[0]
    exact, catalog = cache_of(GQA_FP8)[0], asset.catalog
    with pytest.raises(UsageError, match=r"cannot be converted to torch\.float8_e4m3fn"):
        Assembler(catalog, dtype=torch.float8_e4m3fn)
    out = torch.zeros_like(exact)
    assembler = Assembler(catalog, out=out)
    for group in range(catalog.groups - 1):
        assembler.put(group, "Raw", asset.frame(group, "Raw"))
    last = exact[:, :, :, 64:]
    numbers = last.float() * torch.tensor([[0.5, 1.0], [2.0, 4.0]])[:, :, None, None, None]
    with pytest.raises(UsageError, match="NaN"):
        assembler.put_computed(2, 3, torch.full_like(last, float("nan")))
    assembler.put_computed(2, 3, numbers)
    assert same(assembler.take(), exact)
    assert same(out, exact)


@pytest.mark.parametrize("out", [False, True])
@virtual
async def test_what_the_engine_computes_itself_becomes_its_codes(tmp_path, out):
    tokens = list(range(100, 150))
    into = torch.zeros(GQA_FP8.shape(60), dtype=torch.float8_e5m2) if out else None
    wanted = codes_of(numbers(GQA_FP8, tokens)[0], GQA_FP8)
    link = MemoryConnection(partial(published(tmp_path, GQA_FP8).find, EVERYTHING), MemoryLink(1e7, 0.02))
    how = PlayOptions(prefill_cost=PrefillCost.from_rate(1e4), out=into)
    async with link as connection, AsyncClient(connection, options=how, engine=Computer(GQA_FP8)) as client:
        played = await client.play(tokens, deadline=2.0)
        with pytest.raises(UsageError, match="has scales of its own"):
            await client.play(tokens, deadline=2.0, options=replace(how, out=None, dtype=torch.float8_e4m3fn))
    assert same(played.kv.contiguous(), wanted)
    assert into is None or same(into[:, :, :, :50].contiguous(), wanted)
