"""Whole sessions of MoQT: bytes, resets and STOP_SENDINGs of a peer, in any order, on any stream.

An input is a list of steps with `SEPARATOR` between them. Its first part says how the session begins (bit 0: without
the peer's SETUP; bit 1: without a FETCH of this end; bit 2: with a SUBSCRIBE). Each other part is a step:

    what 1 | stream 1 | cut 1 | data

what: the three lowest bits are the kind of step, the others what the owner does with requests. stream: an index into
the streams that the peer may use. cut: as of `chunks`.
"""

import random
from dataclasses import replace

from kvabr.moqt import messages as m
from kvabr.moqt import session as session_module
from kvabr.moqt.events import Requested, Write
from kvabr.moqt.messages import encode
from kvabr.moqt.objects import SubgroupHeader, SubgroupWriter
from kvabr.moqt.requester import MAX_EARLY_OBJECTS_BYTES, MAX_PARTIAL_BYTES
from kvabr.moqt.session import MoqtSession
from kvabr.moqt.setup_options import SetupOptions
from kvabr.moqt.wire import DRAFT_20, DRAFT_22, Draft, Filter, Location, Parameters
from tests.fuzz.samples import MESSAGES, SPACE, TRACK, data_streams
from tests.fuzz.target import SEPARATOR, Target, chunks, family

_RECEIVE, _FIN, _RESET, _STOP = 0, 5, 6, 7
"""Kinds of steps; 1 to 4 receive as well."""
_REFUSES, _SENT = 1, 2
"""What the owner does, bits: refuses requests; says that objects were sent."""
_MAX_STEPS = 60
_MAX_HELD = session_module._MAX_PARTIAL_BYTES + MAX_EARLY_OBJECTS_BYTES + MAX_PARTIAL_BYTES + (1 << 18) + 8 * (1 << 17)
_SCRIPTS = 30


def held(session: MoqtSession) -> int:
    """Return the bytes of a peer's that a session keeps for later."""
    early = sum(len(kept or b"") for kept, _ in session._early.values())
    asked = sum(parser.buffered for parser in session._messages.values() if parser is not None)
    headers = sum(map(len, session._headers.values()))
    requests = session.requester._requests.values()
    objects = headers + session.requester.partial_bytes + session.requester._held_bytes
    answers = sum(each.parser.buffered for each in requests)
    return early + asked + objects + answers + session._control_parser.buffered


def _streams(*, client: bool) -> list[int]:
    """Return the streams that a peer may use, its control stream first."""
    theirs_control = 3 if client else 2
    bidirectional = [*range(1 if client else 0, 30, 4), *range(0 if client else 1, 30, 4)]
    return [theirs_control, *bidirectional, *range(3 if client else 2, 30, 4)]


def _begun(draft: Draft, how: int, *, client: bool) -> MoqtSession:
    session = MoqtSession(draft, client=client, options=SetupOptions())
    session.start()
    if not how & 1:
        setup = m.Setup(SetupOptions())
        session.receive(_streams(client=client)[0], encode(setup, draft))
    if not how & 2:
        at = Location(3, 0)
        session.fetch(SPACE, TRACK, at, at, Parameters(priority=1))
        session.requester.update(0, Parameters(priority=2))
    if how & 4:
        session.subscribe(SPACE, TRACK, Parameters(filter=Filter()))
    return session


def _step(session: MoqtSession, streams: list[int], step: bytes) -> None:
    what, where, cut = (*step[:3], 0, 0, 0)[:3]
    stream, data = streams[where % len(streams)], step[3:]
    kind = what & 7
    if kind == _RESET:
        session.receive_reset(stream, data[0] % 20 if data else 0)
    elif kind == _STOP:
        session.receive_stop(stream, data[0] % 20 if data else 0)
    else:
        for piece in chunks(data, cut):
            session.receive(stream, piece)
        if kind == _FIN and stream != streams[0]:
            session.receive(stream, b"", fin=True)
    _own(session, what >> 3)
    assert held(session) <= _MAX_HELD, held(session)


