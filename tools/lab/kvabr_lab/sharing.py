"""Simulates several plays over one link with a queue, packet by packet, to measure the cost of sharing and queues.

Unlike in `Simulator`, senders do not know the trace, and send through the queue of a bottleneck (`kvabr_lab.packets`).
Each play has another prompt. Plays have separate clients, or share a client with its connection, estimates of the link,
and order of requests, as in `kvabr.Client`. A connection's initial window is ten packets plus the bytes of the lookup.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

from kvabr.abr.estimators import Estimator
from kvabr.client.peers import SharedLink
from kvabr.client.runner import EdfScheduler, wire_priority
from kvabr.player.session import Session
from kvabr.player.session_types import Action, Cancel, Decode, FetchGroup, Recompute
from kvabr.replay.clairvoyant import Bound
from kvabr.replay.experiment import Experiment
from kvabr.replay.link import FIRST_BYTE_S, HANDSHAKE_BYTES, INITIAL_WINDOW, Capacity
from kvabr.replay.outcome import PlayOutcome, rounded, valued
from kvabr.replay.simulator import EPSILON, Machine
from kvabr.replay.trace import Trace
from kvabr.transfer.downloads import HELD_S
from kvabr.types.errors import UsageError
from kvabr.types.events import PlayEvent
from kvabr_lab.packets import PACKET, Bottleneck, Sender, Stream, packet_bytes, queue_bytes

_MAX_RIVALS = 256


@dataclass(frozen=True, slots=True)
class Sharing:
    """How plays share a link."""

    rivals: int = 0
    """Number of further plays of the same policy that begin at the same time."""
    queue_bytes: int | None = None
    """Queue size in bytes; None: one round trip at the trace's maximum rate, at least 64 packets."""
    codel: bool = False
    """True if packets that waited too long are also dropped; False: only if the queue is full."""
    one_connection: bool = False
    """True if all plays share one client and its connection."""

    def __post_init__(self) -> None:
        if not 0 <= self.rivals <= _MAX_RIVALS:
            raise UsageError(f"rivals must be 0 to {_MAX_RIVALS} plays that share the link, got {self.rivals}")
        if self.queue_bytes is not None and self.queue_bytes < PACKET:
            raise UsageError(f"the queue must hold at least one packet of {PACKET} bytes, got {self.queue_bytes}")

    def play(
        self,
        alone: Experiment,
        trace: Trace,
        start_s: float,
        policy: str,
        capacity: Capacity,
        rtt_s: float,
        bound: Bound,
        *,
        log: bool,
    ) -> PlayOutcome:
        """Play once while other plays use the link; see `Experiment.play_on`."""
        options, lookup_s = alone.options, alone.lookup_s(trace, start_s, rtt_s)
        plays = SharedPlays(
            self,
            capacity,
            rtt_s=rtt_s,
            deadline_s=alone.time_for(lookup_s),
            window=INITIAL_WINDOW + HANDSHAKE_BYTES,
            lookup_bytes=alone.catalog_bytes,
            slow_start=options.slow_start,
        )
        machine = partial(
            Machine,
            catalog=alone.catalog,
            cost=options.cost,
            decode_scale=options.decode_scale,
            decoders=options.decoders,
            decode_latency_s=options.decode_latency_s,
        )

        def build(lines: list[PlayEvent] | None, share: Callable[[Estimator], Estimator]) -> Session:
            return alone.session(trace, start_s, policy, capacity, rtt_s, lines, lookup_s=lookup_s, share=share)

        lines: list[PlayEvent] | None = [] if log else None
        for events in (lines, *(None for _ in range(self.rivals))):
            plays.add(partial(build, events), machine)
        plays.run()
        first, *others = plays.players
        outcome = alone.outcome(
            trace, start_s, policy, first.session, capacity, bound, lines,
            lookup_s=lookup_s, ghost_bytes=first.ghost_bytes,
        )  # fmt: skip
        outcome.run["sharing"] = {
            "dropped_bytes": plays.link.dropped,
            "most_queued_bytes": plays.link.max_queued,
            "rivals": [_rival(alone, player.session, lookup_s) for player in others],
        }
        return outcome


