"""A cache with a layer class of every kind: encoded, served, played by an ordinary session, and put together."""

from __future__ import annotations

import json
from functools import partial

import pytest
import torch

from kvabr.client.async_client import AsyncClient
from kvabr.client.lookup import Found, Unplayable, find_prefix
from kvabr.client.options import PlayOptions
from kvabr.client.result import IncompleteError, save
from kvabr.player.assembler import Assembler
from kvabr.publish.frames import FrameEncoder, MemoryFrames
from kvabr.server.grants import EVERYTHING
from kvabr.server.published_assets import PublishedAssets
from kvabr.server.relay_catalogs import check_small
from kvabr.store.locations import open_asset, open_store
from kvabr.types.catalog import Catalog, Track
from kvabr.types.cost import PrefillCost
from kvabr.types.errors import ForeignError, FormatError, PlayError, UsageError
from kvabr.types.kv import KVSpec, LayerClass
from kvabr.types.naming import CATALOG_TRACK, TrackNamespace, chain
from kvabr.types.units import count_of
from tests.client.classes import WINDOWS, published
from tests.client.virtual import virtual
from tests.memory_transport import Fault, MemoryConnection, MemoryLink

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
TRACKS = ("FP16", "BF16", "Int8")


def numbers():
    """A cache of whole numbers, which every 16-bit float has exactly; of states the snapshot at the end."""
    out = []
    for part in SPEC.parts:
        shape = part.shape(part.only.k_dim if part.only.kind == "state" else len(TOKENS))
        out.append((torch.arange(torch.Size(shape).numel()) * 7919 % 255 - 127).float().view(shape))
    return tuple(out)


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    root = tmp_path_factory.mktemp("classes")
    chunks = chain(TOKENS, model=SPEC.model, tokenizer=SPEC.tokenizer, group_tokens=SPEC.group_tokens)
    with open_store(root).writer("asset") as writer:
        frames = FrameEncoder(SPEC, chunks, len(TOKENS), TRACKS, None, writer)
        frames.encode(numbers())
        seconds = {track: frames.decode_seconds(track) for track in TRACKS}
        expected = {"FP16": 1e-6, "BF16": 2e-6, "Int8": 0.001}
        losses = {track: [loss] * len(frames.units) for track, loss in expected.items()}
        writer.commit(frames.catalog(losses, seconds, loss_method="made up", source="test"))
    return root


@pytest.fixture(scope="module")
def library(root):
    return PublishedAssets(root)


@pytest.fixture(scope="module")
def catalog(library):
    return library.assets[0].catalog


def link(library, **options):
    return MemoryConnection(partial(library.find, EVERYTHING), MemoryLink(1e6, 0.02), **options)


async def play(library, *, policy="fixed:FP16", faults=None, **options):
    how = PlayOptions(policy=policy, **options)
    async with link(library, faults=faults) as connection, AsyncClient(connection, options=how) as client:
        return await client.play(TOKENS, deadline=2.0, model=SPEC)


def test_every_class_has_tracks_and_files_of_its_own(root, catalog):
    folders = {folder.name: len(list(folder.iterdir())) for folder in (root / "asset" / "groups").iterdir()}
    wanted = {
        "full": 5,
        "window40": 5,
        "chunked64": 5,
        "latent": 5,
        "full-indexer": 5,
        "state": 1,
        "state-convolution": 1,
    }
    assert folders == {f"{track}.{name}": count for track in TRACKS for name, count in wanted.items()}
    assert set(catalog.published) == set(folders)


@pytest.mark.parametrize("policy", ["fixed:FP16", "fixed:Int8", "anytime", "cheapfirst", "cachegen", "fugu"])
@virtual
async def test_what_is_needed_of_every_class_comes(library, policy):
    played = await play(library, policy=policy)
    exact = numbers()
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


@virtual
async def test_a_file_with_one_window_says_where_it_begins(tmp_path):
    from safetensors import safe_open

    async with link(published(tmp_path / "origin", WINDOWS, TOKENS)) as connection, AsyncClient(connection) as client:
        played = await client.play(TOKENS, deadline=2.0, model=WINDOWS)
    save(played, tmp_path / "out.safetensors")
    with safe_open(tmp_path / "out.safetensors", "pt") as file:
        facts = json.loads(file.metadata()["kvabr"])
        assert (facts["tokens"], facts["first"]) == (70, [16])
        assert file.get_tensor("kv").shape[3] == 54


