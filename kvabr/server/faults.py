"""How a publisher in memory may misbehave: for tests of whoever must live with the like."""

from __future__ import annotations

from dataclasses import dataclass

from kvabr.types.naming import TrackNamespace


@dataclass(frozen=True, slots=True)
class Ask:
    """One request, as the publisher sees it."""

    number: int
    """Requests of this connection before it."""
    namespace: TrackNamespace
    track: str
    group: int
    attempt: int
    """Requests of this connection for the same group of the same track before it."""


@dataclass(frozen=True, slots=True)
class Fault:
    """How a publisher misbehaves towards one request. Several may be combined."""

    refuse: int | None = None
    """Answer with this REQUEST_ERROR code."""
    retry_after_s: float | None = None
    """What the refusal says about asking again."""
    first_byte_s: float = 0.0
    """Think so long before the first byte."""
    rate: float | None = None
    """Have no more than so many bytes per second to send."""
    stall_after: int | None = None
    """Send nothing more after so many bytes, and say nothing."""
    reset_after: int | None = None
    """Break off after so many bytes."""
    truncate_to: int | None = None
    """End, as if that were all, after so many bytes."""
    corrupt_at: int | None = None
    """Flip a bit of this byte."""
    replace: bytes | None = None
    """Send this instead."""
    endless: bool = False
    """Go on with zeros after the end, for ever."""


def tampered(data: memoryview, fault: Fault) -> memoryview:
    """What comes instead of a group."""
    if fault.replace is not None:
        data = memoryview(fault.replace)
    if fault.truncate_to is not None:
        data = data[: fault.truncate_to]
    if fault.corrupt_at is not None:
        copy = bytearray(data)
        copy[fault.corrupt_at] ^= 0x10
        data = memoryview(copy)
    return data
