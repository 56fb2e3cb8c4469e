"""Caches that are published while they are being prefilled: what is known at the start, and the news of each group.

A *live catalog* is a catalog whose sizes and losses are expected, not measured, and whose digests are not known yet,
with the times at which groups should appear. *Edge messages* follow. The first news of each group of tokens, in order,
say how large the frames are that ended with it, and their digests. They may come when only the base is encoded; then
they say so, and further news of the group name the rest. The last message says that the cache is complete, or why its
producer stopped. All of them carry the live catalog's key, so that the news of two productions never mix.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Annotated, Any, cast

from msgspec import Meta, Struct

from kvabr.types.catalog import MAX_CATALOG_BYTES, Catalog, Track
from kvabr.types.digests import DIGEST, kind_of, unknown
from kvabr.types.errors import FormatError
from kvabr.types.naming import TrackNamespace
from kvabr.types.records import Positive, check, convert, decode, read_schema
from kvabr.types.tails import losses_behind
from kvabr.types.units import Unit, prefix_units, units_by_chunk, units_of

LIVE_SCHEMA = "kvabr.live/1"
MAX_EDGE_BYTES = 256 << 10
"""Most bytes of one edge message: there are at most a thousand tracks."""
MAX_LIVE_BYTES = MAX_CATALOG_BYTES
"""Most bytes of a live catalog."""
UNKNOWN = unknown()
"""Stands for a SHA-256 that is not known yet; see `kvabr.types.digests.unknown` for those of another kind."""
_SPARE_VALUES = 64
"""Values of a live catalog's first line besides the times."""
_NEWS_BYTES, _FRAME_NEWS_BYTES = 1 << 10, 256
"""Most bytes of news, and of what they say of one frame."""
_MAX_FRAME = 1 << 40
_MOST_BEGUN = 0.25
"""Share of the published groups that a shorter asset does without because only their base was encoded."""
Key = Annotated[str, Meta(pattern=r"^[0-9a-f]{16}\Z")]
"""16 hex digits, another for each production."""
_Frame = tuple[Annotated[int, Meta(ge=1, le=_MAX_FRAME)], Annotated[str, Meta(pattern=rf"^{DIGEST}\Z")]]
_DECODER = json.JSONDecoder()


class _Head(Struct):
    """First line of a live catalog."""

    key: Key
    seconds: tuple[Positive, ...]


@dataclass(frozen=True, slots=True)
class LiveCatalog:
    """What is known of a cache when its prefill begins."""

    catalog: Catalog
    """Its sizes and losses are expected ones; its digests are unknown, and only say of which kind they will be."""
    seconds: tuple[Positive, ...]
    """For each group of tokens, when it should be published, seconds since the producer began; ascending."""
    key: Key

    def __post_init__(self) -> None:
        check(self, "live catalog")
        if self.catalog.passage is not None:
            raise FormatError("live catalog: a passage is published when it is complete")
        if len(self.seconds) != len(self.catalog.chunks):
            raise FormatError(f"live catalog: {len(self.seconds)} times for {len(self.catalog.chunks)} groups")
        if any(later < sooner for sooner, later in pairwise(self.seconds)):
            raise FormatError("live catalog: the times of the groups must ascend")

    def dumps(self) -> str:
        """Return it as text: a line of JSON, and the catalog's JSON."""
        seconds = [round(time_s, 6) for time_s in self.seconds]
        head = {"schema": LIVE_SCHEMA, "key": self.key, "seconds": seconds}
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
        if head.count(b",") > len(catalog.chunks) + _SPARE_VALUES:
            raise FormatError(f"live catalog: more times than its {len(catalog.chunks)} groups")
        read_schema(head, "live catalog", LIVE_SCHEMA)
        found = decode(head, _Head, "live catalog")
        return cls(catalog, found.seconds, found.key)


@dataclass(frozen=True, slots=True)
class PublishedFrames:
    """News: one more group of tokens is published, or further frames of one that was announced before."""

    key: Key
    group: Annotated[int, Meta(ge=0)]
    """The group of tokens."""
    ready_s: Positive
    """When it was published, seconds since the producer began."""
    frames: Mapping[str, _Frame]
    """Size and digest of its frames, by the name of the published track. Some tracks may be missing."""
    rest_s: Positive | None = None
    """Seconds after which the tracks should follow that no news of the group have named; None: they will not."""

    def dumps(self) -> bytes:
        """Return it as one line of JSON."""
        value: dict[str, Any] = {"key": self.key, "group": self.group, "ready_s": round(self.ready_s, 6)}
        if self.rest_s is not None:
            value["rest_s"] = round(self.rest_s, 6)
        frames = {name: list(frame) for name, frame in self.frames.items()}
        return json.dumps({**value, "frames": frames}, separators=(",", ":")).encode()


