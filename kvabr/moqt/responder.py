"""The peer's requests: validates, reports, answers, changes and cancels them."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from kvabr.moqt import messages as m
from kvabr.moqt.codes import Param, RequestCode, ResetCode, SessionFault
from kvabr.moqt.events import Cancelled, Channel, PeerIds, Requested, RequestState, Reset, Stop, Stopped, Updated, Write
from kvabr.moqt.messages import ends_before
from kvabr.moqt.objects import FETCH_HEADER, SubgroupHeader, SubgroupWriter
from kvabr.moqt.parameters import Parameters, present, token_values, unusable
from kvabr.moqt.wire import Location, write_varint

_OF_SUBSCRIPTIONS = m.RequestUpdate.allowed - {Param.TRACK_NAMESPACE_PREFIX, Param.TRACK_PROPERTY_FILTER}
_OF_FETCHES = frozenset({Param.AUTHORIZATION_TOKEN, Param.SUBSCRIBER_PRIORITY})
_OF_PREFIXES = frozenset({Param.AUTHORIZATION_TOKEN, Param.TRACK_NAMESPACE_PREFIX})
_CHANGEABLE: dict[type[m.Message], frozenset[Param]] = {
    m.Subscribe: _OF_SUBSCRIPTIONS, m.Publish: _OF_SUBSCRIPTIONS, m.Fetch: _OF_FETCHES,
    m.PublishNamespace: frozenset({Param.AUTHORIZATION_TOKEN}), m.SubscribeNamespace: _OF_PREFIXES,
    m.SubscribeTracks: _OF_PREFIXES | {Param.FORWARD, Param.TRACK_PROPERTY_FILTER},
}  # fmt: skip
"""Parameters of a REQUEST_UPDATE by the request that it changes (draft 18, section 10.2); TRACK_STATUS has none."""
_RESERVED = (b".", b".session")
"""Reserved first namespace fields, always refused (draft 18, sections 3.2.1 and 3.2.2)."""


@dataclass(slots=True, eq=False)
class _PeerRequest(RequestState):
    streams: set[int] = field(default_factory=set)
    pushed: int = 0
    """Number of streams opened for a subscription."""


class Responder:
    """The peer's open requests. Methods for received data raise SessionFault."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self.ids = PeerIds(channel)
        self._requests: dict[int, _PeerRequest] = {}
        self._by_stream: dict[int, _PeerRequest] = {}
        self._by_data: dict[int, _PeerRequest] = {}
        self.draining = False
        self.lenient = False
        """If True, keep sending objects after the peer resets or stops the stream of an answered FETCH: moq-rs 0.5 does
        so while it still needs the objects, and cancels by stopping the stream of objects.
        """

    def __len__(self) -> int:
        return len(self._requests)

    def __contains__(self, request_id: int) -> bool:
        return request_id in self._requests

    # ------------------------------------------------------------------ messages from the peer

    def receive(self, stream: int, message: m.Message, *, first: bool) -> None:
        """Handle a message on a bidirectional stream that the peer opened."""
        request = self._by_stream.get(stream)
        if request is None:
            if first:
                self.begin(message, stream)
        elif isinstance(message, m.RequestUpdate):
            self.ids.take(message.request_id)
            self._update(request, message)
        elif isinstance(message, m.Goaway):
            self._channel.check_goaway(message, repeated=request.going_away)
            request.going_away = True
        else:
            raise SessionFault(f"{type(message).__name__} cannot follow a request on its stream")

    def begin(self, message: m.Message, stream: int) -> None:
        """Handle a new request."""
        if not isinstance(message, m.Request):
            raise SessionFault(f"{type(message).__name__} does not open a request")
        self.ids.take(message.request_id)
        tokens = token_values(message.parameters.tokens)
        if tokens:  # tokens may be long, and are not needed later
            message = replace(message, parameters=replace(message.parameters, tokens=()))
        request = _PeerRequest(message.request_id, message, stream)
        self._requests[request.number] = self._by_stream[stream] = request
        if self.draining:
            self.refuse(request.number, RequestCode.GOING_AWAY, "this server is going away; reconnect")
        elif _first_field(message) in _RESERVED:
            self.refuse(request.number, RequestCode.DOES_NOT_EXIST, "the namespace is reserved")
        elif message.parameters.range_filters or (message.parameters.fill or message.parameters).range_filters:
            self.refuse(request.number, RequestCode.INVALID_FILTER, "range filters are not supported")
        elif isinstance(message, m.Fetch) and ends_before(message.end, message.start):
            self.refuse(request.number, RequestCode.INVALID_RANGE, "the range ends before it starts")
        elif isinstance(message, m.Publish) and (why := unusable(message.properties)) is not None:
            self.refuse(request.number, *why)
        else:
            self._channel.events.append(Requested(request.number, message, tokens))

    def _update(self, request: _PeerRequest, message: m.RequestUpdate) -> None:
        parameters = message.parameters
        kind = type(request.message)
        allowed = _CHANGEABLE.get(kind)
        if allowed is None or not present(parameters) <= allowed:
            raise SessionFault(f"REQUEST_UPDATE with parameters that a {kind.__name__} cannot have")
        token_values(parameters.tokens)  # raises if they are malformed
        if parameters.namespace_prefix is not None or (parameters.fill or parameters).range_filters:
            # Refusing the change must end the request (draft 18, section 10.9.1).
            code, reason = RequestCode.NOT_SUPPORTED, "a prefix cannot be changed; make a new request"
            if parameters.namespace_prefix is None:
                code, reason = RequestCode.INVALID_FILTER, "range filters are not supported"
            self._channel.write(request.stream, m.RequestErrorMessage(code, 0, reason))
            self._cancelled(request, ResetCode.CANCELLED, reset=None)
            return
        if not request.answered:
            request.updates += 1  # will be acknowledged after the request's own answer
        else:
            self._channel.write(request.stream, m.RequestOk())
        self._channel.events.append(Updated(request.number, parameters))

    def stream_ended(self, stream: int, code: int) -> None:
        """Handle a reset or STOP_SENDING on a request's stream."""
        request = self._by_stream.get(stream)
        if request is not None and self.lenient and isinstance(request.message, m.Fetch) and request.streams:
            return
        data = self._by_data.get(stream)
        if request is None and data is not None and isinstance(data.message, m.Subscribe):
            self.pushed(data.number, stream, reset=ResetCode.CANCELLED)
            self._channel.events.append(Stopped(data.number, stream))
        elif (request := request or data) is not None:
            self._cancelled(request, code)

    def owns(self, stream: int) -> bool:
        """Return True if a bidirectional stream carries an open request."""
        return stream in self._by_stream

    # ------------------------------------------------------------------ answers from the owner

    def accept_fetch(self, request_id: int, end: Location, *, end_of_track: bool) -> int:
        """Accept a FETCH; return the stream to which the owner writes objects, after the header.

        Raise KeyError if the request has ended; a `Cancelled` event was reported.
        """
        channel, request = self._channel, self._requests[request_id]
        self._agree(request, m.FetchOk(end_of_track, end))
        stream = self._open(request)
        channel.commands.append(Write(stream, write_varint(FETCH_HEADER) + write_varint(request_id)))
        return stream

    def fetch_sent(self, request_id: int) -> None:
        """Finish a FETCH; call it after the owner has ended the stream of objects."""
        request = self._requests.get(request_id)
        if request is not None:
            self._finish(request)

    def break_off(self, request_id: int, code: int) -> None:
        """Abort a request and reset its streams."""
        request = self._requests.get(request_id)
        if request is not None:
            self._finish(request, reset=code)

    def accept_subscribe(self, request_id: int, alias: int, largest: Location | None) -> None:
        """Accept a SUBSCRIBE; like the methods below, raise KeyError if the request has ended."""
        self._agree(self._requests[request_id], m.SubscribeOk(alias, Parameters(largest=largest)))

    def push(self, request_id: int, header: SubgroupHeader) -> int:
        """Open a subgroup's stream to which the owner writes objects, after the header. See `pushed`."""
        request = self._requests[request_id]
        stream = self._open(request)
        request.pushed += 1
        self._channel.commands.append(Write(stream, SubgroupWriter(header).begin()))
        return stream

    def pushed(self, request_id: int, stream: int, *, reset: int | None = None) -> None:
        """Forget a subscription's stream that has ended; with ``reset``, reset the stream with this code."""
        if (request := self._requests.get(request_id)) is not None and stream in request.streams:
            request.streams.remove(stream)
            del self._by_data[stream]
            if reset is not None:
                self._channel.commands.append(Reset(stream, reset))

    def publish_done(self, request_id: int, code: int, reason: str) -> None:
        """End a subscription, and reset its open streams."""
        request = self._requests[request_id]
        self._channel.write(request.stream, m.PublishDone(code, request.pushed, reason))
        self._finish(request)

    def accept(self, request_id: int, parameters: Parameters | None = None) -> None:
        """Accept any other request. A TRACK_STATUS is then complete."""
        request = self._requests[request_id]
        self._agree(request, m.RequestOk(parameters or Parameters()))
        if isinstance(request.message, m.TrackStatus):
            self._finish(request)

    def announce_namespace(self, request_id: int, suffix: tuple[bytes, ...]) -> None:
        """Announce a namespace that matches a SUBSCRIBE_NAMESPACE."""
        request = self._requests.get(request_id)
        if request is not None:
            self._channel.write(request.stream, m.Namespace(suffix))

    def refuse(self, request_id: int, code: int, reason: str, *, retry_ms: int | None = None) -> None:
        """Refuse a request; `retry_ms` is the delay before a retry, None if a retry cannot succeed."""
        request = self._requests.get(request_id)
        if request is not None:
            retry = 0 if retry_ms is None else retry_ms + 1
            self._channel.write(request.stream, m.RequestErrorMessage(code, retry, reason))
            self._finish(request)

    # ------------------------------------------------------------------ internals

    def _open(self, request: _PeerRequest) -> int:
        stream = self._channel.open_uni()
        request.streams.add(stream)
        self._by_data[stream] = request
        return stream

    def _agree(self, request: _PeerRequest, message: m.Message) -> None:
        self._channel.write(request.stream, message)
        request.answered = True
        for _ in range(request.updates):
            self._channel.write(request.stream, m.RequestOk())
        request.updates = 0

    def _cancelled(self, request: _PeerRequest, code: int, *, reset: int | None = ResetCode.CANCELLED) -> None:
        if not self._channel.retract(request.number):
            self._channel.events.append(Cancelled(request.number, code))
        self._finish(request, reset=reset)

    def _finish(self, request: _PeerRequest, *, reset: int | None = None) -> None:
        if self._requests.pop(request.number, None) is None:
            return
        stream, subscribed = request.stream, isinstance(request.message, m.Subscribe)
        for data_stream in sorted(request.streams):
            del self._by_data[data_stream]
            if reset is not None or subscribed:
                code = ResetCode.CANCELLED if reset is None else reset
                self._channel.commands.append(Reset(data_stream, code))
        self._by_stream.pop(stream, None)
        if reset is None:
            # The peer ends its side by itself. STOP_SENDING would cost a frame, and aioquic would send one packet at a
            # time while the frame waits for data.
            self._channel.commands.append(Write(stream, b"", fin=True))
        else:
            self._channel.commands += [Reset(stream, reset), Stop(stream, ResetCode.CANCELLED)]


def _first_field(message: m.Request) -> bytes | None:
    prefix: tuple[bytes, ...] = getattr(message, "prefix", ())
    namespace: tuple[bytes, ...] = getattr(message, "namespace", prefix)
    return namespace[0] if namespace else None
