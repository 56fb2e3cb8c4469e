"""A transport without a network: publications of this process, sent over a simulated link, with faults on demand.

For tests and benchmarks. The link is a queue that carries one chunk
after the other at the given rate, the most urgent download first and equals in turn, as a publisher that honours
priorities would. Time is the event loop's; there are no threads and no tasks.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

from kvabr.moqt.codes import REASONS, RequestCode
from kvabr.server.live_tracks import GrowingPublication
from kvabr.server.publication import LevelPublication, Publication
from kvabr.transfer.interface import ConnectionStats, GroupTransfer, PeerConnection
from kvabr.types.errors import AssetError, ConnectionLostError, NotFoundError, Reason, RequestError
from kvabr.types.events import Limit
from kvabr.types.naming import TrackNamespace
from tests.assets import whole

Find = Callable[[TrackNamespace, str], Publication | None]
"""Returns what is served under a name, or None; for `PublishedAssets`: ``functools.partial(assets.find, grant)``."""

_PACKET = 1200
"""Bytes that the link carries at once; more if that takes less than a millisecond."""
_LONG_CHUNK = 64 << 10
"""Bytes that an unlimited link carries at once."""


@dataclass(frozen=True, slots=True)
class Ask:
    """One request, as the publisher sees it."""

    number: int
    """Number of earlier requests on this connection."""
    namespace: TrackNamespace
    track: str
    group: int
    attempt: int
    """Number of earlier requests on this connection for the same group of the same track."""


@dataclass(frozen=True, slots=True)
class Fault:
    """How a publisher misbehaves towards one request. Several may be combined."""

    refuse: int | None = None
    """Answer with this REQUEST_ERROR code."""
    retry_after_s: float | None = None
    """Retry interval in the refusal, seconds."""
    first_byte_s: float = 0.0
    """Seconds before the first byte."""
    rate: float | None = None
    """Maximum rate, bytes per second."""
    stall_after: int | None = None
    """Stop sending silently after this many bytes."""
    reset_after: int | None = None
    """Reset the stream after this many bytes."""
    truncate_to: int | None = None
    """End normally after this many bytes."""
    corrupt_at: int | None = None
    """Flip a bit of this byte."""
    replace: bytes | None = None
    """Send this instead."""
    endless: bool = False
    """Continue with zeros after the end, without end."""


def tampered(data: memoryview, fault: Fault) -> memoryview:
    """Return the bytes that are sent instead of a group's."""
    if fault.replace is not None:
        data = memoryview(fault.replace)
    if fault.truncate_to is not None:
        data = data[: fault.truncate_to]
    if fault.corrupt_at is not None:
        copy = bytearray(data)
        copy[fault.corrupt_at] ^= 0x10
        data = memoryview(copy)
    return data


@dataclass(slots=True)
class MemoryLink:
    """The path of a connection; may be changed while it is in use."""

    rate: float | None = None
    """Bytes per second; None: no limit."""
    rtt_s: float = 0.0


