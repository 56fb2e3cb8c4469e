"""Which part of a prompt engines and stores have cached, according to their KV events.

Publishers name blocks arbitrarily, so blocks are identified by a hash chain of their tokens. Blocks that depend on more
than tokens (adapters, pictures, salts) are skipped, and so are those of sliding windows, which drop a prompt's
beginning.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from kvabr.telemetry.kv_events.wire import KVBlocksRemoved, KVBlocksStored, KVEvent

_KEY_BYTES = 12
_MAX_MEDIA = 16
_MAX_SIZES = 8
_MAX_TOPICS = 256
_ROOT = b""


@dataclass(frozen=True, slots=True)
class PrefixHolder:
    """A publisher and one of its topics; a publisher may serve several models."""

    publisher: str
    topic: str = ""

    @property
    def model(self) -> str:
        """Model named in a topic ``kv@INSTANCE@MODEL``; empty for other topics."""
        parts = self.topic.split("@", 2)
        return parts[2] if len(parts) == 3 else ""


@dataclass(slots=True)
class _Blocks:
    keys: dict[int | bytes, bytes] = field(default_factory=dict)
    """Internal key by block name."""
    media: dict[bytes, int] = field(default_factory=dict)
    """Storage media by key, as a bit set."""
    sizes: dict[int, None] = field(default_factory=dict)


class HeldPrefixes:
    """Blocks of many holders, within a limit."""

    def __init__(self, max_blocks: int = 1 << 20) -> None:
        """Create without blocks; at most ``max_blocks`` are stored per holder."""
        self._max_blocks = max_blocks
        self._held: dict[PrefixHolder, _Blocks] = {}
        self._media: dict[str | None, int] = {}
        self.skipped = 0
        """Number of skipped blocks: over the limit, after an unknown block, or not of text alone."""

    def __len__(self) -> int:
        return sum(len(blocks.media) for blocks in self._held.values())

    @property
    def holders(self) -> Sequence[PrefixHolder]:
        """Holders that have blocks."""
        return tuple(holder for holder, blocks in self._held.items() if blocks.media)

    def apply(self, holder: PrefixHolder, events: Iterable[KVEvent]) -> None:
        """Apply events of a holder."""
        for event in events:
            if isinstance(event, KVBlocksStored):
                self._store(self._blocks(holder), event)
            elif isinstance(event, KVBlocksRemoved):
                if holder in self._held:
                    self._remove(self._held[holder], event)
            else:
                self._held.pop(holder, None)

    def forget(self, publisher: str) -> None:
        """Remove all blocks of a publisher."""
        for holder in [holder for holder in self._held if holder.publisher == publisher]:
            del self._held[holder]

    def cached(self, tokens: Sequence[int], model: str | None = None) -> dict[PrefixHolder, int]:
        """Return the cached tokens at a prompt's start by holder; ``model`` excludes topics of other models."""
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

    def _blocks(self, holder: PrefixHolder) -> _Blocks:
        """Return the blocks of a holder; over the limit of topics, a temporary table."""
        if holder not in self._held:
            if sum(each.publisher == holder.publisher for each in self._held) >= _MAX_TOPICS:
                return _Blocks()
            self._held[holder] = _Blocks()
        return self._held[holder]

    def _store(self, blocks: _Blocks, event: KVBlocksStored) -> None:
        count, size, medium = len(event.block_hashes), event.block_size, self._bit(event.medium)
        parent = _ROOT if event.parent_block_hash is None else blocks.keys.get(event.parent_block_hash)
        plain = event.lora_id is None and event.lora_name is None and not _extra(event.extra_keys)
        fits = (
            size > 0
            and len(event.token_ids) == count * size
            and (size in blocks.sizes or len(blocks.sizes) < _MAX_SIZES)
        )
        known = len(blocks.keys) + count <= self._max_blocks
        if parent is None or medium is None or not (plain and fits and known) or event.kv_cache_spec_sliding_window:
            self.skipped += count
            return
        blocks.sizes[size] = None
        for name, key in zip(event.block_hashes, _chain(parent, event.token_ids, size), strict=True):
            if (before := blocks.keys.get(name, key)) != key:
                blocks.media.pop(before, None)  # the name now belongs to another block
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
        if medium not in self._media and len(self._media) < _MAX_MEDIA:
            self._media[medium] = 1 << len(self._media)
        return self._media.get(medium)


def _chain(parent: bytes, tokens: Sequence[int], size: int) -> Iterable[bytes]:
    parent = parent or hashlib.blake2b(size.to_bytes(4, "little"), digest_size=_KEY_BYTES).digest()
    for first in range(0, len(tokens) - size + 1, size):
        data = parent + struct.pack(f"<{size}I", *tokens[first : first + size])
        parent = hashlib.blake2b(data, digest_size=_KEY_BYTES).digest()
        yield parent


def _extra(keys: object) -> bool:
    return keys is not None and not (isinstance(keys, list) and not any(keys))
