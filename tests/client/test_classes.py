"""A cache with a layer class of every kind: encoded, served, played by an ordinary session, and put together."""

from dataclasses import replace

import pytest
import torch

from kvabr.client.async_client import AsyncClient
from kvabr.client.lookup import Found, find_prefix
from kvabr.client.options import PlayOptions
from kvabr.client.result import IncompleteError, NothingCached, Played, save
from kvabr.player.assembler import Assembler
from kvabr.server.published_assets import PublishedAssets
from kvabr.store.locations import open_asset
from kvabr.types.catalog import Catalog, Track
from kvabr.types.cost import PrefillCost
from kvabr.types.errors import ForeignError, FormatError, PlayError
from kvabr.types.kv import KVSpec, LayerClass
from kvabr.types.naming import TrackNamespace, chain
from kvabr.types.units import Span, count_of
from tests.client.classes import Computer, link, numbers, published
from tests.client.virtual import virtual
from tests.memory_transport import Fault

SPEC = KVSpec(
    "test/every-kind",
    "tokenizer",
    (
        LayerClass("full", (0,), 2, 8, 8, "float16"),
        LayerClass("window", (1, 2), 2, 8, 4, "float16", window=40),
        LayerClass("chunked", (3,), 1, 8, 8, "float16", window=64),
        LayerClass("latent", (4,), 1, 12, 0, "bfloat16"),
        LayerClass("full", (4,), 1, 6, 0, "float16", role="indexer"),
        LayerClass("state", (5,), 2, 6, 5, "float16"),
        LayerClass("state", (5,), 1, 10, 3, "float16", role="convolution"),
    ),
    16,
)
TOKENS = list(range(70))


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    root = tmp_path_factory.mktemp("classes")
    published(root, SPEC, TOKENS)
    return root


@pytest.fixture(scope="module")
def library(root):
    return PublishedAssets(root)


@pytest.fixture(scope="module")
def catalog(library):
    return library.assets[0].catalog


async def play(library, *, policy="fixed:FP16", faults=None, **options):
    how = PlayOptions(policy=policy, **options)
    async with link(library, faults=faults) as connection, AsyncClient(connection, options=how) as client:
        return await client.play(TOKENS, deadline=2.0, model=SPEC)


@pytest.mark.parametrize("policy", ["fixed:FP16", "fixed:Int8", "anytime", "cachegen"])
@virtual
async def test_what_is_needed_of_every_class_comes(library, policy):
    played = await play(library, policy=policy)
    exact = numbers(SPEC, TOKENS)
    assert (played.tokens, played.limited_by) == (70, None)
    assert [(span.first, span.tokens) for span in played.spans] == [
        (0, 70), (16, 54), (64, 6), (0, 70), (0, 70), (70, 6), (70, 10),
    ]  # fmt: skip
    for kv, whole, span, part in zip(played.parts, exact, played.spans, SPEC.parts, strict=True):
        begin = 0 if part.only.kind == "state" else span.first
        error = (kv.float() - whole[:, :, :, begin : begin + span.tokens]).abs().max()
        assert error <= (0.0 if set(played.coverage) == {"FP16"} else 1.5)
    needed = sum(played.catalog.track(track).bytes[group] for group, track in enumerate(played.coverage))
    assert played.record.bytes_fetched - played.record.bytes_wasted >= needed
    with pytest.raises(FormatError, match="several layer classes"):
        _ = played.kv


@virtual
async def test_a_play_is_written_with_a_tensor_per_class(library, tmp_path):
    from safetensors.torch import load_file

    played = await play(library)
    save(played, tmp_path / "out.safetensors")
    written = load_file(tmp_path / "out.safetensors")
    assert set(written) == {f"kv.{name}" for name in SPEC.names}
    assert torch.equal(written["kv.window40"], played.parts[1])


@pytest.mark.parametrize("name", SPEC.names)
@virtual
async def test_a_class_that_does_not_come_is_missing(library, name):
    def faults(ask):
        return Fault(refuse=0x10) if ask.track.partition(".")[2] == name else None

    with pytest.raises(IncompleteError, match=rf"missing groups: {name} #") as caught:
        await play(library, faults=faults, policy="anytime")
    assert caught.value.prefix is None
    assert {catalog_part(library, group) for group in caught.value.missing} == {name}


def catalog_part(library, group):
    return SPEC.names[library.assets[0].catalog.to_play.unit(group).part]


def test_a_frame_of_another_class_is_refused(root, catalog):
    asset, play = open_asset(root / "every-kind"), catalog.to_play
    assembler = Assembler(play)
    for group, unit in enumerate(play.units):
        wrong = next(other for other, one in enumerate(play.units) if one.part != unit.part)
        name, number = play.address(wrong, "FP16")
        with pytest.raises((ForeignError, FormatError)):
            assembler.put(group, "FP16", asset.frame(number, name))
    assert set(assembler.coverage) == {None}


