"""The unidirectional streams of the peer: objects for requests of this end, padding, and its control stream."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from kvabr.moqt.channel import Channel, RequestState
from kvabr.moqt.codes import ResetCode, SessionFault
from kvabr.moqt.events import Stop
from kvabr.moqt.objects import PADDING_STREAM, ObjectParser, SubgroupHeader, read_stream_header
from kvabr.moqt.properties import MalformedTrack
from kvabr.moqt.requester import Requester

_SETUP_STREAM = 0x2F00
_MAX_STREAM_HEADER = 64


class Verdict(Enum):
    """What to do with a stream."""

    TAKEN = 0
    """Nothing: its bytes were consumed."""
    CONTROL = 1
    """Treat it as the peer's control stream."""
    EARLY = 2
    """Hold it until the peer's SETUP: it carries objects."""


@dataclass(slots=True)
class _Incoming:
    header: bytearray = field(default_factory=bytearray)
    """The part of the header received so far; empty once it is parsed."""
    request: RequestState | None = None
    objects: ObjectParser | None = None
    """Both None if the stream's content is ignored."""


class IncomingStreams:
    """The streams that have not ended."""

    def __init__(self, channel: Channel, requester: Requester) -> None:
        self._channel, self._requester = channel, requester
        self._streams: dict[int, _Incoming] = {}

    def __len__(self) -> int:
        return len(self._streams)

    def receive(self, stream: int, data: bytes, *, fin: bool, ready: bool) -> tuple[Verdict, bytes]:
        """Take in bytes from a stream.

        Args:
            stream: The stream.
            data: The bytes.
            fin: Whether they end the stream.
            ready: Whether the peer's SETUP has arrived.

        Returns:
            What to do with the stream and, unless its bytes were consumed, all bytes received on it so far; the caller
            then takes over the stream.

        Raises:
            SessionFault: The stream violates the protocol.
        """
        new = stream not in self._streams
        found = self._streams.setdefault(stream, _Incoming())
        if new or found.header:
            verdict = self._begin(stream, found, data, fin=fin, ready=ready)
        else:
            verdict = Verdict.TAKEN
            self._receive_objects(stream, found, data, fin=fin)
        if fin or verdict is not Verdict.TAKEN:
            del self._streams[stream]
        return verdict, bytes(found.header)

    def reset(self, stream: int, code: int) -> None:
        """Handle a reset of a stream."""
        found = self._streams.pop(stream, None)
        if found is not None and found.request is not None:
            self._requester.data_ended(found.request, stream, code)

    def _begin(self, stream: int, found: _Incoming, data: bytes, *, fin: bool, ready: bool) -> Verdict:
        """Parse the header of a stream."""
        before = len(found.header)
        found.header += data
        draft = self._channel.draft
        header = read_stream_header(found.header, draft)
        if header is None:
            if fin or len(found.header) > _MAX_STREAM_HEADER:
                raise SessionFault("stream without a valid header")
            return Verdict.TAKEN
        kind, what, size = header
        if kind == _SETUP_STREAM and draft.streams:
            return Verdict.CONTROL
        if kind == PADDING_STREAM and draft.streams:
            found.header.clear()
        elif what is None:
            raise SessionFault(f"unknown stream type 0x{kind:x}")
        elif not ready:
            return Verdict.EARLY
        else:
            found.header.clear()
            self._begin_objects(stream, found, what, memoryview(data)[size - before :], fin=fin)
        return Verdict.TAKEN

    def _begin_objects(
        self, stream: int, found: _Incoming, what: SubgroupHeader | int, data: memoryview, *, fin: bool
    ) -> None:
        request = self._requester.claim(stream, what)
        if request is None:
            # The request was cancelled, or its SUBSCRIBE_OK has not arrived yet; the draft allows dropping the stream.
            if not fin:
                self._channel.commands.append(Stop(stream, ResetCode.CANCELLED))
            return
        fetch = isinstance(what, int)
        descending = fetch and request.message.parameters.group_order == 2
        found.request = request
        found.objects = ObjectParser(
            self._channel.draft, None if isinstance(what, int) else what, descending=descending
        )
        self._receive_objects(stream, found, data, fin=fin)

    def _receive_objects(self, stream: int, found: _Incoming, data: bytes | memoryview, *, fin: bool) -> None:
        request, objects = found.request, found.objects
        if request is None or objects is None:
            return
        if not self._requester.wants(request):
            found.request = found.objects = None
            return
        try:
            items = objects.feed(data)
        except MalformedTrack as error:
            self._requester.malformed(request, str(error))
            return
        if items:
            self._requester.received(request, stream, items)
        if fin:
            objects.finish()
            self._requester.data_ended(request, stream, None)
