"""Requests of the peer's: heard, answered, changed, cancelled."""

from __future__ import annotations

from kvabr.moqt.channel import Channel, PeerIds, RequestState
from kvabr.moqt.codes import Param, RequestCode, ResetCode, SessionCode, SessionFault
from kvabr.moqt.events import Cancelled, Requested, Reset, Stop, Updated, Write
from kvabr.moqt.messages import (
    Fetch,
    FetchOk,
    Goaway,
    JoiningFetch,
    MaxRequestId,
    Message,
    Namespace,
    NamespaceDone,
    Publish,
    PublishDone,
    PublishNamespace,
    Request,
    RequestError,
    RequestOk,
    RequestUpdate,
    Subscribe,
    SubscribeNamespace,
    SubscribeOk,
    SubscribeTracks,
    TrackStatus,
)
from kvabr.moqt.objects import FETCH_HEADER
from kvabr.moqt.parameters import Parameters, TokenCache, present
from kvabr.moqt.properties import MalformedTrack, unknown_mandatory
from kvabr.moqt.wire import KeyValue, Location

REQUESTS = (
    Subscribe, TrackStatus, Publish, Fetch, JoiningFetch, PublishNamespace, SubscribeNamespace, SubscribeTracks,
)  # fmt: skip
"""Messages that open a request."""
REQUEST_WINDOW = 256
"""Draft 16: requests that a peer may have open."""
_OF_SUBSCRIPTIONS = frozenset({
    Param.OBJECT_DELIVERY_TIMEOUT, Param.SUBGROUP_DELIVERY_TIMEOUT, Param.AUTHORIZATION_TOKEN,
    Param.SUBSCRIBER_PRIORITY, Param.SUBSCRIPTION_FILTER, Param.FORWARD, Param.NEW_GROUP_REQUEST,
})  # fmt: skip
_OF_FETCHES = frozenset({Param.AUTHORIZATION_TOKEN, Param.SUBSCRIBER_PRIORITY})
_OF_PREFIXES = frozenset({Param.AUTHORIZATION_TOKEN, Param.TRACK_NAMESPACE_PREFIX})
_CHANGEABLE: dict[type[Message], frozenset[Param]] = {
    Subscribe: _OF_SUBSCRIPTIONS, Publish: _OF_SUBSCRIPTIONS, Fetch: _OF_FETCHES, JoiningFetch: _OF_FETCHES,
    PublishNamespace: frozenset({Param.AUTHORIZATION_TOKEN}), SubscribeNamespace: _OF_PREFIXES,
    SubscribeTracks: _OF_PREFIXES,
}  # fmt: skip
"""What a REQUEST_UPDATE may have, by the request that it changes (draft 18, section 10.2); not TRACK_STATUS."""
_RESERVED = (b".", b".session")
"""First fields of namespaces of which nothing exists here (draft 18, sections 3.2.1 and 3.2.2)."""


