"""Caches published during their prefill: the live catalog and the news of each group.

A *live catalog* has expected sizes, losses and publication times, but unknown digests. *Edge messages* follow. The
first news of each group of tokens, in order, gives sizes and digests of the frames that end with this group. If only
the base is encoded, the message says so, and later news adds the other tracks. The last message reports completion, or
why production stopped. Every message has the live catalog's key, so messages of different productions are never mixed.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Annotated, Any, cast

from msgspec import Meta, Struct

from kvabr.types.catalog import MAX_CATALOG_BYTES, Catalog, Track
from kvabr.types.digests import DIGEST, kind_of, unknown
from kvabr.types.errors import FormatError
from kvabr.types.naming import TrackNamespace
from kvabr.types.records import Positive, check, convert, decode, read_schema
from kvabr.types.tails import losses_with_tail
from kvabr.types.units import Unit, prefix_units, units_by_chunk, units_of

LIVE_SCHEMA = "kvabr.live/1"
MAX_EDGE_BYTES = 256 << 10
"""Maximum size of an edge message in bytes; a message lists at most a thousand tracks."""
MAX_LIVE_BYTES = MAX_CATALOG_BYTES
UNKNOWN = unknown()
_BASE_VALUES = 64
"""Number of values in a live catalog's first line other than times."""
_NEWS_BYTES, _FRAME_NEWS_BYTES = 1 << 10, 256
"""Maximum bytes of news without frames, and additional bytes per frame."""
_MAX_BEGUN_SHARE = 0.25
"""Maximum fraction of the published groups that a shorter asset may omit because only their base was encoded."""
Key = Annotated[str, Meta(pattern=r"^[0-9a-f]{16}\Z")]
_Frame = tuple[Annotated[int, Meta(ge=1, le=1 << 40)], Annotated[str, Meta(pattern=rf"^{DIGEST}\Z")]]
_DECODER = json.JSONDecoder()


class _Head(Struct):
    key: Key
    seconds: tuple[Positive, ...]


@dataclass(frozen=True, slots=True)
class LiveCatalog:
    """A cache at the start of its prefill."""

    catalog: Catalog
    """Catalog with expected sizes and losses; digests are unknown, but of the right kind."""
    seconds: tuple[Positive, ...]
    """Expected publication time of each group of tokens, in seconds after the producer began, ascending."""
    key: Key

    def __post_init__(self) -> None:
        check(self, "live catalog")
        if self.catalog.passage is not None:
            raise FormatError("live catalog: must not be of a passage, because passages are published when complete")
        if len(self.seconds) != len(self.catalog.chunks):
            raise FormatError(
                f"live catalog: must have a time for each of {len(self.catalog.chunks)} groups, got {len(self.seconds)}"
            )
        if any(later < sooner for sooner, later in pairwise(self.seconds)):
            raise FormatError("live catalog: the times of the groups must ascend")

    def dumps(self) -> str:
        """Return a line of JSON followed by the catalog's JSON."""
        seconds = [round(time_s, 6) for time_s in self.seconds]
        head = {"schema": LIVE_SCHEMA, "key": self.key, "seconds": seconds}
        return f"{json.dumps(head, separators=(',', ':'))}\n{self.catalog.dumps()}"

    @classmethod
    def loads(cls, text: bytes) -> LiveCatalog:
        """Parse an untrusted result of `dumps`; raise `FormatError` if it is invalid."""
        if len(text) > MAX_LIVE_BYTES:
            raise FormatError(f"live catalog: {len(text)} bytes, more than the {MAX_LIVE_BYTES} allowed")
        head, newline, rest = text.partition(b"\n")
        if not newline:
            raise FormatError("live catalog: the second line is missing")
        catalog = Catalog.loads(rest)
        if head.count(b",") > len(catalog.chunks) + _BASE_VALUES:
            raise FormatError(f"live catalog: more times than its {len(catalog.chunks)} groups")
        read_schema(head, "live catalog", LIVE_SCHEMA)
        found = decode(head, _Head, "live catalog")
        return cls(catalog, found.seconds, found.key)


