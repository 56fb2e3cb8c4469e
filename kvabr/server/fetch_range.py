"""The objects that a FETCH receives, computed from its start and end locations."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from kvabr.codec.container import ObjectSpan
from kvabr.moqt.codes import RequestCode
from kvabr.moqt.messages import Fetch
from kvabr.moqt.wire import Location
from kvabr.server.publication import Publication
from kvabr.types.errors import KvabrError
from kvabr.types.words import counted

DESCENDING = 2
"""Value of GROUP_ORDER: the newest group first."""


class FetchRangeError(KvabrError):
    """A FETCH starts after the end of the track, or requests only groups that the producer omitted."""

    def __init__(self, code: RequestCode, why: str) -> None:
        super().__init__(why)
        self.code = code


@dataclass(frozen=True, slots=True)
class GroupRange:
    """A range of objects of one group of a FETCH."""

    group: int
    first_object: int
    end_object: int | None
    """ID after the last object; None: to the end of the group."""


@dataclass(frozen=True, slots=True)
class FetchRange:
    """The answer to a FETCH. Its size does not depend on the number of groups."""

    start: Location
    last: int
    """Number of the last group."""
    end_object: int | None
    """ID after the last object of the last group; None: to the end of the group."""
    descending: bool
    end: Location
    """End Location of FETCH_OK: the last location plus one."""
    end_of_track: bool
    """True if the end of the track is included."""

    @classmethod
    def of(cls, message: Fetch, publication: Publication, *, dense: bool) -> FetchRange:
        """Limit the range of a FETCH, with its end not before its start, to published groups.

        Raises `FetchRangeError` if none is left.
        """

        def last_of(group: int) -> int:
            return last_object(publication.objects(group), dense=dense)

        start, end, groups, growing = message.start, message.end, publication.groups, publication.growing
        if groups and message.parameters.filter is not None:
            start, end = message.within(Location(groups - 1, last_of(groups - 1)))
        if start.group >= groups:
            so_far = f"the track has {counted(groups, 'group')}{' so far' if growing else ''}"
            raise FetchRangeError(RequestCode.INVALID_RANGE, publication.failure or so_far)
        last = min(end.group, groups - 1)
        final = last_of(last)
        if start.group == last and start.object > final:
            raise FetchRangeError(RequestCode.INVALID_RANGE, f"the last object of group {last} is {final}")
        whole = last < end.group or end.object == 0
        stop = final + 1 if whole else min(end.object, final + 1)
        if not any(map(publication.has, range(start.group, last + 1))):
            raise FetchRangeError(RequestCode.DOES_NOT_EXIST, f"the producer left out group {start.group}")
        ended = last == groups - 1 and stop == final + 1 and not growing
        descending = message.parameters.group_order == DESCENDING
        return cls(start, last, None if whole else end.object, descending, Location(last, stop), ended)

    def groups(self, publication: Publication) -> Iterator[GroupRange]:
        """Yield the groups that exist, in sending order."""
        first, last = self.start.group, self.last
        for group in range(last, first - 1, -1) if self.descending else range(first, last + 1):
            if publication.has(group):
                first_object = self.start.object if group == first else 0
                yield GroupRange(group, first_object, self.end_object if group == last else None)


def last_object(objects: Sequence[ObjectSpan], *, dense: bool) -> int:
    """Return the ID of a group's last object; ``dense``: IDs are 0, 1, 2."""
    return len(objects) - 1 if dense else objects[-1].object_id
