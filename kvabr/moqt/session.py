"""The state machine of one MoQT session, for clients and servers, publishers and subscribers, and all drafts.

The owner passes bytes, resets and STOP_SENDINGs of QUIC streams to the session. The session returns events for the
owner and commands for streams, and allocates all stream IDs.

1. Each end opens a unidirectional control stream with its SETUP. Every request has its own bidirectional stream, which
  carries answers and changes; a reset cancels the request.
2. Data before the peer's SETUP is buffered, within limits, because the tokens in SETUP decide which requests are
  allowed.
3. The objects of a FETCH arrive on one unidirectional stream, those of a subscription on one per subgroup. The owner
   writes its own objects after the header of `Responder.accept_fetch` or `push`.
4. If the peer violates the protocol, the session ends with a `Close` command with the draft's code, and a `Closed`
  event.
"""

from __future__ import annotations

from kvabr.moqt import messages as m
from kvabr.moqt.codes import ResetCode, SessionCode, SessionFault
from kvabr.moqt.events import Close, Closed, Command, Event, GoingAway, Ready, Reset
from kvabr.moqt.messages import MessageParser, decode
from kvabr.moqt.objects import PADDING_STREAM, SETUP_STREAM, read_stream_header
from kvabr.moqt.requester import Channel, Requester
from kvabr.moqt.responder import Responder
from kvabr.moqt.setup_options import SetupOptions, check_target
from kvabr.moqt.wire import Draft, Location, Parameters, token_values

_MAX_STREAM_HEADER = 64
_MAX_EARLY_BYTES = 1 << 17
_MAX_PARTIAL_BYTES = 1 << 20
"""Maximum total bytes of incomplete messages on all request streams of the peer."""


