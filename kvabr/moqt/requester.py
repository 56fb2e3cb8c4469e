"""Requests of ours: made, answered, changed, cancelled; and the objects that come of them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from kvabr.moqt.channel import Channel, RequestState
from kvabr.moqt.codes import Param, RequestCode, ResetCode, SessionCode, SessionFault
from kvabr.moqt.encoding import MessageParser, ends_before
from kvabr.moqt.events import (
    Answered,
    DatagramReceived,
    Ended,
    NamespaceChanged,
    Received,
    Refused,
    Reset,
    Stop,
    SubscriptionDone,
    Write,
)
from kvabr.moqt.messages import (
    Fetch,
    FetchCancel,
    FetchOk,
    Goaway,
    Message,
    Namespace,
    NamespaceDone,
    PublishDone,
    PublishNamespace,
    PublishNamespaceCancel,
    PublishNamespaceDone,
    Request,
    RequestError,
    RequestOk,
    RequestUpdate,
    Subscribe,
    SubscribeNamespace,
    SubscribeOk,
    TrackStatus,
    Unsubscribe,
)
from kvabr.moqt.objects import Item, ObjectHeader, SubgroupHeader
from kvabr.moqt.parameters import Parameters, present
from kvabr.moqt.properties import MalformedTrack, check_object, unknown_mandatory
from kvabr.moqt.wire import MAX_NAME_BYTES, MAX_NAMESPACE_FIELDS, KeyValue

MAX_NAMESPACES = 1 << 14
"""Namespaces that a SUBSCRIBE_NAMESPACE may bring."""
_IN_UPDATE_OK = frozenset({Param.EXPIRES, Param.LARGEST_OBJECT})
_IN_TRACK_STATUS_OK = frozenset({Param.EXPIRES, Param.LARGEST_OBJECT})


class Requester:
    """The requests of ours that are not over."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._requests: dict[int, RequestState] = {}
        self._by_stream: dict[int, RequestState] = {}
        self._waiting: deque[RequestState] = deque()
        self._limit = 0
        """Draft 16: request IDs must be below this."""
        self.peer_draining = False

    # ------------------------------------------------------------------ what the owner wants

    def request(self, make: Callable[[int], Request]) -> int:
        """Make a request; in draft 16 it may have to wait until the peer grants more. Returns its ID."""
        channel = self._channel
        number = channel.take_id()
        message = make(number)
        own_stream = channel.draft.streams or isinstance(message, SubscribeNamespace)
        request = RequestState(number, message, None)
        self._requests[number] = request
        if channel.draft.streams or (number < self._limit and not self._waiting):
            self._send(request, own_stream=own_stream)
        else:
            self._waiting.append(request)
        return number

    def grant(self, limit: int) -> None:
        """Draft 16: the peer allows request IDs below ``limit``."""
        self._limit = limit
        while self._waiting and self._waiting[0].number < limit:
            request = self._waiting.popleft()
            self._send(request, own_stream=isinstance(request.message, SubscribeNamespace))

    def raise_limit(self, limit: int) -> None:
        """Draft 16: the peer raises the limit that `grant` set.

        Raises:
            SessionFault: it does not.
        """
        if limit <= self._limit:
            raise SessionFault("a MAX_REQUEST_ID that does not increase")
        self.grant(limit)

    def update(self, request_id: int, parameters: Parameters) -> bool:
        """Change a request, unless it is over or no longer can be; returns whether anything was sent.

        Draft 16 lets a peer end the session over a change to a request that it has just completed, which nobody can
        rule out; so nothing is sent there.
        """
        request = self._requests.get(request_id)
        if request is None or not self._channel.draft.streams or request.stream is None or self.peer_draining:
            return False
        if isinstance(request.message, TrackStatus):
            return False  # which cannot be changed (draft 18, section 10.14)
        request.updates += 1
        self._channel.write(request.stream, RequestUpdate(self._channel.take_id(), None, parameters))
        return True

    def cancel(self, request_id: int, code: int = ResetCode.CANCELLED) -> None:
        """Nothing more is wanted of a request; nothing more is told of it."""
        request = self._requests.pop(request_id, None)
        if request is None:
            return
        if request in self._waiting:
            # Draft 16 wants IDs in sequence: it must be made, and then cancelled.
            request.data_ended = True
            self._requests[request_id] = request
            return
        self._channel.commands += [Stop(stream, code) for stream in request.streams]
        if request.stream is not None:
            self._channel.commands += [Reset(request.stream, code), Stop(request.stream, code)]
            self._by_stream.pop(request.stream, None)
        elif isinstance(request.message, Fetch):
            self._channel.control(FetchCancel(request_id))
        elif isinstance(request.message, Subscribe):
            self._channel.control(Unsubscribe(request_id))
        elif isinstance(request.message, PublishNamespace):
            self._channel.control(PublishNamespaceDone(request_id))
        self._forget_alias(request)

    # ------------------------------------------------------------------ what the peer answers

    def owns(self, stream: int) -> RequestState | None:
        """The request that a bidirectional stream is of."""
        return self._by_stream.get(stream)

    def by_id(self, number: int) -> RequestState | None:
        """A request that is not over.

        Raises:
            SessionFault: no such request was ever made.
        """
        if not self._channel.made(number):
            raise SessionFault(f"an answer to request {number}, which was never made")
        return self._requests.get(number)

    def answer(self, request: RequestState, message: Message) -> None:
        """The peer answers a request.

        Raises:
            SessionFault: with what is no answer to it.
        """
        asked = request.message
        self._check_sense(request, message)
        if isinstance(message, RequestOk | RequestError) and request.updates and request.answered:
            request.updates -= 1
            self._check_ok(message, _IN_UPDATE_OK)
        elif isinstance(message, RequestError):
            self._channel.events.append(Refused(request.number, message))
            self._drop(request)
        elif isinstance(message, Goaway):
            # It asks to make this request elsewhere; this one goes on until it is broken off.
            request.going_away = True
        elif isinstance(asked, Fetch):
            self._answer_fetch(request, asked, message)
        elif isinstance(asked, Subscribe):
            self._answer_subscribe(request, message)
        elif isinstance(message, Namespace | NamespaceDone) and isinstance(asked, SubscribeNamespace):
            self._namespace(request, message.suffix, gone=isinstance(message, NamespaceDone))
        elif isinstance(message, PublishNamespaceCancel) and isinstance(asked, PublishNamespace):
            error = RequestError(request.number, message.code, 0, message.reason)
            self._channel.events.append(Refused(request.number, error))
            self._drop(request)
        elif isinstance(message, RequestOk) and not request.answered:
            status = isinstance(asked, TrackStatus)
            self._check_ok(message, _IN_TRACK_STATUS_OK if status else frozenset(), properties=status)
            request.answered = True
            self._channel.events.append(Answered(request.number, message))
            if isinstance(asked, TrackStatus):
                self._drop(request)
        else:
            raise self._nonsense(request, message)

    def _answer_fetch(self, request: RequestState, asked: Fetch, message: Message) -> None:
        if isinstance(message, RequestOk) and request.updates:
            request.updates -= 1  # a change may be acknowledged before the FETCH itself
            self._check_ok(message, _IN_UPDATE_OK)
        elif isinstance(message, FetchOk) and not request.answered:
            if ends_before(message.end, asked.start):
                raise SessionFault("a FETCH_OK that ends before its FETCH begins")
            self._accepted(request, message, message.properties)
            self._over(request)
        else:
            raise self._nonsense(request, message)

    def _answer_subscribe(self, request: RequestState, message: Message) -> None:
        if isinstance(message, SubscribeOk) and not request.answered:
            if message.track_alias in self._channel.aliases:
                code = SessionCode.DUPLICATE_TRACK_ALIAS
                raise SessionFault(f"track alias {message.track_alias} is in use", code)
            self._channel.aliases[message.track_alias] = request
            request.alias = message.track_alias
            self._accepted(request, message, message.properties)
        elif isinstance(message, PublishDone):
            self._channel.events.append(SubscriptionDone(request.number, message))
            self._drop(request)
        else:
            raise self._nonsense(request, message)

    def _check_sense(self, request: RequestState, message: Message) -> None:
        """What an answer cannot be, whatever the request.

        Raises:
            SessionFault: it is that.
        """
        streams, asked = self._channel.draft.streams, request.message
        if isinstance(message, Goaway):
            if not streams or request.going_away:
                raise SessionFault("a second GOAWAY on a request's stream" if streams else "a GOAWAY out of place")
            if message.uri and not self._channel.client:
                raise SessionFault("a client's GOAWAY names a server")
        elif isinstance(message, RequestError) and (to := message.redirect) is not None:
            if to.uri and not self._channel.client:
                raise SessionFault("a client's REQUEST_ERROR names a server")
            if to.track and isinstance(asked, SubscribeNamespace | PublishNamespace):
                raise SessionFault("a namespace is redirected to a track")
        if isinstance(message, RequestOk | RequestError) and message.request_id not in (None, request.number):
            raise SessionFault(f"an answer to request {message.request_id} on the stream of {request.number}")

    def _check_ok(
        self, message: RequestOk | RequestError, allowed: frozenset[Param], *, properties: bool = False
    ) -> None:
        """What a REQUEST_OK may have depends on what it answers; draft 16 ignores what is out of place.

        Raises:
            SessionFault: it has more.
        """
        if self._channel.draft.number < 17 or isinstance(message, RequestError):
            return
        if message.properties and not properties:
            raise SessionFault("a REQUEST_OK with properties that it cannot have")
        if extra := present(message.parameters) - allowed:
            names = ", ".join(sorted(param.name for param in extra))
            raise SessionFault(f"a REQUEST_OK with parameters that it cannot have: {names}")

    @staticmethod
    def _nonsense(request: RequestState, message: Message) -> SessionFault:
        return SessionFault(f"a {type(message).__name__} in answer to a {type(request.message).__name__}")

    def stream_gone(self, stream: int, code: int | None) -> None:
        """The peer has ended (``code`` None) or reset the stream of a request."""
        request = self._by_stream.get(stream)
        if request is None:
            return
        if code is None and request.answered and isinstance(request.message, Fetch) and not request.data_ended:
            return  # all is well: its objects are still on their way
        for suffix in request.namespaces:
            self._channel.events.append(NamespaceChanged(request.number, suffix, gone=True))
        if not request.data_ended:
            # The error codes of streams and of requests differ: what both have in common is kept.
            same = code in (ResetCode.EXPIRED_AUTH_TOKEN, ResetCode.EXCESSIVE_LOAD, ResetCode.MALFORMED_TRACK)
            refusal = code if same and code is not None else RequestCode.INTERNAL_ERROR
            how = "ended" if code is None else f"reset (code 0x{code:x})"
            when = "in the middle" if request.answered else "without an answer"
            error = RequestError(request.number, refusal, 0, f"the peer {how} the request {when}")
            self._channel.events.append(Refused(request.number, error))
        self._drop(request)

    # ------------------------------------------------------------------ objects

    def claim(self, stream: int, what: SubgroupHeader | int) -> RequestState | None:
        """The request that a new stream of objects belongs to; None if that is over.

        Raises:
            SessionFault: there never was one, or it cannot have this stream.
        """
        if isinstance(what, int):
            request = self.by_id(what)
            if request is not None and (
                not isinstance(request.message, Fetch) or request.streams or request.data_ended
            ):
                raise SessionFault(f"a second stream, or one of objects, for request {what}")
        else:
            request = self._channel.aliases.get(what.track_alias)
        if request is not None:
            request.streams.add(stream)
        return request

    def wants(self, request: RequestState) -> bool:
        """Whether a request is not over."""
        return self._requests.get(request.number) is request

    def malformed(self, request: RequestState, why: str) -> None:
        """The track of a request cannot be what it claims to be: no more of it (draft 18, section 2.4.2)."""
        if self.wants(request):
            self.cancel(request.number)
            error = RequestError(request.number, RequestCode.MALFORMED_TRACK, 0, f"a malformed track: {why}")
            self._channel.events.append(Refused(request.number, error))

    def received(self, request: RequestState, stream: int, items: list[Item]) -> None:
        """Objects of a request came."""
        if self.wants(request):
            events = self._channel.events
            last = events[-1] if events else None
            if isinstance(last, Received) and last.stream == stream:
                last.items.extend(items)
            else:
                events.append(Received(request.number, items, stream))

    def data_ended(self, request: RequestState, stream: int, code: int | None) -> None:
        """A stream of objects has ended, or (``code``) was reset."""
        request.streams.discard(stream)
        if isinstance(request.message, Fetch) and self.wants(request):
            request.data_ended = True
            self._channel.events.append(Ended(request.number, code))
            self._over(request)

    def datagram(self, alias: int, header: ObjectHeader, payload: bytes) -> None:
        """A datagram came; one of an unknown track is dropped: its subscription may just have ended."""
        request = self._channel.aliases.get(alias)
        if request is None:
            return
        try:
            check_object(header.properties, header.group, header.object, self._channel.draft)
        except MalformedTrack as error:
            self.malformed(request, str(error))
        else:
            self._channel.events.append(DatagramReceived(request.number, header, payload))

    # ------------------------------------------------------------------ internals

    def _send(self, request: RequestState, *, own_stream: bool) -> None:
        if own_stream:
            request.stream = self._channel.open_bidi()
            request.parser = MessageParser(self._channel.draft)
            self._by_stream[request.stream] = request
            self._channel.write(request.stream, request.message)
        else:
            self._channel.control(request.message)
        if request.data_ended:
            self.cancel(request.number)

    def _accepted(
        self, request: RequestState, message: FetchOk | SubscribeOk, properties: tuple[KeyValue, ...]
    ) -> None:
        request.answered = True
        try:
            unknown = unknown_mandatory(properties, self._channel.draft)
        except MalformedTrack as error:
            self.malformed(request, str(error))
            return
        if unknown is not None:
            # Such a track must not be touched by those who do not know the property (draft 18, section 2.5.1).
            reason = f"the track has a mandatory property 0x{unknown:x} that is unknown here"
            self.cancel(request.number)
            refusal = RequestError(request.number, RequestCode.UNSUPPORTED_EXTENSION, 0, reason)
            self._channel.events.append(Refused(request.number, refusal))
        else:
            self._channel.events.append(Answered(request.number, message))

    def _namespace(self, request: RequestState, suffix: tuple[bytes, ...], *, gone: bool) -> None:
        if not request.answered:
            raise SessionFault("a namespace before the answer to its SUBSCRIBE_NAMESPACE")
        whole = (*getattr(request.message, "prefix", ()), *suffix)
        if len(whole) > MAX_NAMESPACE_FIELDS or sum(map(len, whole)) > MAX_NAME_BYTES:
            raise SessionFault("a namespace that is too long with its prefix")
        if gone:
            if suffix not in request.namespaces:
                raise SessionFault("a NAMESPACE_DONE without its NAMESPACE")
            request.namespaces.discard(suffix)
        elif len(request.namespaces) < MAX_NAMESPACES:
            request.namespaces.add(suffix)
        else:
            raise SessionFault(f"more than {MAX_NAMESPACES} namespaces", SessionCode.INTERNAL_ERROR)
        self._channel.events.append(NamespaceChanged(request.number, suffix, gone))

    def _over(self, request: RequestState) -> None:
        """A FETCH is over when its objects have come and it has been answered, in whichever order."""
        if request.answered and request.data_ended:
            self._drop(request)

    def _drop(self, request: RequestState) -> None:
        self._requests.pop(request.number, None)
        self._forget_alias(request)
        self._channel.commands += [Stop(stream, ResetCode.CANCELLED) for stream in request.streams]
        if request.stream is not None and self._by_stream.pop(request.stream, None) is not None:
            self._channel.commands.append(Write(request.stream, b"", fin=True))

    def _forget_alias(self, request: RequestState) -> None:
        if request.alias is not None:
            self._channel.aliases.pop(request.alias, None)
            request.alias = None
