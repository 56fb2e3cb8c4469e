"""Encoders for what kvabr only receives: ends of ranges."""

from kvabr.moqt.objects import DEFAULT_PRIORITY, FetchWriter
from kvabr.moqt.wire import KeyValue, Location, write_varint


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
        field = self._group_field(location.group)
        self._last = location
        return write_varint(0x10C if unknown else 0x8C) + write_varint(field) + write_varint(location.object)