def _rival(alone: Experiment, session: Session, lookup_s: float) -> dict[str, Any]:
    record = alone.finished(session, None, lookup_s)
    loss, value = valued(alone.catalog, alone.options.config, alone.options.deadline_s, record)
    return {
        "ttft_s": rounded(record.delivered_s),
        "met": record.met,
        "loss": rounded(loss),
        "objective": rounded(value),
    }


class _Answer(Stream):
    def __init__(self, request: FetchGroup, player: Player) -> None:
        super().__init__(request.bytes)
        self.request, self.received = request, 0
        self.last_received_s = 0.0
        self.seen = False
        """True once the first byte was reported to the session."""
        self._player = player

    def place(self) -> int:
        return self._player.place(self.request.priority)

    def receive(self, size: int, now: float) -> None:
        self._player.receive(self, size, now)

    def cancel(self, now: float) -> None:  # noqa: ARG002  # an event of the link
        self.cancelled = True


class SharedClient:
    """State that the plays of a client share; for the order see `kvabr.client.runner`."""

    def __init__(self, link: Bottleneck, sender: Sender) -> None:
        self.bandwidth = SharedLink(clock=lambda: link.now)
        self._link, self._sender = link, sender
        self._schedule: EdfScheduler[Player] = EdfScheduler()
        self._tardy: set[Player] = set()
        self._received_s: dict[int, float] = {}
        """Time of the last received bytes by rank."""

    def enter(self, player: Player, due_s: float) -> None:
        """Add a play due at ``due_s``; plays due later give way to it."""
        self._schedule.add(player, due_s)
        self._link.at(due_s, partial(self._late, player))

    def leave(self, player: Player) -> None:
        """Remove a play that has ended."""
        self._schedule.remove(player)
        self._reorder()

    def place(self, player: Player, priority: int) -> int:
        """Return a request's rank among all plays, from its priority within its play."""
        if len(self._schedule) < 2 or player.session.over:
            return priority
        return wire_priority(self._schedule.level(player), priority, late=player in self._tardy)

    def received(self, stream: _Answer, size: int, now: float) -> None:
        """Record received bytes."""
        self.bandwidth.received(size)
        self._received_s[stream.place()] = now

    def held_by_priority(self, stream: _Answer) -> bool:
        """Return True if a stream is idle only because streams of at least the same urgency receive bytes."""
        since_s = max(stream.last_received_s, self._link.now - HELD_S)
        place = stream.place()
        return any(other <= place and at_s > since_s for other, at_s in self._received_s.items())

    def _late(self, player: Player, now: float) -> None:
        if not player.session.over:
            self._tardy.add(player)
            self._schedule.remove(player)
            self._schedule.add(player, 2 * now)
            self._reorder()

    def _reorder(self) -> None:
        self._link.at(self._link.now + self._link.rtt_s, self._sender.reorder)


class Player:
    """A play, with its session, decoders, engine and requests."""

    def __init__(
        self, session: Session, machine: Machine, link: Bottleneck, sender: Sender, client: SharedClient | None
    ) -> None:
        """Prepare a play with a new session; ``client`` is state shared with other plays, or None."""
        self.session, self._machine, self._link, self._sender, self._client = session, machine, link, sender, client
        self._streams: dict[int, _Answer] = {}
        self._fresh: list[_Answer] = []
        self.ghost_bytes = 0

    def start(self) -> None:
        """Begin the play."""
        self.session.start(0.0)
        self._obey(self.session.actions(), 0.0)

    def next_s(self) -> float:
        """Return the next time at which the session must be informed of something other than the link."""
        timer = self.session.next_timer()
        return self._machine.next_s() if timer is None else min(timer, self._machine.next_s())

    def place(self, priority: int) -> int:
        """Return a request's rank on the connection."""
        return priority if self._client is None else self._client.place(self, priority)

    def receive(self, stream: _Answer, size: int, now: float) -> None:
        """Handle received bytes of a stream."""
        if stream.request.request not in self._streams:
            self.ghost_bytes += size
            return
        stream.received += size
        stream.last_received_s = now
        if self._client is not None:
            self._client.received(stream, size, now)
        if not stream.seen or stream.received >= stream.size:
            self._fresh.append(stream)

    def update(self, now: float) -> None:
        """Report everything up to ``now`` to the session, and execute its actions."""
        session = self.session
        timer = session.next_timer()
        due = timer is not None and timer <= now + EPSILON
        if not (due or self._fresh or self._machine.next_s() <= now + EPSILON):
            return
        self._update_streams(now, due=due)
        self._machine.report(now)
        if due:
            session.timer(now)
        self._obey(session.actions(), now)

    def _update_streams(self, now: float, *, due: bool) -> None:
        session = self.session
        fresh, self._fresh = self._fresh, []
        for stream in fresh:
            if not stream.seen:
                stream.seen = True
                session.first_byte(stream.request.request, now)
            if stream.received >= stream.size and self._streams.pop(stream.request.request, None) is not None:
                session.done(stream.request.request, now)
        streams = self._streams.values() if due else ()
        for stream in streams:
            if stream.received:
                session.progress(stream.request.request, stream.received, now)
        if streams and self._client is not None and all(map(self._client.held_by_priority, streams)):
            session.waited(now)

    def _obey(self, actions: Iterable[Action], now: float) -> None:
        rtt_s = self._link.rtt_s
        for action in actions:
            if isinstance(action, FetchGroup):
                stream = self._streams[action.request] = _Answer(action, self)
                self._link.at(now + rtt_s + FIRST_BYTE_S, partial(self._sender.open, stream))
            elif isinstance(action, Decode | Recompute):
                self._machine.begin(action, now)
            elif isinstance(action, Cancel) and (cut := self._streams.pop(action.request, None)) is not None:
                self._link.at(now + rtt_s, cut.cancel)


