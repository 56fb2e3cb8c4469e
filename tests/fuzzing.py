"""Hostile input for every parser: valid bytes, mutated at random; `tools/fuzz` runs it for long, a test for a moment.

A target takes bytes and dice. It returns if the parser has taken them or refused them as it should, and raises
otherwise: any error that is not the documented one, a value that does not come back, more kept than is allowed.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from kvabr.codec.container import FrameHeader, pack, unpack
from kvabr.moqt import messages as m
from kvabr.moqt import session as session_module
from kvabr.moqt.codes import Param, SessionFault
from kvabr.moqt.encoding import MAX_MESSAGE_BYTES, MessageParser, decode, encode
from kvabr.moqt.events import Requested, Write
from kvabr.moqt.objects import MAX_PROPERTIES_BYTES, ObjectParser, read_stream_header
from kvabr.moqt.parameters import Parameters, SetupOptions, Token, read_parameters, setup_options, setup_pairs
from kvabr.moqt.properties import MalformedTrack
from kvabr.moqt.session import MoqtSession
from kvabr.moqt.wire import DRAFT_16, DRAFT_18, Draft, Location, Reader, read_pairs, write_pairs, write_text
from kvabr.types.catalog import Catalog
from kvabr.types.errors import FormatError
from kvabr.types.naming import parse_prefix_track, prefix_track
from tests.catalogs import catalog
from tests.fuzzcorpus import SOME, SPACE, TRACK, control, data_streams, fetch_streams, sample_messages
from tests.moqt.writers import write_filter

Take = Callable[[bytes, random.Random], None]
_SLOW_S = 120.0
"""No input of the sizes used here may take as long; the slowest take a few milliseconds."""
_BYTES = (0x00, 0x01, 0x3F, 0x40, 0x7F, 0x80, 0xBF, 0xC0, 0xFE, 0xFF)
_LONG = 70_000


@dataclass(frozen=True)
class Target:
    """One parser."""

    take: Take
    corpus: Callable[[], list[bytes]]
    """Valid inputs."""


# ------------------------------------------------------------------ mutation


def mutate(data: bytes, others: list[bytes], dice: random.Random) -> bytes:
    """A few random changes."""
    out = bytearray(data)
    for _ in range(dice.choice((0, 1, 1, 1, 2, 3, 6))):
        at = dice.randrange(len(out) + 1)
        end = min(len(out), at + dice.choice((1, 1, 2, 4, 8, 64)))
        match dice.randrange(8):
            case 0 if at < len(out):
                out[at] ^= 1 << dice.randrange(8)
            case 1 if at < len(out):
                out[at] = dice.choice(_BYTES)
            case 2:
                del out[at:end]
            case 3:
                out[at:at] = out[at:end]
            case 4:
                out[at:at] = dice.randbytes(dice.choice((1, 2, 8, 9)))
            case 5:
                out[at:at] = b"\xff" * dice.choice((1, 8, 9))
            case 6:
                other = dice.choice(others)
                cut = dice.randrange(len(other) + 1)
                out[at:] = other[cut:]
            case 7 if dice.random() < 0.05:
                out[at:at] = bytes([dice.choice(_BYTES)]) * _LONG
            case _:
                del out[at:]
    return bytes(out)


def chunks(data: bytes, dice: random.Random) -> list[bytes]:
    """The same bytes in pieces."""
    out, at, most = [], 0, dice.choice((1, 3, 40, 2000, 1 << 20))
    while at < len(data) and len(out) < 5000:
        size = dice.randint(1, most)
        out.append(data[at : at + size])
        at += size
    return [*out, data[at:]] if at < len(data) else out


# ------------------------------------------------------------------ small parsers


def _expect(parse: Callable[[], object], *errors: type[Exception]) -> object:
    """What it reads, or None if it refuses as it should."""
    try:
        return parse()
    except errors:
        return None


def _message(draft: Draft) -> Take:
    def take(data: bytes, dice: random.Random) -> None:
        found = _expect(lambda: list(MessageParser(draft).feed(data)), SessionFault)
        for kind, payload in found if isinstance(found, list) else []:
            side = dice.random() < 0.5
            message = _expect(lambda: decode(kind, payload, draft, control=side), SessionFault)  # noqa: B023  # at once
            if isinstance(message, m.Message) and not hasattr(message, "reason"):  # reasons are repaired
                again = encode(message, draft)
                ((kind, payload),) = MessageParser(draft).feed(again)  # noqa: PLW2901
                assert decode(kind, payload, draft, control=side) == message

    return take


def _parser(draft: Draft) -> Take:
    def take(data: bytes, dice: random.Random) -> None:
        whole = list(MessageParser(draft).feed(data))
        parser = MessageParser(draft)
        pieces = [each for piece in chunks(data, dice) for each in parser.feed(piece)]
        assert pieces == whole
        assert parser.buffered <= MAX_MESSAGE_BYTES + 11

    return take


def _objects(draft: Draft) -> Take:
    def feed(pieces: list[bytes], *, descending: bool) -> list[object]:
        parser = ObjectParser(draft, descending=descending)
        out: list[object] = []
        try:
            for piece in pieces:
                for item in parser.feed(piece):
                    if isinstance(item, memoryview):
                        item = bytes(item)  # noqa: PLW2901  # compared, and joined, by value
                    if isinstance(item, bytes) and out and isinstance(out[-1], bytes):
                        out[-1] += item
                    else:
                        out.append(item)
                assert len(parser._buffer) <= MAX_PROPERTIES_BYTES + 64
            parser.finish()
        except (SessionFault, MalformedTrack) as error:
            out.append(type(error))
        return out

    def take(data: bytes, dice: random.Random) -> None:
        descending = dice.random() < 0.3
        cut = feed(chunks(data, dice), descending=descending)
        whole = feed([data], descending=descending)
        # An error hides what came in the same piece: whatever did come out must be the same.
        bare = [item for item in whole if not isinstance(item, type)]
        assert [item for item in cut if not isinstance(item, type)][: len(bare)] == bare or isinstance(whole[-1], type)
        assert isinstance(cut[-1] if cut else None, type) == isinstance(whole[-1] if whole else None, type)

    return take


def _header(draft: Draft) -> Take:
    def take(data: bytes, _: random.Random) -> None:
        _expect(lambda: read_stream_header(data, draft), SessionFault)

    return take


def _token(data: bytes, _: random.Random) -> None:
    for draft in (DRAFT_18, DRAFT_16):
        found = _expect(lambda: Token.decode(data, draft.varint), SessionFault)  # noqa: B023  # at once
        if isinstance(found, Token):
            assert Token.decode(found.encode(draft.varint), draft.varint) == found


def _filter(data: bytes, _: random.Random) -> None:
    for draft in (DRAFT_18, DRAFT_16):
        parameter = b"\x01\x21" + write_text(draft.varint, data)
        found = _expect(lambda: read_parameters(Reader(parameter, draft.varint), draft, frozenset(Param)), SessionFault)  # noqa: B023  # at once
        assert found is None or found == Parameters(filter=data)


def _setup(data: bytes, _: random.Random) -> None:
    for draft in (DRAFT_18, DRAFT_16):

        def read(raw: bytes, draft: Draft = draft) -> SetupOptions:
            return setup_options(read_pairs(Reader(raw, draft.varint)), draft)

        found = _expect(lambda: read(data), SessionFault)  # at once
        if isinstance(found, SetupOptions):
            assert read(write_pairs(draft.varint, setup_pairs(found, draft))) == found


def _setup_corpus() -> list[bytes]:
    options = SetupOptions(b"/p", b"h:1", SOME.tokens, 100, b"me", 300)
    return [write_pairs(draft.varint, setup_pairs(options, draft)) for draft in (DRAFT_18, DRAFT_16)]


def _prefix(data: bytes, _: random.Random) -> None:
    found = _expect(lambda: parse_prefix_track(data.decode("utf-8", "surrogateescape")), FormatError)
    assert found is None or all(len(key) == 8 for key in found)


def _catalog(data: bytes, _: random.Random) -> None:
    found = _expect(lambda: Catalog.loads(data.decode("utf-8", "replace")), FormatError)
    if isinstance(found, Catalog):
        assert Catalog.loads(found.dumps()) == found


def _container(data: bytes, _: random.Random) -> None:
    found = _expect(lambda: unpack(data), FormatError)
    assert found is None or isinstance(found[0], FrameHeader)


def _container_corpus() -> list[bytes]:
    header = FrameHeader("Int4", bytes(16), "ab" * 32, 3, 384, 128)
    return [pack(payload, header) for payload in (b"", b"payload")]


# ------------------------------------------------------------------ a whole session


def held(session: MoqtSession) -> int:
    """Bytes of a peer's that a session keeps for later."""
    early = sum(len(kept or b"") for kept, _ in session._early.values())
    asked = sum(parser.buffered for parser in session._messages.values() if parser is not None)
    headers = sum(map(len, session._headers.values()))
    requests = session.requester._requests.values()
    objects = headers + sum(len(each.objects._buffer) for each in requests)
    answers = sum(each.parser.buffered for each in requests)
    return early + asked + objects + answers + session._control_parser.buffered


