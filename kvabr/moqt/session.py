"""The state machine of one MoQT session, as client or server, publisher or subscriber, in drafts 18 and 16.

Theory of operation. The owner tells of bytes, resets and stops on QUIC streams; the session answers with events for
the owner and commands for streams. It allots stream IDs itself, as QUIC does: it must be the connection's only user.

1. Draft 18: each end opens a unidirectional control stream with its SETUP; every request has a bidirectional stream of
   its own, on which it is answered, changed and, by a reset, cancelled. Draft 16: one bidirectional stream carries the
   SETUPs, all requests and all answers; only SUBSCRIBE_NAMESPACE has a stream of its own.
2. What comes before the peer's SETUP waits for it, within bounds: tokens in the SETUP decide what a request may do.
3. Objects of a FETCH come on one unidirectional stream. The owner writes the payload of its own streams itself, behind
   the header that `Responder.accept_fetch` has the session write.
4. A peer that breaks a rule ends the session: a `Close` command with the draft's code, and a `Closed` event.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from kvabr.moqt.channel import Channel, RequestState
from kvabr.moqt.codes import ResetCode, SessionCode, SessionFault
from kvabr.moqt.draft import Draft
from kvabr.moqt.encoding import MessageParser, decode
from kvabr.moqt.events import Close, Closed, Command, Event, GoingAway, Ready, Stop
from kvabr.moqt.messages import (
    Fetch,
    FetchCancel,
    FetchOk,
    Goaway,
    MaxRequestId,
    Message,
    PublishDone,
    PublishNamespaceCancel,
    PublishNamespaceDone,
    PublishOk,
    RequestError,
    RequestOk,
    RequestsBlocked,
    RequestUpdate,
    Setup,
    Subscribe,
    SubscribeNamespace,
    SubscribeOk,
    TrackStatus,
    Unsubscribe,
)
from kvabr.moqt.messages import PublishNamespace as PublishNamespaceMessage
from kvabr.moqt.objects import PADDING_STREAM, ObjectParser, SubgroupHeader, read_datagram, read_stream_header
from kvabr.moqt.parameters import Parameters, SetupOptions
from kvabr.moqt.requester import Requester
from kvabr.moqt.responder import REQUEST_WINDOW, REQUESTS, Responder
from kvabr.moqt.tokens import TokenCache
from kvabr.moqt.wire import Location

_SETUP_STREAM = 0x2F00
_MAX_EARLY_BYTES = 1 << 17
"""Bytes that may wait for the peer's SETUP."""
_MAX_STREAM_HEADER = 64


@dataclass(slots=True)
class _Incoming:
    """A unidirectional stream of the peer's."""

    header: bytearray = field(default_factory=bytearray)
    """Its header, as far as it has come."""
    request: RequestState | None = None
    objects: ObjectParser | None = None
    control: MessageParser | None = None
    ignored: bool = False


