"""The FETCHes that this end makes, their answers, and their objects."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from kvabr.moqt import messages as m
from kvabr.moqt.channel import Channel, RequestState
from kvabr.moqt.codes import Param, RequestCode, ResetCode, SessionFault
from kvabr.moqt.encoding import MessageParser, decode, ends_before
from kvabr.moqt.events import Answered, Ended, Received, Refused, Reset, Stop, Write
from kvabr.moqt.objects import ObjectParser
from kvabr.moqt.parameters import Parameters, present
from kvabr.moqt.properties import MalformedTrack, unusable

_IN_UPDATE_OK = frozenset({Param.EXPIRES, Param.LARGEST_OBJECT})
"""Parameters of a REQUEST_OK that answers a REQUEST_UPDATE (draft 18, sections 10.2.10 and 10.2.11)."""


@dataclass(slots=True, eq=False, kw_only=True)
class _FetchState(RequestState):
    message: m.Fetch = field(kw_only=False)
    parser: MessageParser
    """Parser of the answers on the request's own stream."""
    objects: ObjectParser
    data_ended: bool = False
    cancelled: bool = False
    """Draft 16: the request was cancelled before it was sent."""


class Requester:
    """The open requests of this end; methods that take in what the peer sends raise SessionFault if it is wrong."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._requests: dict[int, _FetchState] = {}
        self._by_stream: dict[int, _FetchState] = {}
        self._by_data: dict[int, _FetchState | None] = {}
        """By unidirectional stream that has not ended; None if its content is ignored."""
        self._waiting: deque[_FetchState] = deque()
        self._limit = 0
        """Draft 16: request IDs must be below this."""
        self.peer_draining = False

    # ------------------------------------------------------------------ called by the owner

    def request(self, message: m.Fetch) -> None:
        """Make a request; in draft 16 it may wait until the peer grants more IDs."""
        draft, number = self._channel.draft, message.request_id
        objects = ObjectParser(draft, descending=message.parameters.group_order == 2)
        request = self._requests[number] = _FetchState(number, message, parser=MessageParser(draft), objects=objects)
        if draft.streams or (number < self._limit and not self._waiting):
            self._send(request)
        else:
            self._waiting.append(request)

    def grant(self, limit: int) -> None:
        """Draft 16: allow request IDs below `limit`, as granted by the peer."""
        self._limit = limit
        while self._waiting and self._waiting[0].number < limit:
            self._send(self._waiting.popleft())

    def raise_limit(self, limit: int) -> None:
        """Draft 16: handle a MAX_REQUEST_ID."""
        if limit <= self._limit:
            raise SessionFault(f"MAX_REQUEST_ID of {limit} does not increase the limit of {self._limit}")
        self.grant(limit)

    def update(self, request_id: int, parameters: Parameters) -> bool:
        """Send a REQUEST_UPDATE if the request is still open, and return whether one was sent.

        Draft 16 allows a peer to close the session over an update to a request that it has just completed. The
        requester cannot rule that out, so it sends no updates in that draft.
        """
        request = self._requests.get(request_id)
        if request is None or request.stream is None or self.peer_draining:
            return False
        request.updates += 1
        self._channel.write(request.stream, m.RequestUpdate(self._channel.take_id(), None, parameters))
        return True

    def cancel(self, request_id: int, code: int = ResetCode.CANCELLED) -> None:
        """Cancel a request; no more events follow for it."""
        request = self._requests.get(request_id)
        if request is None:
            return
        if request in self._waiting:
            request.cancelled = True  # draft 16 requires consecutive IDs, so it must be sent before it is cancelled
            return
        self._forget(request, code)
        if request.stream is not None:
            self._channel.commands += [Reset(request.stream, code), Stop(request.stream, code)]
        else:
            self._channel.control(m.FetchCancel(request_id))

    # ------------------------------------------------------------------ answers from the peer

    def by_id(self, number: int) -> _FetchState | None:
        """Return a request, or None if it is over."""
        if not self._channel.made(number):
            raise SessionFault(f"answer to request {number}, which was never made")
        return self._requests.get(number)

    def receive_answers(self, stream: int, data: bytes, *, fin: bool) -> None:
        """Take in bytes of a request's own stream; those for a request that is over are ignored."""
        request = self._by_stream.get(stream)
        if request is None:
            return
        for kind, payload in request.parser.feed(data):
            message = decode(kind, payload, self._channel.draft, control=False)
            if stream in self._by_stream:
                self.answer(request, message)
        if fin:
            if request.parser.buffered:
                raise SessionFault("the answers to a request end inside a message")
            self.stream_gone(stream, None)

    def answer(self, request: _FetchState, message: m.Message) -> None:
        """Handle an answer to a request."""
        channel = self._channel
        if isinstance(message, m.RequestErrorMessage) and message.redirect is not None:
            channel.check_uri(message.redirect.uri, message)
        if isinstance(message, m.RequestOk) and request.updates:  # even before the FETCH itself is answered
            self._updated(request, message)
        elif isinstance(message, m.RequestErrorMessage) and request.updates and request.answered:
            request.updates -= 1
        elif isinstance(message, m.RequestErrorMessage):
            channel.events.append(Refused(request.number, message))
            self._drop(request)
        elif isinstance(message, m.Goaway) and channel.draft.streams:
            # The peer asks to make this request elsewhere; it continues until it is reset.
            channel.check_goaway(message, repeated=request.going_away)
            request.going_away = True
        elif isinstance(message, m.FetchOk) and not request.answered:
            if ends_before(message.end, request.message.start):
                raise SessionFault(f"FETCH_OK ends at {tuple(message.end)}, before the start of its FETCH")
            request.answered = True
            if (refusal := unusable(message.properties, channel.draft)) is not None:
                self._abandon(request, *refusal)
            else:
                channel.events.append(Answered(request.number, message))
                self._finish(request)
        else:
            raise SessionFault(f"{type(message).__name__} does not answer a FETCH")

    def _updated(self, request: _FetchState, message: m.RequestOk) -> None:
        """Handle a REQUEST_OK for a REQUEST_UPDATE; draft 16 ignores parameters that are out of place."""
        request.updates -= 1
        if not self._channel.draft.streams:
            return
        if message.properties:
            raise SessionFault("REQUEST_OK for a REQUEST_UPDATE carries properties")
        if extra := present(message.parameters) - _IN_UPDATE_OK:
            names = ", ".join(sorted(param.name for param in extra))
            raise SessionFault(f"REQUEST_OK for a REQUEST_UPDATE carries the parameters {names}")

    def stream_gone(self, stream: int, code: int | None) -> None:
        """Handle the end (`code` is None) or the reset of a request's stream."""
        request = self._by_stream.get(stream)
        if request is None:
            return
        if code is None and request.answered and not request.data_ended:
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

    def ignore(self, stream: int) -> None:
        """Ignore the content of a unidirectional stream."""
        self._by_data[stream] = None

    def begin_objects(self, stream: int, number: int | None, data: memoryview, *, fin: bool) -> None:
        """Take in the first objects on a stream, of FETCH `number`, or of a subscription (None)."""
        request = None if number is None else self.by_id(number)
        if request is None:
            if not fin:  # the request was cancelled; the draft allows dropping the stream
                self.ignore(stream)
                self._channel.commands.append(Stop(stream, ResetCode.CANCELLED))
            return
        if request.data_stream is not None:
            raise SessionFault(f"second stream of objects for request {number}")
        request.data_stream = stream
        self._by_data[stream] = request
        self.receive_objects(stream, data, fin=fin)

    def receives(self, stream: int) -> bool:
        """Return whether a unidirectional stream carries objects."""
        return stream in self._by_data

    def receive_objects(self, stream: int, data: bytes | memoryview, *, fin: bool) -> None:
        """Take in more objects of a stream."""
        request = self._by_data.pop(stream) if fin else self._by_data[stream]
        if request is None:
            return
        try:
            items = request.objects.feed(data)
        except MalformedTrack as error:
            self._abandon(request, RequestCode.MALFORMED_TRACK, f"malformed track: {error}")
            return
        if items:
            events = self._channel.events
            last = events[-1] if events else None
            if isinstance(last, Received) and last.request_id == request.number:
                last.items.extend(items)
            else:
                events.append(Received(request.number, items))
        if fin:
            request.objects.finish()
            self._data_ended(request, None)

    def data_reset(self, stream: int, code: int) -> None:
        """Handle the reset of a stream of objects."""
        request = self._by_data.pop(stream, None)
        if request is not None:
            self._data_ended(request, code)

    # ------------------------------------------------------------------ internals

    def _send(self, request: _FetchState) -> None:
        channel = self._channel
        if channel.draft.streams:
            request.stream = channel.open_bidi()
            self._by_stream[request.stream] = request
        channel.write(request.stream, request.message)
        if request.cancelled:
            self.cancel(request.number)

    def _data_ended(self, request: _FetchState, code: int | None) -> None:
        request.data_ended = True
        self._channel.events.append(Ended(request.number, code))
        self._finish(request)

    def _refused(self, request: _FetchState, code: int, reason: str) -> None:
        self._channel.events.append(Refused(request.number, m.RequestErrorMessage(request.number, code, 0, reason)))

    def _abandon(self, request: _FetchState, code: int, reason: str) -> None:
        """Cancel a request whose track cannot be used, such as a malformed one (draft 18, section 2.4.2)."""
        self.cancel(request.number)
        self._refused(request, code, reason)

    def _finish(self, request: _FetchState) -> None:
        """Drop a FETCH once its answer and all its objects have arrived, in either order."""
        if request.answered and request.data_ended:
            self._drop(request)

    def _drop(self, request: _FetchState) -> None:
        self._forget(request, ResetCode.CANCELLED)
        if request.stream is not None:
            self._channel.commands.append(Write(request.stream, b"", fin=True))

    def _forget(self, request: _FetchState, code: int) -> None:
        """Remove a request, and stop its objects."""
        self._requests.pop(request.number, None)
        if request.stream is not None:
            self._by_stream.pop(request.stream, None)
        if request.data_stream in self._by_data:
            self._by_data[request.data_stream] = None
            self._channel.commands.append(Stop(request.data_stream, code))
