"""How a node is asked to fetch a cache into its store before somebody plays it there.

The request is one for a track of the asset. Its name says how long that may take and is worth, and it is answered when
the node has done so, with what it has then. Nodes answer it (`kvabr.node`); origins and plain relays do not.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Annotated, NamedTuple, Self

from msgspec import Meta

from kvabr.types.records import decode

HINT_TRACK = "kvabr.hint."
"""Prefix of the name of such a track."""
MAX_ANSWER_BYTES = 1 << 10
MAX_WITHIN_S = 60.0
"""Most seconds that a node may take."""
_NAME = re.compile(re.escape(HINT_TRACK) + r"([0-9]{1,10})\.([0-9]{1,10})\.([0-9]{1,8})")


class HintRequest(NamedTuple):
    """What a node is asked for."""

    within_s: float
    """Seconds that it may take."""
    keep_s: float
    """Seconds for which other groups make room in its store before these."""
    groups: int
    """Leading groups of tokens that are wanted; 0: all."""

    @property
    def track(self) -> str:
        """Name of the track; times are rounded to milliseconds."""
        within_ms = round(1e3 * min(self.within_s, MAX_WITHIN_S))
        return f"{HINT_TRACK}{within_ms}.{round(1e3 * min(self.keep_s, 1e6))}.{self.groups}"

    @classmethod
    def of(cls, track: str) -> Self | None:
        """Return what the name of a track asks for; None if it is no such track."""
        if (found := _NAME.fullmatch(track)) is None:
            return None
        within_ms, keep_ms, groups = map(int, found.groups())
        return cls(min(within_ms / 1e3, MAX_WITHIN_S), keep_ms / 1e3, groups)


@dataclass(frozen=True)
class HintAnswer:
    """What a node has in its store when it has done what it was asked for; see `kvabr.client.result.Hinted`."""

    tokens: Annotated[int, Meta(ge=0)]
    nbytes: Annotated[int, Meta(ge=0)]
    loss: Annotated[float, Meta(ge=0)]

    @classmethod
    def loads(cls, data: bytes) -> Self:
        """Read an answer from an untrusted source; `FormatError` if it is none."""
        return decode(data, cls, "answer to a hint")

    def dumps(self) -> bytes:
        """Return it as JSON."""
        return json.dumps(vars(self)).encode()
