"""Objects on data streams of a FETCH, or of a subgroup of a subscription (draft 18, section 11.4).

The parser returns payload without copying it, and buffers at most one object header of bounded size. Datagrams are not
supported, as groups of a cache are larger. Unknown properties of tracks and objects (sections 2.5 and 12) are ignored.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

from kvabr.moqt.codes import MANDATORY_TRACK_PROPERTIES, Property, RequestCode, SessionFault
from kvabr.moqt.wire import (
    MAX_INTEGER,
    Incomplete,
    KeyValue,
    Location,
    Reader,
    read_pairs,
    write_pairs,
    write_text,
    write_varint,
)  # fmt: skip

FETCH_HEADER = 0x05
SETUP_STREAM = 0x2F00
PADDING_STREAM = 0x132B3E28
MAX_PROPERTIES_BYTES = 0xFFFF
"""Maximum bytes of an object's properties; the draft sets no limit."""
_MAX_HEADER = MAX_PROPERTIES_BYTES + 64
DEFAULT_PRIORITY = 128
FREE_OBJECTS = 1024
MIN_MEAN_BYTES = 64
"""Minimum mean payload bytes of the objects of a request after the first `FREE_OBJECTS`, as a peer could send empty
objects forever. A stream without objects counts as an empty object. This limit is set by kvabr.
"""


class MalformedTrack(Exception):  # noqa: N818  # the track's fault; the session continues
    """A track violates the data model. Cancel requests for this track (draft 18, section 2.4.2)."""


def unfold(properties: tuple[KeyValue, ...]) -> tuple[KeyValue, ...]:
    """Return the properties, including those inside IMMUTABLE_PROPERTIES; raise MalformedTrack if malformed."""
    out = list(properties)
    for kind, value in properties:
        if kind == Property.IMMUTABLE_PROPERTIES and isinstance(value, bytes):
            try:
                inner = read_pairs(Reader(value))
            except SessionFault as fault:
                raise MalformedTrack(f"cannot parse the immutable properties: {fault}") from fault
            if any(each == Property.IMMUTABLE_PROPERTIES for each, _ in inner):
                raise MalformedTrack("nested immutable properties")
            out += inner
    return tuple(out)


def check_track(properties: tuple[KeyValue, ...]) -> None:
    """Raise SessionFault for track properties that require closing the session."""
    try:
        every = unfold(properties)
    except MalformedTrack:
        every = properties  # `unusable` refuses the track later; the session continues
    for kind, value in every:
        wrong = isinstance(value, int) and (
            (kind == Property.DEFAULT_PUBLISHER_PRIORITY and value > 0xFF)
            or (kind == Property.DEFAULT_PUBLISHER_GROUP_ORDER and value not in (1, 2))
            or (kind == Property.DYNAMIC_GROUPS and value > 1)
        )
        if wrong:
            raise SessionFault(f"track property {Property(kind).name} has the invalid value {value!r}")


def unusable(properties: tuple[KeyValue, ...]) -> tuple[RequestCode, str] | None:
    """Return an error code and a reason if a track must not be used, e.g. for unknown mandatory properties.

    See draft 18, section 2.5.1.
    """
    try:
        every = unfold(properties)
    except MalformedTrack as error:
        return RequestCode.MALFORMED_TRACK, f"malformed track: {error}"
    for kind, _ in every:
        if kind in MANDATORY_TRACK_PROPERTIES:
            return RequestCode.UNSUPPORTED_EXTENSION, f"the track has the unknown mandatory property 0x{kind:x}"
    return None


def check_object(properties: tuple[KeyValue, ...], group: int, number: int) -> None:
    """Raise MalformedTrack for invalid object properties."""
    if not properties:
        return
    if sum(kind == Property.IMMUTABLE_PROPERTIES for kind, _ in properties) > 1:
        raise MalformedTrack("object with two IMMUTABLE_PROPERTIES")
    seen: set[int] = set()
    for kind, value in unfold(properties):
        if kind in MANDATORY_TRACK_PROPERTIES:
            raise MalformedTrack(f"object with property 0x{kind:x}, which only tracks may have")
        if kind in (Property.PRIOR_GROUP_ID_GAP, Property.PRIOR_OBJECT_ID_GAP):
            largest = group if kind == Property.PRIOR_GROUP_ID_GAP else number
            if kind in seen or not isinstance(value, int) or value > largest:
                raise MalformedTrack(f"object with a repeated or impossible {Property(kind).name}")
            seen.add(kind)