@dataclass(frozen=True, slots=True)
class PublishedFrames:
    """News of a published group of tokens, or of further frames of a group published before."""

    key: Key
    group: Annotated[int, Meta(ge=0)]
    ready_s: Positive
    frames: Mapping[str, _Frame]
    """Size and digest by published track name; tracks may be missing."""
    rest_s: Positive | None = None
    """Expected seconds until the group's remaining tracks follow; None if they will not follow."""

    def dumps(self) -> bytes:
        """Return one line of JSON."""
        value: dict[str, Any] = {"key": self.key, "group": self.group, "ready_s": round(self.ready_s, 6)}
        if self.rest_s is not None:
            value["rest_s"] = round(self.rest_s, 6)
        frames = {name: list(frame) for name, frame in self.frames.items()}
        return json.dumps({**value, "frames": frames}, separators=(",", ":")).encode()


@dataclass(frozen=True, slots=True)
class LiveEnd:
    """News that the production has ended."""

    key: Key
    reason: str = ""

    def dumps(self) -> bytes:
        """Return one line of JSON."""
        reason = self.reason[:500].encode(errors="replace").decode()
        return json.dumps({"key": self.key, "end": reason}, separators=(",", ":")).encode()


EdgeMessage = PublishedFrames | LiveEnd


def news_bytes(tracks: int) -> int:
    """Return the maximum size in bytes of news about a group with ``tracks`` published tracks."""
    return min(MAX_EDGE_BYTES, _NEWS_BYTES + _FRAME_NEWS_BYTES * tracks)


def parse_edge(data: bytes) -> EdgeMessage:
    """Parse an untrusted edge message; raise `FormatError` if it is invalid."""
    messages = parse_edges(data)
    if len(messages) != 1:
        raise FormatError(f"edge message: must be 1 message, got {len(messages)}")
    return messages[0]


def parse_edges(data: bytes) -> list[EdgeMessage]:
    """Parse concatenated edge messages of at most `MAX_EDGE_BYTES` each; errors as for `parse_edge`."""
    if len(data) > MAX_EDGE_BYTES:
        raise FormatError(f"edge message: {len(data)} bytes, more than the {MAX_EDGE_BYTES} allowed")
    found: list[EdgeMessage] = []
    try:
        text, at = data.decode(), 0
        escaped = "\\u" in text
        while at < len(text):
            value, at = _DECODER.raw_decode(text, at)
            if escaped:
                json.dumps(value, ensure_ascii=False).encode()  # raises for half of a surrogate pair, as msgspec does
            found.append(_message(value))
    except (ValueError, RecursionError) as error:
        raise FormatError(f"edge message: not JSON ({error})") from error
    return found


def _message(value: Any) -> EdgeMessage:
    if not isinstance(value, dict) or "end" not in value:
        return convert(value, PublishedFrames, "edge message")
    end = convert({**value, "reason": value["end"]}, LiveEnd, "edge message")
    return replace(end, reason=end.reason[:500])


def check_kind(news: PublishedFrames, kind: str) -> None:
    """Raise `FormatError` if a digest is of another kind than those of the live catalog."""
    if any(kind_of(digest) != kind for _, digest in news.frames.values()):
        raise FormatError(f"edge message: group {news.group} must have digests of the kind {kind}")


