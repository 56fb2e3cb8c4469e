"""Publishers that lie: what comes is refused with its reason, asked for again, and never becomes part of a cache."""

from __future__ import annotations

import asyncio
import hashlib
import json
import shutil

import pytest

from kvabr.client.play import play
from kvabr.errors import PlayError, TransportError
from kvabr.moqt.codes import RequestCode, ResetCode
from tests.faults.common import COST, SPEC, TOKENS, Log, Stopwatch, connect, engine, right
from tests.faults.rude import GOAL, lying, rude_server

FULL = 10586
"""Bytes of a group of Int4."""


def flipped(frame):
    return frame[:5000] + bytes([frame[5000] ^ 1]) + frame[5001:]


def many_objects(answer):
    """Objects without end, each of them small."""
    for number in range(200):
        header = answer.writer.header(answer.group, answer.first_object + number, 100)
        answer.write(header + b"\0" * 100)


def two_streams(answer):
    answer.one_object(answer.frame[:100], end=False)
    stream = answer.peer.session.responder._channel.open_uni()
    answer.peer.quic.send_stream_data(stream, b"\x05" + answer.peer.session.draft.varint.encode(answer.number), False)


def of_nobody(answer):
    stream = answer.peer.session.responder._channel.open_uni()
    answer.peer.quic.send_stream_data(stream, b"\x05" + answer.peer.session.draft.varint.encode(4000), False)


def bad_control(answer):
    answer.peer.quic.send_stream_data(answer.peer.session._channel.control_stream, b"\x3f\xff" * 40, False)


LIES = {
    "short": (lambda answer: answer.one_object(answer.frame[:-100]), f"{FULL - 100} bytes came, the catalog says {FULL}"),
    "long": (lambda answer: answer.one_object(answer.frame + b"more"), f"longer than the {FULL} bytes"),
    "empty": (lambda answer: answer.write(b"", end=True), "nothing there"),
    "one bit": (lambda answer: answer.one_object(flipped(answer.frame)), "digest"),
    "noise": (lambda answer: answer.one_object(bytes(FULL)), "digest"),
    "one huge object": (lambda answer: answer.one_object(answer.frame, size=1 << 40, end=False), "longer than the"),
    "objects without end": (many_objects, f"longer than the {FULL} bytes"),
    "another group's objects": (lambda answer: answer.one_object(answer.frame, group=GOAL + 1), "objects of group 3 came"),
    "reset": (lambda answer: (answer.one_object(answer.frame[:999], size=FULL, end=False), answer.reset(0x12)), "MALFORMED"),
    "refused": (lambda answer: answer.refuse(RequestCode.INTERNAL_ERROR, "disk on fire"), "INTERNAL_ERROR: disk on fire"),
    "refused with an unknown code": (lambda answer: answer.refuse(0x7777, "because"), "0x7777: because"),
    "stalled": (lambda answer: answer.one_object(answer.frame[:999], size=FULL, end=False), "it stands still"),
    "no answer": (lambda answer: None, "it stands still"),
    "garbage as objects": (lambda answer: answer.write(b"\x3f" + b"\xff" * 500), "PROTOCOL_VIOLATION"),
    "garbage as messages": (bad_control, "PROTOCOL_VIOLATION"),
    "two streams": (two_streams, "second stream"),
    "a stream for nobody's request": (of_nobody, "never made"),
}  # fmt: skip


@pytest.mark.parametrize("draft", ["moqt-18", "moqt-16"])
async def test_a_lie_told_once_is_refused_and_the_group_asked_for_again(root, tls, fingerprint, draft):
    async def one(name, lie):
        log = Log()
        async with lying(root, tls, fingerprint, lie) as served:
            async with served.connect(drafts=(draft,)) as connection:
                played = await play(connection, TOKENS, deadline=2.0, policy="fixed:Int4", spec=SPEC, log=log)
            assert served.server.told == 1, name
            await served.empty()
        assert right(played), name
        assert played.met, name
        return name, log

    for name, log in await asyncio.gather(*(one(name, lie) for name, (lie, _) in LIES.items())):
        reasons = [line["reason"] for line in log.lines if line["event"] in {"failed", "cancel"}]
        assert any(LIES[name][1] in reason for reason in reasons), (name, reasons)


@pytest.mark.parametrize("name", ["one bit", "long", "stalled", "garbage as objects"])
async def test_a_lie_told_always(root, tls, fingerprint, name):
    """Without an engine it ends in an error that names it; with one, in a cache without a hole."""
    lie, reason = LIES[name]
    async with lying(root, tls, fingerprint, lie, once=False) as served:
        async with served.connect() as one, served.connect() as other:
            watch = Stopwatch()
            error, played = await asyncio.gather(
                play(one, TOKENS, deadline=1.0, patience=2.0, spec=SPEC),
                play(other, TOKENS, deadline=1.0, patience=2.0, recompute=engine(), cost=COST),
                return_exceptions=True,
            )
            assert watch.s < 2.5
    assert isinstance(error, PlayError), error
    assert reason in str(error)
    assert right(played)
    assert played.coverage[GOAL] == "recomputed"
