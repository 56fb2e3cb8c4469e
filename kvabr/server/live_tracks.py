"""The tracks of a growing asset: its news, and its levels with the announced groups. Not thread-safe.

A growing track ends once: complete, or with the reason why its producer stopped. Its groups stay available. An origin
reads them from a folder (`kvabr.server.live_assets`), a relay from its origin (`kvabr.server.relay_live`).
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from kvabr.codec.container import ObjectSpan, object_spans
from kvabr.server.grants import Grant
from kvabr.server.publication import ArrivingGroup, BytesPublication, Publication, PublishedGroup
from kvabr.store.asset_index import check_names
from kvabr.types.digests import digest_of
from kvabr.types.errors import AssetError, FormatError
from kvabr.types.live import EdgeMessage, LiveCatalog, LiveEnd, NewsOrder
from kvabr.types.naming import EDGE_TRACK, LIVE_TRACK, TrackNamespace
from kvabr.types.units import Unit
from kvabr.types.words import counted

MAX_NEWS_BYTES = 64 << 20
"""Maximum bytes of one asset's news."""


class GrowingPublication(Publication):
    """A track that grows; subclasses store the groups."""

    def __init__(self) -> None:
        self.groups, self.growing = 0, True
        self._watchers: dict[object, Callable[[], None]] = {}
        self._notifying = False

    def grow(self, groups: int) -> None:
        """Set the number of published groups, and notify subscriptions."""
        self.groups = groups
        self._notify_soon()

    def finish(self, failure: str = "") -> None:
        """End the track, with a reason if it is incomplete, and notify subscriptions. Idempotent."""
        if self.growing:
            self.growing, self.failure = False, failure
            self._notify_soon()

    def watch(self, subscription: object, changed: Callable[[], None]) -> None:
        """Call ``changed`` after new groups and after the end."""
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
    """A growing track in memory, with one object per group; used for news."""

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

    def objects(self, group: int) -> Sequence[ObjectSpan]:
        return self.open(group).objects

    def open(self, group: int, priority: int = 128, on_more: Callable[[], None] = lambda: None) -> PublishedGroup:
        del priority, on_more
        return self._published[group]


class PublishedFrame(NamedTuple):
    """An announced group of a level."""

    unit: Unit
    size: int
    digest: str
    """Digest of the frame; empty if the producer omitted the group."""


class LiveLevel(GrowingPublication):
    """One compression level of a growing asset."""

    def __init__(self, asset: GrowingAsset, part: int, level: str, expected: Sequence[int]) -> None:
        super().__init__()
        self.expected = expected
        self.asset = asset
        self._part, self._level = asset.live.catalog.spec.parts[part], level
        self.name = self._part.track_name(level)
        self.dear = asset.dear
        self._frames: dict[int, PublishedFrame] = {}

    def readable(self, grant: Grant) -> bool:
        return self.asset.readable(grant)

    def publish(self, unit: Unit, frame: tuple[int, str] | None) -> None:
        """Publish a group, after all before it; ``frame``: bytes and digest, None if the producer omitted it."""
        size, digest = frame or (0, "")
        self._frames[unit.group] = PublishedFrame(unit, size, digest)
        groups = self.groups
        while groups in self._frames:
            groups += 1
        if groups > self.groups:
            self.grow(groups)

    def has(self, group: int) -> bool:
        return bool(self.frame(group).digest)

    def objects(self, group: int) -> Sequence[ObjectSpan]:
        unit, size, digest = self.frame(group)
        if not digest:
            return (ObjectSpan(unit.first, 0, 0),)
        return object_spans(self._part, self._level, unit.first, unit.tokens, size)

    def watch(self, subscription: object, changed: Callable[[], None]) -> None:
        super().watch(subscription, changed)
        self.asset.subscribed(self)

    def unwatch(self, subscription: object) -> None:
        super().unwatch(subscription)
        if not self.watched:
            self.asset.unsubscribed(self)

    def loads(self, group: int) -> int:
        return self.asset.loads(self, group) if self.has(group) else 0

    def open(self, group: int, priority: int = 128, on_more: Callable[[], None] = lambda: None) -> ArrivingGroup:
        if not self.has(group):
            raise AssetError(f"group {group} of {self.name}: the producer left it out")
        return self.asset.open(self, group, priority, on_more)

    def frame(self, group: int) -> PublishedFrame:
        """Return the announcement of a group."""
        return self._frames[group]


