"""Data streams and datagrams: how objects travel (draft 18, section 11).

The parser passes payloads through as they come and keeps no more than one object's header, whose size is bounded.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

from kvabr.moqt.codes import SessionFault
from kvabr.moqt.properties import MalformedTrack, check_object
from kvabr.moqt.wire import MAX_INTEGER, Draft, KeyValue, Location, Reader, read_pairs, write_pairs, write_text

FETCH_HEADER = 0x05
PADDING_STREAM = 0x132B3E28
PADDING_DATAGRAM = 0x132B3E29
MAX_PROPERTIES_BYTES = 0xFFFF
"""The draft sets no limit; this one is far beyond what any property needs."""
_MAX_HEADER = MAX_PROPERTIES_BYTES + 64
DEFAULT_PRIORITY = 128


class Status(IntEnum):
    """What an object on a subscription's stream says (draft 18, section 11.2.1.1)."""

    NORMAL = 0x0
    END_OF_GROUP = 0x3
    END_OF_TRACK = 0x4


@dataclass(frozen=True, slots=True)
class ObjectHeader:
    """The beginning of an object; its payload of ``size`` bytes follows."""

    group: int
    subgroup: int | None
    """None for one that its publisher sent as a datagram."""
    object: int
    priority: int
    size: int
    properties: tuple[KeyValue, ...] = ()
    status: Status = Status.NORMAL


@dataclass(frozen=True, slots=True)
class RangeEnd:
    """Objects up to a location, inclusive, that a FETCH will not bring."""

    location: Location
    unknown: bool
    """Whether nobody knows if they exist; otherwise they do not."""


@dataclass(frozen=True, slots=True)
class SubgroupHeader:
    """What all objects of a subgroup's stream have in common."""

    track_alias: int
    group: int
    subgroup: int | None
    """None: the ID of the stream's first object."""
    priority: int | None
    """None: the track's."""
    properties: bool
    end_of_group: bool
    first_object: bool = False
    """Draft 18: the stream starts with the first object of the subgroup."""


Item = ObjectHeader | RangeEnd | memoryview
"""What a stream is made of. A view is a piece of the payload of the object before it."""


class _Short(Exception):  # noqa: N818  # no error: the rest is still to come
    """Not all of a header has come."""


class _Header:
    """Reads a header from bytes of which more may come."""

    def __init__(self, data: bytearray | memoryview, at: int, draft: Draft) -> None:
        self.data, self.at, self.draft = data, at, draft

    def varint(self) -> int:
        found = self.draft.varint.peek(self.data, self.at)
        if found is None:
            raise _Short
        self.at = found[1]
        return found[0]

    def u8(self) -> int:
        if self.at >= len(self.data):
            raise _Short
        self.at += 1
        return self.data[self.at - 1]

    def properties(self) -> tuple[KeyValue, ...]:
        size = self.varint()
        if size > MAX_PROPERTIES_BYTES:
            raise SessionFault(f"an object with {size} bytes of properties")
        if self.at + size > len(self.data):
            raise _Short
        piece = bytes(self.data[self.at : self.at + size])
        self.at += size
        return read_pairs(Reader(piece, self.draft.varint))


