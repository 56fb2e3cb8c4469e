"""One catalog of a prompt that is joined from passages, so that a player can play it as it plays an asset.

The groups of such a catalog are those of its passages, in the order of the prompt, and the texts between them, which
nobody has published and an engine must compute (`Catalog.computed`). So they have unequal lengths. Each group of a
passage is published under the passage's own name (`Catalog.namespace_of`, `Catalog.address`), was encoded at one place
of it (`Unit.free`), and has another in the prompt (`Unit.first`). The tracks are those that all passages have.

What follows the last passage is no part of it, as what follows a cached prefix is none of that.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import replace

from kvabr.types.catalog import RECOMPUTED, Catalog, Track
from kvabr.types.digests import unknown
from kvabr.types.errors import FormatError
from kvabr.types.kv import KVSpec
from kvabr.types.naming import TrackNamespace
from kvabr.types.passage import Part, Passage
from kvabr.types.units import COMPUTED, Unit

_NO_BYTES = 1
"""Size on every track of a group that has none: sizes are positive, and one byte weighs nothing."""


def join(parts: Sequence[Part], found: Mapping[Passage, Catalog], spec: KVSpec) -> Catalog | None:
    """Return the catalog of a prompt, up to the end of the last passage that was found; None if there is none.

    A passage that begins the prompt is computed: it would have no attention sink before it, and is exact without.

    Args:
        parts: the prompt.
        found: catalogs of passages, of the same spec, and with the same codec profile if any.
        spec: of the model.

    Raises `FormatError` if the passages have no track in common.
    """
    units: list[Unit] = []
    sources: list[Catalog] = []
    position, done = 0, 0
    for part in parts:
        catalog = found.get(part) if isinstance(part, Passage) and position else None
        if catalog is not None:
            if done < position:
                units.append(Unit(0, 0, len(units), done, position - done, None, COMPUTED))
            own = catalog.at(position)
            for group in range(own.groups):
                units.append(own.unit(group)._replace(chunk=len(units), source=len(sources)))
            sources.append(catalog)
            done = position + catalog.tokens
        position += len(part.ids)
    if not sources:
        return None
    profiles = {catalog.profile: catalog.profile_bytes for catalog in sources if catalog.profile is not None}
    if len(profiles) > 1:
        raise FormatError("passages with different codec profiles cannot be joined")
    chunks = tuple("0" * 64 if unit.source == COMPUTED else sources[unit.source].chunks[unit.group] for unit in units)
    profile, profile_bytes = next(iter(profiles.items()), (None, 0))
    return Catalog(
        namespace=TrackNamespace(spec.model, _name(spec, units, chunks)),
        spec=spec,
        tokens=done,
        chunks=chunks,
        tracks=_common(units, sources),
        profile=profile,
        profile_bytes=profile_bytes,
        prefill=sources[0].prefill,
        loss_method="joined from passages",
        chosen=tuple(units),
        sources=tuple(sources),
    )


def fusion_loss(catalog: Catalog, coverage: Sequence[str]) -> float | None:
    """Return what joining its passages costs a cache, nats per generated token; None if that of one was not measured.

    ``coverage``: per group the track, or `RECOMPUTED`. Those of passages that were not wholly computed add up, as the
    losses of groups do.
    """
    joined = {
        unit.source
        for unit, track in zip(catalog.units, coverage, strict=True)
        if unit.source != COMPUTED and track != RECOMPUTED
    }
    notes = (catalog.sources[number].passage for number in sorted(joined))
    losses = [None if note is None else note.fusion_loss(0.0) for note in notes]
    known = [loss for loss in losses if loss is not None]
    return float(sum(known)) if len(known) == len(losses) else None


def _common(units: Sequence[Unit], sources: Sequence[Catalog]) -> tuple[Track, ...]:
    """Return the tracks that all passages have, with what each group is on them."""
    tracks: dict[str, Track] = {}
    for first in sources[0].tracks:
        own = [catalog.by_name.get(first.name) for catalog in sources]
        every = [track for track in own if track is not None and track.refines == first.refines]
        if len(every) < len(sources) or (first.refines is not None and first.refines not in tracks):
            continue
        missing = unknown(sources[0].digest_kind)
        listed = [
            (_NO_BYTES, 0.0, missing)
            if unit.source == COMPUTED
            else (
                every[unit.source].bytes[unit.group],
                every[unit.source].loss[unit.group],
                every[unit.source].digests[unit.group],
            )
            for unit in units
        ]
        sizes, losses, digests = zip(*listed, strict=True)
        slowest = max(track.decode_s for track in every)
        tracks[first.name] = replace(first, bytes=sizes, loss=losses, digests=digests, decode_s=slowest, measured=None)
    if all(track.refines is not None for track in tracks.values()):
        raise FormatError("the passages of this prompt have no track in common")
    return tuple(tracks.values())


def _name(spec: KVSpec, units: Sequence[Unit], chunks: Sequence[str]) -> str:
    """Return a digest that tells joined prompts apart in logs; nothing is published under it."""
    places = "".join(f"{chunk} {unit.first} {unit.tokens}\n" for unit, chunk in zip(units, chunks, strict=True))
    return hashlib.sha256(b"kvabr.joined/1\0" + spec.digest() + places.encode()).hexdigest()
