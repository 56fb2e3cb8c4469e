"""The objects of a track that a FETCH receives, from its start and end locations. Pure functions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from kvabr.codec.container import ObjectSpan
from kvabr.moqt.messages import Fetch
from kvabr.moqt.wire import Location
from kvabr.types.errors import KvabrError
from kvabr.types.words import counted

DESCENDING = 2
"""GROUP_ORDER: the newest group first."""


class InvalidRangeError(KvabrError):
    """A FETCH begins after the end of the track."""


class LeftOutError(KvabrError):
    """A FETCH requests only groups that the producer left out."""


@dataclass(frozen=True, slots=True)
class GroupRange:
    """One group of a FETCH, and the range of its objects."""

    group: int
    first_object: int
    end_object: int | None
    """After the last object; None for all."""


@dataclass(frozen=True, slots=True)
class FetchRange:
    """The answer to a FETCH."""

    groups: tuple[GroupRange, ...]
    """In sending order; at least one."""
    descending: bool
    end: Location
    """End Location of FETCH_OK: the last location plus one."""
    end_of_track: bool
    """Whether it includes the end of the track."""

    @classmethod
    def of(
        cls,
        message: Fetch,
        groups: int,
        last_object_of: Callable[[int], int],
        *,
        growing: bool = False,
        has: Callable[[int], bool] = lambda _: True,
    ) -> FetchRange:
        """Limit the range of a FETCH to published groups.

        Args:
            message: The request, with its end not before its start.
            groups: Number of groups of the track.
            last_object_of: Returns the ID of a group's last object; called for the range's last group, and if the range
                depends on it, for the track's.
            growing: Whether more groups may appear.
            has: Returns whether a group exists; others are left out.

        Raises:
            InvalidRangeError: The range begins after the end of the track.
            LeftOutError: None of its groups exists.
        """
        start, end = message.start, message.end
        if groups and message.parameters.filter is not None:
            start, end = message.within(Location(groups - 1, last_object_of(groups - 1)))
        if start.group >= groups:
            raise InvalidRangeError(f"the track has {counted(groups, 'group')}{' so far' if growing else ''}")
        last = min(end.group, groups - 1)
        final = last_object_of(last)
        if start.group == last and start.object > final:
            raise InvalidRangeError(f"the last object of group {last} is {final}")
        whole = last < end.group or end.object == 0
        stop = final + 1 if whole else min(end.object, final + 1)
        ranges = [GroupRange(group, 0, None) for group in range(start.group, last + 1)]
        ranges[0] = replace(ranges[0], first_object=start.object)
        if not whole:
            ranges[-1] = replace(ranges[-1], end_object=end.object)
        ranges = [part for part in ranges if has(part.group)]
        if not ranges:
            raise LeftOutError(f"the producer left out group {start.group}")
        descending = message.parameters.group_order == DESCENDING
        if descending:
            ranges.reverse()
        ended = last == groups - 1 and stop == final + 1 and not growing
        return cls(tuple(ranges), descending, Location(last, stop), ended)


def last_object(objects: tuple[ObjectSpan, ...], *, dense: bool) -> int:
    """Return the ID of a group's last object; ``dense`` if numbered 0, 1, 2."""
    return len(objects) - 1 if dense else objects[-1].object_id
