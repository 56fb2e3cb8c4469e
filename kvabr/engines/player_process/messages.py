"""What the two ends of a channel say to each other."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvabr.engines.client_arguments import ClientArguments

OPENED = 0
"""Number of the answer to `OpenClient`."""


@dataclass(frozen=True, slots=True)
class OpenClient:
    """An engine begins."""

    version: str
    """Of its kvabr: messages are those of one version."""
    arguments: ClientArguments


@dataclass(frozen=True, slots=True)
class CallMethod:
    """Call a method of the client."""

    number: int
    """From 1 on."""
    name: str
    args: tuple[Any, ...]
    options: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class CancelCall:
    """Cancel a call, whose answer is not waited for any more."""

    number: int


@dataclass(frozen=True, slots=True)
class PlayedMemory:
    """The views of the next message lie in this region, whose file comes along unless it came before."""

    region: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class CallAnswer:
    """What came of a call."""

    number: int
    value: Any = None
    error: Exception | None = None


@dataclass(frozen=True, slots=True)
class ReleaseRegion:
    """No view of a region is left."""

    region: int


@dataclass(frozen=True, slots=True)
class ForgetRegion:
    """A region is gone, and its number not used again."""

    region: int