def published_catalog(live: LiveCatalog, news: Sequence[PublishedFrames]) -> Catalog | None:
    """Return the ordinary catalog of the published frames; None if it cannot be played.

    It is for the whole prompt or a prefix, has the expected losses, and only the tracks that all groups have. A few
    last groups are dropped if this keeps further tracks. ``news`` has one message per group, from the first group on.
    """
    catalog = live.catalog
    many = min(len(news), len(catalog.chunks))
    begun = next((count for count in range(many) if news[many - 1 - count].rest_s is None), many)
    groups, _ = catalog.playable(many - begun if begun <= many * _MAX_BEGUN_SHARE else many)
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
            if catalog.even:
                loss = losses_with_tail(track.loss, track.tails, groups, 0, spec.group_tokens)
            else:
                loss = tuple(track.loss[alike.get(index, index)] for index in own)
            tracks[track.name] = replace(track, bytes=sizes, digests=digests, loss=loss, measured=None)
    if not tracks:
        return None
    chunks = catalog.chunks[:groups]
    space = TrackNamespace(catalog.namespace.model, chunks[-1])
    made = tuple(tracks.values())
    return replace(catalog, namespace=space, tokens=tokens, chunks=chunks, tracks=made, mixes=(), asked=())


class NewsOrder:
    """Checks that news matches earlier news and the live catalog."""

    def __init__(self, live: LiveCatalog) -> None:
        self._key, self._catalog = live.key, live.catalog
        self._units = None if live.catalog.every_token else units_by_chunk(live.catalog.units, len(live.catalog.chunks))
        self.groups = 0
        self.messages = 0
        self.coming: dict[int, set[str]] = {}
        """Published tracks that will still follow, by group of tokens."""

    def units(self, group: int) -> Sequence[Unit]:
        """Return the units that end with a group of tokens."""
        return (self._catalog.unit(group),) if self._units is None else self._units[group]

    def tracks(self, group: int) -> set[str]:
        """Return the published tracks that have a frame for a group of tokens."""
        parts = self._catalog.spec.parts
        return {parts[unit.part].track_name(track) for unit in self.units(group) for track in self._catalog.by_name}

    def check_key(self, message: EdgeMessage) -> None:
        """Raise `FormatError` if a message is from another production."""
        if message.key != self._key:
            raise FormatError("the message belongs to another prefill of this prompt")

    def take(self, news: PublishedFrames) -> set[str]:
        """Process the next message; return the tracks that now have a frame of its group, or never will.

        Raises:
            FormatError: the message is from another production; its group is out of range, out of order or complete; a
                track does not exist or was already named; a new group has no self-contained track; a frame is too
                large; or a digest is of another kind.
        """
        self.check_key(news)
        for name, (size, _) in news.frames.items():
            self._catalog.spec.check_frame_sizes(f"edge message: track {name[:80]}", [size])
        check_kind(news, self._catalog.digest_kind)
        group, groups = news.group, len(self._catalog.chunks)
        if group >= groups:
            raise FormatError(f"received group {group}, but the live catalog has {groups}")
        if new := group == self.groups:
            self._check_base(news)
            due = self.tracks(group)
        elif group in self.coming:
            due = self.coming[group]
            if not news.frames and news.rest_s is not None:
                raise FormatError(f"edge message: group {group} has no new frame")
        else:
            raise FormatError(f"received group {group}, expected {self.groups}")
        if wrong := news.frames.keys() - due:
            what = "the live catalog lacks" if new else "were listed as complete or left out"
            raise FormatError(f"group {group} has tracks that {what}: {min(wrong)[:80]}")
        self.coming.pop(group, None)
        rest = set[str]() if news.rest_s is None else due - news.frames.keys()
        if rest:
            self.coming[group] = rest
        self.groups += new
        self.messages += 1
        return due - rest

    def _check_base(self, news: PublishedFrames) -> None:
        for unit in self.units(news.group):
            part = self._catalog.spec.parts[unit.part]
            alone = (part.track_name(track.name) for track in self._catalog.tracks if track.refines is None)
            if not any(name in news.frames for name in alone):
                raise FormatError(f"group {news.group} has no track that stands alone")


