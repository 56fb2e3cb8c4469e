"""Two sessions connected in memory by streams with QUIC's guarantees: order within a stream, none between streams."""

import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvabr.moqt.events import Close, Event, Requested, Reset, Stop, Write
from kvabr.moqt.messages import Fetch, Request, Subscribe, SubscribeNamespace
from kvabr.moqt.objects import FetchWriter, RangeEnd
from kvabr.moqt.session import MoqtSession
from kvabr.moqt.setup_options import SetupOptions
from kvabr.moqt.wire import DRAFT_22, Draft, Location, Parameters

NAMESPACE = (b"root", b"model", b"prompt")
TRACK = b"FP16"
GROUPS = {0: [b"a0", b"a1", b"a2"], 1: [b"b0"], 3: [b"d0", b"d1"]}


@dataclass
class Pipe:
    sent: deque[bytes | int | None] = field(default_factory=deque)
    """In flight: bytes, None for the end, or the code of a reset."""
    over: bool = False
    stopped: bool = False
    """STOP_SENDING has been sent."""


class Pair:
    """A client and a server; with a seed, streams overtake each other at random, in pieces."""

    def __init__(
        self,
        draft: Draft = DRAFT_22,
        *,
        seed: int | None = None,
        client: SetupOptions | None = None,
        server: SetupOptions | None = None,
        start: bool = True,
    ) -> None:
        self.draft = draft
        self.client = MoqtSession(draft, client=True, options=client)
        self.server = MoqtSession(draft, client=False, options=server)
        self.ends = {True: self.client, False: self.server}
        self.events: dict[bool, list[Event]] = {True: [], False: []}
        self.owners: dict[bool, Callable[[Event], None]] = {}
        self.pipes: dict[tuple[bool, int], Pipe] = {}
        """By sender (True: the client) and stream."""
        self.stops: deque[tuple[bool, int, int]] = deque()
        """STOP_SENDINGs in flight: receiver, stream, code."""
        self.closes: dict[bool, Close] = {}
        self.foreign: dict[int, int] = {}
        """Requests made by `request` with their streams."""
        self.dice = None if seed is None else random.Random(seed)
        self.client.start()
        self.server.start()
        if start:
            self.run()

    def write(self, sender: bool, stream: int, data: bytes, *, fin: bool = False) -> None:
        """Write after everything that the session has sent so far."""
        self._carry_out(sender)
        self._write(sender, stream, data, fin=fin)

    def _write(self, sender: bool, stream: int, data: bytes, *, fin: bool) -> None:
        pipe = self.pipes.setdefault((sender, stream), Pipe())
        if pipe.over:
            return  # a QUIC library raises here, and the owner ignores it
        if data:
            pipe.sent.append(data)
        if fin:
            pipe.sent.append(None)
            pipe.over = True

    def reset(self, sender: bool, stream: int, code: int) -> None:
        pipe = self.pipes.setdefault((sender, stream), Pipe())
        if pipe.over:
            return
        if self.dice is not None and self.dice.random() < 0.5:
            pipe.sent.clear()  # a reset may overtake data in flight
        pipe.sent.append(code)
        pipe.over = True

    def request(self, make: Callable[[int], Request]) -> int:
        """Make a client's request of a kind that sessions only answer; the client ignores the answers."""
        channel = self.client._channel
        number = channel.take_id()
        message = make(number)
        stream = self.foreign[number] = channel.open_bidi()
        channel.write(stream, message, fin=not isinstance(message, Subscribe | SubscribeNamespace))
        return number

    def cancel(self, number: int) -> None:
        if number not in self.foreign:
            self.client.requester.cancel(number)
        else:
            stream = self.foreign.pop(number)
            self.client._channel.commands += [Reset(stream, 1), Stop(stream, 1)]

    def collect(self) -> None:
        """Pass events to the owners and carry out commands."""
        again = True
        while again:
            again = False
            for sender, session in self.ends.items():
                events = session.take_events()
                self.events[sender] += events
                for event in events:
                    if sender in self.owners:
                        self.owners[sender](event)
                again |= bool(events)
                self._carry_out(sender)

    def _carry_out(self, sender: bool) -> None:
        for command in self.ends[sender].take_commands():
            if isinstance(command, Write):
                self._write(sender, command.stream, command.data, fin=command.fin)
            elif isinstance(command, Reset):
                self.reset(sender, command.stream, command.code)
            elif isinstance(command, Stop):
                pipe = self.pipes.setdefault((not sender, command.stream), Pipe())
                if not pipe.stopped:
                    pipe.stopped = True
                    self.stops.append((not sender, command.stream, command.code))
            else:
                self.closes[sender] = command

    def run(self, steps: int | None = None) -> None:
        """Deliver everything in flight, or make a number of deliveries."""
        self.collect()
        while steps is None or steps > 0:
            if not self._step():
                return
            self.collect()
            steps = None if steps is None else steps - 1

    def _step(self) -> bool:
        ready = [key for key, pipe in self.pipes.items() if pipe.sent]
        if self.stops and (not ready or self.dice is None or self.dice.random() < 0.3):
            to, stream, code = self.stops.popleft()
            self.ends[to].receive_stop(stream, code)
            self.collect()
            self.reset(to, stream, code)  # QUIC does this by itself
            return True
        if not ready:
            return False
        sender, stream = ready[0] if self.dice is None else self.dice.choice(ready)
        self._deliver(sender, stream)
        return True

    def _deliver(self, sender: bool, stream: int) -> None:
        pipe, receiver = self.pipes[(sender, stream)], self.ends[not sender]
        first = pipe.sent.popleft()
        if first is None:
            receiver.receive(stream, b"", fin=True)
        elif isinstance(first, int):
            receiver.receive_reset(stream, first)
        else:
            if self.dice is not None and len(first) > 1 and self.dice.random() < 0.6:
                cut = self.dice.randrange(1, len(first))
                pipe.sent.appendleft(first[cut:])
                first = first[:cut]
            fin = bool(pipe.sent) and pipe.sent[0] is None
            if fin:
                pipe.sent.popleft()
            receiver.receive(stream, first, fin=fin)

    def told(self, client: bool, *kinds: type) -> list[Event]:
        return [event for event in self.events[client] if isinstance(event, kinds)]

    def healthy(self) -> None:
        assert self.closes == {}, self.closes

    def tidy(self) -> None:
        """Assert that nothing was wrong, and that no state is left."""
        self.healthy()
        for session in self.ends.values():
            assert session._messages == {}
            assert session._early == {}
            assert session._headers == {}
            assert session.requester._by_data == {}
            assert session.requester._requests == {}
            assert session.requester._by_stream == {}
            assert session.responder._requests == {}
            assert session.responder._by_stream == {}
            assert session.responder._by_data == {}


