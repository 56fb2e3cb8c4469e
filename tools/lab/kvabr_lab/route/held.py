"""What engines and stores hold of a prompt, as they tell it in KV events.

Publishers name blocks as they like. Here blocks are found by a chain of hashes of their tokens, and a publisher's name
only says which block it means later. Left out are blocks that depend on more than tokens (adapters, pictures, salts)
and those of layers with windows, which drop the beginning of a prompt.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from kvabr.telemetry.kv_events.wire import KVBlocksRemoved, KVBlocksStored, KVEvent

_KEY_BYTES = 12
_MOST_MEDIA = 16
_MOST_SIZES = 8
"""Sizes of blocks of one holder."""
_ROOT = b""


@dataclass(frozen=True, slots=True)
class PrefixHolder:
    """Whose blocks they are: a publisher, and a topic of it, since one may serve several models."""

    publisher: str
    topic: str = ""

    @property
    def model(self) -> str:
        """The model that a topic of the form ``kv@INSTANCE@MODEL`` names; empty if it names none."""
        parts = self.topic.split("@", 2)
        return parts[2] if len(parts) == 3 else ""


@dataclass(slots=True)
class _Blocks:
    """Blocks of one holder."""

    keys: dict[int | bytes, bytes] = field(default_factory=dict)
    """By the holder's own name of a block, its key here."""
    media: dict[bytes, int] = field(default_factory=dict)
    """By key, the media that it is on, a bit each."""
    sizes: dict[int, None] = field(default_factory=dict)
    """Tokens of a block."""


class HeldPrefixes:
    """Blocks of many holders, within a bound."""

    def __init__(self, max_blocks: int = 1 << 20) -> None:
        """Begin empty; of each holder at most ``max_blocks`` are known."""
        self._max_blocks = max_blocks
        self._held: dict[PrefixHolder, _Blocks] = {}
        self._media: dict[str | None, int] = {}
        self.skipped = 0
        """Blocks that were left out: beyond the bound, behind one that is not known, or not of text alone."""

    def __len__(self) -> int:
        """Return how many blocks are known."""
        return sum(len(blocks.media) for blocks in self._held.values())

    @property
    def holders(self) -> Sequence[PrefixHolder]:
        """Who holds anything."""
        return tuple(holder for holder, blocks in self._held.items() if blocks.media)

    def apply(self, holder: PrefixHolder, events: Iterable[KVEvent]) -> None:
        """Take what a holder tells."""
        for event in events:
            if isinstance(event, KVBlocksStored):
                self._store(self._held.setdefault(holder, _Blocks()), event)
            elif isinstance(event, KVBlocksRemoved):
                if holder in self._held:
                    self._remove(self._held[holder], event)
            else:
                self._held.pop(holder, None)

    def forget(self, publisher: str) -> None:
        """Forget all that a publisher has told."""
        for holder in [holder for holder in self._held if holder.publisher == publisher]:
            del self._held[holder]

    def cached(self, tokens: Sequence[int], model: str | None = None) -> dict[PrefixHolder, int]:
        """Return how many tokens at the beginning of a prompt each holder has, if any.

        ``model`` leaves out topics that name another one.
        """
        chains: dict[int, list[bytes]] = {}
        found: dict[PrefixHolder, int] = {}
        for holder, blocks in self._held.items():
            if model is not None and holder.model not in ("", model):
                continue
            best = 0
            for size in blocks.sizes:
                if size not in chains:
                    chains[size] = list(_chain(_ROOT, tokens, size))
                held = next((at for at, key in enumerate(chains[size]) if key not in blocks.media), len(chains[size]))
                best = max(best, held * size)
            if best:
                found[holder] = best
        return found

    def _store(self, blocks: _Blocks, event: KVBlocksStored) -> None:
        count, size, medium = len(event.block_hashes), event.block_size, self._bit(event.medium)
        parent = _ROOT if event.parent_block_hash is None else blocks.keys.get(event.parent_block_hash)
        plain = event.lora_id is None and event.lora_name is None and not _extra(event.extra_keys)
        fits = (
            size > 0
            and len(event.token_ids) == count * size
            and (size in blocks.sizes or len(blocks.sizes) < _MOST_SIZES)
        )
        known = len(blocks.keys) + count <= self._max_blocks
        if parent is None or medium is None or not (plain and fits and known) or event.kv_cache_spec_sliding_window:
            self.skipped += count
            return
        blocks.sizes[size] = None
        for name, key in zip(event.block_hashes, _chain(parent, event.token_ids, size), strict=True):
            blocks.keys[name] = key
            blocks.media[key] = blocks.media.get(key, 0) | medium

    def _remove(self, blocks: _Blocks, event: KVBlocksRemoved) -> None:
        medium = self._bit(event.medium)
        for name in event.block_hashes:
            key = blocks.keys.get(name)
            if key is None or medium is None:
                continue
            left = blocks.media.get(key, 0) & ~medium
            if left:
                blocks.media[key] = left
            else:
                blocks.media.pop(key, None)
                del blocks.keys[name]

    def _bit(self, medium: str | None) -> int | None:
        """Return the bit of a medium; None if there are too many."""
        if medium not in self._media and len(self._media) < _MOST_MEDIA:
            self._media[medium] = 1 << len(self._media)
        return self._media.get(medium)


def _chain(parent: bytes, tokens: Sequence[int], size: int) -> Iterable[bytes]:
    """Yield the key of each whole block."""
    parent = parent or hashlib.blake2b(size.to_bytes(4, "little"), digest_size=_KEY_BYTES).digest()
    for first in range(0, len(tokens) - size + 1, size):
        data = parent + struct.pack(f"<{size}I", *tokens[first : first + size])
        parent = hashlib.blake2b(data, digest_size=_KEY_BYTES).digest()
        yield parent


def _extra(keys: object) -> bool:
    """Return whether any block depends on more than its tokens."""
    return keys is not None and not (isinstance(keys, list) and not any(keys))
