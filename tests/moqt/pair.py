"""Two sessions joined in memory by streams that keep QUIC's promises: order within a stream, none between streams."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from kvabr.moqt.events import Close, Event, Requested, Reset, Stop, Write
from kvabr.moqt.messages import Fetch, Request, SubscribeNamespace
from kvabr.moqt.objects import FetchWriter, RangeEnd
from kvabr.moqt.parameters import SetupOptions
from kvabr.moqt.session import Session
from kvabr.moqt.wire import Draft, Location

NAMESPACE = (b"root", b"model", b"prompt")
TRACK = b"FP16"


@dataclass
class Lane:
    """One direction of one stream: what is under way, and whether the sender is done with it."""

    sent: deque[bytes | int | None] = field(default_factory=deque)
    """Bytes; None: the end; a number: a reset."""
    over: bool = False
    stopped: bool = False
    """STOP_SENDING is under way to the sender, or was."""


class Pair:
    """A client and a server.

    Args:
        draft: the draft.
        seed: None: what was sent first comes first. Otherwise streams overtake each other at random, in pieces.
        start: whether to exchange SETUPs now.
    """

    def __init__(
        self,
        draft: Draft,
        *,
        seed: int | None = None,
        client: SetupOptions | None = None,
        server: SetupOptions | None = None,
        start: bool = True,
    ) -> None:
        self.draft = draft
        self.client = Session(draft, client=True, options=client)
        self.server = Session(draft, client=False, options=server)
        self.ends = {True: self.client, False: self.server}
        self.events: dict[bool, list[Event]] = {True: [], False: []}
        self.owners: dict[bool, Callable[[Event], None]] = {}
        self.lanes: dict[tuple[bool, int], Lane] = {}
        """By who sends, and the stream."""
        self.stops: deque[tuple[bool, int, int]] = deque()
        """STOP_SENDING to whom, about which stream, and why."""
        self.closes: dict[bool, Close] = {}
        self.foreign: dict[int, int] = {}
        """Requests of the client that its session does not know, with their streams."""
        self.dice = None if seed is None else random.Random(seed)
        self.client.start()
        self.server.start()
        if start:
            self.run()

    # ------------------------------------------------------------------ what an owner of a session does

    def write(self, sender: bool, stream: int, data: bytes, *, fin: bool = False) -> None:
        """Behind all that the session has wanted sent before."""
        self._carry_out(sender)
        self._write(sender, stream, data, fin=fin)

    def _write(self, sender: bool, stream: int, data: bytes, *, fin: bool) -> None:
        lane = self.lanes.setdefault((sender, stream), Lane())
        if lane.over:
            return  # a QUIC library raises here, and the owner lets it be
        if data:
            lane.sent.append(data)
        if fin:
            lane.sent.append(None)
            lane.over = True

    def reset(self, sender: bool, stream: int, code: int) -> None:
        lane = self.lanes.setdefault((sender, stream), Lane())
        if lane.over:
            return
        if self.dice is not None and self.dice.random() < 0.5:
            lane.sent.clear()  # what has not arrived may never
        lane.sent.append(code)
        lane.over = True

    def request(self, make: Callable[[int], Request]) -> int:
        """Make a request that sessions only answer; the client's session ignores what comes back."""
        channel = self.client._channel
        number = channel.take_id()
        message = make(number)
        namespaces = isinstance(message, SubscribeNamespace)
        if self.draft.streams or namespaces:
            self.foreign[number] = channel.open_bidi()
            channel.write(self.foreign[number], message, fin=not namespaces)
        else:
            channel.control(message)
        return number

    def cancel(self, number: int) -> None:
        """Cancel any request of the client's."""
        stream = self.foreign.pop(number, None)
        if stream is None:
            self.client.requester.cancel(number)
        else:
            self.client._channel.commands += [Reset(stream, 1), Stop(stream, 1)]

    def collect(self) -> None:
        """Let the owners hear what there is, and carry out what the sessions want."""
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
                lane = self.lanes.setdefault((not sender, command.stream), Lane())
                if not lane.stopped:
                    lane.stopped = True
                    self.stops.append((not sender, command.stream, command.code))
            else:
                self.closes[sender] = command

    # ------------------------------------------------------------------ the network

    def run(self, steps: int | None = None) -> None:
        """Deliver everything, or a few things."""
        self.collect()
        while steps is None or steps > 0:
            if not self._step():
                return
            self.collect()
            steps = None if steps is None else steps - 1

    def _step(self) -> bool:
        ready = [key for key, lane in self.lanes.items() if lane.sent]
        if self.stops and (not ready or self.dice is None or self.dice.random() < 0.3):
            to, stream, code = self.stops.popleft()
            self.ends[to].receive_stop(stream, code)
            self.collect()
            self.reset(to, stream, code)  # which QUIC does by itself
            return True
        if not ready:
            return False
        sender, stream = ready[0] if self.dice is None else self.dice.choice(ready)
        self._deliver(sender, stream)
        return True

    def _deliver(self, sender: bool, stream: int) -> None:
        lane, receiver = self.lanes[(sender, stream)], self.ends[not sender]
        first = lane.sent.popleft()
        if first is None:
            receiver.receive(stream, b"", fin=True)
        elif isinstance(first, int):
            receiver.receive_reset(stream, first)
        else:
            if self.dice is not None and len(first) > 1 and self.dice.random() < 0.6:
                cut = self.dice.randrange(1, len(first))
                lane.sent.appendleft(first[cut:])
                first = first[:cut]
            fin = bool(lane.sent) and lane.sent[0] is None
            if fin:
                lane.sent.popleft()
            receiver.receive(stream, first, fin=fin)

    # ------------------------------------------------------------------ what tests look at

    def told(self, client: bool, *kinds: type) -> list[Event]:
        return [event for event in self.events[client] if isinstance(event, kinds)]

    def healthy(self) -> None:
        assert self.closes == {}, self.closes

    def tidy(self) -> None:
        """Nothing is kept of what is over."""
        for session in self.ends.values():
            assert session._messages == {}
            assert session._early == {}
            assert len(session._incoming) == 0
            assert session.requester._requests == {}
            assert session.requester._by_stream == {}
            assert not session.requester._waiting
            assert session.responder._requests == {}
            assert session.responder._by_stream == {}
            assert session.responder._by_data == {}
            assert session._channel.aliases == {}


class Origin:
    """Answers FETCHes of one track: group to payloads, numbered from 0."""

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
        writer = FetchWriter(self.pair.draft, descending=descending)
        for group in sorted(self.groups, reverse=descending):
            for index, payload in enumerate(self.groups[group]):
                at = Location(group, index)
                if at >= start and (group < end.group or (group == end.group and (not end.object or at < end))):
                    data = writer.header(group, index, len(payload)) + payload
                    self.pair.write(self.side, stream, data)
        self.pair.write(self.side, stream, b"", fin=True)
        session.responder.fetch_sent(number)
        self.answered += 1


def payload(events: Sequence[object]) -> bytes:
    """What `Received` events brought, end to end."""
    return b"".join(item for event in events for item in event.items if isinstance(item, memoryview))  # type: ignore[attr-defined]


def locations(events: Sequence[object]) -> list[tuple[int, int]]:
    """Where the objects were that `Received` events brought."""
    found = [item for event in events for item in event.items if not isinstance(item, memoryview)]  # type: ignore[attr-defined]
    return [tuple(item.location) if isinstance(item, RangeEnd) else (item.group, item.object) for item in found]