class ObjectParser:
    """Reads the objects of one stream, behind its header."""

    def __init__(self, draft: Draft, subgroup: SubgroupHeader | None = None, *, descending: bool = False) -> None:
        """Begin behind a stream's header.

        Args:
            draft: the draft.
            subgroup: the header of a subgroup's stream; None for a FETCH's.
            descending: whether the FETCH asked for its groups in descending order.
        """
        self._draft, self._subgroup, self._descending = draft, subgroup, descending
        self._buffer = bytearray()
        self._left = 0
        self._group = self._object = 0
        self._any = False
        """Whether an object or the end of a range came before."""
        self._before: Location | None = None
        """The object before."""
        self._prior_subgroup: int | None = None
        self._prior_priority: int | None = None

    def feed(self, data: bytes | memoryview) -> list[Item]:
        """Parse bytes of the stream.

        Returns:
            What they hold; payload as views of ``data``, not copies.

        Raises:
            SessionFault: they are no objects.
            MalformedTrack: they are none that a track can have; nothing more can be read.
        """
        view, at, items = memoryview(data), 0, list[Item]()
        buffer = self._buffer
        while at < len(view):
            if self._left:
                piece = view[at : at + self._left]
                self._left -= len(piece)
                at += len(piece)
                items.append(piece)
                continue
            kept = len(buffer)
            if kept:
                buffer += view[at : at + _MAX_HEADER]
            header = _Header(buffer if kept else view, 0 if kept else at, self._draft)
            try:
                item = self._read_subgroup_object(header) if self._subgroup else self._read_fetch_object(header)
            except _Short:
                if not kept:
                    buffer += view[at:]
                if len(buffer) > _MAX_HEADER:
                    raise SessionFault("an object's header that does not end") from None
                break
            at = at + header.at - kept if kept else header.at
            buffer.clear()
            items.append(item)
            if isinstance(item, ObjectHeader):
                self._left = item.size
        return items

    def finish(self) -> None:
        """The stream has ended.

        Raises:
            SessionFault: in the middle of an object.
        """
        if self._left or self._buffer:
            raise SessionFault("a data stream ends within an object")

    def _read_fetch_object(self, header: _Header) -> Item:
        flags = header.varint()
        if flags in (0x8C, 0x10C):
            location = self._location(header, header.varint(), header.varint())
            self._group, self._object, self._any = location.group, location.object, True
            return RangeEnd(location, unknown=flags == 0x10C)
        if flags >= 0x80:
            raise SessionFault(f"an object with serialization flags 0x{flags:x}")
        datagram = bool(flags & 0x40)
        if not self._any and not (flags & 0x04 and flags & 0x08):
            raise SessionFault("the first object of a FETCH refers to one before it")
        group = header.varint() if flags & 0x08 else None
        subgroup = self._fetch_subgroup(header, flags & 0x03) if not datagram else None
        number = header.varint() if flags & 0x04 else None
        if not flags & 0x10 and self._prior_priority is None:
            raise SessionFault("the first object of a FETCH has no priority")
        priority = header.u8() if flags & 0x10 else self._prior_priority
        properties = header.properties() if flags & 0x20 else ()
        size = header.varint()
        location = self._location(header, group, number)
        self._check_order(location)
        check_object(properties, location.group, location.object, self._draft)
        # Nothing is kept before all of the header has come: it may be read again from its start.
        self._group, self._object, self._any = location.group, location.object, True
        self._before, self._prior_priority = location, priority
        if not datagram:
            self._prior_subgroup = subgroup
        return ObjectHeader(location.group, subgroup, location.object, priority or 0, size, properties)

    def _check_order(self, location: Location) -> None:
        """Groups come in the order that was asked for, and objects of a group in theirs (draft 16, section 2.4.2)."""
        before = self._before
        if before is None:
            return
        if location.group == before.group:
            wrong = location.object <= before.object
        else:
            wrong = (location.group < before.group) != self._descending
        if wrong:
            raise MalformedTrack(f"object {tuple(location)} comes after {tuple(before)}")

    def _fetch_subgroup(self, header: _Header, mode: int) -> int:
        if mode == 0:
            return 0
        if mode == 3:
            return header.varint()
        if self._prior_subgroup is None:
            raise SessionFault("an object refers to the subgroup of one before it, and there is none")
        if self._prior_subgroup + mode - 1 > MAX_INTEGER:
            raise SessionFault("an object whose subgroup is beyond 64 bits")
        return self._prior_subgroup + mode - 1

    def _location(self, header: _Header, group: int | None, number: int | None) -> Location:
        """Where an object is, from the fields that its header has; draft 16 writes IDs, draft 18 differences."""
        if header.draft.number < 17:
            found = Location(self._group if group is None else group, self._object + 1 if number is None else number)
        elif not self._any:
            found = Location(group or 0, number or 0)
        elif group is None:
            found = Location(self._group, self._object + (1 if number is None else number))
        else:
            step = -(group + 1) if self._descending else group + 1
            found = Location(self._group + step, self._object + 1 if number is None else number)
        if not (0 <= found.group <= MAX_INTEGER and found.object <= MAX_INTEGER):
            raise SessionFault("an object whose location is beyond 64 bits")
        return found

    def _read_subgroup_object(self, header: _Header) -> ObjectHeader:
        common = self._subgroup
        assert common is not None  # noqa: S101  # the caller looked
        delta = header.varint()
        number = delta if not self._any else self._object + delta + 1
        if number > MAX_INTEGER:
            raise SessionFault("an object whose ID is beyond 64 bits")
        properties = header.properties() if common.properties else ()
        size = header.varint()
        status = _status(header.varint(), properties) if size == 0 else Status.NORMAL
        check_object(properties, common.group, number, self._draft)
        if not self._any:
            self._prior_subgroup = number if common.subgroup is None else common.subgroup
        self._object, self._any = number, True
        priority = DEFAULT_PRIORITY if common.priority is None else common.priority
        return ObjectHeader(common.group, self._prior_subgroup, number, priority, size, properties, status)


