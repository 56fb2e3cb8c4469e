"""Groups that pass through a relay, from its store or its origin to all of their readers.

They are `Downloads` that restart after a lost connection. Readers get bytes as they arrive, except for the last byte,
which is withheld until the digest is checked: a wrong group never looks complete. Assets share complete groups, but not
arriving ones, so a removed or wrong asset does not affect others.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvabr.codec.container import ObjectSpan
from kvabr.server.publication import ArrivingGroup
from kvabr.store.group_cache import GroupCache
from kvabr.telemetry.client_metrics import ClientMetrics
from kvabr.transfer.downloads import Download, Downloads
from kvabr.transfer.interface import GroupRequest, PeerConnection, TaskSet, TransferListener
from kvabr.types.errors import ConnectionLostError, Reason, RequestError, TransportError, UnauthorizedError
from kvabr.types.naming import TrackNamespace

PATIENCE_S = 10.0
"""Seconds without a byte on an open connection after which requested groups fail, since the origin is presumed away."""
DISCONNECTED_S = 1.0
"""The same without a connection; short, so that players can react in time."""
MAX_EXPECTED, MAX_EXPECTED_BYTES = 256, 64 << 20
"""Maximum number and bytes of groups to wait for or receive without a reader."""
_TRIES, _PAUSE_S = 5, 0.1
"""Attempts to download a group after lost connections, and the seconds between them."""
_BUSY_S = 1.0
_TOP_PRIORITY = 0
_WRONG = "the origin sent a group whose digest is not the one in its catalog"

_Place = tuple[TrackNamespace, str, int]


@dataclass(eq=False)
class TransferReader(ArrivingGroup, TransferListener):
    """One player's view of a group."""

    download: Download
    objects: Sequence[ObjectSpan]
    priority: int
    more: Callable[[], None]

    def __post_init__(self) -> None:
        request = self.download.request
        self.digest, self.size = request.digest or "", request.limit

    @property
    def memory(self) -> int:
        """Size of the group for its first reader, 0 for other readers."""
        return self.size if self.download.readers[:1] == [self] else 0

    @property
    def wire_priority(self) -> int:
        return self.priority

    @property
    def available(self) -> int:
        if self.download.error is not None:
            raise self.download.error
        if self.download.verified is False:
            raise RequestError(_WRONG, reason=Reason.WRONG)
        return self.size if self.download.verified else min(len(self.download.data), self.size - 1)

    def on_more(self) -> None:
        self.more()

    def read(self, begin: int, end: int) -> memoryview:
        return self.download.data[begin:end]

    def prioritise(self, priority: int) -> None:
        self.priority = priority
        self.download.reprioritise()

    def close(self) -> None:
        """Stop reading; the next reader accounts for the memory."""
        accounted = bool(self.memory)
        self.download.leave(self)
        if accounted and self.download.readers:
            self.download.readers[0].on_more()