@pytest.mark.parametrize("name", SPEC.names)
@virtual
async def test_a_class_that_does_not_come_is_missing(library, name):
    def faults(ask):
        return Fault(refuse=0x10) if ask.track.partition(".")[2] == name else None

    with pytest.raises(IncompleteError, match=rf"missing: {name} #") as caught:
        await play(library, faults=faults, policy="anytime")
    assert caught.value.prefix is None
    assert {catalog_part(library, group) for group in caught.value.missing} == {name}


def catalog_part(library, group):
    return SPEC.names[library.assets[0].catalog.to_play.unit(group).part]


@virtual
async def test_a_damaged_unit_is_fetched_on_another_track(library):
    def faults(ask):
        return Fault(corrupt_at=200) if ask.track == "FP16.state" else None

    played = await play(library, faults=faults)
    state = next(group for group in range(played.catalog.groups) if catalog_part(library, group) == "state")
    assert played.coverage[state] != "FP16"


@virtual
async def test_less_of_a_prompt_cannot_be_played_without_a_snapshot(library):
    async with link(library) as connection:
        assert await find_prefix(connection, [*TOKENS[:48], 500], SPEC) == Unplayable("state")
        found = await find_prefix(connection, [*TOKENS, 500], SPEC)
        assert (found.catalog.tokens, found.limited_by) == (70, None)


def test_a_relay_knows_every_class(catalog):
    facts = check_small(catalog.namespace, CATALOG_TRACK, catalog.dumps().encode())
    assert set(facts.sizes) == set(catalog.published)
    assert len(facts.all_digests()) == 3 * 27


def test_a_frame_of_another_class_is_refused(root, catalog):
    asset, play = open_asset(root / "asset"), catalog.to_play
    assembler = Assembler(play)
    for group, unit in enumerate(play.units):
        wrong = next(other for other, one in enumerate(play.units) if one.part != unit.part)
        name, number = play.address(wrong, "FP16")
        with pytest.raises((ForeignError, FormatError)):
            assembler.put(group, "FP16", asset.frame(number, name))
    assert set(assembler.coverage) == {None}


def test_swapped_files_are_named(root):
    asset = open_asset(root / "asset")
    one, other = (root / "asset" / "groups" / f"FP16.{name}" / "00000.kvg" for name in ("state", "state-convolution"))
    data = other.read_bytes()
    other.write_bytes(one.read_bytes())
    try:
        with pytest.raises(ForeignError, match=r"group 0 of FP16\.state, not group 0 of FP16\.state-convolution"):
            asset.frame(0, "FP16.state-convolution")
    finally:
        other.write_bytes(data)


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


def test_what_is_not_there_yet_says_so(catalog):
    play = catalog.to_play
    with pytest.raises(UsageError, match=r"Catalog\.to_play"):
        Assembler(catalog)
    with pytest.raises(UsageError, match="not one tensor"):
        Assembler(play, out=torch.zeros(1))


def test_a_cache_of_another_shape_is_not_encoded():
    """A snapshot too few, rows too few, a class too few."""
    spec = KVSpec("m", "t", (LayerClass("state", (0,), 1, 4, 4, "float16", interval=16),), 16)
    frames = FrameEncoder(spec, ["ab" * 32] * 2, 32, ["FP16"], None, MemoryFrames())
    frames.encode((torch.ones(spec.shape(8)),))
    assert len(frames.bytes["FP16"]) == 2
    for rows in (4, 7, 12):
        with pytest.raises(FormatError, match=r"cannot encode .* not \(1, 1, 1, 8, 4\)"):
            frames.encode((torch.ones(spec.shape(rows)),))


@virtual
async def test_a_prefix_has_its_snapshots(library, catalog):
    async with link(library) as connection, AsyncClient(connection) as client:
        found = await client.find(TOKENS, model=SPEC)
        played = await client.play_prefix(found, deadline=1.0, cost=PrefillCost.from_rate(10.0))
        assert played.tokens == 70
