"""Assets of a folder that are still being written, as a server follows and serves them.

Under the name of an asset there are, while it grows: `kvabr.live`, its live catalog; `kvabr.edge`, the news of each
group of tokens, one after the other; and its levels, whose groups exist once the news have named them. A lookup of the
longest prefix that also takes what is growing has a name of its own. Once the asset is complete it is in the store like
any other, and its levels go on under the same names.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from kvabr.codec.container import ObjectSpan, object_spans
from kvabr.server.grants import Grant
from kvabr.server.growing import GrowingBytes, GrowingPublication
from kvabr.server.publication import BytesPublication, OpenedGroup, Publication
from kvabr.store.files import PARTIAL
from kvabr.store.live_folder import LiveFolder, live_folders
from kvabr.types.errors import AssetError, FormatError
from kvabr.types.live import LiveEnd, PublishedFrames
from kvabr.types.naming import (
    EDGE_TRACK,
    LIVE_PREFIX_TRACK,
    LIVE_TRACK,
    TrackNamespace,
    parse_prefix_track,
    prefix_key,
)
from kvabr.types.units import Unit

if TYPE_CHECKING:
    from structlog.typing import FilteringBoundLogger

LOOK_S, POLL_S = 0.05, 0.004
"""Seconds between looks for new assets, and between looks at those that grow."""
_ALIVE_S = 0.5
"""Seconds between checks whether writers live."""


class LiveLevel(GrowingPublication):
    """One level of an asset that grows."""

    def __init__(self, asset: LiveAsset, part: int, level: str) -> None:
        """Begin without groups; ``part`` is the index of the layer class."""
        super().__init__()
        self.asset, self._part, self._level = asset, asset.live.catalog.spec.parts[part], level
        self.name = self._part.track_name(level)
        self._groups: list[tuple[Unit, int, bytes] | None] = []

    def publish(self, unit: Unit, frame: tuple[int, str] | None) -> None:
        """Take the next group; None: the producer left it out, so it does not exist."""
        self._groups.append(None if frame is None else (unit, frame[0], bytes.fromhex(frame[1])))
        self.grow(len(self._groups))

    def objects(self, group: int) -> tuple[ObjectSpan, ...]:
        """See `Publication.objects`."""
        unit, size, _ = self._group(group)
        return object_spans(self._part, self._level, unit.first, unit.tokens, size)

    def open(self, group: int, priority: int = 128, on_more: Callable[[], None] = lambda: None) -> OpenedGroup:
        """See `Publication.open`."""
        del priority, on_more
        _, size, digest = self._group(group)
        return OpenedGroup(self.asset.folder.open_frame(group, self.name, size), self.objects(group), digest)

    def _group(self, group: int) -> tuple[Unit, int, bytes]:
        if not 0 <= group < self.groups:
            raise IndexError(f"group {group} of a track that has {self.groups} groups so far")
        if (found := self._groups[group]) is None:
            raise AssetError(f"group {group} of {self.name}: the producer had no time for it")
        return found


class LiveAsset:
    """One asset that grows."""

    def __init__(self, folder: LiveFolder) -> None:
        """Follow a folder."""
        self.folder, self.live = folder, folder.live
        self.name = folder.path.name.removeprefix(".").removesuffix(PARTIAL).rpartition(".")[0]
        catalog = self.live.catalog
        self._units = catalog.units if not catalog.every_token else tuple(map(catalog.unit, range(catalog.groups)))
        self.levels = {
            level.name: level
            for part in range(len(catalog.spec.parts))
            for level in (LiveLevel(self, part, track.name) for track in catalog.tracks)
        }
        self.edge = GrowingBytes()
        self.text = BytesPublication(self.live.dumps().encode())
        self.over = False

    @property
    def namespace(self) -> TrackNamespace:
        """Name of the whole prompt."""
        return self.live.catalog.namespace

    def tracks(self) -> dict[str, Publication]:
        """Return all tracks by name."""
        return {**self.levels, EDGE_TRACK: self.edge, LIVE_TRACK: self.text}

    def poll(self) -> None:
        """Take what has been written since the last call; raises as `LiveFolder.read`, and `FormatError`."""
        for message in self.folder.read():
            if self.over:
                return
            if message.key != self.live.key:
                raise FormatError(f"{self.folder.path}: a message of another production")
            if isinstance(message, LiveEnd):
                self.end(message.reason)
            else:
                self._publish(message)

    def _publish(self, news: PublishedFrames) -> None:
        if news.group != self.edge.groups:
            raise FormatError(f"{self.folder.path}: group {news.group} came, {self.edge.groups} is next")
        for unit in self._units:
            if unit.chunk == news.group:
                part = self.live.catalog.spec.parts[unit.part]
                for track in self.live.catalog.tracks:
                    name = part.track_name(track.name)
                    self.levels[name].publish(unit, news.frames.get(name))
        self.edge.append(news.dumps())

    def end(self, reason: str) -> None:
        """Say that nothing follows; an empty reason: it is complete."""
        if not self.over:
            self.over = True
            self.edge.append(LiveEnd(self.live.key, reason).dumps())
            for track in (*self.levels.values(), self.edge):
                track.finish(reason)


class LiveAssets:
    """Follows everything that is being written in a folder. Used from the event loop only."""

    def __init__(self, root: Path, log: FilteringBoundLogger, complete: Callable[[], object]) -> None:
        """Begin with nothing; ``complete`` is called when an asset has got its name, so that the store is looked at."""
        self._root, self._log, self._complete = root, log, complete
        self._assets: dict[Path, LiveAsset] = {}
        self._refused: set[Path] = set()

    def __iter__(self) -> Iterator[LiveAsset]:
        return iter(self._assets.values())

    async def follow(self) -> None:
        """Look for assets and follow them until cancelled."""
        loop = asyncio.get_running_loop()
        looked_s = checked_s = float("-inf")
        try:
            while True:
                now_s = loop.time()
                if now_s - looked_s >= LOOK_S:
                    looked_s = now_s
                    self.look()
                if now_s - checked_s >= _ALIVE_S:
                    checked_s = now_s
                    self.check()
                self.poll()
                growing = any(not asset.over for asset in self)
                await asyncio.sleep(POLL_S if growing else LOOK_S)
        finally:
            for asset in self:
                asset.end("the server is going away")
                asset.folder.close()

    def look(self) -> None:
        """Look for new assets, and forget those that are over and whose folder is gone."""
        found = set(live_folders(self._root))
        self._refused &= found
        for path in found - self._assets.keys() - self._refused:
            try:
                asset = LiveAsset(LiveFolder(path))
                if any(other.namespace == asset.namespace and not other.over for other in self):
                    asset.folder.close()
                    raise FormatError(f"{path}: another producer is publishing the same prompt")
            except (AssetError, FormatError) as error:
                self._refused.add(path)
                self._log.warning("live asset left out", error=str(error))
                continue
            self._assets[path] = asset
            self._log.info("live asset", asset=asset.name, model=asset.namespace.model, groups=len(asset.live.seconds))
        for path in [path for path, asset in self._assets.items() if asset.over and path not in found]:
            self._assets.pop(path).folder.close()

    def poll(self) -> None:
        """Take what has been written since the last call."""
        for asset in self:
            if asset.over:
                continue
            try:
                asset.poll()
            except (AssetError, FormatError) as error:
                self._log.warning("live asset ended", asset=asset.name, error=str(error))
                asset.end(str(error)[:200])
            if asset.over:
                self._complete()

    def check(self) -> None:
        """End the assets whose writer was killed."""
        for asset in self:
            if not asset.over and not asset.folder.has_writer():
                asset.poll()  # it may have ended orderly a moment ago
                self._log.warning("live asset ended", asset=asset.name, error="its producer is gone")
                asset.end("its producer is gone")

    def find(self, grant: Grant, namespace: TrackNamespace, track: str) -> Publication | None:
        """Return a track of an asset that grows and that a grant may read, or None."""
        readable = [asset for asset in self if grant.may_read(asset.name, asset.namespace.model)]
        if track.startswith(LIVE_PREFIX_TRACK):
            best = max(readable, key=lambda asset: _shared(asset, namespace, track), default=None)
            return None if best is None or not _shared(best, namespace, track) else best.text
        return next((asset.tracks().get(track) for asset in readable if asset.namespace == namespace), None)


def _shared(asset: LiveAsset, namespace: TrackNamespace, track: str) -> int:
    """Return one more than the last group of an asset that a lookup names; 0 if it shares none."""
    catalog = asset.live.catalog
    if (catalog.namespace.model, catalog.chunks[0]) != (namespace.model, namespace.prompt):
        return 0
    try:
        keys = {bytes.fromhex(namespace.prompt[:16]), *parse_prefix_track(track)}
    except FormatError:
        return 0
    return max((index + 1 for index, chunk in enumerate(catalog.chunks) if prefix_key(chunk) in keys), default=0)
