"""The longest prefix of a prompt that is completely in place, for any layer classes.

It needs every group of full attention and latents, the window groups still visible at its end, and the state snapshot
there. So with windows, the end of a prompt can be complete although its beginning is missing.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile
from typing import NamedTuple

from kvabr.types.catalog import RECOMPUTED, Catalog
from kvabr.types.loss import predicted_loss, promised_loss
from kvabr.types.units import Span, groups_needed


class PlacedPrefix(NamedTuple):
    """The usable part of an incomplete cache."""

    tokens: int
    """Number of tokens, counted from the catalog's first."""
    groups: tuple[int, ...]
    """Indices of its groups, ascending."""
    spans: tuple[Span, ...]
    """Tokens of the prefix in the tensor of each layer class."""


def longest_prefix(catalog: Catalog, placed: Sequence[object], block: int = 1) -> PlacedPrefix:
    """Return the longest prefix that is in place and ends at the end of a group of tokens.

    ``placed``: per group, a true value if it is in place; groups beyond its end are not. ``block``: the prefix must end
    at a multiple of this many tokens of the prompt, possibly inside a group.
    """
    first, size = catalog.first_token, catalog.spec.group_tokens
    if catalog.every_token:
        solid = sum(1 for _ in takewhile(bool, placed))
        tokens = max(0, (first + catalog.tokens_before(solid)) // block * block - first)
        groups = takewhile(lambda group: catalog.tokens_before(group) < tokens, range(solid))
        return PlacedPrefix(tokens, tuple(groups), (Span(first, tokens),))
    units = enumerate(zip(catalog.units, placed, strict=False))
    there = {(unit.part, unit.group): index for index, (unit, here) in units if here}
    for count in range(_solid(catalog, there), 0, -1):
        end = (first + min(count * size, catalog.tokens)) // block * block
        if end > first + (count - 1) * size and (found := _at(catalog, there, end)) is not None:
            return found
    return PlacedPrefix(0, (), tuple(Span(first, 0) for _ in catalog.spec.parts))


def _solid(catalog: Catalog, there: dict[tuple[int, int], int]) -> int:
    most = len(catalog.chunks)
    for part, only in enumerate(catalog.spec.classes):
        if only.kind in ("full", "latent"):
            most = next((count for count in range(most) if (part, catalog.offset + count) not in there), most)
    return most


def _at(catalog: Catalog, there: dict[tuple[int, int], int], end: int) -> PlacedPrefix | None:
    spec, first, found, spans = catalog.spec, catalog.first_token, [], []
    for part, one in enumerate(spec.parts):
        groups = groups_needed(spec, part, end, first, first + catalog.tokens)
        if groups is None or any((part, group) not in there for group in groups):
            return None
        found += [there[part, group] for group in groups]
        begin = groups.start * spec.group_tokens
        spans.append(Span(end, one.rows) if one.only.kind == "state" else Span(begin, end - begin))
    return PlacedPrefix(end - first, tuple(sorted(found)), tuple(spans))


def prefix_loss(catalog: Catalog, found: PlacedPrefix, tracks: Sequence[str]) -> float:
    """Return a prefix's expected loss on these tracks, nats per generated token, if the engine computes the rest."""
    if not found.groups:
        return 0.0
    if catalog.every_token:
        whole = [*tracks, *(RECOMPUTED,) * (catalog.groups - len(tracks))]
        return promised_loss(catalog, whole, predicted_loss(catalog, whole))
    units = (catalog.unit(group) for group in found.groups)
    track_of = {(unit.part, unit.group): track for unit, track in zip(units, tracks, strict=True)}
    shorter = catalog.prefix(catalog.spec.groups(found.tokens))
    needed = ((index, track_of.get(shorter.unit(index)[:2])) for index in range(shorter.groups))
    return sum(shorter.track(track).loss[index] for index, track in needed if track is not None)