def _status(value: int, properties: tuple[KeyValue, ...]) -> Status:
    if value not in (0, 3, 4):
        raise SessionFault(f"an object of status {value}")
    if value and properties:
        raise SessionFault("an object that is only a status has properties")
    return Status(value)


def is_subgroup(kind: int, draft: Draft) -> bool:
    """Whether a stream's type is that of a subgroup."""
    bits = 0x6F if draft.number >= 17 else 0x2F
    return kind & ~bits == 0x10 and kind & 0x06 != 0x06


def read_stream_header(data: bytearray, draft: Draft) -> tuple[int, SubgroupHeader | int | None, int] | None:
    """The header of a unidirectional stream, if all of it has come.

    Returns:
        Its type; a subgroup's header, or the request ID of a FETCH, or None for other types; and its length.

    Raises:
        SessionFault: a type that the draft does not have.
    """
    header = _Header(data, 0, draft)
    try:
        kind = header.varint()
        if kind == FETCH_HEADER:
            return kind, header.varint(), header.at
        if not is_subgroup(kind, draft):
            return kind, None, header.at
        alias, group = header.varint(), header.varint()
        mode = kind >> 1 & 0x03
        subgroup = 0 if mode == 0 else None if mode == 1 else header.varint()
        priority = None if kind & 0x20 else header.u8()
    except _Short:
        return None
    found = SubgroupHeader(alias, group, subgroup, priority, bool(kind & 1), bool(kind & 8), bool(kind & 0x40))
    return kind, found, header.at


def read_datagram(data: bytes, draft: Draft) -> tuple[int, ObjectHeader, bytes, bool] | None:
    """An object that came as a datagram; None for padding, which draft 16 does not know.

    Returns:
        Track alias, header, payload, and whether its group ends with it.

    Raises:
        SessionFault: it is none, or of an unknown type.
    """
    reader = Reader(data, draft.varint)
    kind = reader.varint()
    if kind == PADDING_DATAGRAM and draft.number >= 17:
        return None
    if kind & ~0x2F or kind & 0x22 == 0x22:
        raise SessionFault(f"a datagram of type 0x{kind:x}")
    alias, group = reader.varint(), reader.varint()
    number = 0 if kind & 0x04 else reader.varint()
    priority = DEFAULT_PRIORITY if kind & 0x08 else reader.u8()
    properties: tuple[KeyValue, ...] = ()
    if kind & 0x01:
        piece = reader.text(MAX_PROPERTIES_BYTES, "properties")
        if not piece:
            raise SessionFault("a datagram that announces properties and has none")
        properties = read_pairs(Reader(piece, draft.varint))
    status = Status.NORMAL
    if kind & 0x20:
        status = _status(reader.varint(), properties)
        reader.end()
    payload = reader.rest()
    header = ObjectHeader(group, None, number, priority, len(payload), properties, status)
    return alias, header, payload, bool(kind & 0x02)


