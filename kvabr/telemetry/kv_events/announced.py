"""Converts changes of a store's assets to KV events.

A block is removed when the last asset that has it is removed. Since hashes are chained, prompts with common blocks are
next to each other in sorted order.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from struct import unpack_from
from typing import Generic, Literal, TypeVar

from kvabr.store.asset import Asset
from kvabr.telemetry.kv_events.hashes import BlockHashes
from kvabr.telemetry.kv_events.wire import (
    MAX_TOPIC_BYTES,
    STORAGE,
    KVBlocksCleared,
    KVBlocksRemoved,
    KVBlocksStored,
    KVEvent,
)
from kvabr.types.errors import KvabrError, UsageError

Reason = Literal["no tokens", "salted", "passage", "short", "another model", "unreadable"]
_EVENT_TOKENS = 8192
_WIDTH = 8
MODEL = "{model}"

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class AnnouncedPrompt:
    """An asset's prompt."""

    model: str
    asset: str
    tokens: Sequence[int]


def prompt_of(asset: Asset) -> AnnouncedPrompt | Reason:
    """Return an asset's prompt, or why not to announce it, such as a salt; errors as for `Asset.prompt`."""
    if asset.catalog.passage is not None:
        return "passage"
    if not asset.has_prompt():
        return "no tokens"
    prompt = asset.prompt()
    space = asset.catalog.namespace
    return "salted" if prompt.seal is not None else AnnouncedPrompt(space.model, space.prompt, prompt.tokens)


@dataclass(frozen=True, slots=True)
class _Entry(Generic[T]):
    asset: T
    topic: str
    hashes: bytes = b""