def _own(session: MoqtSession, how: int) -> None:
    """Do what an owner does with what it is told."""
    for event in session.take_events():
        if not isinstance(event, Requested):
            continue
        number, message = event.request_id, event.message
        if how & _REFUSES:
            session.responder.refuse(number, 0x10, "no")
        elif isinstance(message, m.Fetch):
            stream = session.responder.accept_fetch(number, message.end, end_of_track=False)
            session._channel.commands.append(Write(stream, b"objects", fin=True))
            if how & _SENT:
                session.responder.fetch_sent(number)
        elif isinstance(message, m.Subscribe):
            session.responder.accept_subscribe(number, number, None)
            header = SubgroupHeader(number, 3, 0, None, properties=False, end_of_group=True)
            pushed = session.responder.push(number, header)
            data = SubgroupWriter(header).header(0, 2) + b"ab"
            session._channel.commands.append(Write(pushed, data, fin=True))
            if how & _SENT:
                session.responder.pushed(number, pushed)
                session.responder.publish_done(number, 2, "over")
        elif isinstance(message, m.TrackStatus | m.SubscribeNamespace):
            session.responder.accept(number)
    session.take_commands()


def _script(draft: Draft, seed: int, *, client: bool) -> bytes:
    """Return what a peer says that knows what it should say, most of the time."""
    dice, streams = random.Random(seed), _streams(client=client)
    how = dice.choice((0, 0, 0, 0, 1, 2, 4, 4, 6))
    session = _begun(draft, how, client=client)
    parts, fresh = [bytes([how])], 1 if client else 0
    samples = [message for message in MESSAGES if not isinstance(message, m.Setup)]
    for _ in range(dice.randrange(1, 9)):
        what = dice.randrange(32) << 3 | dice.choice((_RECEIVE, _RECEIVE, _RECEIVE, _FIN, _RESET, _STOP))
        if dice.random() < 0.7:
            stream, data = _said(session, draft, dice, samples, fresh, client=client)
        else:
            stream, data = dice.choice([each for each in streams if each & 2]), dice.choice(data_streams())
        fresh += 2
        step = bytes([what, streams.index(stream), dice.choice((0, 0, dice.randrange(256)))]) + data
        _step(session, streams, step)
        if session.closed is not None:
            break
        parts.append(step)
    return SEPARATOR.join(parts)


def _said(
    session: MoqtSession, draft: Draft, dice: random.Random, samples: list[m.Message], fresh: int, *, client: bool
) -> tuple[int, bytes]:
    """Return something that a peer might rightly say: a stream, and the bytes."""
    message = dice.choice(samples)
    request = isinstance(message, m.Request | m.RequestUpdate)
    if request:
        message = replace(message, request_id=fresh)
    elif getattr(message, "request_id", None) is not None and not isinstance(message, m.Goaway):
        message = replace(message, request_id=dice.randrange(0, 12, 2) + (not client))
    asks = request and not isinstance(message, m.RequestUpdate)
    base = (1 if client else 0) if asks else (0 if client else 1)
    stream = base + 4 * dice.randrange(6) if asks else base + 4 * dice.randrange(5)
    if isinstance(message, m.RequestUpdate):
        stream = dice.choice(list(session.responder._by_stream) or [1 if client else 0])
    if isinstance(message, m.Goaway):
        stream = _streams(client=client)[0]
    return stream, encode(message, draft)


def _session(draft: Draft, *, client: bool) -> Target:
    def take(data: bytes) -> bool:
        first, *steps = data.split(SEPARATOR)
        session, streams = _begun(draft, first[0] if first else 0, client=client), _streams(client=client)
        for step in steps[:_MAX_STEPS]:
            _step(session, streams, step)
        if session.closed is not None:
            assert session.take_commands() == []
        return session.closed is None

    return Target(take, lambda: [_script(draft, seed, client=client) for seed in range(_SCRIPTS)])


SESSIONS = family(
    _session(DRAFT_20, client=False),
    _session(DRAFT_22, client=True),
)