class Status(IntEnum):
    """Object status (draft 18, section 11.2.1.1)."""

    NORMAL = 0x0
    END_OF_GROUP = 0x3
    END_OF_TRACK = 0x4


@dataclass(frozen=True, slots=True)
class ObjectHeader:
    """Header of an object; `size` bytes of payload follow."""

    group: int
    subgroup: int | None
    """Subgroup ID; None for a datagram."""
    object: int
    priority: int
    size: int
    properties: tuple[KeyValue, ...] = ()
    status: Status = Status.NORMAL
    """Status of the object; always normal in a FETCH."""


@dataclass(frozen=True, slots=True)
class SubgroupHeader:
    """Header of a subgroup's stream."""

    track_alias: int
    group: int
    subgroup: int | None
    """Subgroup ID; None: the ID of the first object."""
    priority: int | None
    """Priority; None: that of the track."""
    properties: bool
    """True if objects may have properties."""
    end_of_group: bool
    """True if the group ends with this stream."""
    first_object: bool = False
    """True if the stream starts with the subgroup's first object."""


@dataclass(frozen=True, slots=True)
class RangeEnd:
    """End of a range that a FETCH does not deliver; `location` is the last location of the range."""

    location: Location
    unknown: bool
    """True if it is unknown whether the objects exist, False if they do not exist."""


Item = ObjectHeader | RangeEnd | memoryview
"""An element of a stream. A view is payload of the preceding object."""


class ObjectBudget:
    """Limits the number of objects of a request, see `MIN_MEAN_BYTES`."""

    def __init__(self) -> None:
        self._left = FREE_OBJECTS * MIN_MEAN_BYTES

    def earn(self, size: int) -> None:
        """Record bytes of payload."""
        self._left += size

    def spend(self) -> None:
        """Record an object; raise MalformedTrack if there are too many objects for their bytes."""
        self._left -= MIN_MEAN_BYTES
        if self._left < 0:
            mean = f"less than {MIN_MEAN_BYTES} bytes on average"
            raise MalformedTrack(f"more than {FREE_OBJECTS} objects of {mean}")