class GrowingCatalog:
    """The catalog of one play of a live asset, updated group by group."""

    def __init__(self, live: LiveCatalog, wanted: Catalog) -> None:
        """Create a catalog in which no group is published.

        ``wanted`` is the played part of the catalog: `Catalog.prefix`, `Catalog.suffix`, `Catalog.with_tracks`.
        """
        self.key = live.key
        self.order = NewsOrder(live)
        self.seconds = live.seconds[wanted.offset : wanted.offset + len(wanted.chunks)]
        """Expected publication time of each played group of tokens, in seconds after the producer began."""
        self._sizes = {track.name: list(track.bytes) for track in wanted.tracks}
        self._digests = {track.name: [unknown(wanted.digest_kind)] * len(track.digests) for track in wanted.tracks}
        # Only this class modifies these lists, and only for groups that cannot be requested yet.
        tracks = tuple(self._growing(track) for track in wanted.tracks)
        self.catalog = replace(wanted, tracks=tracks)
        """The current catalog. For groups from `edge` on and those in `left_out`, sizes are expected and digests
        unknown.
        """
        self.edge = 0
        """Number of published groups (units)."""
        self.chunks = 0
        """Number of published groups of tokens in the play."""
        self.left_out: set[tuple[int, str]] = set()
        """Published groups (units) that do not have a track, perhaps only for now."""
        self.coming: dict[int, float] = {}
        """Expected seconds until further tracks of a group (unit) follow."""
        self._changed: set[int] = set()
        self._begun: dict[int, range] = {}
        self.known: dict[str, list[str]] = {}
        """Digests of groups by published track name; "" if unknown."""
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
        """True if every played group is published."""
        return self.chunks == len(self.catalog.chunks)

    @property
    def settled(self) -> bool:
        """True if no further news can affect this play."""
        return self.complete and not self.coming

    @property
    def expected_s(self) -> list[float]:
        """Expected publication time of each group (unit), in seconds after the producer began."""
        return [self.seconds[self.catalog.unit(group).chunk] for group in range(self.catalog.groups)]

    def publish(self, news: PublishedFrames) -> list[tuple[int, str]]:
        """Process news; return the (group, track) pairs added to groups (units) that were already published.

        Raises:
            FormatError: as for `NewsOrder.take`; or no played track is self-contained.
        """
        order, catalog = self.order, self.catalog
        new, units = news.group == order.groups, self._begun.get(news.group, range(0))
        order.take(news)
        if new:
            end = self.edge
            while end < catalog.groups and catalog.offset + catalog.unit(end).chunk == news.group:
                end += 1
            units = range(self.edge, end)
        taken: list[tuple[int, str]] = []
        for group in units:
            made = [track for track in catalog.tracks if self._publish(group, track.name, news)]
            if new and all(track.refines is not None for track in made):
                raise FormatError(f"group {news.group} has no track that stands alone")
            taken += [(group, track.name) for track in made]
        if new:
            self.edge, self.chunks = units.stop, max(0, min(order.groups - catalog.offset, len(catalog.chunks)))
        self._begun.pop(news.group, None)
        follow = news.group in order.coming
        self._changed.update(units if follow else self.coming.keys() & units)
        for group in units:
            self.coming.pop(group, None)
        if units and follow:
            self._begun[news.group] = units
            self.coming.update(dict.fromkeys(units, news.rest_s or 0.0))
        return [] if new else taken

    def coming_changed(self) -> dict[int, float | None]:
        """Return the changes of `coming` since the last call; None means that no further tracks will follow."""
        changed, self._changed = self._changed, set()
        return {group: self.coming.get(group) for group in changed}

    def end(self) -> None:
        """Record the end of the production."""
        self._changed.update(self.coming)
        self.coming.clear()

    def _publish(self, group: int, track: str, news: PublishedFrames) -> bool:
        name, number = self.catalog.address(group, track)
        frame = news.frames.get(name)
        if frame is None:
            if not self.known[name][number]:
                self.left_out.add((group, track))
            return False
        self._sizes[track][group], self._digests[track][group] = frame
        self.known[name][number] = frame[1]
        self.left_out.discard((group, track))
        return True