class MoqtSession:
    """One session; see the module docstring for its use."""

    def __init__(self, draft: Draft, *, client: bool, options: SetupOptions | None = None) -> None:
        self.draft, self.client = draft, client
        self._options = options or SetupOptions()
        self._channel = Channel(draft, client=client)
        self.requester = Requester(self._channel)
        self.responder = Responder(self._channel)
        self._control_in: int | None = None
        self._messages: dict[int, MessageParser | None] = {}
        """Parsers of the peer's open bidirectional streams; None if the request has ended."""
        self._control_parser = MessageParser()
        self._headers: dict[int, bytes] = {}
        self._early: dict[int, tuple[bytearray | None, bool]] = {}
        """Data received before the peer's SETUP, by stream: bytes (None if they are not needed), and True if the stream
        ended.
        """
        self._early_bytes = 0
        self._ready = False
        self.closed: Closed | None = None

    # ------------------------------------------------------------------ called by the owner

    def start(self) -> None:
        """Send the SETUP."""
        self._channel.control_stream = self._channel.open_uni()
        self._channel.control(m.Setup(self._options))

    def fetch(
        self, namespace: tuple[bytes, ...], track: bytes, start: Location, end: Location, parameters: Parameters
    ) -> int:
        """Request published objects up to ``end`` (see `Fetch.end`); return the request ID."""
        number = self._channel.take_id()
        self.requester.request(m.Fetch(number, namespace, track, start, end, parameters))
        return number

    def subscribe(self, namespace: tuple[bytes, ...], track: bytes, parameters: Parameters) -> int:
        """Request future objects, by default those after the largest object; return the request ID.

        Raise ValueError if a subscription to the track is open.
        """
        if self.requester.subscribed(namespace, track):
            raise ValueError("a subscription to that track is already open")
        number = self._channel.take_id()
        self.requester.request(m.Subscribe(number, namespace, track, parameters))
        return number

    def goaway(self, timeout_ms: int = 0) -> None:
        """Announce the end of the session; later requests from the peer are refused."""
        if self._channel.control_stream is not None and not self.responder.draining and self.closed is None:
            self.responder.draining = True
            self._channel.control(m.Goaway(b"", timeout_ms))

    def close(self, code: int = SessionCode.NO_ERROR, reason: str = "") -> None:
        """Close the session."""
        if self.closed is None:
            self.closed = Closed(code, reason)
            self._channel.commands.append(Close(code, reason))
            self._channel.events.append(self.closed)

    # ------------------------------------------------------------------ called by the connection

    def receive(self, stream: int, data: bytes | memoryview, *, fin: bool = False) -> None:
        """Handle bytes from a stream. Events may refer to ``data`` until `take_events`."""
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
        """Handle a reset of the peer's side of a stream."""
        if self.closed is not None:
            return
        if stream == self._control_in:
            self.close(SessionCode.PROTOCOL_VIOLATION, "the control stream was reset")
        elif self._early.pop(stream, None) is not None:
            self._refuse_stream(stream)
        elif stream & 2:
            self._headers.pop(stream, None)
            self.requester.data_reset(stream, code)
        else:
            parser = self._messages.pop(stream, None)
            if parser is not None and not parser.count:
                self._refuse_stream(stream)
            self.requester.stream_ended(stream, code)
            self.responder.stream_ended(stream, code)

    def receive_stop(self, stream: int, code: int) -> None:
        """Handle STOP_SENDING for this end's side of a stream."""
        if self.closed is not None:
            return
        if stream == self._channel.control_stream:
            self.close(SessionCode.PROTOCOL_VIOLATION, "the control stream was stopped")
        elif self._opened(stream) and not stream & 2:
            return  # harmless: the peer does not need the rest of the request's stream
        elif self._opened(stream) or self.responder.owns(stream):
            self.responder.stream_ended(stream, code)
        elif (parser := self._messages.get(stream)) is not None and not parser.count:
            self._messages[stream] = None  # the request is incomplete, so it needs no answer
            self._refuse_stream(stream)
        elif (early := self._early.get(stream)) is not None:
            self._early[stream] = (None, early[1])
            self._refuse_stream(stream)

    def _refuse_stream(self, stream: int) -> None:
        if not stream & 2:
            self._channel.commands.append(Reset(stream, ResetCode.CANCELLED))

    def _opened(self, stream: int) -> bool:
        return stream % 2 == (not self.client)

    def take_events(self) -> list[Event]:
        """Return the events since the last call."""
        out, self._channel.events = self._channel.events, []
        return out

    def take_commands(self) -> list[Command]:
        """Return the commands since the last call. `Close` is the last command."""
        out, self._channel.commands = self._channel.commands, []
        if self.closed is None:
            return out
        last = next((at for at, command in enumerate(out) if isinstance(command, Close)), -1)
        return out[: last + 1]

    # ------------------------------------------------------------------ unidirectional streams

    def _receive_uni(self, stream: int, data: bytes | memoryview, *, fin: bool) -> None:
        if self.requester.receives(stream):
            self.requester.receive_objects(stream, data, fin=fin)
        elif stream == self._control_in:
            self._receive_control(data, fin=fin)
        elif stream in self._early:
            self._keep_early(stream, data, fin=fin)
        else:
            self._begin_uni(stream, self._headers.pop(stream, b"") + data, fin=fin)

    def _begin_uni(self, stream: int, data: bytes, *, fin: bool) -> None:
        header = read_stream_header(data)
        if header is None:
            if fin or len(data) > _MAX_STREAM_HEADER:
                raise SessionFault("stream without a valid header")
            self._headers[stream] = data
            return
        kind, of, size = header
        if kind == SETUP_STREAM:
            if self._control_in is not None:
                raise SessionFault("second control stream")
            self._control_in = stream
            self._receive_control(data, fin=fin)
        elif kind == PADDING_STREAM:
            if not fin:
                self.requester.ignore(stream)
        elif of is None:
            raise SessionFault(f"unknown stream type 0x{kind:x}")
        elif self._ready:
            self.requester.begin_objects(stream, of, memoryview(data)[size:], fin=fin)
        else:
            self._keep_early(stream, data, fin=fin)

    # ------------------------------------------------------------------ bidirectional streams

    def _receive_bidi(self, stream: int, data: bytes | memoryview, *, fin: bool) -> None:
        if not self._ready:
            self._keep_early(stream, data, fin=fin)
        elif self._opened(stream):
            self.requester.receive_answers(stream, data, fin=fin)
        else:
            self._receive_request(stream, data, fin=fin)

    def _receive_request(self, stream: int, data: bytes | memoryview, *, fin: bool) -> None:
        parser = self._messages.setdefault(stream, MessageParser())
        if parser is not None:
            self._receive_requests(stream, parser, data)
            if fin and parser.buffered:
                raise SessionFault("a request's stream ends inside a message")
            if fin and not parser.count:
                self._refuse_stream(stream)
        if fin:
            self._messages.pop(stream)

    def _receive_requests(self, stream: int, parser: MessageParser, data: bytes | memoryview) -> None:
        for kind, payload in parser.feed(data):
            message = decode(kind, payload, self.draft)
            self.responder.receive(stream, message, first=parser.count == 1)
        if parser.count and not self.responder.owns(stream):
            self._messages[stream] = None  # the request has ended
        elif parser.buffered:
            held = sum(parser.buffered for parser in self._messages.values() if parser is not None)
            if held > _MAX_PARTIAL_BYTES:
                what = f"more than {_MAX_PARTIAL_BYTES} bytes of incomplete messages"
                raise SessionFault(what, SessionCode.INTERNAL_ERROR)

    def _receive_control(self, data: bytes | memoryview, *, fin: bool) -> None:
        for kind, payload in self._control_parser.feed(data):
            message = decode(kind, payload, self.draft)
            if isinstance(message, m.Setup):
                self._receive_setup(message)
            elif not self._ready:
                raise SessionFault(f"{type(message).__name__} before SETUP")
            elif isinstance(message, m.Goaway):
                self._receive_goaway(message)
            else:
                raise SessionFault(f"{type(message).__name__} on the control stream")
            if self.closed is not None:
                return
        if fin:
            raise SessionFault("the control stream has ended")

    def _keep_early(self, stream: int, data: bytes | memoryview, *, fin: bool) -> None:
        kept: bytearray | None = self._early.get(stream, (bytearray(), False))[0]
        self._early_bytes += len(data) + 64
        if self._early_bytes > _MAX_EARLY_BYTES:
            raise SessionFault(f"more than {_MAX_EARLY_BYTES} bytes before SETUP", SessionCode.INTERNAL_ERROR)
        if kept is not None:
            kept += data
        self._early[stream] = (kept, fin)

    # ------------------------------------------------------------------ control messages

    def _receive_setup(self, message: m.Setup) -> None:
        if self._ready:
            raise SessionFault("second SETUP")
        options = message.options
        check_target(options, client=not self.client)
        tokens = token_values(options.tokens, setup=True)
        self._ready = True
        self._channel.events.append(Ready(options, tokens))
        self.requester.max_updates = options.max_request_updates
        early, self._early = self._early, {}
        for stream, (data, fin) in early.items():
            if data is not None:
                self.receive(stream, bytes(data), fin=fin)
            elif not fin:
                self._messages[stream] = None

    def _receive_goaway(self, message: m.Goaway) -> None:
        self._channel.check_goaway(message, repeated=self.requester.peer_draining)
        self.requester.peer_draining = True
        self._channel.events.append(GoingAway(message.uri, message.timeout_ms))
