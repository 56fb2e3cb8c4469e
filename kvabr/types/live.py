"""Caches that are published while they are being prefilled: what is known at the start, and the news of each group.

A *live catalog* is a catalog whose sizes and losses are expected, not measured, and whose digests are not known yet,
with the times at which groups should appear. *Edge messages* follow, one per group of tokens, in order: they say how
large the frames are that ended with it, and their digests. The last one says that the cache is complete, or why its
producer stopped. All of them carry the live catalog's key, so that the news of two productions never mix.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, cast

from kvabr.types.catalog import MAX_CATALOG_BYTES, Catalog, Track
from kvabr.types.digests import is_digest, kind_of, unknown
from kvabr.types.errors import FormatError
from kvabr.types.json_pieces import JsonPieces
from kvabr.types.naming import TrackNamespace
from kvabr.types.units import Unit, prefix_units, units_of

LIVE_SCHEMA = "kvabr.live/1"
MAX_EDGE_BYTES = 256 << 10
"""Most bytes of one edge message: there are at most a thousand tracks."""
MAX_LIVE_BYTES = MAX_CATALOG_BYTES
"""Most bytes of a live catalog."""
UNKNOWN = unknown()
"""Stands for a SHA-256 that is not known yet; see `kvabr.types.digests.unknown` for those of another kind."""
_MAX_FRAME = 1 << 40
_KEY = re.compile(r"[0-9a-f]{16}")
_DECODER = json.JSONDecoder()


@dataclass(frozen=True, slots=True)
class LiveCatalog:
    """What is known of a cache when its prefill begins."""

    catalog: Catalog
    """Its sizes and losses are expected ones; its digests are unknown, and only say of which kind they will be."""
    seconds: tuple[float, ...]
    """For each group of tokens, when it should be published, seconds since the producer began; ascending."""
    key: str
    """16 hex digits, another for each production."""

    def __post_init__(self) -> None:
        if not _KEY.fullmatch(self.key):
            raise FormatError(f"live catalog: the key is {self.key[:80]!r}, not 16 hex digits")
        if len(self.seconds) != len(self.catalog.chunks):
            raise FormatError(f"live catalog: {len(self.seconds)} times for {len(self.catalog.chunks)} groups")
        if not all(0 <= time_s < math.inf for time_s in self.seconds[:1] + self.seconds[-1:]) or any(
            not later >= sooner for sooner, later in pairwise(self.seconds)
        ):
            raise FormatError("live catalog: the times of the groups must be finite, and ascend from zero")

    def dumps(self) -> str:
        """Return it as text: a line of JSON, and the catalog's JSON."""
        head = {"schema": LIVE_SCHEMA, "key": self.key, "seconds": [round(time_s, 6) for time_s in self.seconds]}
        return f"{json.dumps(head, separators=(',', ':'))}\n{self.catalog.dumps()}"

    @classmethod
    def loads(cls, text: bytes) -> LiveCatalog:
        """Parse the output of `dumps` from an untrusted source; raise a `FormatError` if anything is wrong."""
        if len(text) > MAX_LIVE_BYTES:
            raise FormatError(f"live catalog: {len(text)} bytes, more than the {MAX_LIVE_BYTES} allowed")
        head, newline, rest = text.partition(b"\n")
        if not newline:
            raise FormatError("live catalog: it has no second line")
        catalog = Catalog.loads(rest)
        value: dict[str, Any] = {}
        try:
            pieces = JsonPieces(head, "live catalog")
            for name in pieces.members():
                if name == "seconds":
                    value[name] = tuple(map(float, pieces.scalars({int, float}, len(catalog.chunks))))
                elif name in {"schema", "key"}:
                    value[name] = pieces.value()
                    if name == "schema" and value[name] != LIVE_SCHEMA:
                        raise FormatError(f"live catalog: schema is {str(value[name])[:80]!r}, not {LIVE_SCHEMA!r}")
                else:
                    pieces.skip()
            pieces.finish()
            _ = value["schema"]
            return cls(catalog, value["seconds"], str(value["key"]))
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise FormatError(f"live catalog: a field is missing or has the wrong type ({error!r})") from error


@dataclass(frozen=True, slots=True)
class PublishedFrames:
    """News: one more group of tokens is published."""

    key: str
    group: int
    """The group of tokens."""
    ready_s: float
    """When it was published, seconds since the producer began."""
    frames: Mapping[str, tuple[int, str]]
    """Size and digest of its frames, by the name of the published track. Some tracks may be missing: then the
    producer had no time to encode them."""

    def dumps(self) -> bytes:
        """Return it as one line of JSON."""
        value = {"key": self.key, "group": self.group, "ready_s": round(self.ready_s, 6)}
        frames = {name: list(frame) for name, frame in self.frames.items()}
        return json.dumps({**value, "frames": frames}, separators=(",", ":")).encode()