class ObjectParser:
    """Parses the objects of one stream, after its header."""

    def __init__(
        self,
        subgroup: SubgroupHeader | None = None,
        *,
        descending: bool = False,
        budget: ObjectBudget | None = None,
        priority: int = DEFAULT_PRIORITY,
    ) -> None:
        """Create a parser for a FETCH, or for a ``subgroup``.

        ``descending`` is True if the FETCH requested descending groups. The streams of one request share a ``budget``.
        ``priority`` is that of the track, for subgroups without a priority.
        """
        self._of, self._descending = subgroup, descending
        self._budget = budget or ObjectBudget()
        self._track_priority = priority
        self._buffer = bytearray()
        self._left = 0
        self.follower = b""
        """Expected header of the next object; empty if it cannot be predicted."""
        self.size = 0
        self._last: Location | None = None
        self._before: Location | None = None
        self._prior_subgroup: int | None = None
        self._prior_priority: int | None = None

    @property
    def buffered(self) -> int:
        """Number of buffered bytes of an incomplete header."""
        return len(self._buffer)

    @property
    def left(self) -> int:
        """Number of bytes left of the current object's payload."""
        return self._left

    def took(self, parts: Sequence[memoryview]) -> tuple[int, Sequence[memoryview]]:
        """Record data that the owner read: at most ``left`` bytes, `follower`, at most ``size`` bytes, and so on.

        Return the number of payload bytes, and the remaining parts, which must be passed to `feed`.
        """
        payload = 0
        for index, part in enumerate(parts):
            if index % 2 == 0:
                self._left -= len(part)
                self._budget.earn(len(part))
                payload += len(part)
            elif part == self.follower and self._last is not None:
                self._budget.spend()  # cannot fail: the preceding object has contributed as many bytes
                self._last = self._before = Location(self._last.group, self._last.object + 1)
                self._left = self.size
            else:
                return payload, parts[index:]
        return payload, ()

    def feed(self, data: bytes | memoryview) -> list[Item]:
        """Parse bytes of the stream; return the elements, with payload as views of `data`.

        Raises:
            SessionFault: the bytes violate the protocol.
            MalformedTrack: the objects violate the data model; parsing cannot continue.
        """
        view, at, items = memoryview(data), 0, list[Item]()
        buffer = self._buffer
        while at < len(view):
            if self._left:
                piece = view[at : at + self._left]
                self._left -= len(piece)
                self._budget.earn(len(piece))
                at += len(piece)
                items.append(piece)
                continue
            kept = len(buffer)
            if kept:
                buffer += view[at : at + _MAX_HEADER]
            header = Reader(buffer if kept else view, at=0 if kept else at, partial=True)
            try:
                item = self._read_object(header) if self._of is None else self._read_of(self._of, header)
            except Incomplete:
                if not kept:
                    buffer += view[at:]
                if len(buffer) > _MAX_HEADER:
                    raise SessionFault(f"object header of more than {_MAX_HEADER} bytes") from None
                break
            self._budget.spend()
            read = bytes(buffer[: header.at] if kept else view[at : header.at])
            at = at + header.at - kept if kept else header.at
            buffer.clear()
            items.append(item)
            if isinstance(item, ObjectHeader):
                self._left = self.size = item.size
                self.follower = read if self._of is None and _repeats(item, read[0]) else b""
        return items

    def finish(self) -> None:
        """Raise SessionFault if the stream ends inside an object, MalformedTrack for too many empty streams."""
        if self._left or self._buffer:
            raise SessionFault("data stream ends inside an object")
        if self._last is None:
            self._budget.spend()

    def _read_of(self, common: SubgroupHeader, header: Reader) -> ObjectHeader:
        """Parse an object header of a subgroup (draft 18, section 11.4.2)."""
        step = header.varint()
        number = step if self._last is None else self._last.object + step + 1
        if number > MAX_INTEGER:
            raise SessionFault("object ID exceeds 64 bits")
        properties = self._properties(header) if common.properties else ()
        size = header.varint()
        status = _status(header.varint(), properties) if size == 0 else Status.NORMAL
        check_object(properties, common.group, number)
        if self._last is None:  # as below: change state only when the header is complete
            self._prior_subgroup = number if common.subgroup is None else common.subgroup
        self._last = Location(common.group, number)
        priority = self._track_priority if common.priority is None else common.priority
        return ObjectHeader(common.group, self._prior_subgroup, number, priority, size, properties, status)

    def _read_object(self, header: Reader) -> Item:
        flags = header.varint()
        if flags in (0x8C, 0x10C, 0x20C):
            self._last = self._location(header.varint(), header.varint())
            return RangeEnd(self._last, unknown=flags != 0x8C)
        if flags >= 0x80:
            raise SessionFault(f"object with invalid serialization flags 0x{flags:x}")
        if self._last is None and not (flags & 0x04 and flags & 0x08):
            raise SessionFault("first object of a FETCH refers to a preceding one")
        group = header.varint() if flags & 0x08 else None
        subgroup = None if flags & 0x40 else self._subgroup(header, flags & 0x03)
        number = header.varint() if flags & 0x04 else None
        priority = header.u8() if flags & 0x10 else self._prior_priority
        if priority is None:
            raise SessionFault("first object of a FETCH has no priority")
        properties = self._properties(header) if flags & 0x20 else ()
        size = header.varint()
        location = self._location(group, number)
        self._check_order(location)
        check_object(properties, location.group, location.object)
        # Change state only after a complete header, since an incomplete header is parsed again.
        self._last = self._before = location
        self._prior_priority = priority
        if subgroup is not None:
            self._prior_subgroup = subgroup
        return ObjectHeader(location.group, subgroup, location.object, priority, size, properties)

    def _check_order(self, location: Location) -> None:
        """Raise unless groups are in the requested order and object IDs ascend (draft 16, section 2.4.2)."""
        before = self._before
        if before is None:
            return
        if location.group == before.group:
            wrong = location.object <= before.object
        else:
            wrong = (location.group < before.group) != self._descending
        if wrong:
            raise MalformedTrack(f"object {tuple(location)} follows {tuple(before)}")

    def _subgroup(self, header: Reader, mode: int) -> int:
        if mode == 0:
            return 0
        if mode == 3:
            return header.varint()
        if self._prior_subgroup is None:
            raise SessionFault("object refers to the subgroup of a preceding one, but there is none")
        if self._prior_subgroup + mode - 1 > MAX_INTEGER:
            raise SessionFault("subgroup ID exceeds 64 bits")
        return self._prior_subgroup + mode - 1

    def _properties(self, header: Reader) -> tuple[KeyValue, ...]:
        return read_pairs(Reader(header.text(MAX_PROPERTIES_BYTES, "object properties")))

    def _location(self, group: int | None, number: int | None) -> Location:
        last = self._last
        if last is None:
            found = Location(group or 0, number or 0)
        elif group is None:
            found = Location(last.group, last.object + (1 if number is None else number))
        else:
            step = -(group + 1) if self._descending else group + 1
            found = Location(last.group + step, last.object + 1 if number is None else number)
        if not (0 <= found.group <= MAX_INTEGER and found.object <= MAX_INTEGER):
            raise SessionFault("object location exceeds 64 bits")
        return found