class _Sending:
    """The publisher's side of a transfer."""

    def __init__(self, link: MemoryConnection, ask: Ask, transfer: GroupTransfer) -> None:
        self.transfer = transfer
        self._link, self._ask, self._limit = link, ask, transfer.request.limit
        self._groups = transfer.request.groups
        self._unwatch: Callable[[], object] = lambda: None
        self._fault = Fault()
        self._data = memoryview(b"")
        self._sent = 0
        self._end: int | None = 0
        """Size of the group; None if it never ends."""
        self._next_s = 0.0
        """Time at which a slow publisher has more to send."""
        self._pace: asyncio.TimerHandle | None = None
        self._opening: asyncio.TimerHandle | None = None
        self._waiting = False
        """Whether it waits for its group to be published."""
        self._limited: Limit = "network"
        """What limits what comes next."""

    @property
    def priority(self) -> int:
        return self.transfer.priority

    @property
    def over(self) -> bool:
        """Whether nothing more will be sent."""
        return self.transfer.over

    def begin(self, fault: Fault) -> None:
        self._fault = fault
        self._opening = self._link.loop.call_later(self._link.path.rtt_s + fault.first_byte_s, self._open)

    def _waits(self) -> bool:
        """Wait for a group that is not published yet, as a subscription does; return whether it does."""
        publication = self._link.find(self._ask.namespace, self._ask.track)
        growing = isinstance(publication, GrowingPublication) and publication.growing
        if not self.transfer.request.live or not growing or self._ask.group < publication.groups:
            return False

        def look() -> None:
            self._forget()
            self._open()

        self._waiting = True
        publication.watch(self, look)
        self._unwatch = lambda: publication.unwatch(self)
        return True

    def _forget(self) -> None:
        unwatch, self._unwatch, self._waiting = self._unwatch, lambda: None, False
        unwatch()

    def _open(self) -> None:
        self._opening = None
        fault, ask = self._fault, self._ask
        what = f"group {ask.group} of {ask.track}"
        if self.over or (fault.refuse is None and self._waits()):
            return
        try:
            if fault.refuse is not None:
                code, after = fault.refuse, fault.retry_after_s
                kind = NotFoundError if code == RequestCode.DOES_NOT_EXIST else RequestError
                raise kind(
                    f"{what}: refused, code {code:#x}", reason=REASONS.get(code, Reason.OTHER), retry_after_s=after
                )
            self._data = tampered(self._published(what), fault)
        except RequestError as error:
            self.fail(error)
        self._end = None if fault.endless else len(self._data)
        self._next_s = self._link.loop.time()
        # Not at once: of those that arrive at the same moment, the most urgent goes first.
        self._link.loop.call_soon(self._link.serve)

    def _published(self, what: str) -> memoryview:
        ask = self._ask
        publication = self._link.find(ask.namespace, ask.track)
        try:
            if isinstance(publication, GrowingPublication):
                groups = range(ask.group, min(ask.group + self._groups, publication.groups))
                if publication.growing and not groups:
                    raise NotFoundError(f"{what}: not published yet", reason=Reason.MISSING)
                if data := b"".join(whole(publication.open(group)) for group in groups):
                    return memoryview(data)
            elif publication is not None and ask.group < publication.groups:
                level = isinstance(publication, LevelPublication)  # whose frames may have to be loaded
                return memoryview(whole(publication.frame(ask.group) if level else publication.open(ask.group)))
        except AssetError as error:
            raise RequestError(f"{what}: the publisher cannot read it ({error})") from error
        why = f"{what} of {ask.namespace.model}: there is none that we may read"
        raise NotFoundError(why, reason=Reason.MISSING)

    def next_chunk(self, now: float) -> int:
        """Return how many bytes could go on the link now."""
        if self.over or self._opening is not None or self._waiting:
            return 0
        fault = self._fault
        if fault.rate is not None and now < self._next_s:
            self._limited = "publisher"
            if self._pace is None:
                self._pace = self._link.loop.call_at(self._next_s, self._paced)
            return 0
        stops = [stop for stop in (self._end, fault.stall_after, fault.reset_after) if stop is not None]
        left = min(stops) - self._sent if stops else self._link.chunk
        return max(0, min(left, self._limit + 1 - self._sent, self._link.chunk))

    def ends_now(self) -> bool:
        """End the download if everything has been sent, or where its fault breaks it off; return whether it is over."""
        if self.over or self._opening is not None or self._waiting:
            return self.over
        if self._fault.reset_after is not None and self._sent >= self._fault.reset_after:
            self.fail(RequestError(f"reset by the publisher after {self._sent} bytes"))
        elif self._end is not None and self._sent >= self._end:
            self.transfer.finish()
        return self.over

    def arrived(self, count: int) -> None:
        """Take ``count`` more bytes from the link."""
        if self.over:
            return
        now = self._link.loop.time()
        begin, self._sent = self._sent, self._sent + count
        if self._fault.rate is not None:
            self._next_s = max(now - 0.01, self._next_s) + count / self._fault.rate
        part: bytes | memoryview = self._data[begin : self._sent]
        if len(part) < count:
            part = bytes(part) + bytes(count - len(part))
        limit, self._limited = self._limited, "network"
        self.transfer.push(part, limit)
        if self.transfer.error is None:
            self._link.bytes_received += count

    def fail(self, error: Exception) -> None:
        """End the transfer with an error."""
        self.stop()
        self.transfer.fail(error)

    def stop(self) -> None:
        self._forget()
        for timer in (self._opening, self._pace):
            if timer is not None:
                timer.cancel()
        self._opening = self._pace = None

    def _paced(self) -> None:
        self._pace = None
        self._link.serve()


@dataclass(slots=True)
class _Carried:
    """The chunk that is on the link."""

    sending: _Sending
    count: int
    timer: asyncio.Handle = field(repr=False)


