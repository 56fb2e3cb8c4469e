"""Location filters: which part of a track a subscription or a FETCH asks for (draft 18, section 5.1.2).

The drafts encode them in three ways, which `Draft.filters` names. Only drafts 20 and later can begin some groups before
the next one, or end at an object.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvabr.moqt.codes import SessionFault
from kvabr.moqt.wire import MAX_INTEGER, MAX_VALUE_BYTES, Draft, Location, Reader, write_text, write_varint

_NEXT_GROUP, _LARGEST_OBJECT, _ABSOLUTE_START, _ABSOLUTE_RANGE = 1, 2, 3, 4
"""The kinds of draft 18."""
_NO_FILTER, _RELATIVE, _START, _TO_GROUP, _TO_OBJECT, _NEXT_OBJECT = range(6)
"""The forms of draft 22: how many fields follow, but for the last one, which has none."""


@dataclass(frozen=True, slots=True)
class Filter:
    """A range of locations. Without any field, it begins after the largest object and does not end."""

    start: Location | None = None
    """The first location; None if it depends on the largest object."""
    groups_back: int | None = None
    """Without a start: how many groups before the next group it begins. 0 is the next group, 1 the current one."""
    end_group: int | None = None
    """The last group, after an absolute start; None if there is no end."""
    end_object: int | None = None
    """The last object of the last group; None for all."""

    def within(self, largest: Location | None) -> tuple[Location, Location | None]:
        """Return the first and the last location, given the largest one of the track (None if it is empty).

        The last one is None if there is no end.
        """
        if self.start is not None:
            if self.end_group is None:
                return self.start, None
            last = MAX_INTEGER if self.end_object is None else self.end_object
            return self.start, Location(self.end_group, last)
        if largest is None:
            return Location(0, 0), None
        if self.groups_back is None:
            return Location(largest.group, largest.object + 1), None
        return Location(max(0, largest.group + 1 - self.groups_back), 0), None

    @property
    def _fields(self) -> list[int]:
        if self.start is None:
            return [] if self.groups_back is None else [self.groups_back]
        fields = [*self.start]
        if self.end_group is not None:
            fields.append(self.end_group - self.start.group)
            if self.end_object is not None:
                fields.append(self.end_object)
        return fields


EVERYTHING = Filter(Location(0, 0))
NEXT_GROUP = Filter(groups_back=0)


def write_filter(value: Filter, draft: Draft) -> bytes:
    """Encode a filter as a parameter's value, or raise ValueError if the draft cannot express it."""
    fields = value._fields  # this module is the filter's own
    everything = value == EVERYTHING
    if draft.filters == "form":
        form = _NO_FILTER if everything else len(fields) or _NEXT_OBJECT
        return _integers([form, *([] if everything else fields)])
    if draft.filters == "count":  # two zeros stand for the next object
        return write_text(_integers([] if everything else fields or [0, 0]))
    if value.groups_back or value.end_object is not None:
        raise ValueError(f"draft {draft.number} has no filter that starts groups back or ends at an object")
    if value.start is None:
        return write_text(write_varint(_LARGEST_OBJECT if value.groups_back is None else _NEXT_GROUP))
    kind = _ABSOLUTE_START if value.end_group is None else _ABSOLUTE_RANGE
    return write_text(_integers([kind, *fields]))


def read_filter(reader: Reader, draft: Draft) -> Filter:
    """Parse a filter from a parameter's value, or raise SessionFault."""
    if draft.filters == "form":
        form = reader.varint()
        if form > _NEXT_OBJECT:
            raise SessionFault(f"unknown form {form} of a location filter")
        if form in (_NO_FILTER, _NEXT_OBJECT):
            return EVERYTHING if form == _NO_FILTER else Filter()
        return _filter([reader.varint() for _ in range(form)])
    inner = Reader(reader.text(MAX_VALUE_BYTES, "parameter"))
    found = _read_counted(inner) if draft.filters == "count" else _read_kind(inner)
    inner.end()
    return found


def _read_counted(inner: Reader) -> Filter:
    fields: list[int] = []
    while inner.left:
        if len(fields) == _TO_OBJECT:
            raise SessionFault("location filter with more than four fields")
        fields.append(inner.varint())
    if not fields:
        return EVERYTHING
    return Filter() if fields == [0, 0] else _filter(fields)


def _read_kind(inner: Reader) -> Filter:
    kind = inner.varint()
    if kind not in (_NEXT_GROUP, _LARGEST_OBJECT, _ABSOLUTE_START, _ABSOLUTE_RANGE):
        raise SessionFault(f"unknown subscription filter type {kind}")
    if kind in (_NEXT_GROUP, _LARGEST_OBJECT):
        return NEXT_GROUP if kind == _NEXT_GROUP else Filter()
    fields = [*inner.location()]
    if kind == _ABSOLUTE_RANGE:
        fields.append(inner.varint())
    return _filter(fields)


def _filter(fields: list[int]) -> Filter:
    """Return the filter with one to four fields."""
    if len(fields) == 1:
        return Filter(groups_back=fields[0])
    end = fields[0] + fields[2] if len(fields) > 2 else None
    if end is not None and not fields[0] <= end <= MAX_INTEGER:
        raise SessionFault(f"location filter from group {fields[0]} to {end}")
    return Filter(Location(*fields[:2]), None, end, fields[3] if len(fields) > 3 else None)


def _integers(values: list[int]) -> bytes:
    return b"".join(map(write_varint, values))
