"""Simulates a link with a queue, and its senders, packet by packet.

- A connection sends the most urgent data first. Its window doubles every round trip (slow start), and follows CUBIC
  (RFC 9438) after the first loss. A loss is detected after a round trip, and shrinks the window once. Lost data is sent
  again first.
- The queue drops packets that do not fit (drop-tail), and with CoDel (RFC 8289) also packets that waited too long.
- Acknowledgements use no capacity and are never lost. On very fast links, packets are larger than real ones, so that a
  play can be computed in seconds.
- Times in the trace are those at the receiver, as in `Simulator` and in the bound. Feedback reaches a sender after a
  round trip.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from heapq import heapify, heappop, heappush

from kvabr.replay.link import Capacity
from kvabr.replay.simulator import EPSILON

PACKET = 1164
"""Payload bytes per packet."""
_MAX_PACKETS = 50_000
"""Approximate maximum number of packets per play; on faster links packets are larger."""
_MIN_QUEUE = 64
"""Minimum queue in packets, unless the queue's size is given."""
_BETA, _CUBIC = 0.7, 0.4
"""CUBIC's window factor after a loss, and its constant C, packets per second cubed."""
_REORDERED = 3
"""Number of packets acknowledged after a missing packet before it counts as lost (RFC 9002, section 6.1.1)."""
_PROBE_S = 1.0
"""Seconds without an acknowledgement, beyond a round trip, before a packet counts as lost."""
_TARGET_S, _INTERVAL_S = 0.005, 0.1
"""CoDel's acceptable delay, and how long it may be exceeded, in seconds."""
_RECENT = 16
"""Number of intervals for which CoDel remembers its previous drop rate."""


class Stream(ABC):
    """The answer to a request."""

    def __init__(self, size: int) -> None:
        """Create an answer of ``size`` bytes, none of them sent."""
        self.size, self.sent = size, 0
        self.cancelled = False

    @abstractmethod
    def place(self) -> int:
        """Return the stream's rank in its connection; the lowest rank is sent first."""

    @abstractmethod
    def receive(self, size: int, now: float) -> None:
        """Handle received bytes."""


@dataclass(slots=True, eq=False)
class _Packet:
    sender: Sender
    stream: Stream
    size: int
    sent_s: float
    queued_s: float = 0.0


def packet_bytes(capacity: Capacity, seconds: float) -> int:
    """Return the size of a packet: that of a real packet, or more on fast links."""
    return max(PACKET, int(capacity.between(0.0, seconds) / _MAX_PACKETS))


def queue_bytes(capacity: Capacity, rtt_s: float, seconds: float) -> int:
    """Return the default queue size: a round trip at the link's maximum rate, at least 64 packets."""
    best = max(rate for _, rate in capacity.series(seconds))
    return max(_MIN_QUEUE * packet_bytes(capacity, seconds), int(best * rtt_s))


class Bottleneck:
    """The queue before a link, and the clock for its events."""

    def __init__(self, capacity: Capacity, rtt_s: float, queue_bytes: int, packet: int, *, codel: bool) -> None:
        """Create an empty queue; ``capacity`` excludes slow start, ``rtt_s`` the queue; for ``codel`` see `Sharing`."""
        self.rtt_s, self.packet = rtt_s, packet
        self.now = 0.0
        self.dropped = 0
        self.max_queued = 0
        self._capacity, self._limit, self._codel = capacity, max(queue_bytes, packet), codel
        self._queue: deque[_Packet] = deque()
        self._queued, self._busy = 0, False
        self._events: list[tuple[float, int, Callable[[float], None]]] = []
        self._made = 0
        self._above_s: float | None = None
        """End of the current interval of excessive delay; None while the delay is acceptable."""
        self._dropping, self._drops, self._drops_before, self._drop_s = False, 0, 0, -math.inf
        """``dropping``, ``count``, ``lastcount`` and ``drop_next`` of RFC 8289, section 5."""

    def at(self, when: float, what: Callable[[float], None]) -> None:
        """Call ``what`` at time ``when``, with the time."""
        heappush(self._events, (when, self._made, what))
        self._made += 1

    def next_s(self) -> float:
        """Return the time of the next event; infinite if there is none."""
        return self._events[0][0] if self._events else math.inf

    def run(self, now: float) -> None:
        """Process all events until ``now``."""
        while self._events and self._events[0][0] <= now + EPSILON:
            when, _, what = heappop(self._events)
            self.now = when
            what(when)
        self.now = max(self.now, now)

    def send(self, packet: _Packet, now: float) -> None:
        """Queue or drop a packet."""
        if self._queued + packet.size > self._limit and self._busy:
            self._drop(packet, now, self._queued)
            return
        packet.queued_s = now
        self._queue.append(packet)
        self._queued += packet.size
        self.max_queued = max(self.max_queued, self._queued)
        if not self._busy:
            self._serve(now)

    def _drop(self, packet: _Packet, now: float, behind: int) -> None:
        """Notify the sender once ``behind`` bytes were transferred and acknowledged, or after a timeout."""
        self.dropped += packet.size
        noticed_s = min(self._capacity.when(now, behind), now + _PROBE_S)
        self.at(noticed_s + self.rtt_s, partial(packet.sender.lost, packet))

    def _serve(self, now: float) -> None:
        self._busy = False
        while self._queue and not self._busy:
            packet = self._queue.popleft()
            if self._codel and self._too_late(now - packet.queued_s, now):
                self._queued -= packet.size
                self._drop(packet, now, min(self._queued, _REORDERED * self.packet))
                continue
            self._busy = True
            # Aim slightly short, so that a rounding error cannot move the end past an outage.
            self.at(self._capacity.when(now, packet.size - 0.25), partial(self._carried, packet))

    def _too_late(self, waited_s: float, now: float) -> bool:
        if waited_s < _TARGET_S or self._queued <= self.packet:
            self._above_s, self._dropping = None, False
            return False
        if self._above_s is None:
            self._above_s = now + _INTERVAL_S
        if now < (self._drop_s if self._dropping else self._above_s):
            return False
        if self._dropping:
            self._drops += 1
        else:
            # After a recent excessive delay, resume with the drop rate that ended it.
            more = self._drops - self._drops_before
            recent = now - self._drop_s < _RECENT * _INTERVAL_S
            self._dropping, self._drop_s = True, now
            self._drops = self._drops_before = more if recent and more > 1 else 1
        self._drop_s += _INTERVAL_S / math.sqrt(self._drops)
        return True

    def _carried(self, packet: _Packet, now: float) -> None:
        self._queued -= packet.size
        packet.stream.receive(packet.size, now)
        self.at(now + self.rtt_s, partial(packet.sender.acknowledged, packet))
        self._serve(now)