class RelayGroups(Downloads):
    """All groups in transfer through a relay, and the store of complete ones."""

    def __init__(
        self,
        upstream: PeerConnection,
        store: GroupCache,
        metrics: ClientMetrics,
        on_failed: Callable[[GroupRequest, TransportError], None],
    ) -> None:
        """``on_failed`` is called for groups that the origin refuses, or that are wrong."""
        super().__init__(upstream, store, metrics)
        self._on_failed = on_failed
        self._expected: dict[_Place, Download] = {}
        """Downloads of unpublished groups, which the origin will send by subscription."""
        self._watching: asyncio.Task[None] | None = None
        self._deleting = TaskSet()

    def open(
        self, request: GroupRequest, objects: Sequence[ObjectSpan], priority: int, on_more: Callable[[], None]
    ) -> TransferReader:
        """Join or start the transfer of a group.

        ``request`` must have the group's exact size and its digest; otherwise as `Publication.open`.
        """
        reader = TransferReader(self.get(request, priority), objects, priority, on_more)
        reader.download.join(reader)
        self._watch(reader.download)
        return reader

    def expect(self, request: GroupRequest) -> None:
        """Subscribe to an unpublished group, whose size and digest are unknown, if there is memory for it."""
        place, before = _place(request), self._expected.get(_place(request))
        if before is not None and not (before.over and not before.received):
            return
        self._cancel_expected(place)
        taken = [*self._expected.values(), *(one for one in self._under_way.values() if one.expected)]
        most = MAX_EXPECTED_BYTES - request.limit
        if len(taken) < MAX_EXPECTED and sum(one.request.limit for one in taken) <= most:
            download = self._expected[place] = Download(request, self)
            download.priority, download.expected = _TOP_PRIORITY, True
            download.begin(self.peer)

    def receive_expected(self, request: GroupRequest) -> None:
        """Receive and store an expected group, now published; ``request`` as for `open`."""
        download = self._expected.pop(_place(request), None)
        if download is None:
            return
        if request in self or self.store.held(request.digest or "") is not None:
            download.end(None)
        elif download.error is not None:
            download = self.get(request, _TOP_PRIORITY)
            download.expected = True
        else:
            self._under_way[request] = download
            download.identify(request)
        self._watch(download)

    def stop_expecting(self, namespace: TrackNamespace, track: str | None = None) -> None:
        """Cancel expected groups of an asset, or of one track."""
        for place in [place for place in self._expected if place[0] == namespace and track in (None, place[1])]:
            self._cancel_expected(place)

    def withdraw(self, error: TransportError) -> None:
        """Fail all transfers, and delete all stored groups."""
        for download in list(self._under_way.values()):
            download.end(error)
        self._deleting.start(self._delete(list(self.store)))

    async def close(self) -> None:
        """End all transfers, and finish deleting."""
        for place in list(self._expected):
            self._cancel_expected(place)
        await super().close()
        if self._deleting:
            await asyncio.wait(self._deleting)

    # --------------------------------------------------------------- Downloads

    def may_store(self, digest: str) -> bool:
        """Return True also for a shared bucket, where other relays may have stored the group."""
        return self.store.disk is not None or super().may_store(digest)

    def failed(self, download: Download, error: Exception) -> Exception | None:
        """Restart after a lost connection, since groups do not change; fetch a group that a subscription omitted."""
        if download.cancelled or download.tries >= _TRIES or download.request.digest is None:
            return error
        lost = isinstance(error, ConnectionLostError) and not isinstance(error, UnauthorizedError)
        unsent = download.expected and not (download.received or download.tries) and isinstance(error, RequestError)
        if not (lost or unsent):
            return error
        download.tries += 1
        if download.tries == _TRIES:
            return _away(download.request)
        if download.carrier is not None:
            download.carrier.released(download)
        self._tasks.start(self._again(download, _PAUSE_S if lost else 0.0))
        return None

    def settled(self, download: Download) -> None:
        error, request = download.error, download.request
        super().settled(download)
        if download.cancelled or request.digest is None or not isinstance(error, TransportError):
            return
        if not isinstance(error, ConnectionLostError) or isinstance(error, UnauthorizedError):
            self._on_failed(request, error)

    def damaged(self, download: Download) -> None:
        self._on_failed(download.request, RequestError(_WRONG, reason=Reason.WRONG))

    # -------------------------------------------------------------- internals

    async def _again(self, download: Download, pause_s: float) -> None:
        await asyncio.sleep(pause_s)
        if not download.over:
            download.begin(self.peer)

    def _watch(self, download: Download) -> None:
        if self._watching is None and not download.over:
            self._watching = asyncio.get_running_loop().create_task(self._until_silent())
            self._tasks.add(self._watching)

    async def _until_silent(self) -> None:
        """Watch transfers until there are none; fail them if the origin sends nothing for too long."""
        quiet_s, before = 0.0, self.peer.stats().bytes_received
        try:
            while waiting := [one for one in self._under_way.values() if not (one.over or one.subscribed)]:
                await asyncio.sleep(DISCONNECTED_S)
                received = self.peer.stats().bytes_received
                quiet_s, before = quiet_s + DISCONNECTED_S if received == before else 0.0, received
                if quiet_s >= (PATIENCE_S if self.peer.trouble is None else DISCONNECTED_S):
                    for download in waiting:
                        download.tries = _TRIES
                        download.reject(_away(download.request))
        finally:
            self._tasks.discard(self._watching)
            self._watching = None

    async def _delete(self, digests: Sequence[str]) -> None:
        for digest in digests:
            await self.store.delete(digest)

    def _cancel_expected(self, place: _Place) -> None:
        if (download := self._expected.pop(place, None)) is not None:
            download.end(None)


def _away(request: GroupRequest) -> RequestError:
    why = f"{request}: the relay cannot reach its origin"
    return RequestError(why, reason=Reason.AWAY, retry_after_s=_BUSY_S)


def _place(request: GroupRequest) -> _Place:
    return request.namespace, request.track, request.group