def _repeats(header: ObjectHeader, flags: int) -> bool:
    """Return True if the same header may repeat: it has no properties and no explicit location.

    ``flags`` is the first byte; its highest bit indicates extended flags.
    """
    return not flags & 0xAC and flags & 0x03 != 0x02 and header.size >= MIN_MEAN_BYTES and header.object < 1 << 63


def _status(value: int, properties: tuple[KeyValue, ...]) -> Status:
    """Return the status of an object that has no payload (draft 18, section 11.2.1)."""
    if value not in tuple(Status):
        raise SessionFault(f"invalid object status {value}")
    if value and properties:
        raise SessionFault("object with a status other than NORMAL has properties")
    return Status(value)


def is_subgroup(kind: int) -> bool:
    """Return True for a subgroup's stream type."""
    return kind & ~0x6F == 0x10 and kind & 0x06 != 0x06


def read_stream_header(data: bytes) -> tuple[int, SubgroupHeader | int | None, int] | None:
    """Parse the header of a unidirectional stream; return None while it is incomplete.

    The result has the stream type, a subgroup's header or a FETCH's request ID (None for other types), and the header's
    length.
    """
    header = Reader(data, partial=True)
    try:
        kind = header.varint()
        if kind == FETCH_HEADER:
            return kind, header.varint(), header.at
        if not is_subgroup(kind):
            return kind, None, header.at
        alias, group, mode = header.varint(), header.varint(), kind >> 1 & 0x03
        subgroup = 0 if mode == 0 else None if mode == 1 else header.varint()
        priority = None if kind & 0x20 else header.u8()
    except Incomplete:
        return None
    flags = bool(kind & 0x01), bool(kind & 0x08), bool(kind & 0x40)
    return kind, SubgroupHeader(alias, group, subgroup, priority, *flags), header.at


class FetchWriter:
    """Encodes the object headers of one FETCH."""

    def __init__(self, *, descending: bool = False) -> None:
        self._descending = descending
        self._last: Location | None = None

    def header(
        self, group: int, number: int, size: int, properties: tuple[KeyValue, ...] = (), *, priority: int | None = None
    ) -> bytes:
        """Encode an object header; IDs must increase in a group, and `size` bytes of payload must follow.

        The default priority is that of the preceding object, and 128 for the first object.
        """
        last = self._last
        flags, parts = 0, []
        if last is None or last.group != group:
            flags |= 0x08 | 0x04
            parts += [write_varint(self._group_field(group)), write_varint(number)]
        elif number != last.object + 1:
            flags |= 0x04
            parts.append(write_varint(number - last.object))
        if last is None or priority is not None:
            flags |= 0x10
            parts.append(bytes([DEFAULT_PRIORITY if priority is None else priority]))
        if properties:
            flags |= 0x20
            parts.append(write_text(write_pairs(properties)))
        self._last = Location(group, number)
        return b"".join((write_varint(flags), *parts, write_varint(size)))

    def _group_field(self, group: int) -> int:
        if self._last is None:
            return group
        return (self._last.group - group if self._descending else group - self._last.group) - 1


class SubgroupWriter:
    """Encodes the headers of a subgroup's stream and objects."""

    def __init__(self, header: SubgroupHeader) -> None:
        self._header = header
        self._last: int | None = None

    def begin(self) -> bytes:
        """Encode the header of the stream."""
        header = self._header
        kind = 0x10 | header.properties | header.end_of_group << 3 | (header.priority is None) << 5
        if header.first_object:
            kind |= 0x40
        out = write_varint(header.track_alias) + write_varint(header.group)
        if header.subgroup is None:
            kind |= 0x02
        elif header.subgroup:
            kind |= 0x04
            out += write_varint(header.subgroup)
        if header.priority is not None:
            out += bytes([header.priority])
        return write_varint(kind) + out

    def header(
        self, number: int, size: int, properties: tuple[KeyValue, ...] = (), status: Status = Status.NORMAL
    ) -> bytes:
        """Encode an object header; IDs must increase, and `size` bytes of payload must follow."""
        last = self._last
        out = write_varint(number if last is None else number - last - 1)
        self._last = number
        if self._header.properties:
            out += write_text(write_pairs(properties))
        elif properties:
            raise ValueError("this subgroup's header excludes object properties")
        out += write_varint(size)
        return out if size else out + write_varint(status)
