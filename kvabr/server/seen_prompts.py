"""The prompts that a relay announces to routers, after they were looked up through it.

Their tokens are those of the origin's KV events. The relay can serve an announced prompt for as long as its origin can;
evicted groups are fetched again.
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
_MAX_SEEN = 1 << 16
_PARTIAL_SHARE = 4


class SeenPrompts:
    """A bounded set of prompts. Thread-safe."""

    def __init__(self, max_bytes: int = _MAX_TOKEN_BYTES) -> None:
        size = _OVERHEAD_BYTES
        self._tokens: ByteLru[str, array[int]] = ByteLru(max_bytes, lambda one: size + 4 * len(one))
        """By the prompt's digest, which identifies its tokens."""
        self._parts: ByteLru[str, tuple[object, array[int]]] = ByteLru(
            max_bytes // _PARTIAL_SHARE, lambda one: size + 4 * len(one[1])
        )
        """By digest, a prompt's last received block, and its tokens so far."""
        self._seen: OrderedDict[str, TrackNamespace] = OrderedDict()
        """Assets looked up and not removed since, by their marks (`mark_of`), oldest first."""
        self._announced: dict[str, AnnouncedPrompt] = {}
        """The last result of `assets`, to return equal prompts as the same objects."""
        self._lock = threading.Lock()
        self._listeners: list[Callable[[], None]] = []

    def listen(self, changed: Callable[[], None]) -> None:
        """Call ``changed`` when prompts were added or removed."""
        self._listeners.append(changed)

    def assets(self) -> Mapping[str, AnnouncedPrompt]:
        """Return the prompts to announce, by digest; only for the publisher's thread."""
        with self._lock:
            seen = list(self._seen.values())
        before, self._announced = self._announced, {}
        for space in seen:
            with self._lock:  # briefly for each: the event loop needs it, too
                tokens = self._tokens.peek(space.prompt)
            if tokens is not None:
                prompt = before.get(space.prompt)
                if prompt is None or prompt.tokens is not tokens or prompt.model != space.model:
                    prompt = AnnouncedPrompt(space.model, space.prompt, tokens)
                self._announced[space.prompt] = prompt
        return dict(self._announced)

    def saw(self, namespace: TrackNamespace) -> None:
        """Add an asset that was looked up."""
        if not self._tokens.maxsize:
            return  # no events are published
        mark = mark_of(namespace)
        with self._lock:
            new = mark not in self._seen
            self._seen[mark] = namespace
            self._seen.move_to_end(mark)
            while len(self._seen) > _MAX_SEEN:
                self._seen.popitem(last=False)
        if new:
            self._notify()

    def receive(self, _topic: str, events: Sequence[KVEvent]) -> None:
        """Learn tokens from an origin's events."""
        with self._lock:
            stored = [one for one in events if isinstance(one, KVBlocksStored) and one.kvabr_asset and one.block_hashes]
            news = [self._take(one, one.kvabr_asset or "") for one in stored]
        if any(news):
            self._notify()

    def remove(self, marks: Collection[str]) -> None:
        """Remove assets that an origin has removed or replaced, by their marks."""
        with self._lock:
            gone = [self._seen.pop(mark, None) for mark in marks]
        if any(gone):
            self._notify()

    def clear(self) -> None:
        """Remove all assets until they are looked up again."""
        with self._lock:
            self._seen.clear()
        self._notify()

    def _take(self, event: KVBlocksStored, prompt: str) -> bool:
        last, tokens = self._parts.pop(prompt, (None, array("I")))
        if event.parent_block_hash is None:
            tokens = array("I")
        elif last != event.parent_block_hash:
            return False
        tokens.extend(event.token_ids)
        self._parts.add(prompt, (event.block_hashes[-1], tokens))
        known = self._tokens.get(prompt)
        new = known is None or len(known) < len(tokens)
        if new:
            self._tokens.replace(prompt, tokens[:])
        return new

    def _notify(self) -> None:
        for listener in self._listeners:
            listener()
