"""Made-up assets as object stores have them, without a cache: catalogs, and spans of frames of a few bytes."""

from __future__ import annotations

import hashlib
from dataclasses import replace

from kvabr.store.objects import spans
from kvabr.store.objects.layout import SPAN_GROUPS
from kvabr.types.catalog import Catalog, Track
from kvabr.types.kv import KVSpec
from kvabr.types.naming import TrackNamespace, chain
from kvabr.types.units import count_of
from tests.catalogs import catalog


def catalog_of(spec: KVSpec | None, tokens: int) -> Catalog:
    """A catalog with digests of made-up frames; one class unless there is a spec."""
    spec = replace(catalog(1).spec, group_tokens=16) if spec is None else spec
    chunks = chain(list(range(tokens)), model=spec.model, tokenizer=spec.tokenizer, group_tokens=spec.group_tokens)
    units = range(count_of(spec, tokens))
    tracks = [
        Track(
            name,
            tuple(len(frame(name, unit)) for unit in units),
            tuple(unit / 7 for unit in units),
            tuple(hashlib.sha256(frame(name, unit)).hexdigest() for unit in units),
            refines=below,
            decode_s=0.25,
        )
        for name, below in (("Int8", None), ("AC-L0", None), ("AC-L1", "AC-L0"))
    ]
    return Catalog(TrackNamespace(spec.model, chunks[-1]), spec, tokens, tuple(chunks), tuple(tracks))


def frame(track: str, unit: int) -> bytes:
    """Return the made-up frame of a unit."""
    return f"{track} {unit} ".encode() * (unit % 5 + 1)


def spans_of(made: Catalog, span_groups: int = SPAN_GROUPS) -> list[bytes]:
    """Return its spans."""
    found = []
    for number, units in enumerate(spans.units_by_span(made, span_groups)):
        frames = [
            frame(track.name, index)
            for track in made.tracks
            for part in range(len(made.spec.parts))
            for index, unit in units
            if unit.part == part
        ]
        found.append(spans.encode_span(spans.head_of(made, number, units, span_groups), frames))
    return found
