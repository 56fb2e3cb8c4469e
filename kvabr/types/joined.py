"""The catalog of a prompt joined from passages, which can be played like the catalog of one asset.

Its groups, of unequal lengths, are those of the passages in prompt order, and the texts between passages, which only an
engine can compute (`Catalog.computed`). A passage's group is published under the passage's name
(`Catalog.namespace_of`, `Catalog.address`), encoded at position `Unit.free` and placed at `Unit.first`. The tracks are
those that all passages have. The catalog ends with the last passage.

The loss of a group includes its share of the fusion loss, so computing a group saves both losses. Codec losses were
measured directly after the passage without other context, so a passage's codec loss counts in proportion to its length
and to its tokens that are not recomputed. Fusion losses add up. (SmolLM2-135M, three prompts of four pieces of a text:
predicted for FP16 0.018, 0.047 and 0.053 nats, measured 0.014, 0.033 and 0.044; AC-L0 0.09 and 0.14, measured 0.054 and
0.062.)
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from kvabr.types.catalog import RECOMPUTED, Catalog, CommonFacts, Track
from kvabr.types.digests import unknown
from kvabr.types.errors import FormatError
from kvabr.types.kv import KVSpec
from kvabr.types.naming import TrackNamespace
from kvabr.types.passage import Part, Passage, PassageNotes
from kvabr.types.records import fields_of
from kvabr.types.tails import losses_with_tail
from kvabr.types.units import COMPUTED, Unit

_NO_BYTES = 1
"""Size of a group without frames, bytes."""
_NO_COMMON_TRACK = (
    "it shares no track, or not the codec profile, with most of this prompt's passages; publish it as they were "
    "published"
)
_NOT_MEASURED = "the loss of joining it was not measured; publish it again with fusion losses, or set max_loss=inf"


class Joined(NamedTuple):
    """A passage and its place in a prompt."""

    first: int
    end: int
    notes: PassageNotes | None
    groups: range


def joinable(
    found: Mapping[Passage, Catalog], max_loss: float, refused: Callable[[Passage, str], None] = lambda *_: None
) -> dict[Passage, Catalog]:
    """Return the passages that may be joined; call ``refused`` with every other passage and the reason.

    The fusion loss must be measured unless ``max_loss`` is infinite, and the passages must have the same profile and a
    common base track (`_alike`).
    """
    measured = {}
    for passage, catalog in found.items():
        if math.isinf(max_loss) or (catalog.passage is not None and catalog.passage.fusion):
            measured[passage] = catalog
        else:
            refused(passage, _NOT_MEASURED)
    usable = _alike(measured)
    for passage in measured:
        if passage not in usable:
            refused(passage, _NO_COMMON_TRACK)
    return usable


def join(parts: Sequence[Part], found: Mapping[Passage, Catalog], spec: KVSpec) -> Catalog | None:
    """Return the catalog of a prompt up to the end of its last passage in ``found``; None if it has no such passage.

    A passage at the start of the prompt is computed: there is no attention sink before it, and prefill is exact. Raise
    `FormatError` if the passages have no track in common, or several codec profiles.
    """
    units: list[Unit] = []
    sources: list[Catalog] = []
    position, done = 0, 0
    for part in parts:
        catalog = found.get(part) if position and isinstance(part, Passage) else None
        if catalog is not None:
            if done < position:
                units.append(Unit(0, 0, len(units), done, position - done, None, COMPUTED))
            own = catalog.at(position)
            for group in range(own.groups):
                units.append(own.unit(group)._replace(chunk=len(units), source=len(sources)))
            sources.append(catalog)
            done = position + catalog.tokens
        position += len(part.ids)
    if not any(unit.free is not None for unit in units):
        return None
    profiles = {catalog.profile: catalog.profile_bytes for catalog in sources if catalog.profile is not None}
    if len(profiles) > 1:
        raise FormatError("passages with different codec profiles cannot be joined")
    chunks = tuple("0" * 64 if unit.source == COMPUTED else sources[unit.source].chunks[unit.group] for unit in units)
    profile, profile_bytes = next(iter(profiles.items()), (None, 0))
    said = {"profile": profile, "profile_bytes": profile_bytes, "loss_method": "joined from passages"}
    return Catalog(
        namespace=TrackNamespace(spec.model, _name(spec, units, chunks)),
        spec=spec,
        tokens=done,
        chunks=chunks,
        tracks=_common(units, sources, 0.0),
        **fields_of(sources[0], CommonFacts) | said,
        chosen=tuple(units),
        sources=tuple(sources),
    )


def at_share(catalog: Catalog, share: float) -> Catalog:
    """Return a joined catalog with its losses if ``share`` of each passage's tokens is recomputed."""
    return replace(catalog, tracks=_common(catalog.units, catalog.sources, share))


def last_groups(catalog: Catalog) -> range:
    """Return the groups of the passage that ends a joined catalog; empty if it ends in text."""
    passages = joined_passages(catalog)
    return passages[-1].groups if passages and passages[-1].groups.stop == catalog.groups else range(0)


