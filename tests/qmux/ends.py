"""Two ends of a connection, and frames as a peer may write them."""

from kvabr.qmux.connection import QmuxConnection
from kvabr.qmux.frames import FrameType, TransportParameters, frame, write_varint

PARAMETERS = TransportParameters(
    max_data=1 << 16, max_stream_data_bidi_local=1 << 14, max_stream_data_bidi_remote=1 << 14,
    max_stream_data_uni=1 << 14, max_streams_bidi=4, max_streams_uni=4, max_record_size=1 << 15,
)  # fmt: skip


def end(*, client=True, parameters=PARAMETERS):
    return QmuxConnection(client=client, parameters=parameters)


def flush(sender, receiver, *, most=1 << 20, cut=None):
    """Carry everything that one end has to say to the other, in pieces; return the events of that."""
    events = []
    while out := b"".join(sender.data_to_send(most)):
        step = cut or len(out)
        for at in range(0, len(out), step):
            receiver.receive(out[at : at + step])
            events += [fixed(event) for event in receiver.take_events()]
    return events


def fixed(event):
    """An event whose data no longer depends on what it was read from."""
    if hasattr(event, "data"):
        return type(event)(event.stream, bytes(event.data), event.fin)
    return event


def pair(**more):
    """A client and a server that know each other's parameters."""
    client, server = end(client=True, **more), end(client=False, **more)
    flush(client, server)
    flush(server, client)
    client.take_events()
    return client, server


def record(*frames):
    body = b"".join(frames)
    return write_varint(len(body)) + body


def stream(number, data=b"", *, offset=0, fin=False, size=None):
    kind = FrameType.STREAM | 6 | fin
    return frame(kind, number, offset, len(data) if size is None else size) + data


def begun(parameters=PARAMETERS):
    """The record with which a peer begins."""
    return record(parameters.encode())
