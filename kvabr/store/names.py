"""Names of the objects in a store, and places of frames in objects. See `docs/design/store.md`."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import NamedTuple

from kvabr.types.kv import KVSpec
from kvabr.types.naming import LOOKUP_RUN

CATALOGS, PAGES, GROUPS, PROFILES, MODELS, LIVE = "a/", "i/", "g/", "p/", "m/", "l/"
PRIVATE_PREFIX = "private/"
"""Prefix of objects that only their owner may read."""
MAX_MODELS = 256
PROBES = "probe/"
"""Prefix of objects that probe a store."""
PAGE_GROUPS = LOOKUP_RUN
PACK_BYTES = 4 << 20
"""Maximum bytes of a pack."""


class FramePlace(NamedTuple):
    """Where a frame is: bytes ``first`` to ``last`` of an object."""

    name: str
    first: int
    last: int
    digest: str


def catalog_name(prompt: str) -> str:
    """Return the name of a prompt's catalog."""
    return CATALOGS + prompt


def page_name(digest: str, *, end: bool = False) -> str:
    """Return the name of the page for a group's chained digest, or for the first 16 digits of the digest.

    ``end``: name the last page of an asset with recurrent states, which has the snapshot at the asset's end.
    """
    return PAGES + digest[:16] + (".end" if end else "")


def group_name(digest: str) -> str:
    """Return the name of a frame or pack."""
    return GROUPS + digest


def profile_name(sha256: str) -> str:
    """Return the name of a codec profile."""
    return PROFILES + sha256


def model_name(number: int) -> str:
    """Return the name of a model's spec. Numbers have no gaps, so readers need no listing."""
    return f"{MODELS}{number}"


def prompt_name(prompt: str) -> str:
    """Return the name of a prompt's token ids."""
    return PRIVATE_PREFIX + prompt


def pack_name(digests: Sequence[str]) -> str:
    """Return the name of the object that contains these frames in this order."""
    if len(digests) == 1:
        return group_name(digests[0])
    return group_name(hashlib.sha256(b"kvabr.pack/1\0" + "\n".join(digests).encode()).hexdigest())


def pack_groups(frame_bytes: int) -> int:
    """Return the number of frames of this size in a pack: a power of two up to `PAGE_GROUPS`."""
    count = PAGE_GROUPS
    while count > 1 and count * frame_bytes > PACK_BYTES:
        count //= 2
    return count


def lookup_names(spec: KVSpec, chunks: Sequence[str]) -> list[str]:
    """Return the names of the objects by which players find an asset: pages, and a store's first model."""
    ends = [page_name(chunks[-1], end=True)] if has_states(spec) else []
    return [model_name(0), *map(page_name, chunks), *ends]


def has_states(spec: KVSpec) -> bool:
    """Return True if a model has recurrent states; their frames are not packed."""
    return any(each.kind == "state" for each in spec.classes)


def place(first: int, sizes: Sequence[int], digests: Sequence[str], pack: int, group: int) -> FramePlace | None:
    """Return where a group's frame is, given some consecutive groups of its track; None if it is not among these.

    ``first`` is the first given group's number, a multiple of ``pack``, the number of frames per pack; the last pack
    may have fewer. ``sizes`` (bytes) and ``digests`` are those of the given frames, with all frames of each pack.
    """
    if not 0 <= group - first < len(sizes):
        return None
    at = group - first
    begin = at - at % pack
    offset = sum(sizes[begin:at])
    return FramePlace(pack_name(digests[begin : begin + pack]), offset, offset + sizes[at], digests[at])