def joined_with_tail(catalog: Catalog, groups: int, tail: int) -> Catalog:
    """Return the catalog of a joined catalog's first groups, followed by ``tail`` computed tokens.

    The groups must end in the last passage (`last_groups`). Only this passage's losses change, since tails were
    measured per passage. See `Catalog.with_tail`.
    """
    made = catalog.prefix(groups)
    if not tail or not last_groups(catalog):
        return made
    end = made.unit(groups - 1)
    source, size, tracks = catalog.sources[end.source], catalog.spec.group_tokens, []
    for track in source.tracks:
        losses = losses_with_tail(track.loss, track.tails, end.group + 1, tail, size, source.asked)
        tracks.append(replace(track, loss=losses + (0.0,) * (len(track.loss) - len(losses))))
    sources = list(catalog.sources)
    sources[end.source] = replace(source, tracks=tuple(tracks))
    common = tuple(track for track in _common(made.units, sources, 0.0) if track.name in made.by_name)
    return replace(made, tracks=common, sources=tuple(sources), tail=catalog.tail + tail)


def joined_passages(catalog: Catalog) -> tuple[Joined, ...]:
    """Return the passages of a joined catalog in prompt order; empty for other catalogs."""
    places: dict[int, list[int]] = {}
    for group, unit in enumerate(catalog.units if catalog.sources else ()):
        if unit.source != COMPUTED and unit.free is not None:
            places.setdefault(unit.source, []).append(group)
    return tuple(
        Joined(
            catalog.unit(groups[0]).first,
            catalog.unit(groups[-1]).first + catalog.unit(groups[-1]).tokens,
            catalog.sources[source].passage,
            range(groups[0], groups[-1] + 1),
        )
        for source, groups in places.items()
    )


def is_joined(catalog: Catalog, steps: Iterable[tuple[str, int, int | str]]) -> bool:
    """Return True if a cache assembled in these steps contains a passage, or KV computed after a passage.

    Steps are as in `PlayRecord.steps`. Computed groups are exact only if all groups before them are exact at that time.
    """
    foreign = [False] * catalog.groups
    for _, first, what in steps:
        for group in range(first, min(what if isinstance(what, int) else first + 1, len(foreign))):
            foreign[group] = catalog.unit(group).free is not None if isinstance(what, str) else any(foreign[:group])
    return any(foreign)


def fusion_loss(catalog: Catalog, coverage: Sequence[str], share: float = 0.0) -> float | None:
    """Return the fusion loss of a cache, nats per generated token; None if that of a passage was not measured.

    ``coverage`` has the track of each group, or `RECOMPUTED` for a group without fusion loss; ``share`` of each
    passage's tokens was recomputed. The loss of a partly played passage counts in proportion.
    """
    total = 0.0
    for passage in joined_passages(catalog):
        left = sum(catalog.unit(group).tokens for group in passage.groups if coverage[group] != RECOMPUTED)
        if left:
            loss = None if passage.notes is None else passage.notes.fusion_loss(share)
            if loss is None:
                return None
            total += loss * left / catalog.sources[catalog.unit(passage.groups.start).source].tokens
    return total


def _alike(found: Mapping[Passage, Catalog]) -> dict[Passage, Catalog]:
    best: dict[Passage, Catalog] = {}
    profiles = dict.fromkeys(one.profile for one in found.values())
    bases = dict.fromkeys(track.name for one in found.values() for track in one.tracks if track.refines is None)
    for profile in profiles:
        for base in bases:
            alike = {
                passage: one
                for passage, one in found.items()
                if one.profile in (None, profile) and base in one.by_name and one.by_name[base].refines is None
            }
            if _tokens(alike) > _tokens(best):
                best = alike
    return best


def _tokens(found: Iterable[Passage]) -> int:
    return sum(len(passage.ids) for passage in found)


def _common(units: Sequence[Unit], sources: Sequence[Catalog], share: float) -> tuple[Track, ...]:
    whole = sum(one.tokens for one in sources)
    parts = [one.tokens / whole for one in sources]
    fusion = [0.0 if one.passage is None else one.passage.fusion_loss(share) or 0.0 for one in sources]
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
                every[unit.source].loss[unit.group] * parts[unit.source] * (1 - share)
                + fusion[unit.source] * unit.tokens / sources[unit.source].tokens,
                every[unit.source].digests[unit.group],
            )
            for unit in units
        ]
        sizes, losses, digests = zip(*listed, strict=True)
        slowest = max(track.decode_s for track in every)
        tracks[first.name] = replace(
            first, bytes=sizes, loss=losses, digests=digests, decode_s=slowest, measured=None, tails=()
        )
    if all(track.refines is not None for track in tracks.values()):
        raise FormatError("the passages of this prompt have no track in common")
    return tuple(tracks.values())


def _name(spec: KVSpec, units: Sequence[Unit], chunks: Sequence[str]) -> str:
    """Return a digest that distinguishes joined prompts in logs."""
    places = "".join(f"{chunk} {unit.first} {unit.tokens}\n" for unit, chunk in zip(units, chunks, strict=True))
    return hashlib.sha256(b"kvabr.joined/1\0" + spec.digest() + places.encode()).hexdigest()
