"""Several plays over one link with a queue, packet by packet: what sharing and long queues cost.

In `Simulator` a play has the link to itself, and its bytes come as the trace carries them. Here they come as senders,
which do not know the trace, get them through the queue of a bottleneck:

- The plays have a connection each, or share one. A connection sends what is most urgent first; on a shared one the
  earliest deadline comes before that, as in `kvabr.client.scheduling`.
- A connection's window begins with ten packets and the bytes of the lookup, doubles every round trip (slow start), and
  grows by CUBIC (RFC 9438) after the first loss. A loss is noticed a round trip after it, and shrinks the window once.
  What was lost is sent again first.
- The queue drops what does not fit (drop-tail), or also what has waited too long (CoDel, RFC 8289).
- Acknowledgements cost nothing and are never lost. Packets are larger than real ones on very fast links, so that a play
  takes seconds of computation at most.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from heapq import heappop, heappush

from kvabr.player.session import Session
from kvabr.player.session_types import Action, Cancel, Decode, FetchGroup, Recompute
from kvabr.replay.link import FIRST_BYTE_S, Capacity
from kvabr.replay.simulator import EPSILON, Machine
from kvabr.types.catalog import Catalog
from kvabr.types.cost import PrefillCost
from kvabr.types.errors import UsageError

PACKET = 1164
"""Payload of a packet, bytes."""
_MOST_PACKETS = 50_000
"""Packets that the link carries in the time of a play, about; they are larger on a faster link."""
_LEAST_QUEUE = 64
"""Packets that fit the queue at least, unless its size is given."""
_BETA, _CUBIC = 0.7, 0.4
"""CUBIC's factor of a window after a loss, and its constant C, packets per second cubed."""
_TARGET_S, _INTERVAL_S = 0.005, 0.1
"""CoDel's acceptable delay of a packet, and for how long it may be exceeded."""
_MOST_RIVALS = 256


@dataclass(frozen=True, slots=True)
class Sharing:
    """How plays share a link."""

    rivals: int = 0
    """Plays of the same policy that begin at the same time as the one that is reported."""
    queue_bytes: int | None = None
    """Size of the queue; None: a round trip of the trace at its best, at least 64 packets."""
    codel: bool = False
    """Whether packets that have waited too long are dropped; if not, only those that do not fit."""
    one_connection: bool = False
    """Whether all plays share a connection."""

    def __post_init__(self) -> None:
        if not 0 <= self.rivals <= _MOST_RIVALS:
            raise UsageError(f"{self.rivals} rivals; give 0 to {_MOST_RIVALS} plays that share the link")
        if self.queue_bytes is not None and self.queue_bytes < PACKET:
            raise UsageError(f"a queue of {self.queue_bytes} bytes; at least one packet of {PACKET} must fit")


@dataclass(slots=True, eq=False)
class _Stream:
    """The answer to one request."""

    request: int
    size: int
    player: Player
    sent: int = 0
    received: int = 0
    seen: bool = False
    """Whether the session knows of its first byte."""
    cancelled: bool = False


@dataclass(slots=True, eq=False)
class _Packet:
    sender: Sender
    stream: _Stream
    size: int
    sent_s: float
    queued_s: float = 0.0


