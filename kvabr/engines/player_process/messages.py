"""Messages between the two ends of a channel."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvabr.engines.client_arguments import ClientArguments

OPENED = 0
"""Number of the answer to `OpenClient`, in place of a call's number."""


@dataclass(frozen=True, slots=True)
class OpenClient:
    """An engine connects to the process."""

    version: str
    """Version of kvabr in the engine; it must equal the version in the process."""
    arguments: ClientArguments


@dataclass(frozen=True, slots=True)
class CallMethod:
    """Call a method of the client."""

    number: int
    name: str
    args: tuple[Any, ...]
    options: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class CancelCall:
    """Cancel a call without an answer."""

    number: int


@dataclass(frozen=True, slots=True)
class PlayedMemory:
    """The next message's views are in this region. Its file is attached the first time."""

    region: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class CallAnswer:
    """The result of a call."""

    number: int
    value: Any = None
    error: Exception | None = None


@dataclass(frozen=True, slots=True)
class ReleaseRegion:
    """The engine no longer uses any view of a region."""

    region: int


@dataclass(frozen=True, slots=True)
class ForgetRegion:
    """A region was freed; its number is not reused."""

    region: int