class Session:
    """One session. See the module's docstring for how to drive it."""

    def __init__(self, draft: Draft, *, client: bool, options: SetupOptions | None = None) -> None:
        """Prepare a session; `start` begins it.

        Args:
            draft: what ALPN has negotiated.
            client: which end this is.
            options: what our SETUP says.
        """
        self.draft, self.client = draft, client
        self._options = replace(
            options or SetupOptions(), max_request_id=0 if draft.streams else 2 * REQUEST_WINDOW
        )
        self._channel = Channel(draft, client=client)
        self._tokens = TokenCache(self._options.max_auth_token_cache_size)
        self.requester = Requester(self._channel)
        """Requests of ours."""
        self.responder = Responder(self._channel, self._tokens, self._options.max_request_id)
        """Requests of the peer's."""
        self._control_in: int | None = None
        self._messages: dict[int, MessageParser] = {}
        """Of the bidirectional streams."""
        self._incoming: dict[int, _Incoming] = {}
        self._early: list[tuple[int, bytes, bool]] = []
        self._early_bytes = 0
        self._ready = False
        self.closed: Closed | None = None

    # ------------------------------------------------------------------ what the owner wants

    def start(self) -> None:
        """Send our SETUP; a server in draft 16 sends it in answer."""
        channel = self._channel
        if self.draft.streams:
            channel.control_stream = channel.open_uni()
            channel.control(Setup(self._options))
        elif self.client:
            channel.control_stream = self._control_in = channel.open_bidi()
            self._messages[self._control_in] = MessageParser(self.draft)
            channel.control(Setup(self._options))

    def fetch(
        self, namespace: tuple[bytes, ...], track: bytes, start: Location, end: Location, parameters: Parameters
    ) -> int:
        """Ask for published objects from ``start`` to ``end``, given as the draft does; returns the request's ID."""
        return self.requester.request(lambda number: Fetch(number, namespace, track, start, end, parameters))

    def subscribe(self, namespace: tuple[bytes, ...], track: bytes, parameters: Parameters) -> int:
        """Ask for objects yet to be published; returns the request's ID."""
        return self.requester.request(lambda number: Subscribe(number, namespace, track, parameters))

    def track_status(self, namespace: tuple[bytes, ...], track: bytes, parameters: Parameters) -> int:
        """Ask what there is of a track; returns the request's ID."""
        return self.requester.request(lambda number: TrackStatus(number, namespace, track, parameters))

    def publish_namespace(self, namespace: tuple[bytes, ...], parameters: Parameters | None = None) -> int:
        """Tell of a namespace, until the request is cancelled; returns its ID."""
        given = parameters or Parameters()
        return self.requester.request(lambda number: PublishNamespaceMessage(number, namespace, given))

    def subscribe_namespace(self, prefix: tuple[bytes, ...], parameters: Parameters | None = None) -> int:
        """Ask to be told of namespaces; returns the request's ID."""
        given = parameters or Parameters()
        return self.requester.request(lambda number: SubscribeNamespace(number, prefix, 1, given))

    def goaway(self, timeout_ms: int = 0) -> None:
        """Tell the peer that the session will end; requests that come after this are refused."""
        if self._channel.control_stream is not None and not self.responder.draining and self.closed is None:
            self.responder.draining = True
            number = self.responder.ids.next if self.draft.streams else None
            self._channel.control(Goaway(b"", timeout_ms, number))

    def close(self, code: int = SessionCode.NO_ERROR, reason: str = "") -> None:
        """End the session."""
        if self.closed is None:
            self.closed = Closed(code, reason)
            self._channel.commands.append(Close(code, reason))
            self._channel.events.append(self.closed)

    # ------------------------------------------------------------------ what the connection tells

    def receive(self, stream: int, data: bytes, *, fin: bool = False) -> None:
        """Bytes came on a stream."""
        if self.closed is not None:
            return
        try:
            if stream & 2:
                self._receive_uni(stream, data, fin=fin)
            else:
                self._receive_bidi(stream, data, fin=fin)
        except SessionFault as fault:
            self.close(fault.code, str(fault))

    def receive_reset(self, stream: int, code: int) -> None:
        """The peer has reset its side of a stream."""
        if self.closed is not None:
            return
        if stream == self._control_in:
            self.close(SessionCode.PROTOCOL_VIOLATION, "the control stream was reset")
        elif stream & 2:
            found = self._incoming.pop(stream, None)
            if found is not None and found.request is not None:
                self.requester.data_ended(found.request, stream, code)
        else:
            self._messages.pop(stream, None)
            self.requester.stream_gone(stream, code)
            self.responder.stream_gone(stream, code)

    def receive_stop(self, stream: int, code: int) -> None:
        """The peer wants no more on a stream of ours."""
        if self.closed is not None:
            return
        if stream == self._channel.control_stream:
            self.close(SessionCode.PROTOCOL_VIOLATION, "the peer does not want the control stream")
        elif self.requester.owns(stream) is None:
            # On a stream of ours it only means that the peer needs no more of our request, as after its answer.
            self.responder.stream_gone(stream, code)

    def receive_datagram(self, data: bytes) -> None:
        """A datagram came."""
        if self.closed is not None or not self._ready:
            return
        try:
            found = read_datagram(data, self.draft)
        except SessionFault as fault:
            self.close(fault.code, str(fault))
            return
        if found is not None:
            self.requester.datagram(found[0], found[1], found[2])

    def take_events(self) -> list[Event]:
        """Events since the last call."""
        out, self._channel.events = self._channel.events, []
        return out

    def take_commands(self) -> list[Command]:
        """Commands since the last call, to be carried out in order."""
        out, self._channel.commands = self._channel.commands, []
        return out

    # ------------------------------------------------------------------ unidirectional streams

    def _receive_uni(self, stream: int, data: bytes, *, fin: bool) -> None:
        found = self._incoming.get(stream)
        if found is None:
            found = self._incoming[stream] = _Incoming()
        if found.objects is not None:
            self._receive_objects(stream, found, data, fin=fin)
        elif found.control is not None:
            self._receive_control(found.control, data, fin=fin)
        elif not found.ignored:
            found.header += data
            self._begin_uni(stream, found, fin=fin)
        if fin:
            self._incoming.pop(stream, None)

    def _begin_uni(self, stream: int, found: _Incoming, *, fin: bool) -> None:
        """Find out what a new stream of the peer's is."""
        header = read_stream_header(found.header, self.draft)
        if header is None:
            if fin or len(found.header) > _MAX_STREAM_HEADER:
                raise SessionFault("a stream without a header")
            return
        kind, what, size = header
        data = bytes(found.header)
        if kind == _SETUP_STREAM and self.draft.streams:
            if self._control_in is not None:
                raise SessionFault("a second control stream")
            self._control_in = stream
            found.control = MessageParser(self.draft)
            found.header.clear()
            self._receive_control(found.control, data, fin=fin)
        elif kind == PADDING_STREAM and self.draft.streams:
            found.ignored = True
        elif what is None:
            raise SessionFault(f"a stream of type 0x{kind:x}")
        elif not self._ready:
            self._keep_early(stream, data, fin=fin)
            self._incoming.pop(stream)
        else:
            found.header.clear()
            self._begin_objects(stream, found, what, data[size:], fin=fin)

    def _begin_objects(
        self, stream: int, found: _Incoming, what: SubgroupHeader | int, data: bytes, *, fin: bool
    ) -> None:
        request = self.requester.claim(stream, what)
        if request is None:
            # What it belongs to was cancelled, or its SUBSCRIBE_OK is still on its way: the draft lets us drop it.
            found.ignored = True
            if not fin:
                self._channel.commands.append(Stop(stream, ResetCode.CANCELLED))
            return
        found.request = request
        fetch = isinstance(what, int)
        descending = fetch and request.message.parameters.group_order == 2
        found.objects = ObjectParser(self.draft, None if isinstance(what, int) else what, descending=descending)
        self._receive_objects(stream, found, data, fin=fin)

    def _receive_objects(self, stream: int, found: _Incoming, data: bytes, *, fin: bool) -> None:
        request, objects = found.request, found.objects
        assert request is not None  # noqa: S101  # both are set at once
        assert objects is not None  # noqa: S101
        items = objects.feed(data)
        if items:
            self.requester.received(request, items)
        if fin:
            objects.finish()
            self.requester.data_ended(request, stream, None)

    # ------------------------------------------------------------------ bidirectional streams

    def _receive_bidi(self, stream: int, data: bytes, *, fin: bool) -> None:
        if not self.draft.streams and self._control_in is None:
            self._control_in = self._channel.control_stream = stream
            self._messages[stream] = MessageParser(self.draft)
        if stream == self._control_in:
            self._receive_control(self._messages[stream], data, fin=fin)
        elif not self._ready:
            self._keep_early(stream, data, fin=fin)
        else:
            self._receive_request(stream, data, fin=fin)

    def _receive_request(self, stream: int, data: bytes, *, fin: bool) -> None:
        ours = stream % 2 == (not self.client)
        if ours and self.requester.owns(stream) is None:
            if fin:
                self._messages.pop(stream, None)
            return  # its request is over
        parser = self._messages.get(stream)
        if parser is None:
            if not ours and not data:
                return  # the end of a stream whose request is over
            parser = self._messages[stream] = MessageParser(self.draft)
        for kind, payload in parser.feed(data):
            message = decode(kind, payload, self.draft, control=False)
            if ours:
                if (request := self.requester.owns(stream)) is not None:
                    self.requester.answer(request, message)
            else:
                self.responder.heard(stream, message, first=parser.count == 1)
        if fin:
            if parser.buffered:
                raise SessionFault("a request's stream ends within a message")
            self._messages.pop(stream, None)
            self.requester.stream_gone(stream, None)

    def _receive_control(self, parser: MessageParser, data: bytes, *, fin: bool) -> None:
        for kind, payload in parser.feed(data):
            message = decode(kind, payload, self.draft)
            if isinstance(message, Setup):
                self._setup_came(message)
            elif not self._ready:
                raise SessionFault("a message before SETUP")
            else:
                self._control_came(message)
            if self.closed is not None:
                return
        if fin:
            raise SessionFault("the control stream has ended")

    def _keep_early(self, stream: int, data: bytes, *, fin: bool) -> None:
        self._early_bytes += len(data) + 64
        if self._early_bytes > _MAX_EARLY_BYTES:
            raise SessionFault(f"more than {_MAX_EARLY_BYTES} bytes before SETUP", SessionCode.INTERNAL_ERROR)
        self._early.append((stream, data, fin))

    # ------------------------------------------------------------------ control messages

    def _setup_came(self, message: Setup) -> None:
        if self._ready:
            raise SessionFault("a second SETUP")
        options = message.options
        if self.client and options.path is not None:
            raise SessionFault("a server's SETUP has a path", SessionCode.INVALID_PATH)
        if self.client and options.authority is not None:
            raise SessionFault("a server's SETUP has an authority", SessionCode.INVALID_AUTHORITY)
        tokens = self._tokens.resolve(options.tokens, setup=True)
        self._ready = True
        if not self.draft.streams and not self.client:
            self._channel.control(Setup(self._options))
        self._channel.events.append(Ready(options, tokens))
        self.requester.grant(options.max_request_id)
        early, self._early = self._early, []
        for stream, data, fin in early:
            self.receive(stream, data, fin=fin)

    def _control_came(self, message: Message) -> None:
        """A message on the control stream: a GOAWAY, or anything in draft 16."""
        if isinstance(message, Goaway):
            self._goaway_came(message)
        elif self.draft.streams:
            raise SessionFault(f"a {type(message).__name__} on the control stream")
        elif isinstance(message, REQUESTS):
            self.responder.begin(message, None)
        elif isinstance(message, MaxRequestId):
            self.requester.raise_limit(message.request_id)
        elif isinstance(message, RequestUpdate):
            self.responder.update_16(message)
        elif isinstance(message, FetchCancel | Unsubscribe | PublishNamespaceDone):
            self.responder.cancelled_16(message.request_id)
        elif isinstance(message, RequestOk | RequestError | SubscribeOk | FetchOk | PublishDone):
            number = -1 if message.request_id is None else message.request_id
            if (request := self.requester.by_id(number)) is not None:
                self.requester.answer(request, message)
        elif not isinstance(message, RequestsBlocked | PublishNamespaceCancel | PublishOk):
            # The first of these only informs; the others answer what is never sent here.
            raise SessionFault(f"a {type(message).__name__} on the control stream")

    def _goaway_came(self, message: Goaway) -> None:
        if self.requester.peer_draining:
            raise SessionFault("a second GOAWAY")
        if message.uri and not self.client:
            raise SessionFault("a client's GOAWAY names a server")
        if message.request_id is not None and message.request_id % 2 == self.client:
            raise SessionFault("a GOAWAY with a request ID of its sender's", SessionCode.INVALID_REQUEST_ID)
        self.requester.peer_draining = True
        self._channel.events.append(GoingAway(message.uri, message.timeout_ms))
