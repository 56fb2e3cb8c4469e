"""The unidirectional streams that a peer opens: objects for requests of ours, padding, and its control stream."""

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
    """Whose bytes they were."""

    TAKEN = 0
    """Nobody else's."""
    CONTROL = 1
    """The stream is the peer's control stream."""
    EARLY = 2
    """They are objects, and must wait for the peer's SETUP."""


@dataclass(slots=True)
class _Incoming:
    header: bytearray = field(default_factory=bytearray)
    """Its header, as far as it has come."""
    request: RequestState | None = None
    objects: ObjectParser | None = None
    """Both None where nothing of the stream is wanted."""


class IncomingStreams:
    """Those that have not ended."""

    def __init__(self, channel: Channel, requester: Requester) -> None:
        self._channel, self._requester = channel, requester
        self._streams: dict[int, _Incoming] = {}

    def __len__(self) -> int:
        return len(self._streams)

    def receive(self, stream: int, data: bytes, *, fin: bool, ready: bool) -> tuple[Verdict, bytes]:
        """Bytes came on a stream.

        Args:
            stream: the stream.
            data: the bytes.
            fin: whether it ends with them.
            ready: whether the peer's SETUP has come.

        Returns:
            Whose they were; and, unless they were taken, all that has come on the stream: it is forgotten here.

        Raises:
            SessionFault: they cannot be.
        """
        found = self._streams.get(stream)
        if found is None:
            found = self._streams[stream] = _Incoming()
            verdict = self._begin(stream, found, data, fin=fin, ready=ready)
        elif found.header:
            verdict = self._begin(stream, found, data, fin=fin, ready=ready)
        else:
            verdict = Verdict.TAKEN
            self._receive_objects(stream, found, data, fin=fin)
        if fin or verdict is not Verdict.TAKEN:
            del self._streams[stream]
        return verdict, bytes(found.header)

    def reset(self, stream: int, code: int) -> None:
        """The peer has reset a stream."""
        found = self._streams.pop(stream, None)
        if found is not None and found.request is not None:
            self._requester.data_ended(found.request, stream, code)

    def _begin(self, stream: int, found: _Incoming, data: bytes, *, fin: bool, ready: bool) -> Verdict:
        """Find out what a stream is."""
        before = len(found.header)
        found.header += data
        draft = self._channel.draft
        header = read_stream_header(found.header, draft)
        if header is None:
            if fin or len(found.header) > _MAX_STREAM_HEADER:
                raise SessionFault("a stream without a header")
            return Verdict.TAKEN
        kind, what, size = header
        if kind == _SETUP_STREAM and draft.streams:
            return Verdict.CONTROL
        if kind == PADDING_STREAM and draft.streams:
            found.header.clear()
        elif what is None:
            raise SessionFault(f"a stream of type 0x{kind:x}")
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
            # What it belongs to was cancelled, or its SUBSCRIBE_OK is still on its way: the draft lets us drop it.
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
