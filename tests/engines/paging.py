"""Blocks of a paged cache, as an engine names them."""

from kvabr.codec.block_slots import BlockSlots
from kvabr.engines.layouts import block_layers


def paged_blocks(caches, numbers, layout, split=None):
    """All tokens of some blocks; ``split``: dimensions of keys and of values, half each by default."""
    half = caches[0].shape[-1] // 2
    return BlockSlots.of_blocks(block_layers(caches, layout, split or (half, half), caches[0].dtype), numbers)
