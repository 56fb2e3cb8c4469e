"""What a relay checks before it keeps something: catalogs against their names, groups and profiles against digests.

So an origin that lies, or whose disk does, cannot make a relay serve its lie to everyone who comes later. Groups are
passed on as they come, and checked when they are complete; one that is wrong is broken off at its end.
"""

from __future__ import annotations

import asyncio
import hashlib
from array import array
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache

from kvabr.moqt.codes import RequestCode
from kvabr.types.catalog import Catalog
from kvabr.types.errors import FormatError, NotFoundError, RequestError
from kvabr.types.naming import CATALOG_TRACK, PROFILE_TRACK, TrackNamespace

_DIGEST_BYTES = 32
_THREADS = 2
_AT_ONCE = 1 << 20
"""Bytes that are given to a thread at a time, unless it has nothing to do."""


@dataclass(frozen=True, slots=True)
class Facts:
    """What a relay must know of an asset, in little memory."""

    namespace: TrackNamespace
    sha256: bytes
    """Of its catalog."""
    groups: int
    sizes: dict[str, array[int]]
    """By track, the bytes of each group."""
    digests: dict[str, bytes]
    """By track, the SHA-256 of each group, end to end."""

    @property
    def memory(self) -> int:
        """Bytes that this takes, about."""
        return sum(16 + 8 * self.groups + len(digests) for digests in self.digests.values())

    def expected(self, track: str, group: int) -> tuple[int, bytes]:
        """Size and SHA-256 of a group.

        Raises:
            NotFoundError: there is no such group.
        """
        if track not in self.sizes or not 0 <= group < self.groups:
            code = RequestCode.INVALID_RANGE if track in self.sizes else RequestCode.DOES_NOT_EXIST
            raise NotFoundError(f"{track[:80]}, group {group}: not in the catalog", code=code)
        begin = _DIGEST_BYTES * group
        return self.sizes[track][group], self.digests[track][begin : begin + _DIGEST_BYTES]


def check_small(namespace: TrackNamespace, track: str, data: bytes) -> Facts | None:
    """Check the only group of a small track; takes long for the catalog of a long prompt.

    Args:
        namespace: under which it was asked for.
        track: a catalog, a lookup, or a profile.
        data: what came.

    Returns:
        What a catalog, or the answer to a lookup, says; None for a profile.

    Raises:
        FormatError: it is not what its name says.
    """
    digest = hashlib.sha256(data)
    if track == PROFILE_TRACK:
        if digest.hexdigest() != namespace.prompt:
            raise FormatError("a profile whose SHA-256 is not the one in its name")
        return None
    catalog = Catalog.loads(data)
    if track == CATALOG_TRACK:
        right = catalog.namespace == namespace
    else:
        right = (catalog.namespace.model, catalog.chunks[0]) == (namespace.model, namespace.prompt)
    if not right or catalog.chunks[-1] != catalog.namespace.prompt:
        raise FormatError("a catalog of another prompt")
    try:
        digests = {one.name: b"".join(map(bytes.fromhex, one.digests)) for one in catalog.tracks}
    except ValueError as error:
        raise FormatError("a catalog with a digest that is none") from error
    if any(len(found) != _DIGEST_BYTES * catalog.groups for found in digests.values()):
        raise FormatError("a catalog with a digest that is none")
    sizes = {one.name: array("Q", one.bytes) for one in catalog.tracks}
    return Facts(catalog.namespace, digest.digest(), catalog.groups, sizes, digests)


@cache
def checkers() -> ThreadPoolExecutor:
    """The threads that check for every relay of this process."""
    return ThreadPoolExecutor(_THREADS, thread_name_prefix="kvabr-check")


class RunningDigest:
    """The SHA-256 of a group that is coming in, worked out beside the event loop."""

    def __init__(self) -> None:
        self._hash = hashlib.sha256()
        self._todo: deque[bytes] = deque()
        self._waiting = 0
        self._working: asyncio.Future[None] | None = None

    def add(self, data: bytes) -> None:
        """More has come."""
        self._todo.append(data)
        self._waiting += len(data)
        if self._waiting >= _AT_ONCE and self._working is None:
            self._work()

    async def check(self, expected: bytes) -> None:
        """All of it has come: compare.

        Raises:
            RequestError: it is another group than the catalog says.
        """
        while self._working is not None or self._todo:
            if self._working is None:
                self._work()
            await asyncio.wait({self._working} if self._working is not None else set())
        if self._hash.digest() != expected:
            why = "the origin sent a group whose SHA-256 is not the one in its catalog"
            raise RequestError(why, code=RequestCode.MALFORMED_TRACK)

    def _work(self) -> None:
        todo, self._todo, self._waiting = self._todo, deque(), 0
        self._working = asyncio.get_running_loop().run_in_executor(checkers(), self._update, todo)
        self._working.add_done_callback(self._worked)

    def _update(self, todo: deque[bytes]) -> None:
        for data in todo:
            self._hash.update(data)

    def _worked(self, _: asyncio.Future[None]) -> None:
        self._working = None