class MemoryConnection(PeerConnection):
    """Fetches from publications in this process."""

    backend = "memory"
    protocol = "memory"

    def __init__(
        self,
        find: Find,
        path: MemoryLink | None = None,
        *,
        faults: Callable[[Ask], Fault | None] | None = None,
        lasts_s: float | None = None,
    ) -> None:
        """Connect; must be called while an event loop runs.

        Args:
            find: what is served.
            path: rate and round trip; by default none of either.
            faults: called for every request, says how the publisher misbehaves towards it.
            lasts_s: seconds after which the connection is lost.
        """
        self.loop = asyncio.get_running_loop()
        self.find, self.path = find, path or MemoryLink()
        self.bytes_received = 0
        self._faults = faults
        self._sending: list[_Sending] = []
        self._asked: dict[tuple[TrackNamespace, str, int], int] = {}
        self._requests = 0
        self._carried: _Carried | None = None
        self._lost: ConnectionLostError | None = None
        self._going_away = False
        self._lasts = None if lasts_s is None else self.loop.call_later(lasts_s, self.lose, "the connection timed out")

    def carry(self, transfer: GroupTransfer) -> None:
        """See `Carrier.carry`."""
        request = transfer.request
        key = (request.namespace, request.track, request.group)
        ask = Ask(self._requests, *key, self._asked.get(key, 0))
        self._requests += 1
        self._asked[key] = ask.attempt + 1
        sending = _Sending(self, ask, transfer)
        if self._lost is not None:
            sending.fail(self._lost)
        else:
            self._sending.append(sending)
            sending.begin((self._faults(ask) if self._faults is not None else None) or Fault())

    def reprioritise(self, transfer: GroupTransfer) -> None:
        """See `Carrier.reprioritise`: the link looks whenever it is free."""

    def drop(self, transfer: GroupTransfer) -> None:
        for sending in [one for one in self._sending if one.transfer is transfer]:
            sending.stop()
            if self._carried is not None and self._carried.sending is sending:
                self._carried.timer.cancel()
                self._carried = None
            self.serve()

    def stats(self) -> ConnectionStats:
        """See `Connection.stats`; rate and round trip are those of the link now."""
        return ConnectionStats(rtt_s=self.path.rtt_s, bytes_received=self.bytes_received)

    @property
    def closed(self) -> bool:
        return self._lost is not None

    @property
    def going_away(self) -> bool:
        return self._going_away

    @property
    def downloads(self) -> int:
        """Number of transfers that have not ended."""
        return sum(not sending.over for sending in self._sending)

    @property
    def requests(self) -> int:
        return self._requests

    def go_away(self) -> None:
        self._going_away = True

    def lose(self, reason: str = "the connection was lost") -> None:
        if self._lost is not None:
            return
        self._lost = ConnectionLostError(reason)
        if self._lasts is not None:
            self._lasts.cancel()
        if self._carried is not None:
            self._carried.timer.cancel()
            self._carried = None
        sending = list(self._sending)
        self._sending.clear()
        for one in sending:
            one.fail(self._lost)

    async def close(self) -> None:
        self.lose("this side closed the connection")

    # ---------------------------------------------------------------- the link

    @property
    def chunk(self) -> int:
        """Bytes that the link carries at once."""
        return _LONG_CHUNK if self.path.rate is None else max(_PACKET, int(self.path.rate / 1000))

    def serve(self, since: float | None = None) -> None:
        """Put the next chunk on the link if it is free and there is one; ``since``: time at which it became free."""
        if self._carried is not None or self._lost is not None:
            return
        now = self.loop.time()
        self._sending = [sending for sending in self._sending if not sending.ends_now()]
        best: tuple[int, int] | None = None
        for place, sending in enumerate(self._sending):
            urgent = best is None or sending.priority < self._sending[best[0]].priority
            if urgent and (count := sending.next_chunk(now)):
                best = (place, count)
        if best is None:
            return
        place, count = best
        sending = self._sending.pop(place)
        self._sending.append(sending)  # equals take turns
        if self.path.rate is None:
            self._carried = _Carried(sending, count, self.loop.call_soon(self._arrive, now))
        else:
            then = (now if since is None else since) + count / self.path.rate
            self._carried = _Carried(sending, count, self.loop.call_at(then, self._arrive, then))

    def _arrive(self, then: float) -> None:
        carried, self._carried = self._carried, None
        if carried is not None:
            carried.sending.arrived(carried.count)
        self.serve(then)


class Dials:
    """A `kvabr.transfer.peer.Dialler` of connections that a test makes."""

    names = ("peer:1",)

    def __init__(self, dial, max_connections=1, first=None):
        """Dial by a coroutine function; ``first`` is a connection that is there already."""
        self._dial, self._first, self.max_connections = dial, first, max_connections

    async def dial(self):
        first, self._first = self._first, None
        return await self._dial() if first is None else first