class Bottleneck:
    """The queue in front of a link, and the clock of everything that crosses it."""

    def __init__(self, capacity: Capacity, rtt_s: float, queue_bytes: int, packet: int, *, codel: bool) -> None:
        """Begin empty.

        Args:
            capacity: what the link carries, without slow start.
            rtt_s: round trip without the queue, seconds.
            queue_bytes: bytes that fit the queue.
            packet: bytes of a packet.
            codel: see `Sharing`.
        """
        self.rtt_s, self.packet = rtt_s, packet
        self.dropped = 0
        """Bytes dropped."""
        self.most_queued = 0
        """Most bytes in the queue."""
        self._capacity, self._limit, self._codel = capacity, max(queue_bytes, packet), codel
        self._queue: deque[_Packet] = deque()
        self._queued, self._busy = 0, False
        self._events: list[tuple[float, int, Callable[[float], None]]] = []
        self._made = 0
        self._above_s: float | None = None
        """When the delay will have been too long for an interval; None while it is acceptable."""
        self._drops, self._drop_s = 0, math.inf
        """Packets dropped since the delay was acceptable, and when the next one is."""

    def at(self, when: float, what: Callable[[float], None]) -> None:
        """Call ``what`` with the time at ``when``."""
        heappush(self._events, (when, self._made, what))
        self._made += 1

    def next_s(self) -> float:
        """Return the time of the next event; infinite if there is none."""
        return self._events[0][0] if self._events else math.inf

    def run(self, now: float) -> None:
        """Let everything happen until ``now``."""
        while self._events and self._events[0][0] <= now + EPSILON:
            when, _, what = heappop(self._events)
            what(when)

    def send(self, packet: _Packet, now: float) -> None:
        """Take a packet into the queue, or drop it."""
        if self._queued + packet.size > self._limit and self._busy:
            self._drop(packet, now)
            return
        packet.queued_s = now
        self._queue.append(packet)
        self._queued += packet.size
        self.most_queued = max(self.most_queued, self._queued)
        if not self._busy:
            self._serve(now)

    def _drop(self, packet: _Packet, now: float) -> None:
        """Let the sender know when it would have missed the acknowledgement: those behind it wait in the queue."""
        self.dropped += packet.size
        waits_s = self._capacity.when(now, self._queued) - now
        self.at(now + min(waits_s, 1.0) + self.rtt_s, partial(packet.sender.lost, packet))

    def _serve(self, now: float) -> None:
        self._busy = False
        while self._queue and not self._busy:
            packet = self._queue.popleft()
            if self._codel and self._too_late(now - packet.queued_s, now):
                self._queued -= packet.size
                self._drop(packet, now)
                continue
            self._busy = True
            # Aim a little short: a rounding error must not put the end behind an outage.
            self.at(self._capacity.when(now, packet.size - 0.25), partial(self._carried, packet))

    def _too_late(self, waited_s: float, now: float) -> bool:
        """Return whether CoDel drops a packet that has waited so long."""
        if waited_s < _TARGET_S or self._queued <= self.packet:
            self._above_s, self._drops, self._drop_s = None, 0, math.inf
            return False
        if self._above_s is None:
            self._above_s = self._drop_s = now + _INTERVAL_S
        if now < self._drop_s:
            return False
        self._drops += 1
        self._drop_s = now + _INTERVAL_S / math.sqrt(self._drops)
        return True

    def _carried(self, packet: _Packet, now: float) -> None:
        self._queued -= packet.size
        self.at(now + self.rtt_s / 2, partial(packet.stream.player.receive, packet.stream, packet.size))
        self.at(now + self.rtt_s, partial(packet.sender.acknowledged, packet))
        self._serve(now)


class Sender:
    """A publisher's end of one connection: its window, and what it has to send."""

    def __init__(self, link: Bottleneck, window: float, *, grown: bool = False) -> None:
        """Begin with a window of so many bytes; ``grown``: slow start is over."""
        self._link, self._window = link, max(window, float(link.packet))
        self._threshold = self._window if grown else math.inf
        self._in_flight = 0
        self._open: list[tuple[tuple[float, int], int, _Stream]] = []
        """Heap of what is to be sent, the most urgent first, then in the order of requests."""
        self._again: deque[_Packet] = deque()
        self._opened = 0
        self._shrunk_s = 0.0
        self._best = self._window
        """Window before the last loss, bytes."""

    def open(self, stream: _Stream, urgency: tuple[float, int], now: float) -> None:
        """Begin to answer a request; the lowest urgency is served first."""
        heappush(self._open, (urgency, self._opened, stream))
        self._opened += 1
        self._fill(now)

    def acknowledged(self, packet: _Packet, now: float) -> None:
        """Take an acknowledgement."""
        self._in_flight -= packet.size
        if self._window < self._threshold:
            self._window += packet.size
        else:
            self._window = max(self._window, self._cubic(now - self._shrunk_s))
        self._fill(now)

    def lost(self, packet: _Packet, now: float) -> None:
        """Notice the loss of a packet."""
        self._in_flight -= packet.size
        self._again.append(packet)
        if packet.sent_s >= self._shrunk_s:  # else it was sent before the window shrank: the same congestion
            self._best = self._window
            self._window = self._threshold = max(2.0 * self._link.packet, _BETA * self._window)
            self._shrunk_s = now
        self._fill(now)

    def _cubic(self, seconds: float) -> float:
        """Return the window so many seconds after a loss: CUBIC's, and at least that of a standard sender."""
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
            stream = self._open[0][2]
            if not stream.cancelled and stream.sent < stream.size:
                size = min(self._link.packet, stream.size - stream.sent)
                stream.sent += size
                return _Packet(self, stream, size, now)
            heappop(self._open)
        return None