@dataclass(frozen=True, slots=True)
class LiveEnd:
    """News: nothing follows."""

    key: str
    reason: str = ""
    """Why the producer stopped; empty if the cache is complete."""

    def dumps(self) -> bytes:
        """Return it as one line of JSON."""
        return json.dumps({"key": self.key, "end": self.reason[:500]}, separators=(",", ":")).encode()


EdgeMessage = PublishedFrames | LiveEnd


def parse_edge(data: bytes) -> EdgeMessage:
    """Parse an edge message from an untrusted source; raise a `FormatError` if anything is wrong."""
    messages = parse_edges(data)
    if len(messages) != 1:
        raise FormatError(f"edge message: {len(messages)} messages where one is due")
    return messages[0]


def parse_edges(data: bytes) -> list[EdgeMessage]:
    """Parse edge messages that lie one behind the other, up to `MAX_EDGE_BYTES` in all; raises as `parse_edge`."""
    if len(data) > MAX_EDGE_BYTES:
        raise FormatError(f"edge message: {len(data)} bytes, more than the {MAX_EDGE_BYTES} allowed")
    found: list[EdgeMessage] = []
    try:
        text, at = data.decode(), 0
        while at < len(text):
            value, at = _DECODER.raw_decode(text, at)
            found.append(_message(value))
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError, RecursionError) as error:
        raise FormatError(f"edge message: a field is missing or has the wrong type ({error!r})") from error
    return found


def _message(value: Any) -> EdgeMessage:
    key = value["key"]
    if not isinstance(key, str) or not _KEY.fullmatch(key):
        raise FormatError("edge message: it has no key of 16 hex digits")
    if "end" in value:
        if not isinstance(value["end"], str):
            raise FormatError("edge message: the reason of an end must be text")
        return LiveEnd(key, value["end"][:500])
    group, ready_s = value["group"], float(value["ready_s"])
    if type(group) is not int or group < 0 or not 0 <= ready_s < math.inf:
        raise FormatError("edge message: the group must be a whole number, its time a finite one, from zero")
    frames = {str(name): _frame(frame) for name, frame in value["frames"].items()}
    return PublishedFrames(key, group, ready_s, frames)


def _frame(value: Any) -> tuple[int, str]:
    size, digest = value
    if type(size) is not int or not 0 < size <= _MAX_FRAME:
        raise FormatError(f"edge message: a frame of {str(size)[:40]} bytes")
    if not is_digest(digest):
        raise FormatError("edge message: a frame needs a digest of 64 hex digits")
    return size, digest


def check_kind(news: PublishedFrames, kind: str) -> None:
    """Raise `FormatError` if a digest is of another kind than those of the live catalog."""
    if any(kind_of(digest) != kind for _, digest in news.frames.values()):
        raise FormatError(f"edge message: group {news.group} has digests of another kind than {kind}")


def published_catalog(live: LiveCatalog, news: Sequence[PublishedFrames]) -> Catalog | None:
    """Return the ordinary catalog of what these news, from the first group on, have named; None if it cannot be played.

    It is that of the whole prompt, or of a shorter one. Its losses are the expected ones, and it has the tracks that no
    group was left out of.
    """
    catalog = live.catalog
    groups, _ = catalog.playable(min(len(news), len(catalog.chunks)))
    while groups and (found := _shorter(catalog, news[:groups])) is None:
        groups, _ = catalog.playable(groups - 1)
    return found if groups else None


def _shorter(catalog: Catalog, news: Sequence[PublishedFrames]) -> Catalog | None:
    spec, groups = catalog.spec, len(news)
    tokens = min(catalog.tokens, groups * spec.group_tokens)
    units: Sequence[Unit] = [catalog.unit(group) for group in range(groups)]
    alike: Mapping[int, int] = {}
    places = {(unit.part, unit.group): index for index, unit in enumerate(units)}
    if not catalog.every_token:
        places = {(unit.part, unit.group): index for index, unit in enumerate(catalog.units)}
        units = units_of(spec, tokens)
        alike = dict(prefix_units(spec, catalog.units, catalog.tokens, tokens, tokens))
    own = [places[unit.part, unit.group] for unit in units]
    tracks: dict[str, Track] = {}
    for track in catalog.tracks:
        name = [part.track_name(track.name) for part in spec.parts]
        frames = [frame for unit in units if (frame := news[unit.chunk].frames.get(name[unit.part])) is not None]
        if len(frames) == len(units) and (track.refines is None or track.refines in tracks):
            sizes, digests = zip(*frames, strict=True)
            loss = tuple(track.loss[alike.get(index, index)] for index in own)
            tracks[track.name] = replace(track, bytes=sizes, digests=digests, loss=loss, measured=None)
    if not tracks:
        return None
    chunks = catalog.chunks[:groups]
    space = TrackNamespace(catalog.namespace.model, chunks[-1])
    return replace(catalog, namespace=space, tokens=tokens, chunks=chunks, tracks=tuple(tracks.values()), mixes=())


