"""The caches that a crowd plays: real frames of noise, small, and what each decodes to."""

from __future__ import annotations

from functools import cache, cached_property
from pathlib import Path

import numpy as np
import torch

from kvabr.client.result import Played
from kvabr.codec.base import GroupContext
from kvabr.codec.group import decode_group, encode_group
from kvabr.store.asset import Prompt
from kvabr.store.asset_folder import FolderAsset, FolderAssetWriter
from kvabr.types.catalog import Catalog, Track
from kvabr.types.digests import SHA256, digest_of
from kvabr.types.kv import KVSpec
from kvabr.types.naming import TrackNamespace, chain

LOSSES = {"Int4": 1e-2, "Int8": 1e-4, "FP16": 1e-7}
"""Tracks, and the loss of a whole cache on each, nats per generated token: what such tracks have as a rule."""
GROUP_TOKENS = 64
LAYER_BYTES = 2 * 2 * 64 * GROUP_TOKENS * 2
"""Of a group's FP16: K and V, two heads of 64 numbers, two bytes each."""


def make_spec(group_kib: int) -> KVSpec:
    """Return the spec of a model whose groups have this size at FP16, a multiple of 32 KiB."""
    return KVSpec.uniform("crowd/model", "crowd", group_kib * 1024 // LAYER_BYTES, 2, 64, "float16", None, GROUP_TOKENS)


def make_asset(folder: Path, spec: KVSpec, groups: int, seed: int) -> None:
    """Publish a cache of noise in a folder."""
    dice = np.random.default_rng(seed)
    tokens = tuple(int(token) for token in dice.integers(50_000, size=groups * GROUP_TOKENS))
    chunks = chain(tokens, model=spec.model, tokenizer=spec.tokenizer, group_tokens=GROUP_TOKENS)
    kv = torch.from_numpy(dice.standard_normal(spec.shape(len(tokens)), np.float32)).half()
    frames: dict[str, list[bytes]] = {name: [] for name in LOSSES}
    with FolderAssetWriter(folder) as writer:
        for group in range(groups):
            own = slice(group * GROUP_TOKENS, (group + 1) * GROUP_TOKENS)
            context = GroupContext(spec, own.start, GROUP_TOKENS)
            for name, made in frames.items():
                made.append(encode_group(kv[:, :, :, own], name, context, chunks[group], group))
                writer.frame(group, name, made[-1])
        tracks = tuple(
            Track(
                name,
                tuple(map(len, made)),
                (LOSSES[name] / groups,) * groups,
                tuple(digest_of(frame, SHA256) for frame in made),
            )
            for name, made in frames.items()
        )
        writer.prompt(Prompt(tokens, ()))
        writer.commit(Catalog(TrackNamespace(spec.model, chunks[-1]), spec, len(tokens), tuple(chunks), tracks))


class Truth:
    """What a published cache decodes to."""

    def __init__(self, folder: Path) -> None:
        self._asset = FolderAsset.open(folder)
        self.group = cache(self._decoded)

    @cached_property
    def tokens(self) -> tuple[int, ...]:
        """Ids of the prompt."""
        return self._asset.prompt().tokens

    @property
    def catalog(self) -> Catalog:
        """The asset's own."""
        return self._asset.catalog

    def wrong(self, played: Played) -> int:
        """Return how many groups of a play are not, bit by bit, what was published on the track that they came on."""
        groups = len(self.catalog.chunks)
        wrong = abs(groups - len(played.coverage))
        for group, track in enumerate(played.coverage[:groups]):
            own = slice(group * GROUP_TOKENS, (group + 1) * GROUP_TOKENS)
            wrong += not torch.equal(played.kv[:, :, :, own], self.group(group, track))
        return wrong

    def _decoded(self, group: int, track: str) -> torch.Tensor:
        spec, frame = self.catalog.spec, self._asset.frame(group, track)
        out = torch.empty(spec.shape(GROUP_TOKENS), dtype=torch.float16)
        context = GroupContext(spec, group * GROUP_TOKENS, GROUP_TOKENS)
        decode_group(frame, track, context, self.catalog.chunks[group], group, out)
        return out
