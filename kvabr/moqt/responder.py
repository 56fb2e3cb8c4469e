"""Requests of the peer's: heard, answered, changed, cancelled."""

from __future__ import annotations

from kvabr.moqt.channel import Channel, PeerIds, RequestState
from kvabr.moqt.codes import RequestCode, ResetCode, SessionFault
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
from kvabr.moqt.parameters import Parameters
from kvabr.moqt.tokens import TokenCache
from kvabr.moqt.wire import KeyValue, Location

REQUESTS = (
    Subscribe, TrackStatus, Publish, Fetch, JoiningFetch, PublishNamespace, SubscribeNamespace, SubscribeTracks,
)  # fmt: skip
"""Messages that open a request."""
REQUEST_WINDOW = 256
"""Draft 16: requests that a peer may have open."""


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
        self.ids.take(message.request_id)
        request = RequestState(message.request_id, message, stream)
        self._requests[request.number] = request
        if stream is not None:
            self._by_stream[stream] = request
        tokens = self._tokens.resolve(message.parameters.tokens)
        if self.draining:
            self.refuse(request.number, RequestCode.GOING_AWAY, "this server is going away; connect anew")
        else:
            self._channel.events.append(Requested(request.number, message, tokens))

    def _more(self, request: RequestState, message: Message) -> None:
        """The peer sends something behind a request, on its stream.

        Raises:
            SessionFault: it must not.
        """
        if isinstance(message, RequestUpdate):
            self.ids.take(message.request_id)
            self._tokens.resolve(message.parameters.tokens)
            self._answer(request, RequestOk(message.request_id))
            self._channel.events.append(Updated(request.number, message.parameters))
        elif not isinstance(message, Goaway):
            raise SessionFault(f"a {type(message).__name__} behind a request")

    def update_16(self, message: RequestUpdate) -> None:
        """Draft 16: the peer changes a request."""
        self.ids.take(message.request_id)
        self._tokens.resolve(message.parameters.tokens)
        existing = -1 if message.existing is None else message.existing
        if existing in self._requests:
            self._channel.control(RequestOk(message.request_id))
            self._channel.events.append(Updated(existing, message.parameters))
        elif self.ids.used(existing):
            # It has just been completed; to end the session over that would be unkind.
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

    # ------------------------------------------------------------------ what the owner answers

    def message_of(self, request_id: int) -> Request | None:
        """A request that is not over."""
        request = self._requests.get(request_id)
        return None if request is None else request.message

    def accept_fetch(
        self, request_id: int, end: Location, *, end_of_track: bool, properties: tuple[KeyValue, ...] = ()
    ) -> int:
        """Agree to a FETCH; returns the stream on which the owner must write the objects, behind its header."""
        channel, request = self._channel, self._requests[request_id]
        self._answer(request, FetchOk(request_id, end_of_track, end, Parameters(), properties))
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
        self._answer(self._requests[request_id], answer)

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
        self._answer(request, RequestOk(request_id, parameters or Parameters(), properties))
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

    def _answer(self, request: RequestState, message: Message) -> None:
        if request.stream is None:
            self._channel.control(message)
        else:
            self._channel.write(request.stream, message)

    def _cancelled(self, request: RequestState, code: int) -> None:
        self._channel.commands += [Reset(stream, ResetCode.CANCELLED) for stream in request.streams]
        self._channel.events.append(Cancelled(request.number, code))
        self._finish(request, reset=ResetCode.CANCELLED)

    def _finish(self, request: RequestState, *, reset: int | None = None) -> None:
        if self._requests.pop(request.number, None) is None:
            return
        for data_stream in request.streams:
            self._by_data.pop(data_stream, None)
        stream = request.stream
        if stream is not None:
            self._by_stream.pop(stream, None)
            self._channel.commands.append(Write(stream, b"", fin=True) if reset is None else Reset(stream, reset))
            self._channel.commands.append(Stop(stream, ResetCode.CANCELLED))
        self._widen()

    def _widen(self) -> None:
        """Draft 16: let the peer make more requests when half of what it was granted is used up."""
        if not self._channel.draft.streams:
            granted = self.ids.widen(REQUEST_WINDOW, len(self._requests))
            if granted is not None:
                self._channel.control(MaxRequestId(granted))
