"""What a session asks its driver to do."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Fetch:
    """Request one group of one track."""

    request: int
    """Number of the request; every event about it carries it back."""
    group: int
    track: str
    bytes: int
    """Size that the catalog promises; more than that must not be read."""
    priority: int
    """0 (most urgent) to 255, as a MoQT subscriber priority: among requests in flight the lowest goes first."""


@dataclass(slots=True)
class Cancel:
    """Stop a request; nothing more is wanted of it, and no event about it is expected."""

    request: int


@dataclass(slots=True)
class Decode:
    """Decode a group that has arrived, into its place; answer with `Session.decoded` or `Session.refused`."""

    request: int
    group: int
    track: str


@dataclass(slots=True)
class Recompute:
    """Let the engine compute groups ``first`` to ``last`` - 1; answer with `Session.computed`.

    All groups before ``first`` are in place.
    """

    first: int
    last: int


@dataclass(slots=True)
class Deliver:
    """Hand the cache to the engine. The play is over."""

    now: float
    met: bool
    """Whether the deadline was met."""
    cut: str | None = None
    """Why a prefix play ended before every group was in place; None if every group is."""


@dataclass(slots=True)
class GiveUp:
    """The play cannot be completed. It is over, and no cache is handed over."""

    now: float
    reason: str


Action = Fetch | Cancel | Decode | Recompute | Deliver | GiveUp