def _session(draft: Draft, *, client: bool) -> Take:
    """Streams, resets and stops at random, before and after SETUP, of a peer that often knows what it should say."""
    objects = data_streams(draft)
    corpus = [*control(draft), *objects]
    theirs_control = (3 if client else 2) if draft.streams else 0
    setup = m.Setup(SetupOptions(max_request_id=0 if draft.streams else 300))
    samples = [message for message in sample_messages(draft) if not isinstance(message, m.Setup)]

    def say(session: MoqtSession, dice: random.Random, fresh: int) -> tuple[int, bytes]:
        """Something that a peer might rightly say: a stream, and the bytes."""
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
        if not draft.streams and not isinstance(message, m.SubscribeNamespace | m.Namespace):
            stream = 0
        if isinstance(message, m.Goaway):
            stream = theirs_control
        return stream, encode(message, draft, client=not client)

    def take(data: bytes, dice: random.Random) -> None:
        session = MoqtSession(draft, client=client, options=SetupOptions())
        session.start()
        if dice.random() < 0.9:
            session.receive(theirs_control, encode(setup, draft, client=not client))
        if dice.random() < 0.7:
            _make_requests(session)
        fresh = 1 if client else 0
        bidi = [*range(1 if client else 0, 30, 4), *range(0 if client else 1, 30, 4)]
        uni = list(range(3 if client else 2, 30, 4))
        for step in range(dice.randrange(1, 20)):
            stream = dice.choice([*bidi, *uni, theirs_control])
            chance = dice.random()
            if step and chance < 0.7:
                stream, data = say(session, dice, fresh) if chance < 0.5 else (dice.choice(uni), dice.choice(objects))
                fresh += 2
                for piece in chunks(data, dice):
                    session.receive(stream, piece)
            elif chance < 0.08 or chance > 0.95:
                session.receive_reset(stream, dice.randrange(20))
            elif chance < 0.16 or chance > 0.9:
                session.receive_stop(stream, dice.randrange(20))
            else:
                for piece in chunks(data, dice):
                    session.receive(stream, piece)
            if dice.random() < 0.2 and stream != theirs_control:
                session.receive(stream, b"", fin=True)
            _own(session, dice)
            assert held(session) <= session_module._MAX_PARTIAL_BYTES + (1 << 18) + 8 * (1 << 17), held(session)
            data = mutate(dice.choice(corpus), corpus, dice) if dice.random() < 0.6 else dice.choice(corpus)
        if session.closed is not None:
            assert session.take_commands() == []

    return take