class Player:
    """One of the plays: its session, its decoders and engine, and its requests."""

    def __init__(
        self, session: Session, machine: Machine, link: Bottleneck, sender: Sender, *, first_byte_s: float, due_s: float
    ) -> None:
        """Prepare a play; nothing happens before `start`.

        Args:
            session: a fresh session.
            machine: its decoders and engine.
            link: the link.
            sender: the publisher's end of its connection.
            first_byte_s: seconds that both ends need to handle a request.
            due_s: its deadline: on a shared connection the earliest goes first.
        """
        self.session, self._machine, self._link, self._sender = session, machine, link, sender
        self._first_byte_s, self._due_s = first_byte_s, due_s
        self._streams: dict[int, _Stream] = {}
        self._fresh: list[_Stream] = []
        """Streams whose first or last bytes the session does not know of."""

    def start(self) -> None:
        """Begin the play."""
        self.session.start(0.0)
        self._obey(self.session.actions(), 0.0)

    def next_s(self) -> float:
        """Return when the session has to be told something that does not come over the link."""
        timer = self.session.next_timer()
        return self._machine.next_s() if timer is None else min(timer, self._machine.next_s())

    def receive(self, stream: _Stream, size: int, now: float) -> None:  # noqa: ARG002  # an event of the link
        """Take bytes of a stream."""
        if not stream.cancelled:
            stream.received += size
            if not stream.seen or stream.received >= stream.size:
                self._fresh.append(stream)

    def tell(self, now: float) -> None:
        """Report to the session what has happened by ``now``, and do what it asks for."""
        session = self.session
        timer = session.next_timer()
        due = timer is not None and timer <= now + EPSILON
        if not (due or self._fresh or self._machine.next_s() <= now + EPSILON):
            return
        fresh, self._fresh = self._fresh, []
        for stream in fresh:
            if not stream.seen:
                stream.seen = True
                session.first_byte(stream.request, now)
            if stream.received >= stream.size and self._streams.pop(stream.request, None) is not None:
                session.done(stream.request, now)
        for stream in self._streams.values() if due else ():
            if stream.received:
                session.progress(stream.request, stream.received, now)
        self._machine.tell(now)
        if due:
            session.timer(now)
        self._obey(session.actions(), now)

    def _obey(self, actions: Iterable[Action], now: float) -> None:
        half_s = self._link.rtt_s / 2
        for action in actions:
            if isinstance(action, FetchGroup):
                stream = self._streams[action.request] = _Stream(action.request, action.bytes, self)
                urgency = (self._due_s, action.priority)
                self._link.at(now + half_s + self._first_byte_s, partial(self._sender.open, stream, urgency))
            elif isinstance(action, Decode | Recompute):
                self._machine.begin(action, now)
            elif isinstance(action, Cancel) and (stream_ := self._streams.pop(action.request, None)) is not None:
                self._link.at(now + half_s, partial(_cancel, stream_))


def _cancel(stream: _Stream, now: float) -> None:  # noqa: ARG001  # an event of the link
    stream.cancelled = True


def packet_bytes(capacity: Capacity, seconds: float) -> int:
    """Return the size of packets on a link: real ones, or larger ones if it carried too many of them."""
    return max(PACKET, int(capacity.between(0.0, seconds) / _MOST_PACKETS))


def queue_bytes(capacity: Capacity, rtt_s: float, seconds: float) -> int:
    """Return the usual size of a queue: a round trip of the link at its best, at least 64 packets."""
    best = max(rate for _, rate in capacity.series(seconds))
    return max(_LEAST_QUEUE * PACKET, int(best * rtt_s))


def play_together(link: Bottleneck, players: Iterable[Player]) -> None:
    """Play until all plays are over; raise `PolicyError` from the sessions' policy."""
    going = list(players)
    for player in going:
        player.start()
    while going := [player for player in going if not player.session.over]:
        then = min(link.next_s(), *(player.next_s() for player in going))
        link.run(then)
        for player in going:
            player.tell(then)


def play_shared(
    sharing: Sharing,
    sessions: Sequence[Session],
    catalog: Catalog,
    capacity: Capacity,
    *,
    rtt_s: float,
    window: float,
    slow_start: bool,
    cost: PrefillCost | None = None,
    decode_scale: float = 1.0,
    decoders: int = 1,
) -> Bottleneck:
    """Play sessions over one link until all are over, and return the link.

    Args:
        sharing: how they share it.
        sessions: fresh sessions, each with the same deadline.
        catalog: their catalog.
        capacity: what the link carries, without slow start.
        rtt_s: round trip without the queue, seconds.
        window: bytes that a connection may have in flight at first.
        slow_start: False for connections whose windows fill the link already.
        cost: what each engine's prefill costs; None for no engines.
        decode_scale: factor for the catalog's decode times.
        decoders: groups that each play decodes at once.

    Raises:
        PolicyError: from the sessions' policy.
    """
    seconds = sessions[0].view.deadline_s
    usual = queue_bytes(capacity, rtt_s, seconds)
    link = Bottleneck(
        capacity, rtt_s, sharing.queue_bytes or usual, packet_bytes(capacity, seconds), codel=sharing.codel
    )

    def sender() -> Sender:
        return Sender(link, window) if slow_start else Sender(link, max(window, float(usual)), grown=True)

    shared = sender()
    players = []
    for session in sessions:
        machine = Machine(session, catalog, cost, decode_scale, decoders)
        own = shared if sharing.one_connection else sender()
        players.append(Player(session, machine, link, own, first_byte_s=FIRST_BYTE_S, due_s=seconds))
    play_together(link, players)
    return link
