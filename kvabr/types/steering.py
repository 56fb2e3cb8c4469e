"""Content steering, as DASH and HLS have it: a publisher tells where else its caches are.

A player asks an origin or relay for `kvabr.types.naming.STEERING_TRACK`, and again when the answer has become old.
"""

from __future__ import annotations

import json
from typing import Annotated, Self

from msgspec import Meta, Struct

from kvabr.types.records import decode

MAX_STEERING_BYTES = 16 << 10
"""Most bytes of a manifest."""
MOST_SOURCES = 8
_URL_BYTES = 1000
STEERING_TTL_S = 300.0
"""Seconds for which an answer is believed, unless it says otherwise."""


class SteeringManifest(Struct, frozen=True):
    """What a publisher tells: ``{"version": 1, "ttl_s": 300, "sources": ["moqt://..."]}``."""

    version: Annotated[int, Meta(ge=1, le=1)]
    ttl_s: Annotated[float, Meta(ge=60, le=86_400)]
    """Seconds until players ask again."""
    sources: Annotated[tuple[Annotated[str, Meta(max_length=_URL_BYTES)], ...], Meta(max_length=MOST_SOURCES)]
    """URLs of origins and relays that have the same caches."""

    @classmethod
    def loads(cls, data: bytes) -> Self:
        """Read a manifest from an untrusted source; `FormatError` if it is none."""
        return decode(data, cls, "steering manifest")

    def dumps(self) -> bytes:
        """Return it as JSON."""
        return json.dumps({"version": self.version, "ttl_s": self.ttl_s, "sources": self.sources}).encode()