class GrowingAsset(ABC):
    """A growing asset; subclasses fetch its frames. Not thread-safe."""

    dear = False

    def __init__(self, live: LiveCatalog, text: BytesPublication | None = None) -> None:
        """``text``: the live catalog as received; None: build it.

        Slow for a long prompt. Raises `FormatError` for names that cannot be served.
        """
        check_names(live.catalog)
        catalog = self.catalog = live.catalog
        self.live = live
        self.order = NewsOrder(live)
        units = list(map(catalog.unit, range(catalog.groups))) if catalog.every_token else catalog.units
        self.levels: dict[str, LiveLevel] = {}
        for part in range(len(catalog.spec.parts)):
            own = [index for index, unit in enumerate(units) if unit.part == part]
            for track in catalog.tracks:
                level = LiveLevel(self, part, track.name, [track.bytes[index] for index in own])
                self.levels[level.name] = level
        self.edge = GrowingBytes(self.readable)
        """The track of the news."""
        self.text = BytesPublication(live.dumps().encode()) if text is None else text
        self.news_bytes = 0
        self.over = False
        self.gone = False
        """True if the asset was removed, so that sending must stop."""

    @property
    def namespace(self) -> TrackNamespace:
        """Name of the whole prompt."""
        return self.catalog.namespace

    @property
    def chunks(self) -> int:
        """Number of published groups of tokens."""
        return self.order.groups

    @property
    def watched(self) -> bool:
        """True if a client subscribes to any of its tracks."""
        return any(track.watched for track in (self.edge, *self.levels.values()))

    @abstractmethod
    def open(self, level: LiveLevel, group: int, priority: int, on_more: Callable[[], None]) -> ArrivingGroup:
        """Open an existing group, as `Publication.open`."""

    def readable(self, grant: Grant) -> bool:
        """Return True if a grant may still read it."""
        del grant
        return not self.gone

    def loads(self, level: LiveLevel, group: int) -> int:
        """Return the bytes that opening an existing group would load into memory."""
        del level, group
        return 0

    def subscribed(self, level: LiveLevel) -> None:  # noqa: B027  # only relays subscribe in turn
        """React to the first subscription to a level."""

    def unsubscribed(self, level: LiveLevel) -> None:  # noqa: B027  # as above
        """React to the end of the last subscription to a level."""

    def track(self, name: str) -> Publication | None:
        """Return a track, or None."""
        if name == LIVE_TRACK:
            return self.text
        return self.edge if name == EDGE_TRACK else self.levels.get(name)

    def take(self, message: EdgeMessage) -> None:
        """Process the next message; raise `FormatError` as `NewsOrder.take`, or if the news are too large."""
        if isinstance(message, LiveEnd):
            self.order.check_key(message)
            missing = len(self.catalog.chunks) - self.chunks
            self.end(message.reason or (f"it ended before its last {counted(missing, 'group')}" if missing else ""))
            return
        data = message.dumps()
        if self.news_bytes + len(data) > MAX_NEWS_BYTES:
            raise FormatError(f"more than {MAX_NEWS_BYTES} bytes of updates")
        self._publish(message.group, self.order.take(message), message.frames)
        self.news_bytes += len(data)
        self.edge.append(data)

    def end(self, reason: str) -> None:
        """End the asset, with a reason if it is incomplete. Idempotent."""
        if not self.over:
            self.over = True
            for group, names in self.order.coming.items():
                self._publish(group, names, {})
            self.edge.append(LiveEnd(self.live.key, reason).dumps())
            self.abandon(reason)

    def _publish(self, group: int, names: set[str], frames: Mapping[str, tuple[int, str]]) -> None:
        for unit in self.order.units(group):
            part = self.catalog.spec.parts[unit.part]
            for name in names.intersection(map(part.track_name, self.catalog.by_name)):
                self.levels[name].publish(unit, frames.get(name))

    def abandon(self, reason: str) -> None:
        """End the tracks of this server, although the producer may continue."""
        self.over = True
        for track in (*self.levels.values(), self.edge):
            track.finish(reason)
