"""A lying origin's answers to a request for a group: by name, functions of a `tests.faults.rude.Answer`."""

import asyncio

from kvabr.moqt.codes import RequestCode, ResetCode
from kvabr.moqt.wire import write_varint


def flipped(frame):
    middle = len(frame) // 2
    return frame[:middle] + bytes([frame[middle] ^ 1]) + frame[middle + 1 :]


def many_objects(answer):
    """Objects without end, each of them small."""
    for number in range(200):
        header = answer.writer.header(answer.group, answer.first_object + number, 100)
        answer.write(header + b"\0" * 100)


def two_streams(answer):
    answer.one_object(answer.frame[:100], end=False)
    stream = answer.peer.session.responder._channel.open_uni()
    answer.peer.transport.write(stream, b"\x05" + write_varint(answer.number))


def of_nobody(answer):
    stream = answer.peer.session.responder._channel.open_uni()
    answer.peer.transport.write(stream, b"\x05" + write_varint(4000))


def bad_control(answer):
    session = answer.peer.session
    answer.peer.transport.write(session._channel.control_stream, b"\x3f\x00\x00")


def broken_off(answer):
    answer.one_object(answer.frame[:999], size=len(answer.frame), end=False)
    # A stream that is reset before anything of it is sent tells a subscriber of draft 16 nothing at all.
    asyncio.get_running_loop().call_later(0.05, answer.reset, ResetCode.MALFORMED_TRACK)


LIES = {
    "short": lambda answer: answer.one_object(answer.frame[:-100]),
    "long": lambda answer: answer.one_object(answer.frame + b"more"),
    "empty": lambda answer: answer.write(b"", end=True),
    "one bit": lambda answer: answer.one_object(flipped(answer.frame)),
    "noise": lambda answer: answer.one_object(b"kvab" + bytes(len(answer.frame) - 4)),
    "another group": lambda answer: answer.one_object(answer.other),
    "one huge object": lambda answer: answer.one_object(answer.frame, size=1 << 40, end=False),
    "objects without end": many_objects,
    "another group's objects": lambda answer: answer.one_object(answer.frame, group=answer.group + 1),
    "broken off": broken_off,
    "refused": lambda answer: answer.refuse(RequestCode.INTERNAL_ERROR, "disk on fire"),
    "refused with an unknown code": lambda answer: answer.refuse(0x7777, "because"),
    "stalled": lambda answer: answer.one_object(answer.frame[:999], size=len(answer.frame), end=False),
    "no answer": lambda _: None,
    "garbage as objects": lambda answer: answer.write(b"\x3f" + b"\xff" * 500),
    "garbage as messages": bad_control,
    "two streams": two_streams,
    "a stream for nobody's request": of_nobody,
}
