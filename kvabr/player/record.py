"""What is written down of a play: one line a group, and the totals."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class GroupRecord:
    """How one group came to its place; times in seconds since the play began."""

    group: int
    track: str | None = None
    """The track in place at delivery, or ``recomputed``; None if there is none."""
    bytes: int = 0
    """Bytes of the frame in place (of all layers, for layers)."""
    requested_s: float | None = None
    first_byte_s: float | None = None
    done_s: float | None = None
    """When its last byte arrived."""
    ready_s: float | None = None
    """When it was decoded, or computed, and in place."""
    source: str | None = None
    """``fetched``, ``upgraded`` or ``recomputed``."""


@dataclass(slots=True)
class PlayRecord:
    """A whole play."""

    groups: list[GroupRecord]
    delivered_s: float | None = None
    """When the cache was handed over; None if the play was given up."""
    met: bool = False
    bytes_fetched: int = 0
    """Bytes received, useful or not."""
    bytes_held_up: dict[str, int] = field(default_factory=dict)
    """Of the bytes received, those that another than the network held up: ``publisher`` or ``cpu``."""
    bytes_wasted: int = 0
    """Bytes of cancelled, failed and replaced transfers."""
    tokens_recomputed: int = 0
    recompute_s: float = 0.0
    """Seconds that the engine computed."""
    abandoned: int = 0
    """Transfers cancelled because they would not have made it."""
    cut: str | None = None
    """Why a prefix play ended before every group was in place; None if every group is, or for another goal."""
    gave_up: str | None = None
    """Why the play was given up."""
    steps: list[tuple[str, int, int | str]] = field(default_factory=list)
    """What came into place, in order: ("fetch", group, track) or ("compute", first, last); for verification."""
