"""Tracks that grow while they are served, for caches that are still being prefilled.

A growing track ends once: complete, or with the reason why its producer stopped; its groups stay. For the event loop
only.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from kvabr.codec.container import ObjectSpan
from kvabr.server.grants import Grant
from kvabr.server.publication import Publication, PublishedGroup
from kvabr.types.digests import digest_of


class GrowingPublication(Publication):
    """A track that grows; subclasses store the groups."""

    def __init__(self) -> None:
        self.groups, self.growing = 0, True
        self._watchers: dict[object, Callable[[], None]] = {}
        self._notifying = False

    def grow(self, groups: int) -> None:
        """Announce that groups below ``groups`` exist."""
        self.groups = groups
        self._notify_soon()

    def finish(self, failure: str = "") -> None:
        """Announce the end, with a reason if incomplete. Idempotent."""
        if self.growing:
            self.growing, self.failure = False, failure
            self._notify_soon()

    def watch(self, subscription: object, changed: Callable[[], None]) -> None:
        """Call ``changed`` after new groups and the end."""
        self._watchers[subscription] = changed

    def unwatch(self, subscription: object) -> None:
        """Stop the calls for a subscription."""
        self._watchers.pop(subscription, None)

    @property
    def watched(self) -> bool:
        return bool(self._watchers)

    def _notify_soon(self) -> None:
        if not self._notifying:
            self._notifying = True
            asyncio.get_running_loop().call_soon(self._notify)

    def _notify(self) -> None:
        self._notifying = False
        for changed in list(self._watchers.values()):
            changed()


class GrowingBytes(GrowingPublication):
    """A growing track in memory with single-object groups: news about other tracks."""

    def __init__(self, readable: Callable[[Grant], bool] = lambda _: True) -> None:
        """``readable``: see `Publication`."""
        super().__init__()
        self._readable = readable
        self._published: list[PublishedGroup] = []

    def readable(self, grant: Grant) -> bool:
        return self._readable(grant)

    def append(self, data: bytes) -> None:
        """Publish the next group."""
        digest = digest_of(data)
        group = PublishedGroup(memoryview(data), (ObjectSpan(0, 0, len(data)),), digest)
        self.grow(self.groups + 1)
        self._published.append(group)

    def objects(self, group: int) -> tuple[ObjectSpan, ...]:
        return self.open(group).objects

    def open(self, group: int, priority: int = 128, on_more: Callable[[], None] = lambda: None) -> PublishedGroup:
        del priority, on_more
        return self._published[group]