@dataclass(frozen=True, slots=True)
class LiveEnd:
    """News: nothing follows."""

    key: Key
    reason: str = ""
    """Why the producer stopped; empty if the cache is complete."""

    def dumps(self) -> bytes:
        """Return it as one line of JSON."""
        return json.dumps({"key": self.key, "end": self.reason[:500]}, separators=(",", ":")).encode()


EdgeMessage = PublishedFrames | LiveEnd


def news_bytes(tracks: int) -> int:
    """Return the most bytes that news of a group with as many published tracks have."""
    return min(MAX_EDGE_BYTES, _NEWS_BYTES + _FRAME_NEWS_BYTES * tracks)


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
        raise FormatError(f"edge message: group {news.group} has digests of another kind than {kind}")


def merged(news: Iterable[PublishedFrames]) -> list[PublishedFrames]:
    """Return news of which each names all that is known of one group, in the order of the groups."""
    found: dict[int, PublishedFrames] = {}
    for message in news:
        before = found.get(message.group)
        frames = message.frames if before is None else {**before.frames, **message.frames}
        found[message.group] = replace(message, frames=frames)
    return [found[group] for group in sorted(found)]


def published_catalog(live: LiveCatalog, news: Sequence[PublishedFrames]) -> Catalog | None:
    """Return the ordinary catalog of what these news have named; None if it cannot be played.

    It is that of the whole prompt, or of a shorter one. Its losses are the expected ones, and it has the tracks that no
    group was left out of. A few groups at the end that were still being encoded are left out, rather than the tracks
    that they lack.

    Args:
        live: the live catalog.
        news: one for each group of tokens, from the first on, see `merged`.
    """
    catalog = live.catalog
    many = min(len(news), len(catalog.chunks))
    begun = next((count for count in range(many) if news[many - 1 - count].rest_s is None), many)
    groups, _ = catalog.playable(many - begun if begun <= many * _MOST_BEGUN else many)
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
            if catalog.even:  # what a group loses depends on its distance from the end
                loss = losses_behind(track.loss, track.tails, groups, 0, spec.group_tokens)
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
    """Checks that the news of one production fit together, and its live catalog: of use to all who take them."""

    def __init__(self, live: LiveCatalog) -> None:
        """Begin without news."""
        self._key, self._catalog = live.key, live.catalog
        self._units = None if live.catalog.every_token else units_by_chunk(live.catalog.units, len(live.catalog.chunks))
        self.groups = 0
        """Groups of tokens of which there were news."""
        self.messages = 0
        self.coming: dict[int, set[str]] = {}
        """By group of tokens, the published tracks that are still to follow."""

    def units(self, group: int) -> Sequence[Unit]:
        """Return the units that end with a group of tokens."""
        return (self._catalog.unit(group),) if self._units is None else self._units[group]

    def tracks(self, group: int) -> set[str]:
        """Return the names of the published tracks that have a frame of a group of tokens."""
        parts = self._catalog.spec.parts
        return {parts[unit.part].track_name(track) for unit in self.units(group) for track in self._catalog.by_name}

    def check_key(self, message: EdgeMessage) -> None:
        """Raise `FormatError` if a message is of another production."""
        if message.key != self._key:
            raise FormatError("a message of another production")

    def take(self, news: PublishedFrames) -> None:
        """Handle the next message.

        Raises:
            FormatError: it is of another production; of another group than the next one, or one with more to come; or
                of one that the catalog does not have. It names a track that does not exist, or that was named before;
                of a new group, none that stands alone; or a digest of another kind.
        """
        self.check_key(news)
        check_kind(news, self._catalog.digest_kind)
        group, groups = news.group, len(self._catalog.chunks)
        if group >= groups:
            raise FormatError(f"group {group} came, the live catalog has {groups}")
        if new := group == self.groups:
            self._check_base(news)
            due = self.tracks(group)
        elif group in self.coming:
            due = self.coming[group]
            if not news.frames and news.rest_s is not None:
                raise FormatError(f"news of group {group} with nothing new")
        else:
            raise FormatError(f"group {group} came, {self.groups} is next")
        if wrong := news.frames.keys() - due:
            what = "the live catalog lacks" if new else "no longer were to come"
            raise FormatError(f"group {group} has tracks that {what}: {min(wrong)[:80]}")
        self.coming.pop(group, None)
        if news.rest_s is not None and (rest := due - news.frames.keys()):
            self.coming[group] = rest
        self.groups += new
        self.messages += 1

    def _check_base(self, news: PublishedFrames) -> None:
        for unit in self.units(news.group):
            part = self._catalog.spec.parts[unit.part]
            alone = (part.track_name(track.name) for track in self._catalog.tracks if track.refines is None)
            if not any(name in news.frames for name in alone):
                raise FormatError(f"group {news.group} has no track that stands alone")


