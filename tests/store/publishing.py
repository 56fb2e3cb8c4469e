"""Publishes made-up caches into stores: those of several layer classes as an encoder does, others as an engine does."""

import torch

from kvabr.data import default_catalog
from kvabr.publish.frames import FrameEncoder
from kvabr.publish.publisher import Publisher
from kvabr.store.asset import Asset
from kvabr.store.asset_store import AssetStore
from kvabr.store.locations import open_store
from kvabr.types.catalog import Catalog
from kvabr.types.kv import KVSpec, LayerClass
from kvabr.types.naming import chain
from kvabr.types.units import snapshot_ends
from tests.client.classes import TRACKS, numbers
from tests.toymodel import SPEC

PLAIN = KVSpec("test/plain", "tokenizer", (LayerClass("full", (0,), 2, 8, 8, "float16"),), 16)


def cache_of(spec: KVSpec, tokens: list[int]):
    """The cache of some tokens, with all snapshots of its states."""
    cache = list(numbers(spec, tokens))
    for number, part in enumerate(spec.parts):
        if ends := snapshot_ends(part, len(tokens)):
            cache[number] = torch.cat([numbers(spec, tokens[:end])[number] for end in ends], dim=3)
    return cache


def put(store, spec: KVSpec, tokens: list[int], *, loss: float = 0.1, tracks=TRACKS, estimated=False, **options):
    """Publish the cache of some tokens; return the catalog as it was written, and the writer."""
    store = store if isinstance(store, AssetStore) else open_store(store, create=True)
    chunks = chain(tokens, model=spec.model, tokenizer=spec.tokenizer, group_tokens=spec.group_tokens)
    with store.writer(chunks[-1], **options) as writer:
        frames = FrameEncoder(spec, chunks, len(tokens), tracks, None, writer)
        frames.encode(cache_of(spec, tokens))
        losses = {track: (loss,) * len(frames.units) for track in tracks}
        catalog = frames.catalog(losses, dict.fromkeys(tracks, 0.0), estimated=estimated)
        writer.commit(catalog)
    return writer.catalog, writer


def check(asset: Asset) -> Catalog:
    """Read every frame, each against its digest, and every part; return the catalog."""
    asset.check_parts()
    for track in asset.catalog.published.values():
        for group in range(len(track.bytes)):
            asset.frame(group, track.name)
    return asset.catalog


def publisher(root, spec: KVSpec = SPEC, **options) -> Publisher:
    return Publisher(root, spec, **({"prior": default_catalog(), "source": "a test"} | options))


def outcome_of(made: Publisher, slot, kv):
    """Publish a cache in the place that is reserved for it, and close the publisher."""
    outcomes = []
    slot.fill(kv, outcomes.append)
    made.close()
    return outcomes[0]
