"""The tracks of an asset that grows: its news, and its levels, whose groups exist once the news have named them.

An origin feeds them from a folder (`kvabr.server.live_assets`), a relay from its origin (`kvabr.server.relay_live`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import NamedTuple

from kvabr.codec.container import ObjectSpan, object_spans
from kvabr.server.grants import Grant
from kvabr.server.growing import GrowingBytes, GrowingPublication
from kvabr.server.publication import ArrivingGroup, BytesPublication, Publication
from kvabr.store.asset_index import check_names
from kvabr.types.errors import AssetError, FormatError
from kvabr.types.live import EdgeMessage, LiveCatalog, LiveEnd, NewsOrder, PublishedFrames, merged, parse_edge
from kvabr.types.naming import EDGE_TRACK, LIVE_TRACK, TrackNamespace
from kvabr.types.units import Unit
from kvabr.types.words import counted

MAX_NEWS_BYTES = 64 << 20
"""Bound on the news of one asset."""


class PublishedFrame(NamedTuple):
    """One group of a level, as the news have it."""

    unit: Unit
    size: int
    digest: str
    """Empty if the producer left the group out."""


class EdgeTrack(GrowingBytes):
    """The news."""

    def __init__(self, asset: GrowingAsset) -> None:
        """Begin without groups."""
        super().__init__()
        self.asset = asset

    def readable(self, grant: Grant) -> bool:
        return self.asset.readable(grant)


class LiveLevel(GrowingPublication):
    """One level."""

    def __init__(self, asset: GrowingAsset, part: int, level: str, expected: Sequence[int]) -> None:
        """Begin without groups; ``part`` is the index of the layer class."""
        super().__init__()
        self.expected = expected
        """Bytes that each group should have."""
        self.asset = asset
        self._part, self._level = asset.live.catalog.spec.parts[part], level
        self.name = self._part.track_name(level)
        self.dear = asset.dear
        self._frames: dict[int, PublishedFrame] = {}

    def readable(self, grant: Grant) -> bool:
        return self.asset.readable(grant)

    def publish(self, unit: Unit, frame: tuple[int, str] | None) -> None:
        """Take a group; None: the producer leaves it out, so it does not exist. Later ones appear after it."""
        size, digest = frame or (0, "")
        self._frames[unit.group] = PublishedFrame(unit, size, digest)
        groups = self.groups
        while groups in self._frames:
            groups += 1
        if groups > self.groups:
            self.grow(groups)

    def has(self, group: int) -> bool:
        return bool(self.frame(group).digest)

    def objects(self, group: int) -> tuple[ObjectSpan, ...]:
        unit, size, digest = self.frame(group)
        if not digest:
            return (ObjectSpan(unit.first, 0, 0),)
        return object_spans(self._part, self._level, unit.first, unit.tokens, size)

    def watch(self, changed: Callable[[], None]) -> Callable[[], None]:
        unwatch = super().watch(changed)
        self.asset.subscribed(self)
        return unwatch

    def unwatched(self) -> None:
        self.asset.unsubscribed(self)

    def loads(self, group: int) -> int:
        return self.asset.loads(self.frame(group)) if self.has(group) else 0

    def open(self, group: int, priority: int = 128, on_more: Callable[[], None] = lambda: None) -> ArrivingGroup:
        if not self.has(group):
            raise AssetError(f"group {group} of {self.name}: the producer left it out")
        return self.asset.open(self, group, priority, on_more)

    def frame(self, group: int) -> PublishedFrame:
        """Return what the news say of a group."""
        if not 0 <= group < self.groups:
            raise IndexError(f"group {group} of a track that has {counted(self.groups, 'group')} so far")
        return self._frames[group]


class GrowingAsset(ABC):
    """One asset that grows; subclasses bring its frames. Used from the event loop only."""

    dear = False
    """See `Publication.dear`."""

    def __init__(self, live: LiveCatalog, text: BytesPublication | None = None) -> None:
        """Begin without groups; ``text`` is the live catalog as it came, if it did.

        Takes time for a long prompt. Raises `FormatError` if the catalog names what cannot be served.
        """
        check_names(live.catalog)
        catalog = self.catalog = live.catalog
        self.live = live
        self.order = NewsOrder(live)
        """The news so far."""
        units = list(map(catalog.unit, range(catalog.groups))) if catalog.every_token else catalog.units
        self.levels: dict[str, LiveLevel] = {}
        """By the names under which they are published."""
        for part in range(len(catalog.spec.parts)):
            own = [index for index, unit in enumerate(units) if unit.part == part]
            for track in catalog.tracks:
                level = LiveLevel(self, part, track.name, [track.bytes[index] for index in own])
                self.levels[level.name] = level
        self.edge = EdgeTrack(self)
        self.text = BytesPublication(live.dumps().encode()) if text is None else text
        """The live catalog."""
        self.news_bytes = 0
        self.over = False
        """Whether nothing follows."""
        self.gone = False
        """Whether it was removed, so that nothing more of it may be sent."""

    @property
    def namespace(self) -> TrackNamespace:
        """Name of the whole prompt."""
        return self.catalog.namespace

    @property
    def chunks(self) -> int:
        """Groups of tokens that are published."""
        return self.order.groups

    @property
    def watched(self) -> bool:
        """Whether somebody waits for more of it."""
        return any(track.watched for track in (self.edge, *self.levels.values()))

    @abstractmethod
    def open(self, level: LiveLevel, group: int, priority: int, on_more: Callable[[], None]) -> ArrivingGroup:
        """Open a group that exists; see `Publication.open`."""

    def readable(self, grant: Grant) -> bool:
        """Return whether a grant may read more of it."""
        del grant
        return not self.gone

    def loads(self, frame: PublishedFrame) -> int:
        return frame.size if self.dear else 0

    def subscribed(self, level: LiveLevel) -> None:  # noqa: B027  # only a relay asks others
        """Note that somebody subscribes to a level."""

    def unsubscribed(self, level: LiveLevel) -> None:  # noqa: B027  # as above
        """Note that nobody subscribes to a level any more."""

    def track(self, name: str) -> Publication | None:
        """Return a track; None if there is no such track."""
        if name == LIVE_TRACK:
            return self.text
        return self.edge if name == EDGE_TRACK else self.levels.get(name)

    def take(self, message: EdgeMessage) -> None:
        """Handle the next message.

        Raises:
            FormatError: as `NewsOrder.take`; or there are too many.
        """
        if isinstance(message, LiveEnd):
            self.order.check_key(message)
            missing = len(self.catalog.chunks) - self.chunks
            self.end(message.reason or (f"it ended before its last {counted(missing, 'group')}" if missing else ""))
            return
        data = message.dumps()
        if self.news_bytes + len(data) > MAX_NEWS_BYTES:
            raise FormatError(f"more than {MAX_NEWS_BYTES} bytes of news")
        begun = self.order.coming.get(message.group)
        self.order.take(message)
        names = self.order.tracks(message.group) if begun is None else begun
        coming = self.order.coming.get(message.group, ())
        for unit in self.order.units(message.group):
            part = self.catalog.spec.parts[unit.part]
            for name in map(part.track_name, self.catalog.by_name):
                if name in names and name not in coming:
                    self.levels[name].publish(unit, message.frames.get(name))
        self.news_bytes += len(data)
        self.edge.append(data)

    def end(self, reason: str) -> None:
        """Say that nothing follows; an empty reason: it is complete. Does nothing the second time."""
        if not self.over:
            self.over = True
            for group, names in self.order.coming.items():
                for unit in self.order.units(group):
                    part = self.catalog.spec.parts[unit.part]
                    for name in names & set(map(part.track_name, self.catalog.by_name)):
                        self.levels[name].publish(unit, None)
            self.edge.append(LiveEnd(self.live.key, reason).dumps())
            for track in (*self.levels.values(), self.edge):
                track.finish(reason)

    def abandon(self, reason: str) -> None:
        """Say that nothing more comes from here, which says nothing of the asset's producer."""
        self.over = True
        for track in (*self.levels.values(), self.edge):
            track.finish(reason)

    def news(self) -> list[PublishedFrames]:
        """Return the news so far, one for each group of tokens."""
        messages = (parse_edge(bytes(self.edge.open(number).data)) for number in range(self.order.messages))
        return merged(message for message in messages if isinstance(message, PublishedFrames))
