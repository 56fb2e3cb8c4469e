"""Objects on data streams and in datagrams (draft 18, section 11).

The parser passes payload through without a copy and holds at most one object header, whose size is bounded.
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
"""Properties of one object; a limit of this implementation, as the draft sets none."""
_MAX_HEADER = MAX_PROPERTIES_BYTES + 64
DEFAULT_PRIORITY = 128


class Status(IntEnum):
    """Object status (draft 18, section 11.2.1.1)."""

    NORMAL = 0x0
    END_OF_GROUP = 0x3
    END_OF_TRACK = 0x4


@dataclass(frozen=True, slots=True)
class ObjectHeader:
    """The header of an object; `size` bytes of payload follow."""

    group: int
    subgroup: int | None
    """None for an object that its publisher sent as a datagram."""
    object: int
    priority: int
    size: int
    properties: tuple[KeyValue, ...] = ()
    status: Status = Status.NORMAL


@dataclass(frozen=True, slots=True)
class RangeEnd:
    """The end of a range of objects that a FETCH does not deliver; `location` is the last one."""

    location: Location
    unknown: bool
    """Whether the publisher does not know if they exist; otherwise they do not exist."""


@dataclass(frozen=True, slots=True)
class SubgroupHeader:
    """The header of a subgroup stream, shared by its objects."""

    track_alias: int
    group: int
    subgroup: int | None
    """None if it is the ID of the first object on the stream."""
    priority: int | None
    """None for the priority of the track."""
    properties: bool
    end_of_group: bool
    first_object: bool = False
    """Draft 18: the stream starts with the first object of the subgroup."""


Item = ObjectHeader | RangeEnd | memoryview
"""One element of a stream; a view is a piece of payload of the preceding object."""


class _Short(Exception):  # noqa: N818  # not an error: the rest is still on its way
    """A header is incomplete."""


class _Header:
    """Read a header from bytes that may be incomplete."""

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
            raise SessionFault(f"object with {size} bytes of properties; the limit is {MAX_PROPERTIES_BYTES}")
        if self.at + size > len(self.data):
            raise _Short
        piece = bytes(self.data[self.at : self.at + size])
        self.at += size
        return read_pairs(Reader(piece, self.draft.varint))


class ObjectParser:
    """Parse the objects of one stream, after its header."""

    def __init__(self, draft: Draft, subgroup: SubgroupHeader | None = None, *, descending: bool = False) -> None:
        """Start after the header of a stream.

        Args:
            draft: The draft.
            subgroup: The header of a subgroup stream; None for a FETCH stream.
            descending: Whether the FETCH requested its groups in descending order.
        """
        self._draft, self._subgroup, self._descending = draft, subgroup, descending
        self._buffer = bytearray()
        self._left = 0
        self._group = self._object = 0
        self._any = False
        """Whether an object or the end of a range precedes."""
        self._before: Location | None = None
        """Location of the preceding object."""
        self._prior_subgroup: int | None = None
        self._prior_priority: int | None = None

    def feed(self, data: bytes | memoryview) -> list[Item]:
        """Parse bytes of the stream.

        Returns:
            The elements of the stream; payload as views of `data`, not copies.

        Raises:
            SessionFault: The bytes violate the protocol.
            MalformedTrack: The objects violate the data model; parsing cannot continue.
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
                    raise SessionFault(f"object header of more than {_MAX_HEADER} bytes") from None
                break
            at = at + header.at - kept if kept else header.at
            buffer.clear()
            items.append(item)
            if isinstance(item, ObjectHeader):
                self._left = item.size
        return items

    def finish(self) -> None:
        """Raise SessionFault if the stream ends inside an object."""
        if self._left or self._buffer:
            raise SessionFault("data stream ends inside an object")

    def _read_fetch_object(self, header: _Header) -> Item:
        flags = header.varint()
        if flags in (0x8C, 0x10C):
            location = self._location(header, header.varint(), header.varint())
            self._group, self._object, self._any = location.group, location.object, True
            return RangeEnd(location, unknown=flags == 0x10C)
        if flags >= 0x80:
            raise SessionFault(f"object with invalid serialization flags 0x{flags:x}")
        datagram = bool(flags & 0x40)
        if not self._any and not (flags & 0x04 and flags & 0x08):
            raise SessionFault("first object of a FETCH refers to a preceding one")
        group = header.varint() if flags & 0x08 else None
        subgroup = self._fetch_subgroup(header, flags & 0x03) if not datagram else None
        number = header.varint() if flags & 0x04 else None
        if not flags & 0x10 and self._prior_priority is None:
            raise SessionFault("first object of a FETCH without a priority")
        priority = header.u8() if flags & 0x10 else self._prior_priority
        properties = header.properties() if flags & 0x20 else ()
        size = header.varint()
        location = self._location(header, group, number)
        self._check_order(location)
        check_object(properties, location.group, location.object, self._draft)
        # Update state only when the header is complete; an incomplete one is parsed again from its start.
        self._group, self._object, self._any = location.group, location.object, True
        self._before, self._prior_priority = location, priority
        if not datagram:
            self._prior_subgroup = subgroup
        return ObjectHeader(location.group, subgroup, location.object, priority or 0, size, properties)

    def _check_order(self, location: Location) -> None:
        """Raise unless groups are in the requested order and objects ascend in a group (draft 16, section 2.4.2)."""
        before = self._before
        if before is None:
            return
        if location.group == before.group:
            wrong = location.object <= before.object
        else:
            wrong = (location.group < before.group) != self._descending
        if wrong:
            raise MalformedTrack(f"object {tuple(location)} follows {tuple(before)}")

    def _fetch_subgroup(self, header: _Header, mode: int) -> int:
        if mode == 0:
            return 0
        if mode == 3:
            return header.varint()
        if self._prior_subgroup is None:
            raise SessionFault("object refers to the subgroup of a preceding one, but there is none")
        if self._prior_subgroup + mode - 1 > MAX_INTEGER:
            raise SessionFault("subgroup ID exceeds 64 bits")
        return self._prior_subgroup + mode - 1

    def _location(self, header: _Header, group: int | None, number: int | None) -> Location:
        """Return the location of an object from its header's fields: IDs in draft 16, differences in draft 18."""
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
            raise SessionFault("object location exceeds 64 bits")
        return found

    def _read_subgroup_object(self, header: _Header) -> ObjectHeader:
        common = self._subgroup
        assert common is not None  # noqa: S101  # checked by the caller
        delta = header.varint()
        number = delta if not self._any else self._object + delta + 1
        if number > MAX_INTEGER:
            raise SessionFault("object ID exceeds 64 bits")
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
        raise SessionFault(f"invalid object status {value}")
    if value and properties:
        raise SessionFault("object with a status other than NORMAL has properties")
    return Status(value)


