"""Tracks whose groups appear one after the other while they are served: a cache that is still being prefilled.

A growing track has an edge, the number of groups that exist. It ends once: complete, or with the reason for which its
producer stopped; what exists stays. All calls are made in the event loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from kvabr.codec.container import ObjectSpan
from kvabr.server.publication import Publication, PublishedGroup
from kvabr.types.digests import digest_of
from kvabr.types.words import counted


class GrowingPublication(Publication):
    """A track that grows; subclasses keep the groups."""

    def __init__(self) -> None:
        """Begin without groups."""
        self.groups, self.growing = 0, True
        self._watchers: dict[object, Callable[[], None]] = {}
        self._telling = False

    def grow(self, groups: int) -> None:
        """Say that groups below ``groups`` exist; `ValueError` if the track has ended or would shrink."""
        if not self.growing or groups < self.groups:
            raise ValueError(
                f"a track of {counted(self.groups, 'group')}{'' if self.growing else ' that has ended'} got {groups}"
            )
        self.groups = groups
        self._tell_soon()

    def finish(self, failure: str = "") -> None:
        """Say that no group follows; ``failure`` is why, if there should be more. Does nothing the second time."""
        if self.growing:
            self.growing, self.failure = False, failure
            self._tell_soon()

    def watch(self, changed: Callable[[], None]) -> Callable[[], None]:
        """Have ``changed`` called after groups have appeared and after the end; return what ends that."""
        key = object()
        self._watchers[key] = changed

        def unwatch() -> None:
            if self._watchers.pop(key, None) is not None and not self._watchers:
                self.unwatched()

        return unwatch

    def unwatched(self) -> None:  # most go on all the same
        """Note that nobody watches any more."""

    @property
    def watched(self) -> bool:
        """Whether somebody waits for more of it."""
        return bool(self._watchers)

    def _tell_soon(self) -> None:
        """Tell the watchers once, however much changes in one turn of the event loop."""
        if not self._telling:
            self._telling = True
            asyncio.get_running_loop().call_soon(self._tell)

    def _tell(self) -> None:
        self._telling = False
        for changed in list(self._watchers.values()):
            changed()


class GrowingBytes(GrowingPublication):
    """A growing track in memory, whose groups are single objects: news about other tracks."""

    def __init__(self) -> None:
        super().__init__()
        self._published: list[PublishedGroup] = []

    def append(self, data: bytes) -> None:
        """Publish the next group; raises as `grow`."""
        digest = digest_of(data)
        group = PublishedGroup(memoryview(data), (ObjectSpan(0, 0, len(data)),), digest, shared=True)
        self.grow(self.groups + 1)
        self._published.append(group)

    def objects(self, group: int) -> tuple[ObjectSpan, ...]:
        return self.open(group).objects

    def open(self, group: int, priority: int = 128, on_more: Callable[[], None] = lambda: None) -> PublishedGroup:
        del priority, on_more
        if not 0 <= group < self.groups:
            raise IndexError(f"group {group} of a track that has {counted(self.groups, 'group')} so far")
        return self._published[group]