def _make_requests(session: MoqtSession) -> None:
    at = Location(3, 0)
    session.fetch(SPACE, TRACK, at, at, Parameters(priority=1))
    session.requester.update(0, Parameters(priority=2))


def _own(session: MoqtSession, dice: random.Random) -> None:
    """What an owner does with what it is told."""
    for event in session.take_events():
        if not isinstance(event, Requested):
            continue
        number, message = event.request_id, event.message
        if dice.random() < 0.3:
            session.responder.refuse(number, 0x10, "no")
        elif isinstance(message, m.Fetch):
            stream = session.responder.accept_fetch(number, message.end, end_of_track=False)
            session._channel.commands.append(Write(stream, b"objects", fin=True))
            if dice.random() < 0.5:
                session.responder.fetch_sent(number)
        elif isinstance(message, m.Subscribe):
            session.responder.accept_subscribe(number, number, None)
        elif isinstance(message, m.TrackStatus | m.SubscribeNamespace):
            session.responder.accept(number)
    session.take_commands()


# ------------------------------------------------------------------ all of them


def targets() -> dict[str, Target]:
    """By name."""
    out = {
        "token": Target(_token, lambda: [token.encode(DRAFT_18.varint) for token in SOME.tokens]),
        "filter": Target(_filter, lambda: [write_filter(d, 4, Location(300, 1), 900) for d in (DRAFT_18, DRAFT_16)]),
        "setup": Target(_setup, _setup_corpus),
        "prefix": Target(_prefix, lambda: [prefix_track([f"{n:064x}" for n in range(9)]).encode(), b"prefix."]),
        "catalog": Target(_catalog, lambda: [catalog(3).dumps().encode()]),
        "container": Target(_container, _container_corpus),
    }
    for draft in (DRAFT_18, DRAFT_16):
        number = draft.number
        messages = lambda draft=draft: list(control(draft))  # noqa: E731
        out[f"message-{number}"] = Target(_message(draft), messages)
        out[f"parser-{number}"] = Target(_parser(draft), messages)
        out[f"fetch-{number}"] = Target(_objects(draft), lambda draft=draft: list(fetch_streams(draft)))
        out[f"header-{number}"] = Target(_header(draft), lambda draft=draft: list(data_streams(draft)))
        for client in (True, False):
            name = f"{'client' if client else 'server'}-{number}"
            out[name] = Target(_session(draft, client=client), messages)
    return out


def run(target: Target, *, seed: int, rounds: int | None = None, seconds: float | None = None) -> int:
    """Feed a target until the rounds or the seconds are over; returns how many inputs it got.

    Raises:
        AssertionError: with the input that it did not take as it should, and the seed that leads there.
    """
    corpus = target.corpus()
    until = None if seconds is None else time.monotonic() + seconds
    done = 0
    while (rounds is None or done < rounds) and (until is None or time.monotonic() < until):
        dice = random.Random(f"{seed}/{done}")
        data = mutate(dice.choice(corpus), corpus, dice)
        began = time.monotonic()
        try:
            target.take(data, dice)
        except Exception as error:
            shown = data.hex() if len(data) < 2000 else f"{data[:1000].hex()}... ({len(data)} bytes)"
            raise AssertionError(f"seed {seed}, round {done}: {error!r} for {shown}") from error
        took = time.monotonic() - began
        assert took < _SLOW_S, f"seed {seed}, round {done}: {took:.1f} s for {len(data)} bytes"
        done += 1
    return done