class Responder:
    """The requests of the peer's that are not over."""

    def __init__(self, channel: Channel, tokens: TokenCache, granted: int) -> None:
        self._channel, self._tokens = channel, tokens
        self.ids = PeerIds(channel, granted)
        self._requests: dict[int, RequestState] = {}
        self._by_stream: dict[int, RequestState] = {}
        self._by_data: dict[int, RequestState] = {}
        self.draining = False
        self.lenient = False
        """Whether a peer that resets or stops the stream of a FETCH that has been answered may still want its objects:
        moq-rs 0.5 does so, and cancels by stopping the stream of the objects."""

    def __len__(self) -> int:
        return len(self._requests)

    # ------------------------------------------------------------------ what the peer wants

    def heard(self, stream: int, message: Message, *, first: bool) -> None:
        """A message came on a bidirectional stream of the peer's.

        Raises:
            SessionFault: it does not belong there.
        """
        request = self._by_stream.get(stream)
        if request is not None:
            self._more(request, message)
        elif first:
            self.begin(message, stream)

    def begin(self, message: Message, stream: int | None) -> None:
        """The peer makes a request, on a stream of its own or, in draft 16, on the control stream.

        Raises:
            SessionFault: it is none, or its ID is wrong.
        """
        if not isinstance(message, REQUESTS):
            raise SessionFault(f"a request that begins with a {type(message).__name__}")
        if not self._channel.draft.streams and (stream is not None) != isinstance(message, SubscribeNamespace):
            raise SessionFault(f"a {type(message).__name__} on the wrong stream")
        self.ids.take(message.request_id, in_order=stream is None)
        if isinstance(message, Publish):
            self._check_alias(message)
        request = RequestState(message.request_id, message, stream)
        self._requests[request.number] = request
        if stream is not None:
            self._by_stream[stream] = request
        tokens = self._tokens.resolve(message.parameters.tokens)
        if self.draining:
            self.refuse(request.number, RequestCode.GOING_AWAY, "this server is going away; connect anew")
        elif self._channel.draft.number >= 17 and _first_field(message) in _RESERVED:
            self.refuse(request.number, RequestCode.DOES_NOT_EXIST, "nothing is there")
        elif isinstance(message, Publish) and (refusal := self._refusal(message)) is not None:
            self.refuse(request.number, *refusal)
        else:
            self._channel.events.append(Requested(request.number, message, tokens))

    def _more(self, request: RequestState, message: Message) -> None:
        """The peer sends something behind a request, on its stream.

        Raises:
            SessionFault: it must not.
        """
        streams = self._channel.draft.streams
        if isinstance(message, RequestUpdate) and streams:
            self.ids.take(message.request_id)
            self._update(request, message)
        elif isinstance(message, Goaway) and streams:
            if request.going_away:
                raise SessionFault("a second GOAWAY on a request's stream")
            if message.uri and not self._channel.client:
                raise SessionFault("a client's GOAWAY names a server")
            request.going_away = True
        else:
            raise SessionFault(f"a {type(message).__name__} behind a request")

    def _update(self, request: RequestState, message: RequestUpdate) -> None:
        """The peer changes a request.

        Raises:
            SessionFault: in a way that it cannot be changed.
        """
        parameters = message.parameters
        kind = type(request.message)
        allowed = _CHANGEABLE.get(kind)
        if allowed is None or not present(parameters) <= allowed:
            raise SessionFault(f"a {kind.__name__} cannot be changed like that")
        self._tokens.resolve(parameters.tokens)
        if parameters.namespace_prefix is not None:
            # Its request must end with a change that is refused (draft 18, section 10.9.1).
            self._answer(request, RequestError(message.request_id, RequestCode.NOT_SUPPORTED, 0, "ask anew instead"))
            self._tell_cancelled(request, ResetCode.CANCELLED)
            self._finish(request)
            return
        if self._channel.draft.streams and not request.answered:
            request.updates += 1  # the request's own answer must come first on its stream
        else:
            self._answer(request, RequestOk(message.request_id))
        self._channel.events.append(Updated(request.number, parameters))

    def update_16(self, message: RequestUpdate) -> None:
        """Draft 16: the peer changes a request."""
        self.ids.take(message.request_id, in_order=True)
        existing = -1 if message.existing is None else message.existing
        request = self._requests.get(existing)
        if request is not None:
            self._update(request, message)
        elif self.ids.used(existing):
            # It has just been completed; to end the session over that would be unkind.
            self._tokens.resolve(message.parameters.tokens)
            refusal = RequestError(message.request_id, RequestCode.INVALID_RANGE, 0, "that request is over")
            self._channel.control(refusal)
        else:
            raise SessionFault(f"request {existing} is changed, which was never made")
        self._widen()

    def cancelled_16(self, number: int) -> None:
        """Draft 16: the peer cancels a request by a message."""
        request = self._requests.get(number)
        if request is not None:
            self._cancelled(request, ResetCode.CANCELLED)
        elif not self.ids.used(number):
            raise SessionFault(f"request {number} is cancelled, which was never made")

    def stream_gone(self, stream: int, code: int) -> None:
        """The peer has reset, or does not want, a stream of a request."""
        request = self._by_stream.get(stream)
        if request is not None and self.lenient and request.streams:
            return
        request = request or self._by_data.get(stream)
        if request is not None:
            self._cancelled(request, code)

    def stream_ended(self, stream: int) -> None:
        """The peer has ended its side of a request's stream.

        That cancels a subscription to namespaces or tracks (draft 18, section 6.1); others merely have nothing to add.
        """
        request = self._by_stream.get(stream)
        if request is not None and isinstance(request.message, SubscribeNamespace | SubscribeTracks):
            self._tell_cancelled(request, ResetCode.CANCELLED)
            self._finish(request)

    def owns(self, stream: int) -> bool:
        """Whether a bidirectional stream has a request that is not over."""
        return stream in self._by_stream

    # ------------------------------------------------------------------ what the owner answers

    def message_of(self, request_id: int) -> Request | None:
        """A request that is not over."""
        request = self._requests.get(request_id)
        return None if request is None else request.message

    def accept_fetch(
        self, request_id: int, end: Location, *, end_of_track: bool, properties: tuple[KeyValue, ...] = ()
    ) -> int:
        """Agree to a FETCH; returns the stream on which the owner must write the objects, behind its header.

        Raises:
            KeyError: it is over; the owner has been told so.
        """
        channel, request = self._channel, self._requests[request_id]
        self._agree(request, FetchOk(request_id, end_of_track, end, Parameters(), properties))
        stream = channel.open_uni()
        request.streams.add(stream)
        self._by_data[stream] = request
        varint = channel.draft.varint
        channel.commands.append(Write(stream, varint.encode(FETCH_HEADER) + varint.encode(request_id)))
        return stream

    def fetch_sent(self, request_id: int) -> None:
        """The owner has written all objects of a FETCH and ended their stream."""
        request = self._requests.get(request_id)
        if request is not None:
            self._finish(request)

    def break_off(self, request_id: int, code: int) -> None:
        """Reset what the peer asked for, in the middle of it."""
        request = self._requests.get(request_id)
        if request is not None:
            self._channel.commands += [Reset(stream, code) for stream in request.streams]
            self._finish(request, reset=code)

    def accept_subscribe(
        self, request_id: int, alias: int, largest: Location | None, properties: tuple[KeyValue, ...] = ()
    ) -> None:
        """Agree to a SUBSCRIBE."""
        answer = SubscribeOk(request_id, alias, Parameters(largest=largest), properties)
        self._agree(self._requests[request_id], answer)

    def publish_done(self, request_id: int, code: int, streams: int, reason: str) -> None:
        """End a subscription."""
        request = self._requests[request_id]
        self._answer(request, PublishDone(request_id, code, streams, reason))
        self._finish(request)

    def accept(
        self, request_id: int, parameters: Parameters | None = None, properties: tuple[KeyValue, ...] = ()
    ) -> None:
        """Agree to another request; a TRACK_STATUS is over with that."""
        request = self._requests[request_id]
        self._agree(request, RequestOk(request_id, parameters or Parameters(), properties))
        if isinstance(request.message, TrackStatus):
            self._finish(request)

    def tell_namespace(self, request_id: int, suffix: tuple[bytes, ...], *, gone: bool = False) -> None:
        """Tell of a namespace that matches a SUBSCRIBE_NAMESPACE."""
        request = self._requests.get(request_id)
        if request is not None:
            self._answer(request, NamespaceDone(suffix) if gone else Namespace(suffix))

    def refuse(self, request_id: int, code: int, reason: str, *, retry_ms: int | None = None) -> None:
        """Refuse a request; ``retry_ms``: after how long asking again may help, None if it will not."""
        request = self._requests.get(request_id)
        if request is not None:
            retry = 0 if retry_ms is None else retry_ms + 1
            self._answer(request, RequestError(request_id, code, retry, reason))
            self._finish(request)

    # ------------------------------------------------------------------ internals

    def _check_alias(self, message: Publish) -> None:
        other = self._channel.aliases.get(message.track_alias)
        if other is None or not isinstance(other.message, Subscribe):
            return
        if (other.message.namespace, other.message.track) != (message.namespace, message.track):
            code = SessionCode.DUPLICATE_TRACK_ALIAS
            raise SessionFault(f"track alias {message.track_alias} is in use", code)

    def _refusal(self, message: Publish) -> tuple[RequestCode, str] | None:
        """Why a track must not be taken, whatever the owner thinks of it."""
        try:
            unknown = unknown_mandatory(message.properties, self._channel.draft)
        except MalformedTrack as error:
            return RequestCode.MALFORMED_TRACK, str(error)
        if unknown is None:
            return None
        return RequestCode.UNSUPPORTED_EXTENSION, f"the mandatory property 0x{unknown:x} is unknown here"

    def _agree(self, request: RequestState, message: Message) -> None:
        self._answer(request, message)
        request.answered = True
        for _ in range(request.updates):
            self._answer(request, RequestOk())
        request.updates = 0

    def _tell_cancelled(self, request: RequestState, code: int) -> None:
        if not self._channel.unsay(request.number):
            self._channel.events.append(Cancelled(request.number, code))

    def _answer(self, request: RequestState, message: Message) -> None:
        if request.stream is None:
            self._channel.control(message)
        else:
            self._channel.write(request.stream, message)

    def _cancelled(self, request: RequestState, code: int) -> None:
        self._channel.commands += [Reset(stream, ResetCode.CANCELLED) for stream in request.streams]
        self._tell_cancelled(request, code)
        self._finish(request, reset=ResetCode.CANCELLED)

    def _finish(self, request: RequestState, *, reset: int | None = None) -> None:
        if self._requests.pop(request.number, None) is None:
            return
        for data_stream in request.streams:
            self._by_data.pop(data_stream, None)
        stream = request.stream
        if stream is not None:
            self._by_stream.pop(stream, None)
            if reset is None:
                # The peer will end its side. To stop it would cost a frame, and with aioquic far more: a STOP_SENDING
                # that waits behind data makes it send one packet at a time.
                self._channel.commands.append(Write(stream, b"", fin=True))
            else:
                self._channel.commands += [Reset(stream, reset), Stop(stream, ResetCode.CANCELLED)]
        self._widen()

    def _widen(self) -> None:
        """Draft 16: let the peer make more requests when half of what it was granted is used up."""
        if not self._channel.draft.streams:
            granted = self.ids.widen(REQUEST_WINDOW, len(self._requests))
            if granted is not None:
                self._channel.control(MaxRequestId(granted))


def _first_field(message: Request) -> bytes | None:
    """The first field of the namespace that a request is about."""
    prefix: tuple[bytes, ...] = getattr(message, "prefix", ())
    namespace: tuple[bytes, ...] = getattr(message, "namespace", prefix)
    return namespace[0] if namespace else None
