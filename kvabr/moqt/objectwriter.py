"""How objects are written on data streams and in datagrams; `kvabr.moqt.objects` reads them (draft 18, section 11)."""

from __future__ import annotations

from kvabr.moqt.draft import Draft
from kvabr.moqt.objects import DEFAULT_PRIORITY, ObjectHeader, Status, SubgroupHeader
from kvabr.moqt.wire import KeyValue, Location, write_pairs, write_text


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
