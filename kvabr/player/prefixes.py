"""The longest prefix of a prompt for which everything is in place, whatever layer classes its cache has.

Of full attention and latents it takes every group of tokens, of a window those that can still be seen at the end of the
prefix, of a state the snapshot there. So a play of windows may have the end of a prompt complete, and nothing before.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile
from typing import NamedTuple

from kvabr.types.catalog import Catalog
from kvabr.types.loss import promised_loss
from kvabr.types.units import Span, groups_needed


class PlacedPrefix(NamedTuple):
    """What can be used of an incomplete cache."""

    tokens: int
    """Tokens of the prefix, counted from the catalog's first."""
    groups: tuple[int, ...]
    """The groups that hold it, ascending: no others are needed."""
    spans: tuple[Span, ...]
    """Its tokens in the tensor of each layer class. Nothing is used of a group before or behind them."""


def longest_prefix(catalog: Catalog, placed: Sequence[object], block: int = 1) -> PlacedPrefix:
    """Return the longest prefix that is in place and ends with a group of tokens, and what of the cache it consists of.

    Args:
        catalog: what is played.
        placed: per group, something true if it is in place; those behind the last one are not.
        block: the prefix must end at a multiple of this many tokens of the prompt; then it may end inside of a group.
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
    """Return the leading groups of tokens that are in place in every class that needs them all."""
    most = len(catalog.chunks)
    for part, only in enumerate(catalog.spec.classes):
        if only.kind in ("full", "latent"):
            most = next((count for count in range(most) if (part, catalog.offset + count) not in there), most)
    return most


def _at(catalog: Catalog, there: dict[tuple[int, int], int], end: int) -> PlacedPrefix | None:
    """Return the prefix that ends at token ``end`` of the prompt; None if something is missing."""
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
    """Return the expected loss of a prefix, whose groups were fetched on these tracks."""
    if catalog.every_token or not found.groups:
        added = sum(catalog.track(track).loss[group] for group, track in zip(found.groups, tracks, strict=True))
        return promised_loss(catalog, tracks, added)
    units = (catalog.unit(group) for group in found.groups)
    track_of = {(unit.part, unit.group): track for unit, track in zip(units, tracks, strict=True)}
    shorter = catalog.prefix(catalog.spec.groups(found.tokens))
    needed = ((index, track_of.get(shorter.unit(index)[:2])) for index in range(shorter.groups))
    return sum(shorter.track(track).loss[index] for index, track in needed if track is not None)
