"""References between tokens of a group, chosen by the encoder and sent in the payload like motion vectors.

A tile of more than 64 tokens takes two steps of the coder per row. Each token of the second step refers to a token of
the first step. The referenced token's index in the same row selects table and sign. The coding order lists the tokens
of the first step, then those of the second, both ascending; a place is an index in this order.

    for each tile of more than 64 tokens: a bit per token, 1 for the second step | lane 1 for each of these tokens

Bits fill bytes from the lowest bit, padded with zeros. A lane is a place in the first step.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvabr.types.errors import FormatError

LANES = 64
TILE = 128


@dataclass(frozen=True, eq=False)
class References:
    """The coding order of a group's tokens, and the token that each refers to."""

    place: NDArray[np.uint8]
    """[place]: token offset in the tile."""
    lane: NDArray[np.uint8]
    """Place of the referenced token in the tile, [place]; 0 in the first step."""

    @property
    def order(self) -> NDArray[np.intp]:
        """Tokens of the group in coding order, [place]."""
        return self.place + np.arange(len(self.place)) // TILE * TILE


def tiles(tokens: int) -> list[slice]:
    """Return the tiles of a group that take two steps."""
    every = (slice(first, min(tokens, first + TILE)) for first in range(0, tokens, TILE))
    return [tile for tile in every if tile.stop - tile.start > LANES]


def join_references(parts: dict[int, tuple[NDArray[np.bool_], NDArray[np.intp]]], tokens: int) -> References:
    """Build a group's references from those of tiles, by each tile's first token; other tiles get neutral ones.

    Each tile has two arrays by token: True for the second step, and the referenced token.
    """
    place = (np.arange(tokens) % TILE).astype(np.uint8)
    lane = np.zeros(tokens, np.uint8)
    for tile in tiles(tokens):
        if tile.start in parts:
            second, named = parts[tile.start]
            first, later = np.flatnonzero(~second), np.flatnonzero(second)
            place[tile] = np.concatenate((first, later))
            lane[tile][LANES:] = np.searchsorted(first, named[later])
    return References(place, lane)


def pack_references(references: References) -> bytes:
    """Return references as bytes."""
    parts = []
    for tile in tiles(len(references.place)):
        second = np.zeros(tile.stop - tile.start, bool)
        second[references.place[tile][LANES:]] = True
        parts += [np.packbits(second, bitorder="little").tobytes(), references.lane[tile][LANES:].tobytes()]
    return b"".join(parts)


def references_size(tokens: int) -> int:
    """Return the size of `pack_references` for a group, in bytes."""
    return sum(-(-(tile.stop - tile.start) // 8) + tile.stop - tile.start - LANES for tile in tiles(tokens))


def read_references(data: bytes | memoryview, tokens: int) -> References:
    """Parse untrusted references of a group; raise `FormatError` if malformed."""
    bad = FormatError("the references between tokens are invalid; the payload is corrupt")
    numbers = np.frombuffer(data, np.uint8)
    if len(numbers) != references_size(tokens):
        raise bad
    place = (np.arange(tokens) % TILE).astype(np.uint8)
    lane = np.zeros(tokens, np.uint8)
    at = 0
    for tile in tiles(tokens):
        size = tile.stop - tile.start
        bits = np.unpackbits(numbers[at : at + -(-size // 8)], bitorder="little")
        at += -(-size // 8)
        second, later = bits[:size].astype(bool), numbers[at : at + size - LANES]
        at += size - LANES
        if bits[size:].any() or int(second.sum()) != size - LANES or int(later.max()) >= LANES:
            raise bad
        place[tile] = np.concatenate((np.flatnonzero(~second), np.flatnonzero(second)))
        lane[tile][LANES:] = later
    return References(place, lane)
