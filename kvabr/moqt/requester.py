"""The requests that this end makes: FETCH and SUBSCRIBE, their answers, and their objects."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from kvabr.moqt.channel import Channel, RequestState
from kvabr.moqt.codes import Param, RequestCode, ResetCode, SessionCode, SessionFault
from kvabr.moqt.encoding import MessageParser, ends_before
from kvabr.moqt.events import Answered, DatagramReceived, Ended, Received, Refused, Reset, Stop, SubscriptionDone, Write
from kvabr.moqt.messages import (
    Fetch,
    FetchCancel,
    FetchOk,
    Goaway,
    Message,
    PublishDone,
    RequestErrorMessage,
    RequestOk,
    RequestUpdate,
    Subscribe,
    SubscribeOk,
    Unsubscribe,
)
from kvabr.moqt.objects import Item, ObjectHeader, SubgroupHeader
from kvabr.moqt.parameters import Parameters, present
from kvabr.moqt.properties import MalformedTrack, check_object, unusable

_IN_UPDATE_OK = frozenset({Param.EXPIRES, Param.LARGEST_OBJECT})
"""Parameters of a REQUEST_OK that answers a REQUEST_UPDATE (draft 18, sections 10.2.10 and 10.2.11)."""


class Requester:
    """The open requests of this end."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._requests: dict[int, RequestState] = {}
        self._by_stream: dict[int, RequestState] = {}
        self._waiting: deque[RequestState] = deque()
        self._limit = 0
        """Draft 16: request IDs must be below this."""
        self.peer_draining = False

    # ------------------------------------------------------------------ called by the owner

    def request(self, make: Callable[[int], Fetch | Subscribe]) -> int:
        """Make a request and return its ID; in draft 16 it may wait until the peer grants more IDs."""
        number = self._channel.take_id()
        request = self._requests[number] = RequestState(number, make(number), None)
        if self._channel.draft.streams or (number < self._limit and not self._waiting):
            self._send(request)
        else:
            self._waiting.append(request)
        return number

    def grant(self, limit: int) -> None:
        """Draft 16: allow request IDs below `limit`, as granted by the peer."""
        self._limit = limit
        while self._waiting and self._waiting[0].number < limit:
            self._send(self._waiting.popleft())

    def raise_limit(self, limit: int) -> None:
        """Draft 16: handle a MAX_REQUEST_ID.

        Raises:
            SessionFault: The limit does not increase.
        """
        if limit <= self._limit:
            raise SessionFault(f"MAX_REQUEST_ID of {limit} does not increase the limit of {self._limit}")
        self.grant(limit)

    def update(self, request_id: int, parameters: Parameters) -> bool:
        """Send a REQUEST_UPDATE if the request is still open, and return whether one was sent.

        Draft 16 allows a peer to close the session over an update to a request that it has just completed. The
        requester cannot rule that out, so it sends no updates in that draft.
        """
        request = self._requests.get(request_id)
        if request is None or not self._channel.draft.streams or request.stream is None or self.peer_draining:
            return False
        request.updates += 1
        self._channel.write(request.stream, RequestUpdate(self._channel.take_id(), None, parameters))
        return True

    def cancel(self, request_id: int, code: int = ResetCode.CANCELLED) -> None:
        """Cancel a request; no more events follow for it."""
        request = self._requests.pop(request_id, None)
        if request is None:
            return
        if request in self._waiting:
            # Draft 16 requires consecutive IDs, so the request must be sent before it is cancelled.
            request.data_ended = True
            self._requests[request_id] = request
            return
        self._channel.commands += [Stop(stream, code) for stream in request.streams]
        if request.stream is not None:
            self._channel.commands += [Reset(request.stream, code), Stop(request.stream, code)]
            self._by_stream.pop(request.stream, None)
        elif isinstance(request.message, Fetch):
            self._channel.control(FetchCancel(request_id))
        else:
            self._channel.control(Unsubscribe(request_id))
        self._forget_alias(request)

    # ------------------------------------------------------------------ answers from the peer

    def owns(self, stream: int) -> RequestState | None:
        """Return the request of a bidirectional stream."""
        return self._by_stream.get(stream)

    def by_id(self, number: int) -> RequestState | None:
        """Return a request, or None if it is over.

        Raises:
            SessionFault: No such request was ever made.
        """
        if not self._channel.made(number):
            raise SessionFault(f"answer to request {number}, which was never made")
        return self._requests.get(number)

    def answer(self, request: RequestState, message: Message) -> None:
        """Handle an answer to a request.

        Raises:
            SessionFault: The message does not answer the request.
        """
        channel = self._channel
        if isinstance(message, RequestErrorMessage) and message.redirect is not None:
            channel.check_uri(message.redirect.uri, message)
        if isinstance(message, RequestOk | RequestErrorMessage) and request.updates and request.answered:
            self._updated(request, message)
        elif isinstance(message, RequestErrorMessage):
            channel.events.append(Refused(request.number, message))
            self._drop(request)
        elif isinstance(message, Goaway) and channel.draft.streams:
            # The peer asks to make this request elsewhere; it continues until it is reset.
            channel.check_goaway(message, repeated=request.going_away)
            request.going_away = True
        elif isinstance(request.message, Fetch):
            self._answer_fetch(request, request.message, message)
        elif isinstance(message, SubscribeOk) and not request.answered:
            if message.track_alias in channel.aliases:
                code = SessionCode.DUPLICATE_TRACK_ALIAS
                raise SessionFault(f"track alias {message.track_alias} is already in use", code)
            channel.aliases[message.track_alias] = request
            request.alias = message.track_alias
            self._accepted(request, message)
        elif isinstance(message, PublishDone):
            channel.events.append(SubscriptionDone(request.number, message))
            self._drop(request)
        else:
            raise self._unexpected(request, message)

    def _answer_fetch(self, request: RequestState, asked: Fetch, message: Message) -> None:
        if isinstance(message, RequestOk) and request.updates:
            self._updated(request, message)  # an update may be acknowledged before the FETCH itself
        elif isinstance(message, FetchOk) and not request.answered:
            if ends_before(message.end, asked.start):
                raise SessionFault(f"FETCH_OK ends at {tuple(message.end)}, before the start of its FETCH")
            self._accepted(request, message)
            self._finish_fetch(request)
        else:
            raise self._unexpected(request, message)

    def _updated(self, request: RequestState, message: RequestOk | RequestErrorMessage) -> None:
        """Handle the answer to a REQUEST_UPDATE; draft 16 ignores parameters that are out of place."""
        request.updates -= 1
        if not self._channel.draft.streams or isinstance(message, RequestErrorMessage):
            return
        if message.properties:
            raise SessionFault("REQUEST_OK for a REQUEST_UPDATE carries properties")
        if extra := present(message.parameters) - _IN_UPDATE_OK:
            names = ", ".join(sorted(param.name for param in extra))
            raise SessionFault(f"REQUEST_OK for a REQUEST_UPDATE carries the parameters {names}")

    @staticmethod
    def _unexpected(request: RequestState, message: Message) -> SessionFault:
        return SessionFault(f"{type(message).__name__} does not answer a {type(request.message).__name__}")

    def stream_gone(self, stream: int, code: int | None) -> None:
        """Handle the end (`code` is None) or the reset of a request's stream."""
        request = self._by_stream.get(stream)
        if request is None:
            return
        if code is None and request.answered and isinstance(request.message, Fetch) and not request.data_ended:
            return  # normal: the objects are still on their way
        if not request.data_ended:
            # Stream and request errors have different code spaces; keep the codes that both share.
            same = code in (ResetCode.EXPIRED_AUTH_TOKEN, ResetCode.EXCESSIVE_LOAD, ResetCode.MALFORMED_TRACK)
            how = "ended" if code is None else f"reset (code 0x{code:x})"
            when = "before completing it" if request.answered else "without an answer"
            refusal = code if same and code is not None else RequestCode.INTERNAL_ERROR
            self._refused(request, refusal, f"the peer {how} the request's stream {when}")
        self._drop(request)

    # ------------------------------------------------------------------ objects

    def claim(self, stream: int, what: SubgroupHeader | int) -> RequestState | None:
        """Return the request that a new stream of objects belongs to, or None if it is over.

        Raises:
            SessionFault: There never was such a request, or it cannot have this stream.
        """
        if isinstance(what, int):
            request = self.by_id(what)
            if request is not None and not isinstance(request.message, Fetch):
                raise SessionFault(f"stream of objects for request {what}, which is not a FETCH")
            if request is not None and (request.streams or request.data_ended):
                raise SessionFault(f"second stream of objects for request {what}")
        else:
            request = self._channel.aliases.get(what.track_alias)
        if request is not None:
            request.streams.add(stream)
        return request

    def wants(self, request: RequestState) -> bool:
        """Return whether a request is still open."""
        return self._requests.get(request.number) is request

    def malformed(self, request: RequestState, why: str) -> None:
        """Cancel a request because its track is malformed (draft 18, section 2.4.2)."""
        if self.wants(request):
            self.cancel(request.number)
            self._refused(request, RequestCode.MALFORMED_TRACK, f"malformed track: {why}")

    def received(self, request: RequestState, stream: int, items: list[Item]) -> None:
        """Hand over objects of a request."""
        if self.wants(request):
            events = self._channel.events
            last = events[-1] if events else None
            if isinstance(last, Received) and last.stream == stream:
                last.items.extend(items)
            else:
                events.append(Received(request.number, items, stream))

    def data_ended(self, request: RequestState, stream: int, code: int | None) -> None:
        """Handle the end (`code` is None) or the reset of a stream of objects."""
        request.streams.discard(stream)
        if isinstance(request.message, Fetch) and self.wants(request):
            request.data_ended = True
            self._channel.events.append(Ended(request.number, code))
            self._finish_fetch(request)

    def datagram(self, alias: int, header: ObjectHeader, payload: bytes) -> None:
        """Hand over an object; drop one of an unknown track, whose subscription may just have ended."""
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

    def _send(self, request: RequestState) -> None:
        channel = self._channel
        if channel.draft.streams:
            request.stream = channel.open_bidi()
            request.parser = MessageParser(channel.draft)
            self._by_stream[request.stream] = request
            channel.write(request.stream, request.message)
        else:
            channel.control(request.message)
        if request.data_ended:
            self.cancel(request.number)

    def _accepted(self, request: RequestState, message: FetchOk | SubscribeOk) -> None:
        request.answered = True
        if (refusal := unusable(message.properties, self._channel.draft)) is not None:
            self.cancel(request.number)
            self._refused(request, *refusal)
        else:
            self._channel.events.append(Answered(request.number, message))

    def _refused(self, request: RequestState, code: int, reason: str) -> None:
        self._channel.events.append(Refused(request.number, RequestErrorMessage(request.number, code, 0, reason)))

    def _finish_fetch(self, request: RequestState) -> None:
        """Drop a FETCH once its answer and all its objects have arrived, in either order."""
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
