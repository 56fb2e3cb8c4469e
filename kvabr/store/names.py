"""Names of the objects in a store, and where frames are in them. See `docs/design/store.md`."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import NamedTuple

from kvabr.types.kv import KVSpec
from kvabr.types.naming import LOOKUP_RUN

CATALOGS, PAGES, GROUPS, PROFILES, MODELS, LIVE = "a/", "i/", "g/", "p/", "m/", "l/"
PRIVATE_PREFIX = "private/"
"""Begins the names of objects that nobody but their owner may read, in any folder."""
MAX_MODELS = 256
"""Models of a store."""
PROBES = "probe/"
"""Objects that tell whether a store can be used; left behind by who may not delete."""
PAGE_GROUPS = LOOKUP_RUN
"""Groups of tokens of a page."""
PACK_BYTES = 4 << 20
"""Bytes of a pack, at most: what a GET should carry."""


class FramePlace(NamedTuple):
    """Where a frame is."""

    name: str
    """Of the object."""
    first: int
    """First byte in the object."""
    last: int
    """Byte after the last one."""
    digest: str
    """Of the frame."""


def catalog_name(prompt: str) -> str:
    """Return the name of the catalog of a prompt digest."""
    return CATALOGS + prompt


def page_name(digest: str, *, end: bool = False) -> str:
    """Return the name of the page of the group with this chained digest, or the first 16 digits of it.

    ``end``: the last page of an asset with recurrent states, which has the snapshot at the asset's end.
    """
    return PAGES + digest[:16] + (".end" if end else "")


def group_name(digest: str) -> str:
    """Return the name of a frame or pack with this digest."""
    return GROUPS + digest


def profile_name(sha256: str) -> str:
    """Return the name of a codec profile."""
    return PROFILES + sha256


def model_name(number: int) -> str:
    """Return the name of the spec of a model, numbered from 0 without a gap, so that readers need not list."""
    return f"{MODELS}{number}"


def prompt_name(prompt: str) -> str:
    """Return the name of the token ids of a prompt digest."""
    return PRIVATE_PREFIX + prompt


def pack_name(digests: Sequence[str]) -> str:
    """Return the name of the object with the frames of these digests, one after the other."""
    if len(digests) == 1:
        return group_name(digests[0])
    return group_name(hashlib.sha256(b"kvabr.pack/1\0" + "\n".join(digests).encode()).hexdigest())


def pack_groups(frame_bytes: int) -> int:
    """Return how many frames of this size share a pack: a power of two up to `PAGE_GROUPS`."""
    count = PAGE_GROUPS
    while count > 1 and count * frame_bytes > PACK_BYTES:
        count //= 2
    return count


def has_states(spec: KVSpec) -> bool:
    """Return whether a model has recurrent states, whose snapshots are stored one by one."""
    return any(each.kind == "state" for each in spec.classes)


def place(first: int, sizes: Sequence[int], digests: Sequence[str], pack: int, group: int) -> FramePlace | None:
    """Return where a frame is, of a published track of which some consecutive groups are known; None: not of this one.

    Args:
        first: number of the first known group, a multiple of ``pack``.
        sizes: bytes of each known frame.
        digests: digests of the known frames; all frames of a pack are known.
        pack: frames per pack; a pack at the end of an asset may have fewer.
        group: number of the group.
    """
    if not 0 <= group - first < len(sizes):
        return None
    at = group - first
    begin = at - at % pack
    offset = sum(sizes[begin:at])
    return FramePlace(pack_name(digests[begin : begin + pack]), offset, offset + sizes[at], digests[at])
