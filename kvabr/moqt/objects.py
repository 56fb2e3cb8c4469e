"""Objects on data streams, of a FETCH or a subgroup of a subscription (draft 18, section 11.4).

The parser passes payload through without a copy and buffers at most one object header of bounded size. Datagrams are
not supported, as groups of a cache exceed them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

from kvabr.moqt.codes import SessionFault
from kvabr.moqt.parameters import MalformedTrack, check_object
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
"""Limit for one object; the draft sets none."""
_MAX_HEADER = MAX_PROPERTIES_BYTES + 64
DEFAULT_PRIORITY = 128
FREE_OBJECTS = 1024
MIN_MEAN_BYTES = 64
"""After `FREE_OBJECTS` of one request, objects must average this many bytes of payload: a peer could send empty ones
forever. A stream without objects counts as an empty one. A limit of this implementation."""


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
    """None for a datagram."""
    object: int
    priority: int
    size: int
    properties: tuple[KeyValue, ...] = ()
    status: Status = Status.NORMAL
    """Always normal in a FETCH."""


@dataclass(frozen=True, slots=True)
class SubgroupHeader:
    """Header of a subgroup's stream."""

    track_alias: int
    group: int
    subgroup: int | None
    """None for the first object's ID."""
    priority: int | None
    """None for the track's priority."""
    properties: bool
    """Objects may have properties."""
    end_of_group: bool
    """The group ends with the stream."""
    first_object: bool = False
    """The stream begins with the subgroup's first object."""


@dataclass(frozen=True, slots=True)
class RangeEnd:
    """End of a range that a FETCH does not deliver; `location` is the last one."""

    location: Location
    unknown: bool
    """Existence is unknown; else the objects do not exist."""


Item = ObjectHeader | RangeEnd | memoryview
"""One element of a stream; a view is payload of the preceding object."""


class ObjectBudget:
    """Limits the objects of a request, see `MIN_MEAN_BYTES`."""

    def __init__(self) -> None:
        self._left = FREE_OBJECTS * MIN_MEAN_BYTES

    def earn(self, size: int) -> None:
        """Record bytes of payload."""
        self._left += size

    def spend(self) -> None:
        """Record an object, or raise MalformedTrack if there are too many for their bytes."""
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
        """Start without objects, of a FETCH or a ``subgroup``.

        ``descending``: the FETCH requested descending groups. The streams of one request share a ``budget``.
        ``priority`` is the track's, for subgroups without one.
        """
        self._of, self._descending = subgroup, descending
        self._budget = budget or ObjectBudget()
        self._track_priority = priority
        self._buffer = bytearray()
        self._left = 0
        self.follower = b""
        """Expected header of the next object, if predictable."""
        self.size = 0
        self._last: Location | None = None
        self._before: Location | None = None
        self._prior_subgroup: int | None = None
        self._prior_priority: int | None = None

    @property
    def buffered(self) -> int:
        """Bytes of an incomplete header."""
        return len(self._buffer)

    @property
    def left(self) -> int:
        """Remaining payload of this object."""
        return self._left

    def took(self, parts: Sequence[memoryview]) -> tuple[int, Sequence[memoryview]]:
        """Record data read elsewhere: at most ``left`` bytes, `follower`, at most ``size`` bytes, and so on.

        Return the bytes of payload, and the remaining parts, for `feed`.
        """
        payload = 0
        for index, part in enumerate(parts):
            if index % 2 == 0:
                self._left -= len(part)
                self._budget.earn(len(part))
                payload += len(part)
            elif part == self.follower and self._last is not None:
                self._budget.spend()  # cannot fail: the object before has brought as many bytes
                self._last = self._before = Location(self._last.group, self._last.object + 1)
                self._left = self.size
            else:
                return payload, parts[index:]
        return payload, ()

    def feed(self, data: bytes | memoryview) -> list[Item]:
        """Parse bytes of the stream; return its elements, with payload as views of `data`.

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
        """Raise SessionFault if the stream ends inside an object; MalformedTrack if too many streams had none."""
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
        if self._last is None:  # as below, only when the header is complete
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
        # Update state only after a complete header; an incomplete one is parsed again.
        self._last = self._before = location
        self._prior_priority = priority
        if subgroup is not None:
            self._prior_subgroup = subgroup
        return ObjectHeader(location.group, subgroup, location.object, priority, size, properties)

    def _check_order(self, location: Location) -> None:
        """Raise unless groups are in the requested order and objects ascend (draft 16, section 2.4.2)."""
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
    """Return whether the same header may follow: no properties and no explicit location.

    ``flags`` is the first byte; its highest bit means extended flags.
    """
    return not flags & 0xAC and flags & 0x03 != 0x02 and header.size >= MIN_MEAN_BYTES and header.object < 1 << 63


def _status(value: int, properties: tuple[KeyValue, ...]) -> Status:
    """Return the status of an object without payload (draft 18, section 11.2.1)."""
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

        The default priority is the preceding object's, at first 128.
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
