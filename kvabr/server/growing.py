"""Tracks whose groups appear one after the other while they are served: a cache that is still being prefilled.

A growing track has an edge, the number of groups that exist. It ends once: complete, or with the reason for which its
producer stopped; what exists stays. All calls are made in the event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable

from kvabr.codec.container import ObjectSpan
from kvabr.moqt.codes import RequestCode
from kvabr.moqt.messages import Fetch, Subscribe, TrackStatus
from kvabr.server.fetch_range import InvalidRangeError, LeftOutError
from kvabr.server.publication import Publication, PublishedGroup
from kvabr.types.digests import digest_of
from kvabr.types.words import counted

LOOK_S = 0.1
"""Seconds between two looks for a track that somebody may be about to publish."""


class GrowingPublication(Publication):
    """A track that grows; subclasses keep the groups."""

    def __init__(self) -> None:
        """Begin without groups."""
        self.groups, self.growing = 0, True
        self._watchers: dict[object, Callable[[], None]] = {}
        self._telling = False

    def grow(self, groups: int) -> None:
        """Say that groups below ``groups`` exist; `ValueError` if the track has ended or would shrink."""
        if not self.growing or groups < self.groups:
            raise ValueError(
                f"a track of {counted(self.groups, 'group')}{'' if self.growing else ' that has ended'} got {groups}"
            )
        self.groups = groups
        self._tell_soon()

    def finish(self, failure: str = "") -> None:
        """Say that no group follows; ``failure`` is why, if there should be more. Does nothing the second time."""
        if self.growing:
            self.growing, self.failure = False, failure
            self._tell_soon()

    def watch(self, changed: Callable[[], None]) -> Callable[[], None]:
        """Have ``changed`` called after groups have appeared and after the end; return what ends that."""
        key = object()
        self._watchers[key] = changed
        return lambda: self._watchers.pop(key, None) and None

    @property
    def watched(self) -> bool:
        """Whether somebody waits for more of it."""
        return bool(self._watchers)

    async def reached(self, group: int) -> None:
        """Wait until a group exists, or can no longer appear."""
        changed = asyncio.Event()
        unwatch = self.watch(changed.set)
        try:
            while self.growing and group >= self.groups:
                changed.clear()
                await changed.wait()
        finally:
            unwatch()

    def _tell_soon(self) -> None:
        """Tell the watchers once, however much changes in one turn of the event loop."""
        if not self._telling:
            self._telling = True
            asyncio.get_running_loop().call_soon(self._tell)

    def _tell(self) -> None:
        self._telling = False
        for changed in list(self._watchers.values()):
            changed()


class GrowingBytes(GrowingPublication):
    """A growing track in memory, whose groups are single objects: news about other tracks."""

    def __init__(self) -> None:
        super().__init__()
        self._published: list[PublishedGroup] = []

    def append(self, data: bytes) -> None:
        """Publish the next group; raises as `grow`."""
        digest = digest_of(data)
        group = PublishedGroup(memoryview(data), (ObjectSpan(0, 0, len(data)),), digest, shared=True)
        self.grow(self.groups + 1)
        self._published.append(group)

    def objects(self, group: int) -> tuple[ObjectSpan, ...]:
        return self.open(group).objects

    def open(self, group: int, priority: int = 128, on_more: Callable[[], None] = lambda: None) -> PublishedGroup:
        del priority, on_more
        if not 0 <= group < self.groups:
            raise IndexError(f"group {group} of a track that has {counted(self.groups, 'group')} so far")
        return self._published[group]


def waits_s(message: Fetch | Subscribe | TrackStatus, found: Publication | None) -> float:
    """Return how long a peer would wait for what is not published yet; 0 if it need not, or would not.

    The drafts have RENDEZVOUS_TIMEOUT for a SUBSCRIBE. A FETCH behind the edge of a growing track is refused, unless
    FILL_TIMEOUT says that its sender would wait; the drafts have that parameter for relays, which do the same. If the
    track ends before the group is there, the answer is DOES_NOT_EXIST with the reason; otherwise it may be asked again.
    """
    parameters, wait_ms = message.parameters, None
    if isinstance(message, Subscribe) and found is None:
        wait_ms = parameters.rendezvous_timeout
    elif isinstance(message, Fetch) and found is not None and found.growing and parameters.filter is None:
        wait_ms = parameters.fill_timeout if message.start.group >= found.groups else None
    return (wait_ms or 0) / 1000


def why_none(
    message: Fetch, publication: Publication, error: InvalidRangeError | LeftOutError
) -> tuple[RequestCode, str]:
    """Return code and reason for a FETCH of which no group exists: one that would wait hears if none will."""
    if isinstance(error, LeftOutError):
        return RequestCode.DOES_NOT_EXIST, str(error)
    if publication.growing or not message.parameters.fill_timeout:
        return RequestCode.INVALID_RANGE, str(error)
    return RequestCode.DOES_NOT_EXIST, publication.failure or f"{error}, and is complete"


async def awaited(
    message: Fetch | Subscribe | TrackStatus,
    found: Publication | None,
    find: Callable[[], Awaitable[Publication | None]],
    most_s: float,
) -> Publication | None:
    """Return the track of a request that waits, by then `found` as far as the request needs it; or after ``most_s``.

    If there is no track yet, ``find`` looks again and again, because publishers may be other processes, which write to
    a folder or to a store.
    """
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(most_s):
            if isinstance(found, GrowingPublication) and isinstance(message, Fetch):
                await found.reached(message.start.group)
            while found is None:
                found = await find()
                await asyncio.sleep(LOOK_S if found is None else 0)  # nobody tells when it comes
    return found