class AnnouncedAssets(Generic[T]):
    """Converts a store's assets to topics with events, one asset at a time."""

    def __init__(
        self,
        hashes: BlockHashes,
        read: Callable[[T], AnnouncedPrompt | Reason],
        *,
        topic: str = f"kv@kvabr@{MODEL}",
        models: str = "*",
        warn: Callable[[str, Reason], object] = lambda _name, _why: None,
    ) -> None:
        """Create an empty set.

        Args:
            hashes: computes block hashes.
            read: returns an asset's prompt, or the reason not to announce it; may raise `KvabrError`.
            topic: 1 to 1,024 bytes of UTF-8, else `UsageError`. ``{model}`` stands for the asset's model; without it,
                only the first model is announced.
            models: shell pattern of the models to announce.
            warn: called with the first skipped asset for each reason.
        """
        size = len(topic.encode(errors="replace"))
        if not 0 < size <= MAX_TOPIC_BYTES or any("\ud800" <= each <= "\udfff" for each in topic):
            raise UsageError(f"topic must be 1 to {MAX_TOPIC_BYTES} bytes of UTF-8, got {size} bytes")
        self._hashes, self._read, self._topic, self._models, self._warn = hashes, read, topic, models, warn
        self._entries: dict[str, _Entry[T]] = {}
        """Assets by name, including skipped ones."""
        self._ordered: dict[str, list[bytes]] = {}
        """Sorted hashes of the announced prompts, by topic."""
        self._only = ""
        """The only model announced if the topic has no ``{model}``."""
        self.skipped: dict[Reason, int] = {}

    def __len__(self) -> int:
        """Return the number of announced assets."""
        return sum(map(len, self._ordered.values()))

    @property
    def topics(self) -> Sequence[str]:
        """Topics used so far."""
        return tuple(self._ordered)

    def changes(self, assets: Mapping[str, T]) -> Iterator[tuple[str, list[KVEvent]]]:
        """Yield the changes since the last call, one asset at a time. Exhaust the iterator before the next call."""
        for name in [name for name, entry in self._entries.items() if assets.get(name) is not entry.asset]:
            yield from self._remove(name)
        for name, asset in assets.items():
            if name not in self._entries:
                yield from self._store(name, asset)

    def all_events(self) -> Iterator[tuple[str, list[KVEvent]]]:
        """Yield the events of all announced assets, one asset at a time; `changes` may be called in between."""
        for name, entry in list(self._entries.items()):
            if entry.topic and self._entries.get(name) is entry:
                prompt = self._prompt(entry.asset)
                yield entry.topic, [] if isinstance(prompt, str) else self._stored(prompt, entry.hashes)

    def _store(self, name: str, asset: T) -> Iterator[tuple[str, list[KVEvent]]]:
        prompt = self._prompt(asset)
        if not isinstance(prompt, str):
            why = self._skip_reason(prompt)
            prompt = prompt if why is None else why
        if isinstance(prompt, str):
            if prompt not in self.skipped:
                self._warn(name, prompt)
            self.skipped[prompt] = self.skipped.get(prompt, 0) + 1
            self._entries[name] = _Entry(asset, "", prompt.encode())
            yield "", []
            return
        topic = self._topic.replace(MODEL, prompt.model)
        hashes = b"".join(one[-_WIDTH:] for one in self._hashes.full(prompt.tokens))
        ordered = self._ordered.get(topic)
        if ordered is None:  # clear the blocks of an earlier publisher with this topic
            ordered = self._ordered[topic] = []
            yield topic, [KVBlocksCleared()]
        insort(ordered, hashes)
        self._entries[name] = _Entry(asset, topic, hashes)
        yield topic, self._stored(prompt, hashes)

    def _remove(self, name: str) -> Iterator[tuple[str, list[KVEvent]]]:
        entry = self._entries.pop(name)
        if not entry.topic:
            why: Reason = entry.hashes.decode()  # type: ignore[assignment]
            self.skipped[why] -= 1
            return
        ordered = self._ordered[entry.topic]
        at = bisect_left(ordered, entry.hashes)
        del ordered[at]
        neighbours = ordered[max(0, at - 1) : at + 1]
        shared = max((_shared_blocks(entry.hashes, other) for other in neighbours), default=0)
        gone = _numbers(entry.hashes[shared * _WIDTH :])
        yield entry.topic, [KVBlocksRemoved(list(gone), STORAGE)] if gone else []

    def _prompt(self, asset: T) -> AnnouncedPrompt | Reason:
        try:
            return self._read(asset)
        except (OSError, KvabrError):
            return "unreadable"

    def _skip_reason(self, prompt: AnnouncedPrompt) -> Reason | None:
        if len(prompt.tokens) < self._hashes.block:
            return "short"
        if not fnmatchcase(prompt.model, self._models):
            return "another model"
        if MODEL not in self._topic:
            self._only = self._only or prompt.model
            return None if prompt.model == self._only else "another model"
        return None

    def _stored(self, prompt: AnnouncedPrompt, hashes: bytes) -> list[KVEvent]:
        numbers, block = _numbers(hashes), self._hashes.block
        step = max(1, _EVENT_TOKENS // block)
        return [
            KVBlocksStored(
                block_hashes=list(numbers[first : first + step]),
                parent_block_hash=numbers[first - 1] if first else None,
                token_ids=list(prompt.tokens[first * block : min(first + step, len(numbers)) * block]),
                block_size=block,
                medium=STORAGE,
                kvabr_asset=prompt.asset,
            )
            for first in range(0, len(numbers), step)
        ]


def everything(assets: Iterable[Asset]) -> dict[str, Asset]:
    """Return assets by name."""
    return {asset.name: asset for asset in assets}


def _numbers(hashes: bytes) -> tuple[int, ...]:
    return unpack_from(f">{len(hashes) // _WIDTH}Q", hashes)


def _shared_blocks(one: bytes, other: bytes) -> int:
    """Return the number of blocks that two prompts share, by bisection, as hashes are chained."""
    low, high = 0, min(len(one), len(other)) // _WIDTH
    while low < high:
        middle = (low + high + 1) // 2
        here = slice((middle - 1) * _WIDTH, middle * _WIDTH)
        low, high = (middle, high) if one[here] == other[here] else (low, middle - 1)
    return low
