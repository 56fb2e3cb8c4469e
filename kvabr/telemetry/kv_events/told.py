"""Which blocks the assets of a store stand for, and what is to be told as assets come and go.

Assets share prefixes: a block is gone only when no asset has it any more. A block's hash covers all tokens before it,
so in the order of their hashes the prompts that share most with one are its neighbours.
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
"""Why an asset is not told."""
_EVENT_TOKENS = 8192
_WIDTH = 8
MODEL = "{model}"
"""Stands for the model's name in a topic."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class ToldPrompt:
    """An asset's prompt."""

    model: str
    """Name of the model in the asset's namespace."""
    asset: str
    """Digest of the prompt in the asset's namespace."""
    tokens: Sequence[int]


def prompt_of(asset: Asset) -> ToldPrompt | Reason:
    """Return the prompt of an asset, or why it must not or cannot be told. Errors as of `Asset.prompt`.

    Salted assets are for those who know the salt: nobody else hears their tokens.
    """
    if asset.catalog.passage is not None:
        return "passage"
    if not asset.has_prompt():
        return "no tokens"
    prompt = asset.prompt()
    space = asset.catalog.namespace
    return "salted" if prompt.seal is not None else ToldPrompt(space.model, space.prompt, prompt.tokens)


@dataclass(frozen=True, slots=True)
class _Told(Generic[T]):
    asset: T
    topic: str
    """Empty if it is not told."""
    hashes: bytes = b""
    """Of its blocks, 8 bytes each."""


class ToldAssets(Generic[T]):
    """Turns what a store has into events: topics with events, one asset at a time."""

    def __init__(
        self,
        hashes: BlockHashes,
        read: Callable[[T], ToldPrompt | Reason],
        *,
        topic: str = f"kv@kvabr@{MODEL}",
        models: str = "*",
        warn: Callable[[str, Reason], object] = lambda _name, _why: None,
    ) -> None:
        """Begin with nothing told.

        Args:
            hashes: names the blocks.
            read: returns the prompt of an asset, or why it is not told; may raise `KvabrError`.
            topic: of the messages; ``{model}`` in it is the asset's model. Without it, one model alone is told.
            models: pattern of the models that are told, as a shell has it.
            warn: hears of the first asset that is not told for each reason, and the reason.

        Raises:
            UsageError: the topic is empty, too long, or no UTF-8.
        """
        size = len(topic.encode(errors="replace"))
        if not 0 < size <= MAX_TOPIC_BYTES or any("\ud800" <= each <= "\udfff" for each in topic):
            raise UsageError(f"a topic of {size} bytes; give 1 to {MAX_TOPIC_BYTES}, in UTF-8")
        self._hashes, self._read, self._topic, self._models, self._warn = hashes, read, topic, models, warn
        self._told: dict[str, _Told[T]] = {}
        """By name; also the assets that are not told."""
        self._ordered: dict[str, list[bytes]] = {}
        """By topic, the hashes of the prompts that are told, in order."""
        self._only = ""
        """The model that a topic without a model is for, once there is one."""
        self.untold: dict[Reason, int] = {}
        """Assets that are not told, by why."""

    def __len__(self) -> int:
        """Return how many assets are told."""
        return sum(map(len, self._ordered.values()))

    @property
    def topics(self) -> Sequence[str]:
        """The topics so far."""
        return tuple(self._ordered)

    def changes(self, assets: Mapping[str, T]) -> Iterator[tuple[str, list[KVEvent]]]:
        """Yield what has changed since the last call, an asset at a time; take all of it before the next call."""
        for name in [name for name, told in self._told.items() if assets.get(name) is not told.asset]:
            yield from self._remove(name)
        for name, asset in assets.items():
            if name not in self._told:
                yield from self._store(name, asset)

    def again(self) -> Iterator[tuple[str, list[KVEvent]]]:
        """Yield everything that is told, an asset at a time; others may change meanwhile."""
        for name, told in list(self._told.items()):
            if told.topic and self._told.get(name) is told:
                prompt = self._prompt(told.asset)
                yield told.topic, [] if isinstance(prompt, str) else self._stored(prompt, told.hashes)

    def _store(self, name: str, asset: T) -> Iterator[tuple[str, list[KVEvent]]]:
        prompt = self._prompt(asset)
        if not isinstance(prompt, str):
            why = self._refused(prompt)
            prompt = prompt if why is None else why
        if isinstance(prompt, str):
            if prompt not in self.untold:
                self._warn(name, prompt)
            self.untold[prompt] = self.untold.get(prompt, 0) + 1
            self._told[name] = _Told(asset, "", prompt.encode())
            yield "", []
            return
        topic = self._topic.replace(MODEL, prompt.model)
        hashes = b"".join(one[-_WIDTH:] for one in self._hashes.full(prompt.tokens))
        ordered = self._ordered.get(topic)
        if ordered is None:  # what routers have of an earlier publisher with this topic is void
            ordered = self._ordered[topic] = []
            yield topic, [KVBlocksCleared()]
        insort(ordered, hashes)
        self._told[name] = _Told(asset, topic, hashes)
        yield topic, self._stored(prompt, hashes)

    def _remove(self, name: str) -> Iterator[tuple[str, list[KVEvent]]]:
        told = self._told.pop(name)
        if not told.topic:
            why: Reason = told.hashes.decode()  # type: ignore[assignment]
            self.untold[why] -= 1
            return
        ordered = self._ordered[told.topic]
        at = bisect_left(ordered, told.hashes)
        del ordered[at]
        beside = ordered[max(0, at - 1) : at + 1]
        kept = max((_shared(told.hashes, other) for other in beside), default=0)
        gone = _numbers(told.hashes[kept * _WIDTH :])
        yield told.topic, [KVBlocksRemoved(list(gone), STORAGE)] if gone else []

    def _prompt(self, asset: T) -> ToldPrompt | Reason:
        try:
            return self._read(asset)
        except (OSError, KvabrError):
            return "unreadable"

    def _refused(self, prompt: ToldPrompt) -> Reason | None:
        if len(prompt.tokens) < self._hashes.block:
            return "short"
        if not fnmatchcase(prompt.model, self._models):
            return "another model"
        if MODEL not in self._topic:
            self._only = self._only or prompt.model
            return None if prompt.model == self._only else "another model"
        return None

    def _stored(self, prompt: ToldPrompt, hashes: bytes) -> list[KVEvent]:
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


def _shared(one: bytes, other: bytes) -> int:
    """Return how many blocks two prompts share: hashes cover what is before them, so they differ from one on."""
    low, high = 0, min(len(one), len(other)) // _WIDTH
    while low < high:
        middle = (low + high + 1) // 2
        here = slice((middle - 1) * _WIDTH, middle * _WIDTH)
        low, high = (middle, high) if one[here] == other[here] else (low, middle - 1)
    return low