HUGE = tuple(range(1, 1024))


@pytest.mark.parametrize(
    "only",
    [
        LayerClass("state", HUGE, 1024, 1 << 16, 4096, "float32"),
        LayerClass("window", HUGE, 1024, 4096, 4096, "float16", window=1 << 31),
    ],
    ids=lambda only: only.kind,
)
@virtual
async def test_a_cache_that_no_machine_has_memory_for_is_refused(library, only):
    spec = KVSpec("test/huge", "tokenizer", (LayerClass("full", (0,), 1, 8, 8, "float16"), only), 1 << 16)
    tokens = [7] * (1 << 17)
    chunks = chain(tokens, model=spec.model, tokenizer=spec.tokenizer, group_tokens=spec.group_tokens)
    count = count_of(spec, len(tokens))
    track = Track("FP16", (100,) * count, (0.5,) * count, ("ab" * 32,) * count)
    huge = Catalog(TrackNamespace(spec.model, chunks[-1]), spec, len(tokens), tuple(chunks), (track,))
    async with link(library) as connection, AsyncClient(connection) as client:
        with pytest.raises(PlayError, match="no memory for a cache of"):
            await client.play_asset(Found(huge, "ab" * 32), deadline=1.0)


STATES = KVSpec(
    "test/states",
    "tokenizer",
    (LayerClass("full", (0,), 1, 2, 2, "float16"), LayerClass("state", (1,), 1, 2, 2, "float16")),
    4,
)
"""With a snapshot at the end of each asset alone."""


async def found(root, tokens: list[int]) -> int:
    """How many tokens of a prompt can be played."""
    async with link(PublishedAssets(root)) as connection:
        best = await find_prefix(connection, tokens, STATES)
        return best.catalog.tokens if isinstance(best, Found) else 0


@pytest.mark.parametrize("order", ["shorter first", "longer first"])
@virtual
async def test_a_longer_asset_without_a_snapshot_does_not_hide_one_that_can_be_played(tmp_path, order):
    turns = {"one": list(range(16)), "two": list(range(40))}
    for name, tokens in sorted(turns.items(), reverse=order == "longer first"):
        published(tmp_path / name, STATES, tokens)
    assert await found(tmp_path, [*range(16), 99, 98]) == 16
    # The longer one shares more, and nothing of it can be played.
    assert await found(tmp_path, [*range(30), 99]) == 16
    assert await found(tmp_path, [*range(40), 99]) == 40
    assert await found(tmp_path, [*range(12), 99]) == 0


@pytest.mark.parametrize("computes", [False, True])
@virtual
async def test_a_prompt_of_which_no_snapshot_is_cached_says_so(tmp_path, computes):
    published(tmp_path / "one", STATES, list(range(16)))
    prompt, engine = [*range(12), 99], Computer(STATES) if computes else None
    options = PlayOptions(prefill_cost=PrefillCost.from_rate(50.0))
    async with (
        link(PublishedAssets(tmp_path)) as connection,
        AsyncClient(connection, engine=engine, options=options) as client,
    ):
        assert await client.find(prompt, model=STATES) is None
        for model in (STATES, "test/states", "test/states"):  # the second time it is known which models there are
            played = await client.play(prompt, deadline=2.0, model=model)
            assert isinstance(played, Played if computes else NothingCached)
            assert played.limited_by == "state"
        other = await client.play([98, 99, 98, 99, 98], deadline=2.0, model=STATES)
        assert other.limited_by is None
        if computes:
            assert played.spans == (Span(0, 13), Span(13, 2))


@virtual
async def test_snapshots_and_group_sizes_are_a_publishers_choice(tmp_path):
    """An engine finds and plays what has groups of another size, and snapshots where it keeps none itself."""
    often = replace(STATES, group_tokens=8, classes=(STATES.classes[0], replace(STATES.classes[1], interval=8)))
    published(tmp_path / "often", often, list(range(40)))
    options = PlayOptions(prefill_cost=PrefillCost.from_rate(1.0))
    async with (
        link(PublishedAssets(tmp_path)) as connection,
        AsyncClient(connection, engine=Computer(STATES), options=options) as client,
    ):
        played = await client.play([*range(30), 99], deadline=2.0)
        assert (played.tokens, played.limited_by) == (24, None)
        name = played.catalog.namespace
        again = await client.play_asset(name, deadline=2.0, tokens=list(range(40)))
        assert again.tokens == 40


@virtual
async def test_a_second_round_trip_never_makes_it_worse(tmp_path):
    """A long prompt's first lookup names only some of its groups, the second those near the end of what was found."""
    prompt = list(range(4 * 330))
    published(tmp_path / "short", STATES, prompt[:80])
    published(tmp_path / "long", STATES, [*prompt[:-8], *range(8)])
    assert await found(tmp_path, prompt) == 80
    published(tmp_path / "longer", STATES, prompt[:84])
    assert await found(tmp_path, prompt) == 84