class SharedPlays:
    """Plays that begin together and share a link."""

    def __init__(
        self,
        sharing: Sharing,
        capacity: Capacity,
        *,
        rtt_s: float,
        deadline_s: float,
        window: float,
        lookup_bytes: int = 0,
        slow_start: bool = True,
    ) -> None:
        """Begin without plays.

        Args:
            sharing: How they share the link.
            capacity: The link without slow start.
            rtt_s: Round trip time without the queue.
            deadline_s: Deadline of the plays.
            window: Initial window of a connection in bytes.
            lookup_bytes: Bytes of each play's catalog, which have already opened its connection's window.
            slow_start: False for connections with windows that already fill the link.
        """
        usual = queue_bytes(capacity, rtt_s, deadline_s)
        packet = packet_bytes(capacity, deadline_s)
        self.link = Bottleneck(capacity, rtt_s, sharing.queue_bytes or usual, packet, codel=sharing.codel)
        self.players: list[Player] = []
        self._window, self._grown = window if slow_start else max(window, float(usual)), not slow_start
        self._deadline_s, self._lookup_bytes = deadline_s, lookup_bytes
        self._left: dict[Player, ExitStack] = {}
        self._shared: tuple[Sender, SharedClient] | None = None
        if sharing.one_connection:
            sender = self._sender(sharing.rivals + 1)
            self._shared = sender, SharedClient(self.link, sender)

    def _sender(self, plays: int) -> Sender:
        return Sender(self.link, self._window + plays * self._lookup_bytes, grown=self._grown)

    def add(
        self,
        build: Callable[[Callable[[Estimator], Estimator]], Session],
        machine: Callable[[Session], Machine],
    ) -> Session:
        """Add a play of the session that ``build`` returns, and return that session.

        ``build`` is called with a function that converts an estimator of the link to an estimator of the play's share
        of it; ``machine`` returns the decoders and the engine.
        """
        left = ExitStack()
        sender, client = self._shared or (self._sender(1), None)

        def share(estimator: Estimator) -> Estimator:
            return estimator if client is None else left.enter_context(client.bandwidth.joined(estimator))

        session = build(share)
        player = Player(session, machine(session), self.link, sender, client)
        if client is not None:
            client.enter(player, self._deadline_s)
            left.callback(client.leave, player)
        self._left[player] = left
        self.players.append(player)
        return session

    def run(self) -> None:
        """Run until all plays have ended; raise the `PolicyError` of a session."""
        link = self.link
        for player in self.players:
            player.start()
        going = self.players
        while going:
            for player in going:
                if player.session.over:
                    self._left.pop(player).close()
            if not (going := [player for player in going if not player.session.over]):
                return
            then = min(link.next_s(), *(player.next_s() for player in going))
            link.run(then)
            for player in going:
                player.update(then)