class GrowingCatalog:
    """The catalog of one play of a live asset; its sizes and digests become known group by group."""

    def __init__(self, live: LiveCatalog, wanted: Catalog, most_bytes: int = _MAX_FRAME) -> None:
        """Begin with no group published.

        Args:
            live: what is known of the asset.
            wanted: what is played of its catalog (`Catalog.prefix`, `Catalog.suffix`, `Catalog.with_tracks`).
            most_bytes: the largest frame that is believed.
        """
        self.key, self._most_bytes, self._kind = live.key, most_bytes, wanted.digest_kind
        self.seconds = live.seconds[wanted.offset : wanted.offset + len(wanted.chunks)]
        """When each group of tokens that is played should be published, seconds since the producer began."""
        self._sizes = {track.name: list(track.bytes) for track in wanted.tracks}
        self._digests = {track.name: [unknown(self._kind)] * len(track.digests) for track in wanted.tracks}
        # Only this class changes them, and only of groups that nobody may request yet.
        tracks = tuple(self._growing(track) for track in wanted.tracks)
        self.catalog = replace(wanted, tracks=tracks)
        """Sizes and digests of groups from `edge` on are expected, and unknown."""
        self.edge = 0
        """Groups (units) that are published: the first ones."""
        self.chunks = 0
        """Groups of tokens that are published, of those that are played."""
        self.news = 0
        """The group of tokens, counted from the asset's first, whose news come next."""
        self.left_out: set[tuple[int, str]] = set()
        """Groups (units) and tracks that the producer had no time for."""
        self.known: dict[str, list[str]] = {}
        """Digests of the groups of every published track, by its name; "" for those that are not known yet."""
        for group in range(self.catalog.groups):
            for track in tracks:
                name, number = self.catalog.address(group, track.name)
                listed = self.known.setdefault(name, [])
                listed += [""] * (number + 1 - len(listed))

    def _growing(self, track: Track) -> Track:
        sizes, digests = self._sizes[track.name], self._digests[track.name]
        return replace(track, bytes=cast("tuple[int, ...]", sizes), digests=cast("tuple[str, ...]", digests))

    @property
    def complete(self) -> bool:
        """Whether all that the play needs is published."""
        return self.chunks == len(self.catalog.chunks)

    @property
    def expected_s(self) -> list[float]:
        """When each group (unit) should be published, seconds since the producer began."""
        return [self.seconds[self.catalog.unit(group).chunk] for group in range(self.catalog.groups)]

    def check_key(self, message: EdgeMessage) -> None:
        """Raise `FormatError` if a message is of another production."""
        if message.key != self.key:
            raise FormatError("edge message: of another production of this cache")

    def publish(self, news: PublishedFrames) -> None:
        """Take the news of the next group of tokens; those behind the play are ignored.

        Raises:
            FormatError: it is of another production, or of another group than the next one; a frame is too large; or
                no track of a group stands alone.
        """
        self.check_key(news)
        if self.complete:
            return
        if news.group != self.news:
            raise FormatError(f"edge message: group {news.group} came, {self.news} is next")
        check_kind(news, self._kind)
        catalog, edge = self.catalog, self.edge
        while edge < catalog.groups and catalog.offset + catalog.unit(edge).chunk == news.group:
            self._publish(edge, news)
            edge += 1
        self.edge, self.news = edge, news.group + 1
        self.chunks = max(0, self.news - catalog.offset)

    def _publish(self, group: int, news: PublishedFrames) -> None:
        alone = False
        for track in self.catalog.tracks:
            name, number = self.catalog.address(group, track.name)
            frame = news.frames.get(name)
            if frame is None:
                self.left_out.add((group, track.name))
                continue
            if frame[0] > self._most_bytes:
                raise FormatError(f"edge message: a group of {name} with {frame[0]} bytes, no cache needs so many")
            self._sizes[track.name][group], self._digests[track.name][group] = frame
            self.known[name][number] = frame[1]
            alone |= track.refines is None
        if not alone:
            raise FormatError(f"edge message: group {news.group} has no track that stands alone")
