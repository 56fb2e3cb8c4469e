"""Encoders for what kvabr only receives: subgroup streams, datagrams, and the ends of ranges."""

from __future__ import annotations

from kvabr.moqt.objects import DEFAULT_PRIORITY, FetchWriter, ObjectHeader, Status, SubgroupHeader
from kvabr.moqt.wire import Draft, KeyValue, Location, write_pairs, write_text


class RangeWriter(FetchWriter):
    """A writer of FETCH objects that can also mark ranges of missing ones."""

    begun = False
    """Whether an object was written; the end of a range has no priority to inherit."""

    def header(
        self, group: int, number: int, size: int, properties: tuple[KeyValue, ...] = (), *, priority: int | None = None
    ) -> bytes:
        if not self.begun and priority is None:
            priority = DEFAULT_PRIORITY
        self.begun = True
        return super().header(group, number, size, properties, priority=priority)

    def range_end(self, location: Location, *, unknown: bool) -> bytes:
        """Encode the end of a range of missing objects; in draft 18 it lies in a later group than the last object."""
        varint = self._draft.varint
        field = self._group_field(location.group)
        self._last = location
        return varint.encode(0x10C if unknown else 0x8C) + varint.encode(field) + varint.encode(location.object)


def write_subgroup_header(header: SubgroupHeader, draft: Draft) -> bytes:
    """Encode the header of a subgroup stream."""
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
    """Encode the header of an object on a subgroup stream; `before` is the ID of the preceding object, if any."""
    varint = draft.varint
    out = varint.encode(number if before is None else number - before - 1)
    if header.properties:
        out += write_text(varint, write_pairs(varint, properties))
    out += varint.encode(size)
    return out if size else out + varint.encode(status)


def write_datagram(
    draft: Draft, alias: int, header: ObjectHeader, payload: bytes, *, end_of_group: bool = False
) -> bytes:
    """Encode an object as a datagram."""
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