class GrowingCatalog:
    """The catalog of one play of a live asset; its sizes and digests become known group by group."""

    def __init__(self, live: LiveCatalog, wanted: Catalog, most_bytes: int = _MAX_FRAME) -> None:
        """Begin with no group published.

        Args:
            live: what is known of the asset.
            wanted: what is played of its catalog (`Catalog.prefix`, `Catalog.suffix`, `Catalog.with_tracks`).
            most_bytes: the largest frame that is believed.
        """
        self.key, self._most_bytes = live.key, most_bytes
        self.order = NewsOrder(live)
        """The news so far, also of groups that are not played."""
        self.seconds = live.seconds[wanted.offset : wanted.offset + len(wanted.chunks)]
        """When each group of tokens that is played should be published, seconds since the producer began."""
        self._sizes = {track.name: list(track.bytes) for track in wanted.tracks}
        self._digests = {track.name: [unknown(wanted.digest_kind)] * len(track.digests) for track in wanted.tracks}
        # Only this class changes them, and only those that cannot be requested yet.
        tracks = tuple(self._growing(track) for track in wanted.tracks)
        self.catalog = replace(wanted, tracks=tracks)
        """Sizes and digests of groups from `edge` on, and of `left_out`, are expected, and unknown."""
        self.edge = 0
        """Groups (units) that are published: the first ones."""
        self.chunks = 0
        """Groups of tokens that are published, of those that are played."""
        self.left_out: set[tuple[int, str]] = set()
        """Groups (units) and tracks that are published, but not on that track, or not yet."""
        self.coming: dict[int, float] = {}
        """Groups (units) of which further tracks are to follow, and after how many seconds."""
        self._changed: set[int] = set()
        """Groups (units) of which that has changed."""
        self._begun: dict[int, range] = {}
        """By group of tokens, its units, as long as more of them is to follow."""
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
        """Whether every group that is played is published."""
        return self.chunks == len(self.catalog.chunks)

    @property
    def settled(self) -> bool:
        """Whether no news matter any more to this play."""
        return self.complete and not self.coming

    @property
    def expected_s(self) -> list[float]:
        """When each group (unit) should be published, seconds since the producer began."""
        return [self.seconds[self.catalog.unit(group).chunk] for group in range(self.catalog.groups)]

    def publish(self, news: PublishedFrames) -> list[tuple[int, str]]:
        """Handle the next news, and return what they add to groups (units) that were published: these, and the tracks.

        News of groups that are not played change nothing.

        Raises:
            FormatError: as `NewsOrder.take`; or a frame is too large, or no track of those played stands alone.
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
        """Return what has changed of `coming` since this was last asked; None: nothing follows any more."""
        changed, self._changed = self._changed, set()
        return {group: self.coming.get(group) for group in changed}

    def end(self) -> None:
        """Note that nothing follows."""
        self._changed.update(self.coming)
        self.coming.clear()

    def _publish(self, group: int, track: str, news: PublishedFrames) -> bool:
        """Take a frame, and return whether there is one."""
        name, number = self.catalog.address(group, track)
        frame = news.frames.get(name)
        if frame is None:
            if not self.known[name][number]:
                self.left_out.add((group, track))
            return False
        if frame[0] > self._most_bytes:
            raise FormatError(f"edge message: a group of {name} with {frame[0]} bytes, more than a cache can need")
        self._sizes[track][group], self._digests[track][group] = frame
        self.known[name][number] = frame[1]
        self.left_out.discard((group, track))
        return True
