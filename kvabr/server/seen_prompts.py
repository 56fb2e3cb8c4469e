"""The prompts that a relay can tell routers of: those that were looked up through it.

It learns their tokens from its origin's KV events. What is told can be had through
here as long as the origin has it; groups that were dropped since come from the origin again.
"""

from __future__ import annotations

import threading
from array import array
from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping, Sequence

from kvabr.server.changes import mark_of
from kvabr.store.lru import ByteLru
from kvabr.telemetry.kv_events.announced import AnnouncedPrompt
from kvabr.telemetry.kv_events.wire import KVBlocksStored, KVEvent
from kvabr.types.naming import TrackNamespace

_MAX_TOKEN_BYTES = 64 << 20
_OVERHEAD_BYTES = 256
_MOST_SEEN = 1 << 16
_PARTS = 4
"""Prompts of which more parts may come have a fourth of the bytes of all; longer ones are not told."""


class SeenPrompts:
    """Prompts within a bound; all methods may be called in any thread."""

    def __init__(self, max_bytes: int = _MAX_TOKEN_BYTES) -> None:
        """Begin empty, and keep tokens of at most ``max_bytes``."""
        size = _OVERHEAD_BYTES
        self._tokens: ByteLru[str, array[int]] = ByteLru(max_bytes, lambda one: size + 4 * len(one))
        """By the digest of the prompt; digests name tokens, so this does not get old."""
        self._parts: ByteLru[str, tuple[object, array[int]]] = ByteLru(
            max_bytes // _PARTS, lambda one: size + 4 * len(one[1])
        )
        """By the digest, the name of the last block that came of a prompt, and its tokens so far."""
        self._seen: OrderedDict[str, TrackNamespace] = OrderedDict()
        """Assets that were looked up and not taken back since, by their marks (`mark_of`); the oldest first."""
        self._told: dict[str, AnnouncedPrompt] = {}
        """What `assets` returned last, so that it returns the same again."""
        self._lock = threading.Lock()
        self._listeners: list[Callable[[], None]] = []

    def listen(self, changed: Callable[[], None]) -> None:
        """Call ``changed`` when there may be other prompts."""
        self._listeners.append(changed)

    def assets(self) -> Mapping[str, AnnouncedPrompt]:
        """Return what can be told, by the digest; the publisher's thread alone calls it."""
        with self._lock:
            seen = list(self._seen.values())
        before, self._told = self._told, {}
        for space in seen:
            with self._lock:  # for a moment each: the event loop wants it, too
                tokens = self._tokens.peek(space.prompt)
            if tokens is not None:
                told = before.get(space.prompt)
                if told is None or told.tokens is not tokens or told.model != space.model:
                    told = AnnouncedPrompt(space.model, space.prompt, tokens)
                self._told[space.prompt] = told
        return dict(self._told)

    def saw(self, namespace: TrackNamespace) -> None:
        """Note an asset that was looked up."""
        if not self._tokens.maxsize:
            return  # nobody wants events
        mark = mark_of(namespace)
        with self._lock:
            new = mark not in self._seen
            self._seen[mark] = namespace
            self._seen.move_to_end(mark)
            while len(self._seen) > _MOST_SEEN:
                self._seen.popitem(last=False)
        if new:
            self._tell()

    def hear(self, _topic: str, events: Sequence[KVEvent]) -> None:
        """Learn tokens from an origin's events."""
        with self._lock:
            stored = [one for one in events if isinstance(one, KVBlocksStored) and one.kvabr_asset and one.block_hashes]
            news = [self._take(one, one.kvabr_asset or "") for one in stored]
        if any(news):
            self._tell()

    def take_back(self, marks: Collection[str]) -> None:
        """Forget assets that an origin has removed or replaced, by their marks (`kvabr.server.changes.mark_of`)."""
        with self._lock:
            gone = [self._seen.pop(mark, None) for mark in marks]
        if any(gone):
            self._tell()

    def clear(self) -> None:
        """Forget all assets until they are looked up again."""
        with self._lock:
            self._seen.clear()
        self._tell()

    def _take(self, event: KVBlocksStored, prompt: str) -> bool:
        """Take some of a prompt's tokens; return whether they were not known."""
        last, tokens = self._parts.pop(prompt, (None, array("I")))
        if event.parent_block_hash is None:
            tokens = array("I")
        elif last != event.parent_block_hash:
            return False
        tokens.extend(event.token_ids)
        self._parts.add(prompt, (event.block_hashes[-1], tokens))
        return self._learn(prompt, tokens)

    def _learn(self, prompt: str, tokens: array[int]) -> bool:
        known = self._tokens.get(prompt)
        new = known is None or len(known) < len(tokens)
        if new:
            self._tokens.replace(prompt, tokens[:])
        return new

    def _tell(self) -> None:
        for listener in self._listeners:
            listener()
