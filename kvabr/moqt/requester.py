"""The requests of this end, FETCH and SUBSCRIBE, with their answers and objects."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from kvabr.moqt import messages as m
from kvabr.moqt.codes import Param, Property, RequestCode, ResetCode, SessionCode, SessionFault
from kvabr.moqt.events import (
    Answered,
    Channel,
    Ended,
    Received,
    Refused,
    RequestState,
    Reset,
    Stop,
    SubscriptionDone,
    SubscriptionEnding,
    Write,
)
from kvabr.moqt.messages import MessageParser, decode, ends_before
from kvabr.moqt.objects import DEFAULT_PRIORITY, Item, ObjectBudget, ObjectParser, SubgroupHeader
from kvabr.moqt.parameters import MalformedTrack, Parameters, present, unfold, unusable

_IN_UPDATE_OK = frozenset({Param.EXPIRES, Param.MAX_OBJECT})
"""Parameters of a REQUEST_OK that answers a REQUEST_UPDATE (draft 18, sections 10.2.10 and 10.2.11)."""
MAX_EARLY_OBJECTS_BYTES = 1 << 20
"""Maximum bytes of streams that are buffered before their SUBSCRIBE_OK; further streams are stopped."""
MAX_PARTIAL_BYTES = 1 << 20
"""Maximum total bytes of incomplete object headers on all streams."""


@dataclass(slots=True, eq=False, kw_only=True)
class _OwnRequest(RequestState):
    message: m.Fetch | m.Subscribe = field(kw_only=False)
    parser: MessageParser = field(default_factory=MessageParser)
    budget: ObjectBudget = field(default_factory=ObjectBudget)
    streams: set[int] = field(default_factory=set)
    """IDs of open streams of objects."""
    begun: int = 0
    """Number of streams of objects so far."""
    data_ended: bool = False
    """For FETCH: True if its stream of objects has ended."""
    alias: int | None = None
    """Track alias; only for SUBSCRIBE."""
    priority: int = DEFAULT_PRIORITY
    """For SUBSCRIBE: priority of subgroups that have none."""
    done: m.PublishDone | None = None
    postponed: Parameters | None = None
    """An update that will be sent once earlier updates are answered."""

    @property
    def subscribes(self) -> bool:
        return isinstance(self.message, m.Subscribe)


@dataclass(frozen=True, slots=True)
class NextPayload:
    """Next payload on a stream of a FETCH."""

    request: int
    left: int
    """Remaining bytes of the current object."""
    follower: bytes
    """Expected header after the current object; empty if it cannot be predicted."""
    size: int
    """Bytes of the next object."""


@dataclass(slots=True, eq=False)
class _Incoming:
    request: _OwnRequest
    objects: ObjectParser


@dataclass(slots=True, eq=False)
class _Held:
    """A stream with a track alias that no SUBSCRIBE_OK has announced yet."""

    header: SubgroupHeader
    data: bytearray
    ended: bool


class Requester:
    """The open requests of this end. Methods for received data raise SessionFault."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._requests: dict[int, _OwnRequest] = {}
        self._by_stream: dict[int, _OwnRequest] = {}
        self._by_data: dict[int, _Incoming | _Held | None] = {}
        """State of each open unidirectional stream, by ID; None if its content is ignored."""
        self._by_alias: dict[int, _OwnRequest] = {}
        self._held_bytes = 0
        self.max_updates = 0
        """Number of unanswered updates allowed per request; 0: any number."""
        self.peer_draining = False

    # ------------------------------------------------------------------ called by the owner

    def subscribed(self, namespace: tuple[bytes, ...], track: bytes) -> bool:
        """Return True if a subscription to a track is open."""
        return any(
            each.subscribes and (each.message.namespace, each.message.track) == (namespace, track)
            for each in self._requests.values()
        )

    def request(self, message: m.Fetch | m.Subscribe) -> None:
        """Make a request."""
        number, stream = message.request_id, self._channel.open_bidi()
        request = _OwnRequest(number, message, stream)
        self._requests[number] = self._by_stream[stream] = request
        self._channel.write(stream, message)

    def update(self, request_id: int, parameters: Parameters) -> bool:
        """Send a REQUEST_UPDATE; return False if the request has ended.

        At the peer's limit of unanswered updates, only the latest update is kept, and sent later.
        """
        request = self._requests.get(request_id)
        if request is None or self.peer_draining:
            return False
        if self.max_updates and request.updates >= self.max_updates:
            request.postponed = parameters
            return True
        request.updates += 1
        self._channel.write(request.stream, m.RequestUpdate(self._channel.take_id(), parameters))
        return True

    def cancel(self, request_id: int, code: int = ResetCode.CANCELLED) -> None:
        """Cancel a request. No events follow for this request."""
        request = self._requests.get(request_id)
        if request is None:
            return
        self._forget(request, code)
        self._channel.commands += [Reset(request.stream, code), Stop(request.stream, code)]

    def stop(self, stream: int) -> None:
        """Stop one stream of a subscription."""
        found = self._by_data.get(stream)
        if isinstance(found, _Incoming):
            found.request.streams.discard(stream)
            self._reject(stream, fin=False)
            self._finish(found.request)

    # ------------------------------------------------------------------ answers from the peer

    def by_id(self, number: int) -> _OwnRequest | None:
        """Return a request; None if it has ended."""
        if not self._channel.made(number):
            raise SessionFault(f"answer to request {number}, which was never made")
        return self._requests.get(number)

    def receive_answers(self, stream: int, data: bytes | memoryview, *, fin: bool) -> None:
        """Handle bytes of a request's own stream; ignore them if the request has ended."""
        request = self._by_stream.get(stream)
        if request is None:
            return
        for kind, payload in request.parser.feed(data):
            message = decode(kind, payload, self._channel.draft)
            if stream in self._by_stream:
                self.answer(request, message)
        if fin:
            if request.parser.buffered:
                raise SessionFault("the answers to a request end inside a message")
            self.stream_ended(stream, None)

    def answer(self, request: _OwnRequest, message: m.Message) -> None:
        """Handle an answer to a request."""
        channel = self._channel
        if isinstance(message, m.RequestErrorMessage) and message.redirect is not None:
            channel.check_uri(message.redirect.uri, message)
        if isinstance(message, m.RequestOk) and request.updates:  # possible even before the request itself is answered
            self._updated(request, message)
        elif isinstance(message, m.RequestErrorMessage) and request.updates and request.answered:
            self._update_answered(request)
        elif isinstance(message, m.RequestErrorMessage) and request.done is None:
            channel.events.append(Refused(request.number, message))
            self._drop(request)
        elif isinstance(message, m.Goaway):
            # The request continues until its stream is reset.
            channel.check_goaway(message, repeated=request.going_away)
            request.going_away = True
        elif isinstance(request.message, m.Fetch):
            self._answer_fetch(request, request.message, message)
        else:
            self._answer_subscribe(request, message)

    def _answer_fetch(self, request: _OwnRequest, fetch: m.Fetch, message: m.Message) -> None:
        if not isinstance(message, m.FetchOk) or request.answered:
            raise SessionFault(f"{type(message).__name__} does not answer a FETCH")
        if fetch.parameters.filter is None and ends_before(message.end, fetch.start):
            raise SessionFault(f"FETCH_OK ends at {tuple(message.end)}, before the start of its FETCH")
        if self._accepted(request, message):
            self._finish(request)

    def _answer_subscribe(self, request: _OwnRequest, message: m.Message) -> None:
        if isinstance(message, m.SubscribeOk) and not request.answered:
            alias = message.track_alias
            if alias in self._by_alias:
                code = SessionCode.DUPLICATE_TRACK_ALIAS
                raise SessionFault(f"track alias {alias} is already in use", code)
            if self._accepted(request, message):
                request.alias, request.priority = alias, _priority(message)
                self._by_alias[alias] = request
                self._release(request)
            self._drop_held()
        elif isinstance(message, m.PublishDone) and request.answered and request.done is None:
            request.done = message
            self._channel.events.append(SubscriptionEnding(request.number, message))
            self._finish(request)
        elif not isinstance(message, m.PublishStateNotify) or not request.answered:  # that message is only informative
            raise SessionFault(f"{type(message).__name__} does not answer a SUBSCRIBE")

    def _accepted(self, request: _OwnRequest, message: m.FetchOk | m.SubscribeOk) -> bool:
        request.answered = True
        if (refusal := unusable(message.properties)) is not None:
            self._abandon(request, *refusal)
            return False
        self._channel.events.append(Answered(request.number, message))
        return True

    def _updated(self, request: _OwnRequest, message: m.RequestOk) -> None:
        self._update_answered(request)
        if message.properties:
            raise SessionFault("REQUEST_OK for a REQUEST_UPDATE carries properties")
        if extra := present(message.parameters) - _IN_UPDATE_OK:
            names = ", ".join(sorted(param.name for param in extra))
            raise SessionFault(f"REQUEST_OK for a REQUEST_UPDATE carries the parameters {names}")

    def _update_answered(self, request: _OwnRequest) -> None:
        request.updates -= 1
        postponed, request.postponed = request.postponed, None
        if postponed is not None:
            self.update(request.number, postponed)

    def stream_ended(self, stream: int, code: int | None) -> None:
        """Handle the end (`code` is None) or the reset of a request's own stream."""
        request = self._by_stream.get(stream)
        if request is None or request.done is not None:
            return
        if code is None and request.answered and not request.subscribes and not request.data_ended:
            return  # regular: objects may still arrive
        if not request.data_ended:
            # Keep only codes with the same meaning for streams and requests.
            same = code in (ResetCode.EXPIRED_AUTH_TOKEN, ResetCode.EXCESSIVE_LOAD, ResetCode.MALFORMED_TRACK)
            how = "ended" if code is None else f"reset (code 0x{code:x})"
            when = "before completing it" if request.answered else "without an answer"
            refusal = code if same and code is not None else RequestCode.INTERNAL_ERROR
            self._refused(request, refusal, f"the peer {how} the request's stream {when}")
        self._drop(request)

    # ------------------------------------------------------------------ objects

    def ignore(self, stream: int) -> None:
        """Ignore the content of a unidirectional stream."""
        self._by_data[stream] = None

    def begin_objects(self, stream: int, of: SubgroupHeader | int, data: memoryview, *, fin: bool) -> None:
        """Handle the first objects on a stream, which is of a subgroup or of the FETCH with the given ID."""
        header = None if isinstance(of, int) else of
        request = self.by_id(of) if isinstance(of, int) else self._by_alias.get(of.track_alias)
        if request is None and header is not None and self._early:
            self._hold(stream, _Held(header, bytearray(), ended=False), data, fin=fin)
        elif request is None:
            self._reject(stream, fin=fin)  # the request was cancelled before
        elif header is None and request.subscribes:
            raise SessionFault(f"stream of objects for request {request.number}, which is not a FETCH")
        elif header is None and request.begun:
            raise SessionFault(f"second stream of objects for request {request.number}")
        else:
            self._begin(stream, request, header, data, fin=fin)

    def _begin(
        self, stream: int, request: _OwnRequest, header: SubgroupHeader | None, data: memoryview, *, fin: bool
    ) -> None:
        descending = header is None and request.message.parameters.group_order == 2
        objects = ObjectParser(header, descending=descending, budget=request.budget, priority=request.priority)
        request.begun += 1
        request.streams.add(stream)
        self._by_data[stream] = _Incoming(request, objects)
        self.receive_objects(stream, data, fin=fin)

    def receives(self, stream: int) -> bool:
        """Return True if a unidirectional stream carries objects."""
        return stream in self._by_data

    def receive_objects(self, stream: int, data: bytes | memoryview, *, fin: bool) -> None:
        """Handle further objects of a stream."""
        found = self._by_data[stream]
        if isinstance(found, _Held):
            self._hold(stream, found, data, fin=fin)
            return
        if fin:
            del self._by_data[stream]
        if found is None:
            return
        request, objects = found.request, found.objects
        if fin:
            request.streams.discard(stream)
        try:
            items = objects.feed(data)
            if fin:
                objects.finish()
        except MalformedTrack as error:
            self._abandon(request, RequestCode.MALFORMED_TRACK, f"malformed track: {error}")
            return
        if items:
            self._received(request, stream, items)
        if fin:
            self._data_ended(request, stream, None)
        elif objects.buffered and self.partial_bytes > MAX_PARTIAL_BYTES:
            what = f"more than {MAX_PARTIAL_BYTES} bytes of incomplete headers of objects"
            raise SessionFault(what, SessionCode.INTERNAL_ERROR)

    def expected(self, stream: int) -> NextPayload | None:
        """Return the expected payload of a FETCH on a stream, or None.

        The owner may read this payload directly, and then call `took` instead of `receive_objects`.
        """
        found = self._by_data.get(stream)
        if not isinstance(found, _Incoming) or found.request.subscribes or not found.objects.left:
            return None
        return NextPayload(found.request.number, found.objects.left, found.objects.follower, found.objects.size)

    def took(self, stream: int, parts: Sequence[memoryview]) -> tuple[int, Sequence[memoryview]]:
        """Record that data returned by `expected` was read, see `ObjectParser.took`."""
        found = self._by_data[stream]
        assert isinstance(found, _Incoming)  # noqa: S101  # the caller has checked
        return found.objects.took(parts)

    def _received(self, request: _OwnRequest, stream: int, items: list[Item]) -> None:
        events, named = self._channel.events, stream if request.subscribes else None
        last = events[-1] if events else None
        if isinstance(last, Received) and (last.request_id, last.stream) == (request.number, named):
            last.items.extend(items)
        else:
            events.append(Received(request.number, items, named))

    @property
    def partial_bytes(self) -> int:
        """Number of buffered bytes of incomplete object headers."""
        return sum(each.objects.buffered for each in self._by_data.values() if isinstance(each, _Incoming))

    def data_reset(self, stream: int, code: int) -> None:
        """Handle the reset of a stream of objects."""
        found = self._by_data.pop(stream, None)
        if isinstance(found, _Held):
            self._held_bytes -= len(found.data) + 64
        elif found is not None:
            found.request.streams.discard(stream)
            self._data_ended(found.request, stream, code)

    # ------------------------------------------------------------------ streams before their SUBSCRIBE_OK

    @property
    def _early(self) -> bool:
        """True if a later SUBSCRIBE_OK may announce a track alias."""
        return any(each.subscribes and not each.answered for each in self._requests.values())

    def _hold(self, stream: int, held: _Held, data: bytes | memoryview, *, fin: bool) -> None:
        self._held_bytes += len(data) + (64 if stream not in self._by_data else 0)
        held.data += data
        held.ended = fin
        self._by_data[stream] = held
        if self._held_bytes > MAX_EARLY_OBJECTS_BYTES:
            self._unhold(stream, held)
            self._reject(stream, fin=fin)

    def _release(self, request: _OwnRequest) -> None:
        for stream, held in list(self._held):
            if held.header.track_alias == request.alias and self._by_data.get(stream) is held:
                self._unhold(stream, held)
                self._begin(stream, request, held.header, memoryview(bytes(held.data)), fin=held.ended)
                if request.number not in self._requests:
                    return

    def _drop_held(self) -> None:
        if self._held_bytes and not self._early:
            for stream, held in list(self._held):
                self._unhold(stream, held)
                self._reject(stream, fin=held.ended)

    @property
    def _held(self) -> Iterator[tuple[int, _Held]]:
        return ((stream, each) for stream, each in self._by_data.items() if isinstance(each, _Held))

    def _unhold(self, stream: int, held: _Held) -> None:
        del self._by_data[stream]
        self._held_bytes -= len(held.data) + 64

    def _reject(self, stream: int, *, fin: bool) -> None:
        if not fin:
            self.ignore(stream)
            self._channel.commands.append(Stop(stream, ResetCode.CANCELLED))

    # ------------------------------------------------------------------ internals

    def _data_ended(self, request: _OwnRequest, stream: int, code: int | None) -> None:
        request.data_ended = not request.subscribes
        self._channel.events.append(Ended(request.number, code, stream if request.subscribes else None))
        self._finish(request)

    def _refused(self, request: _OwnRequest, code: int, reason: str) -> None:
        self._channel.events.append(Refused(request.number, m.RequestErrorMessage(code, 0, reason)))

    def _abandon(self, request: _OwnRequest, code: int, reason: str) -> None:
        """Cancel a request because its track is unusable (draft 18, section 2.4.2)."""
        self.cancel(request.number)
        self._refused(request, code, reason)

    def _finish(self, request: _OwnRequest) -> None:
        done = request.done
        if request.answered and request.data_ended:
            self._drop(request)
        elif done is not None and not request.streams and request.begun >= done.streams:
            self._channel.events.append(SubscriptionDone(request.number))
            self._drop(request)

    def _drop(self, request: _OwnRequest) -> None:
        self._forget(request, ResetCode.CANCELLED)
        self._channel.commands.append(Write(request.stream, b"", fin=True))

    def _forget(self, request: _OwnRequest, code: int) -> None:
        self._requests.pop(request.number, None)
        self._by_stream.pop(request.stream, None)
        if request.alias is not None and self._by_alias.get(request.alias) is request:
            del self._by_alias[request.alias]
        for stream in sorted(request.streams):
            self._by_data[stream] = None
            self._channel.commands.append(Stop(stream, code))
        request.streams.clear()
        self._drop_held()


def _priority(message: m.SubscribeOk) -> int:
    try:
        every = dict(unfold(message.properties))
    except MalformedTrack:  # refused by `unusable`
        return DEFAULT_PRIORITY
    value = every.get(Property.DEFAULT_PUBLISHER_PRIORITY, DEFAULT_PRIORITY)
    return value if isinstance(value, int) else DEFAULT_PRIORITY