class Origin:
    """Answer FETCHes of one track; `groups` maps group IDs to the payloads of objects 0, 1, 2 ..."""

    def __init__(self, pair: Pair, groups: dict[int, Sequence[bytes]], *, client: bool = False) -> None:
        self.pair, self.groups, self.side = pair, groups, client
        self.answered = 0
        pair.owners[client] = self

    def __call__(self, event: Event) -> None:
        if isinstance(event, Requested) and isinstance(event.message, Fetch):
            self.fetch(event.request_id, event.message)

    def fetch(self, number: int, message: Fetch) -> None:
        session = self.pair.ends[self.side]
        start, end = message.start, message.end
        descending = message.parameters.group_order == 2
        stream = session.responder.accept_fetch(number, end, end_of_track=False)
        writer = FetchWriter(descending=descending)
        for group in sorted(self.groups, reverse=descending):
            for index, payload in enumerate(self.groups[group]):
                at = Location(group, index)
                if at >= start and (group < end.group or (group == end.group and (not end.object or at < end))):
                    data = writer.header(group, index, len(payload)) + payload
                    self.pair.write(self.side, stream, data)
        self.pair.write(self.side, stream, b"", fin=True)
        session.responder.fetch_sent(number)
        self.answered += 1


def ask(pair: Pair, start: tuple[int, int] = (0, 0), end: tuple[int, int] = (0, 0), **more: Any) -> int:
    return pair.client.fetch(NAMESPACE, TRACK, Location(*start), Location(*end), Parameters(**more))


def payload(events: Sequence[object]) -> bytes:
    return b"".join(item for event in events for item in event.items if isinstance(item, memoryview))  # type: ignore[attr-defined]


def locations(events: Sequence[object]) -> list[tuple[int, int]]:
    """Return the locations of the objects in `Received` events."""
    found = [item for event in events for item in event.items if not isinstance(item, memoryview)]  # type: ignore[attr-defined]
    return [tuple(item.location) if isinstance(item, RangeEnd) else (item.group, item.object) for item in found]