class Sender:
    """A publisher's end of a connection: its window and pending data."""

    def __init__(self, link: Bottleneck, window: float, *, grown: bool = False) -> None:
        """Create with a window in bytes; ``grown`` is True if slow start is over."""
        self._link, self._window = link, max(window, float(link.packet))
        self._threshold = self._window if grown else math.inf
        self._in_flight = 0
        self._open: list[tuple[int, int, Stream]] = []
        """Heap of pending streams: the most urgent first, then the oldest."""
        self._again: deque[_Packet] = deque()
        self._opened = 0
        self._shrunk_s = 0.0
        self._best = self._window

    def open(self, stream: Stream, now: float) -> None:
        """Start to send the answer to a request."""
        heappush(self._open, (stream.place(), self._opened, stream))
        self._opened += 1
        self._fill(now)

    def reorder(self, now: float) -> None:  # noqa: ARG002  # an event of the link
        """Apply changed ranks of plays."""
        self._open = [(stream.place(), order, stream) for _, order, stream in self._open]
        heapify(self._open)

    def acknowledged(self, packet: _Packet, now: float) -> None:
        """Handle an acknowledgement."""
        self._in_flight -= packet.size
        if self._window < self._threshold:
            self._window += packet.size
        else:
            self._window = max(self._window, self._cubic(now - self._shrunk_s))
        self._fill(now)

    def lost(self, packet: _Packet, now: float) -> None:
        """Handle the loss of a packet."""
        self._in_flight -= packet.size
        self._again.append(packet)
        if packet.sent_s >= self._shrunk_s:  # otherwise the same congestion has already shrunk the window
            self._best = self._window
            self._window = self._threshold = max(2.0 * self._link.packet, _BETA * self._window)
            self._shrunk_s = now
        self._fill(now)

    def _cubic(self, seconds: float) -> float:
        """Return the window ``seconds`` after a loss: CUBIC's, but at least that of a standard sender."""
        packet = self._link.packet
        best, rtt_s = self._best / packet, max(self._link.rtt_s, 1e-3)
        cubic = _CUBIC * (seconds - math.cbrt(best * (1.0 - _BETA) / _CUBIC)) ** 3 + best
        standard = best * _BETA + 3.0 * (1.0 - _BETA) / (1.0 + _BETA) * seconds / rtt_s
        return packet * max(cubic, standard)

    def _fill(self, now: float) -> None:
        while self._in_flight < self._window and (packet := self._next(now)) is not None:
            self._in_flight += packet.size
            self._link.send(packet, now)

    def _next(self, now: float) -> _Packet | None:
        while self._again:
            lost = self._again.popleft()
            if not lost.stream.cancelled:
                return _Packet(self, lost.stream, lost.size, now)
        while self._open:
            stream = self._open[0][-1]
            if not stream.cancelled and stream.sent < stream.size:
                size = min(self._link.packet, stream.size - stream.sent)
                stream.sent += size
                return _Packet(self, stream, size, now)
            heappop(self._open)
        return None