def is_subgroup(kind: int, draft: Draft) -> bool:
    """Return whether a stream type is that of a subgroup."""
    bits = 0x6F if draft.number >= 17 else 0x2F
    return kind & ~bits == 0x10 and kind & 0x06 != 0x06


def read_stream_header(data: bytearray, draft: Draft) -> tuple[int, SubgroupHeader | int | None, int] | None:
    """Parse the header of a unidirectional stream.

    Returns:
        The stream type; the subgroup header, the request ID of a FETCH, or None for other types; and the header's
        length. None while the header is incomplete.
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
    """Parse an object in a datagram.

    Returns:
        Track alias, header, payload, and whether the object ends its group; None for padding (draft 18).

    Raises:
        SessionFault: The datagram is invalid or has an unknown type.
    """
    reader = Reader(data, draft.varint)
    kind = reader.varint()
    if kind == PADDING_DATAGRAM and draft.number >= 17:
        return None
    if kind & ~0x2F or kind & 0x22 == 0x22:
        raise SessionFault(f"unknown datagram type 0x{kind:x}")
    alias, group = reader.varint(), reader.varint()
    number = 0 if kind & 0x04 else reader.varint()
    priority = DEFAULT_PRIORITY if kind & 0x08 else reader.u8()
    properties: tuple[KeyValue, ...] = ()
    if kind & 0x01:
        piece = reader.text(MAX_PROPERTIES_BYTES, "properties")
        if not piece:
            raise SessionFault("datagram announces properties but has none")
        properties = read_pairs(Reader(piece, draft.varint))
    status = Status.NORMAL
    if kind & 0x20:
        status = _status(reader.varint(), properties)
        reader.end()
    payload = reader.rest()
    header = ObjectHeader(group, None, number, priority, len(payload), properties, status)
    return alias, header, payload, bool(kind & 0x02)


class FetchWriter:
    """Encode the object headers of one FETCH."""

    def __init__(self, draft: Draft, *, descending: bool = False) -> None:
        self._draft, self._descending = draft, descending
        self._last: Location | None = None

    def header(
        self, group: int, number: int, size: int, properties: tuple[KeyValue, ...] = (), *, priority: int | None = None
    ) -> bytes:
        """Encode the header of an object; `size` bytes of payload must follow.

        Args:
            group: Group ID.
            number: Object ID; must increase within a group.
            size: Payload size in bytes.
            properties: Object properties.
            priority: Publisher priority; by default that of the preceding object, 128 for the first.
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
        if last is None or priority is not None:
            flags |= 0x10
            parts.append(bytes([DEFAULT_PRIORITY if priority is None else priority]))
        if properties:
            flags |= 0x20
            parts.append(write_text(varint, write_pairs(varint, properties)))
        self._last = Location(group, number)
        return b"".join((varint.encode(flags), *parts, varint.encode(size)))

    def _group_field(self, group: int) -> int:
        """Return the group field: the group ID, or in draft 18 the distance to the preceding group minus one."""
        if self._last is None or self._draft.number < 17:
            return group
        return (self._last.group - group if self._descending else group - self._last.group) - 1