class FetchWriter:
    """Writes the objects of one FETCH."""

    def __init__(self, draft: Draft, *, descending: bool = False) -> None:
        self._draft, self._descending = draft, descending
        self._last: Location | None = None
        self._any = False
        """Whether an object was written; the end of a range has no priority to go on with."""

    def header(
        self, group: int, number: int, size: int, properties: tuple[KeyValue, ...] = (), *, priority: int | None = None
    ) -> bytes:
        """The header of an object; its payload of ``size`` bytes must follow.

        Args:
            group: its group.
            number: its ID; larger than that of the object before, if the group is the same.
            size: bytes of its payload.
            properties: its properties.
            priority: the publisher's; by default that of the object before, 128 for the first.
        """
        varint, last = self._draft.varint, self._last
        wide = self._draft.number >= 17
        flags, parts = 0, []
        if last is None or last.group != group:
            flags |= 0x08 | 0x04
            parts += [varint.encode(self._group_field(group)), varint.encode(number)]
        elif number != last.object + 1:
            flags |= 0x04
            parts.append(varint.encode(number - last.object if wide else number))
        if not self._any or priority is not None:
            flags |= 0x10
            parts.append(bytes([DEFAULT_PRIORITY if priority is None else priority]))
        if properties:
            flags |= 0x20
            parts.append(write_text(varint, write_pairs(varint, properties)))
        self._last, self._any = Location(group, number), True
        return b"".join((varint.encode(flags), *parts, varint.encode(size)))

    def range_end(self, location: Location, *, unknown: bool) -> bytes:
        """The end of a range of objects that will not come; ``location`` lies behind the object before."""
        varint, last = self._draft.varint, self._last
        group, number = location
        if self._draft.number >= 17 and last is not None and group == last.group:
            # A group's delta cannot be zero, and a range's end always has one: only draft 16 can write this.
            raise ValueError("the end of a range must lie in a later group than the object before it")
        field = self._group_field(group)
        self._last = location
        return varint.encode(0x10C if unknown else 0x8C) + varint.encode(field) + varint.encode(number)

    def _group_field(self, group: int) -> int:
        """What stands for a group's ID: draft 18 writes the distance to the group before, less one."""
        if self._last is None or self._draft.number < 17:
            return group
        return (self._last.group - group if self._descending else group - self._last.group) - 1


def write_subgroup_header(header: SubgroupHeader, draft: Draft) -> bytes:
    """The header of a subgroup's stream."""
    varint = draft.varint
    kind = 0x10 | header.properties | header.end_of_group << 3 | (header.priority is None) << 5
    if header.first_object and draft.number >= 17:
        kind |= 0x40
    out = varint.encode(header.track_alias) + varint.encode(header.group)
    if header.subgroup is None:
        kind |= 0x02
    elif header.subgroup:
        kind |= 0x04
        out += varint.encode(header.subgroup)
    if header.priority is not None:
        out += bytes([header.priority])
    return varint.encode(kind) + out


def write_subgroup_object(
    draft: Draft,
    header: SubgroupHeader,
    number: int,
    before: int | None,
    size: int,
    properties: tuple[KeyValue, ...] = (),
    status: Status = Status.NORMAL,
) -> bytes:
    """The header of an object on a subgroup's stream.

    Args:
        draft: the draft.
        header: the stream's header.
        number: the object's ID.
        before: the ID of the object before, None for the first.
        size: bytes of its payload.
        properties: only where the stream's header says that there are some.
        status: other than normal only without payload.
    """
    varint = draft.varint
    out = varint.encode(number if before is None else number - before - 1)
    if header.properties:
        out += write_text(varint, write_pairs(varint, properties))
    out += varint.encode(size)
    return out if size else out + varint.encode(status)


def write_datagram(
    draft: Draft, alias: int, header: ObjectHeader, payload: bytes, *, end_of_group: bool = False
) -> bytes:
    """An object as a datagram."""
    varint = draft.varint
    only_status = header.status != Status.NORMAL
    kind = bool(header.properties) | end_of_group << 1 | (header.object == 0) << 2 | only_status << 5
    out = varint.encode(kind) + varint.encode(alias) + varint.encode(header.group)
    if header.object:
        out += varint.encode(header.object)
    out += bytes([header.priority])
    if header.properties:
        out += write_text(varint, write_pairs(varint, header.properties))
    return out + (varint.encode(header.status) if only_status else payload)
