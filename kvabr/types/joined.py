"""One catalog of a prompt that is joined from passages, so that a player can play it as it plays an asset.

The groups of such a catalog are those of its passages, in the order of the prompt, and the texts between them, which
was not published and an engine must compute (`Catalog.computed`). So they have unequal lengths. Each group of a
passage is published under the passage's own name (`Catalog.namespace_of`, `Catalog.address`), was encoded at one place
of it (`Unit.free`), and has another in the prompt (`Unit.first`). The tracks are those that all passages have.

What follows the last passage is no part of it, as what follows a cached prefix is none of that.

On every track, each group of a passage loses its part of what joining the passage costs (the fusion loss), besides what
the codec costs. So whatever weighs groups against each other knows that computing one saves both. What the codec costs
was measured on the text right behind the passage, with nothing else before it, so of a prompt each passage has only its
part by length, and of that only the part of the tokens that are not computed again. Fusion losses add up. (Three
prompts of four pieces of a text, SmolLM2-135M: by this rule FP16 should lose 0.018, 0.047 and 0.053 nats, and lost
0.014, 0.033 and 0.044; AC-L0 0.09 and 0.14, and lost 0.054 and 0.062. The plain sum of what the codec costs would be
0.31 and 0.41.)
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
from kvabr.types.tails import losses_behind
from kvabr.types.units import COMPUTED, Unit

_NO_BYTES = 1
"""Size on every track of a group that has none: sizes are positive, and one byte weighs nothing."""
_UNLIKE = (
    "it has no track, or another codec profile, in common with most of this prompt's passages; publish it as they are"
)
_NOT_MEASURED = "what joining it costs was not measured; publish it anew with its fusion losses, or set max_loss=inf"


class Joined(NamedTuple):
    """A passage where it stands in a prompt."""

    first: int
    """Its first token in the prompt."""
    end: int
    """The token behind its last one."""
    notes: PassageNotes | None
    """What its publisher says of it."""
    groups: range
    """Its groups in the joined catalog."""


def joinable(
    found: Mapping[Passage, Catalog], max_loss: float, refused: Callable[[Passage, str], None] = lambda *_: None
) -> dict[Passage, Catalog]:
    """Return the passages that may be joined with each other; ``refused`` is told why others may not.

    It must be known what joining one costs, unless any loss is accepted (``max_loss``), and they must have enough in
    common for one play (`_alike`).
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
            refused(passage, _UNLIKE)
    return usable


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
    """Return a joined catalog with the losses that it has if this share of each passage's tokens is computed again."""
    return replace(catalog, tracks=_common(catalog.units, catalog.sources, share))


def last_groups(catalog: Catalog) -> range:
    """Return the groups of the passage that ends a joined catalog; none if a text does."""
    passages = joined_passages(catalog)
    return passages[-1].groups if passages and passages[-1].groups.stop == catalog.groups else range(0)


def joined_behind(catalog: Catalog, groups: int, tail: int) -> Catalog:
    """Return what a play fetches of a joined catalog whose engine computes ``tail`` tokens behind its first groups.

    These end in the last passage (`last_groups`), which is what its publisher has measured tails behind: of the others
    the losses stay. As `Catalog.behind`.
    """
    made = catalog.prefix(groups)
    if not tail or not last_groups(catalog):
        return made
    end = made.unit(groups - 1)
    source, size, tracks = catalog.sources[end.source], catalog.spec.group_tokens, []
    for track in source.tracks:
        losses = losses_behind(track.loss, track.tails, end.group + 1, tail, size, source.asked)
        tracks.append(replace(track, loss=losses + (0.0,) * (len(track.loss) - len(losses))))
    sources = list(catalog.sources)
    sources[end.source] = replace(source, tracks=tuple(tracks))
    # Of the passages' tracks, some may have been left out.
    common = tuple(track for track in _common(made.units, sources, 0.0) if track.name in made.by_name)
    return replace(made, tracks=common, sources=tuple(sources), tail=catalog.tail + tail)


def joined_passages(catalog: Catalog) -> tuple[Joined, ...]:
    """Return the passages of a joined catalog, in the order of the prompt; empty for any other."""
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
    """Return whether a passage is part of a cache that was assembled in these steps, or of what was computed over it.

    Steps are as in `PlayRecord.steps`. What is computed is the prompt's own only behind what is so at that time.
    """
    foreign = [False] * catalog.groups
    for _, first, what in steps:
        for group in range(first, min(what if isinstance(what, int) else first + 1, len(foreign))):
            foreign[group] = catalog.unit(group).free is not None if isinstance(what, str) else any(foreign[:group])
    return any(foreign)


def fusion_loss(catalog: Catalog, coverage: Sequence[str], share: float = 0.0) -> float | None:
    """Return what joining its passages costs a cache, nats per generated token; None if that of one was not measured.

    Args:
        catalog: joined, see `join`.
        coverage: per group the track, or `RECOMPUTED`: such a group costs nothing. What the others cost adds up.
        share: share of each passage's tokens that was computed again.

    Of a passage that is played in part, that part counts.
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
    """Return the passages that can be played together, as many tokens of them as possible.

    A play decodes with one profile, and its base is one track that all passages have.
    """
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
    """Return the tracks that all passages have, with what each group is on them, and what joining it costs."""
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
        # What is left behind a tail was measured without other passages before it.
        tracks[first.name] = replace(
            first, bytes=sizes, loss=losses, digests=digests, decode_s=slowest, measured=None, tails=()
        )
    if all(track.refines is not None for track in tracks.values()):
        raise FormatError("the passages of this prompt have no track in common")
    return tuple(tracks.values())


def _name(spec: KVSpec, units: Sequence[Unit], chunks: Sequence[str]) -> str:
    """Return a digest that tells joined prompts apart in logs; nothing is published under it."""
    places = "".join(f"{chunk} {unit.first} {unit.tokens}\n" for unit, chunk in zip(units, chunks, strict=True))
    return hashlib.sha256(b"kvabr.joined/1\0" + spec.digest() + places.encode()).hexdigest()
