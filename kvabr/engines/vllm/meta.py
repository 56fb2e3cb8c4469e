"""What the scheduler's half of the connector tells the worker's half, step by step. Needs no vLLM."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvabr.client.lookup import Found


@dataclass(frozen=True, slots=True)
class Load:
    """Play this into blocks."""

    request: str
    found: Found
    first: int
    """First token that is wanted: before it the engine has all, whole blocks."""
    last: int
    """The token after the last that is wanted: the end of a block."""
    blocks: tuple[int, ...]
    """The engine's blocks for these tokens."""
    behind: int
    """Tokens of the prompt after ``last``, which the engine computes."""
    deadline_s: float
    """Seconds left of the request's deadline when this was said."""
    tokens: tuple[int, ...] = ()
    """If a rank holds some heads only: ids of all its groups, by which each finds, and names, its own."""
    salt: bytes = b""
    """The tenant's secret, for the same."""


@dataclass(frozen=True, slots=True)
class Publication:
    """Publish what a request has computed. Its blocks are kept until that is said to be done."""

    request: str
    tokens: tuple[int, ...]
    """Ids, whole groups."""
    blocks: tuple[int, ...]
    """The engine's blocks for these tokens."""
    salt: bytes


@dataclass(frozen=True, slots=True)
class Step:
    """One step of the engine."""

    loads: tuple[Load, ...] = ()
    publications: tuple[Publication, ...] = ()
    scheduled: int = 0
    """Tokens that the step computes."""


@dataclass(slots=True)
class Pending:
    """A step in the making."""

    loads: list[Load] = field(default_factory=list)
    publications: list[Publication] = field(default_factory=list)
