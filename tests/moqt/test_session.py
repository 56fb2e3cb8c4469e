"""Two sessions joined in memory: FETCH from its beginning to its end, in both drafts."""

import pytest

from kvabr.moqt.codes import RequestCode, ResetCode, SessionCode
from kvabr.moqt.events import Answered, Cancelled, Ended, GoingAway, Ready, Received, Refused, Requested, Updated
from kvabr.moqt.messages import (
    Namespace,
    PublishNamespace,
    RequestErrorMessage,
    RequestOk,
    SubscribeNamespace,
    SubscribeTracks,
)
from kvabr.moqt.objects import FetchWriter, RangeEnd
from kvabr.moqt.setup_options import SetupOptions
from kvabr.moqt.wire import DRAFTS, REGISTER, Location, Parameters, Token
from tests.moqt.pair import GROUPS, Origin, Pair, ask, locations, payload
from tests.moqt.raw import Raw, frame
from tests.moqt.tables import table
from tests.moqt.writers import RangeWriter

both = pytest.mark.parametrize("draft", DRAFTS)


@both
def test_setup(draft):
    mine = SetupOptions(b"/p?q", b"host:4433", (Token(b"secret"),), 0, b"me")
    pair = Pair(draft, client=mine, server=SetupOptions(implementation=b"you"))
    (at_server,), (at_client,) = pair.told(False, Ready), pair.told(True, Ready)
    assert at_server.tokens == (b"secret",)
    assert at_server.options == SetupOptions(b"/p?q", b"host:4433", (Token(b"secret"),), 0, b"me")
    assert at_client.options == SetupOptions(implementation=b"you")
    pair.healthy()


@both
@table(
    ("start", "end", "expected"),
    [
        ((0, 0), (0, 0), [(0, 0), (0, 1), (0, 2)]),
        ((0, 1), (0, 0), [(0, 1), (0, 2)]),
        ((0, 0), (0, 2), [(0, 0), (0, 1)]),
        ((0, 1), (0, 2), [(0, 1)]),
        ((0, 2), (3, 1), [(0, 2), (1, 0), (3, 0)]),
        ((0, 0), (3, 0), [(0, 0), (0, 1), (0, 2), (1, 0), (3, 0), (3, 1)]),
        ((2, 0), (2, 0), []),
    ],
)
@table("order", [None, 1, 2])
def test_fetch(draft, start, end, expected, order):
    pair = Pair(draft)
    Origin(pair, GROUPS)
    number = ask(pair, start, end, group_order=order)
    pair.run()
    pair.healthy()
    if order == 2:
        expected = sorted(expected, key=lambda at: (-at[0], at[1]))
    received = pair.told(True, Received)
    assert locations(received) == expected
    assert payload(received) == b"".join(GROUPS[group][index] for group, index in expected)
    (answer,), (ended,) = pair.told(True, Answered), pair.told(True, Ended)
    assert answer.message.end == end
    assert ended == Ended(number, None)
    pair.tidy()


def test_a_fetch_with_gaps():
    """Ends of ranges are handed on; the stream may come before the answer."""
    pair = Pair()
    ask(pair, (0, 0), (9, 0))
    pair.run()
    (request,) = pair.told(False, Requested)
    stream = pair.server.responder.accept_fetch(request.request_id, Location(9, 0), end_of_track=True)
    writer = RangeWriter()
    data = writer.header(0, 5, 1) + b"x" + writer.range_end(Location(4, 2), unknown=True) + writer.header(7, 0, 0)
    pair.write(False, stream, data, fin=True)
    pair.server.responder.fetch_sent(request.request_id)
    pair.run()
    items = [item for event in pair.told(True, Received) for item in event.items]
    assert [item for item in items if isinstance(item, RangeEnd)] == [RangeEnd(Location(4, 2), unknown=True)]
    assert locations(pair.told(True, Received)) == [(0, 5), (4, 2), (7, 0)]
    pair.tidy()


def test_refused():
    pair = Pair()
    number = ask(pair)
    pair.run()
    pair.server.responder.refuse(number, RequestCode.EXCESSIVE_LOAD, "later", retry_ms=250)
    pair.run()
    (refused,) = pair.told(True, Refused)
    assert (refused.request_id, refused.message.code) == (number, RequestCode.EXCESSIVE_LOAD)
    assert (refused.message.retry_interval, refused.message.reason) == (251, "later")
    pair.tidy()


def test_update():
    """Draft 18, section 10.9."""
    pair = Pair()
    number = ask(pair, priority=5)
    pair.run()
    stream = pair.server.responder.accept_fetch(number, Location(0, 1), end_of_track=False)
    pair.run()
    assert pair.client.requester.update(number, Parameters(priority=9))
    assert pair.client.requester.update(number, Parameters())
    pair.run()
    assert pair.told(False, Updated) == [Updated(number, Parameters(priority=9)), Updated(number, Parameters())]
    pair.write(False, stream, FetchWriter().header(0, 0, 0), fin=True)
    pair.server.responder.fetch_sent(number)
    pair.run()
    assert not pair.client.requester.update(number, Parameters(priority=1))
    pair.tidy()


def test_an_update_is_acknowledged_after_its_request():
    """FETCH_OK is the first message on the stream (draft 18, section 10.13)."""
    pair = Pair()
    number = ask(pair)
    assert pair.client.requester.update(number, Parameters(priority=9))
    pair.run()
    assert pair.told(False, Updated)
    assert pair.pipes.get((False, 0)) is None
    pair.server.responder.accept_fetch(number, Location(0, 1), end_of_track=False)
    pair.collect()
    assert b"".join(pair.pipes[(False, 0)].sent).hex() == "1800040000000007000100"
    pair.run()
    assert len(pair.told(True, Answered)) == 1
    pair.healthy()


def test_cancelled_before_the_owner_knows_of_it():
    """Request and cancellation come in one packet: the owner hears of neither, and cannot answer what is over."""
    pair = Pair()
    number = ask(pair)
    pair.client.requester.update(number, Parameters(priority=1))
    pair.client.requester.cancel(number)
    server = pair.server
    for command in pair.client.take_commands():
        if hasattr(command, "data"):
            server.receive(command.stream, command.data)
        elif type(command).__name__ == "Reset":
            server.receive_reset(command.stream, command.code)
    assert server.take_events() == []
    assert server.closed is None
    assert server.responder._requests == {}


def test_stop_of_the_data_alone_cancels():
    pair = Pair()
    number = ask(pair)
    pair.run()
    stream = pair.server.responder.accept_fetch(number, Location(0, 0), end_of_track=False)
    pair.run()
    pair.server.receive_stop(stream, ResetCode.CANCELLED)
    pair.run()
    assert pair.told(False, Cancelled)
    pair.healthy()


def test_a_lenient_responder_goes_on():
    """moq-rs 0.5 resets and stops the stream of a FETCH that has been answered, and wants its objects."""
    pair = Pair()
    pair.server.responder.lenient = True
    number = ask(pair)
    pair.run()
    stream = pair.server.responder.accept_fetch(number, Location(0, 1), end_of_track=False)
    pair.run()
    pair.server.receive_reset(0, 0)
    pair.server.receive_stop(0, 0)
    pair.run()
    assert pair.told(False, Cancelled) == []
    pair.server.receive_stop(stream, 0)
    pair.run()
    assert len(pair.told(False, Cancelled)) == 1


def test_an_empty_answer():
    """The peer ends a request without having answered it."""
    pair = Pair()
    ask(pair)
    pair.run()
    pair.write(False, 0, b"", fin=True)
    pair.run()
    (refused,) = pair.told(True, Refused)
    assert refused.message.code == RequestCode.INTERNAL_ERROR
    pair.healthy()


def test_close():
    """Nothing is sent or heard after it."""
    pair = Pair()
    ask(pair)
    pair.client.close(SessionCode.NO_ERROR, "bye")
    ask(pair)
    commands = pair.client.take_commands()
    assert type(commands[-1]).__name__ == "Close"
    assert pair.client.take_commands() == []
    pair.client.receive(3, b"\xff")
    pair.client.receive_reset(3, 0)
    pair.client.receive_stop(2, 0)
    ask(pair)
    assert pair.client.take_commands() == []
    (closed,) = pair.client.take_events()
    assert (closed.code, closed.reason) == (SessionCode.NO_ERROR, "bye")


@table("kind", ["10", "1d", "3a"])
def test_objects_of_an_unknown_track(kind):
    """They may belong to one that is over: dropped, and stopped (draft 18, section 11.4.2)."""
    pair = Pair()
    stream = pair.server._channel.open_uni()
    pair.write(False, stream, bytes.fromhex(kind + "07 05 00 0a") + b"anything")
    pair.write(False, stream, b"more", fin=False)
    pair.run()
    assert pair.pipes[(False, stream)].stopped
    assert pair.told(True, Received) == []
    pair.tidy()


def test_padding_is_dropped():
    """Draft 18, section 11.5."""
    pair = Pair()
    stream = pair.server._channel.open_uni()
    pair.write(False, stream, bytes.fromhex("f0132b3e28") + bytes(1000))
    pair.write(False, stream, bytes(1000), fin=True)
    pair.run()
    pair.tidy()


def subscribed_to_namespaces(raw: Raw) -> int:
    """Make the peer subscribe to namespaces; return the stream."""
    stream = 0
    raw.receive(stream, frame("50", "00 01 0161", "", "00"))
    (request,) = raw.told(Requested)
    assert isinstance(request.message, SubscribeNamespace)
    raw.session.responder.accept(0)
    return stream


def test_publish_namespace():
    raw = Raw(client=True)
    raw.ask(1, frame("06", "01 01 0161 00"))
    (request,) = raw.told(Requested)
    assert isinstance(request.message, PublishNamespace)
    raw.session.responder.accept(1)
    assert raw.said() == [RequestOk()]
    raw.session.receive_reset(1, 1)
    assert raw.told(Cancelled) == [Cancelled(1, ResetCode.CANCELLED)]
    assert len(raw.session.responder) == 0
    assert raw.code is None


def test_subscribe_namespace():
    raw = Raw(client=False)
    stream = subscribed_to_namespaces(raw)
    raw.session.responder.announce_namespace(0, (b"a", b"b"))
    raw.session.responder.announce_namespace(0, ())
    assert raw.said() == [RequestOk(), Namespace((b"a", b"b")), Namespace(())]
    assert {command.stream for command in raw.commands} == {stream}
    raw.session.receive_reset(stream, 1)
    assert raw.told(Cancelled)
    assert len(raw.session.responder) == 0
    assert raw.code is None


def test_a_fin_does_not_end_a_subscription_to_namespaces():
    raw = Raw(client=False)
    stream = subscribed_to_namespaces(raw)
    raw.receive(stream, fin=True)
    assert raw.told(Cancelled) == []
    assert len(raw.session.responder) == 1
    assert raw.code is None


def test_a_prefix_that_changes():
    """Not supported here; the request ends with that (draft 18, section 10.9.1)."""
    raw = Raw(client=False)
    subscribed_to_namespaces(raw)
    raw.receive(0, frame("02", "02 01 34 01 0162"))
    assert raw.told(Cancelled) == [Cancelled(0, ResetCode.CANCELLED)]
    refusal = raw.said()[-1]
    assert isinstance(refusal, RequestErrorMessage)
    assert refusal.code == RequestCode.NOT_SUPPORTED
    assert len(raw.session.responder) == 0
    assert raw.code is None


def test_subscribe_tracks_is_heard():
    raw = Raw(client=False)
    raw.receive(0, frame("51", "00 01 0161 00"))
    assert [type(event.message) for event in raw.told(Requested)] == [SubscribeTracks]
    raw.session.responder.refuse(0, RequestCode.NOT_SUPPORTED, "")
    assert raw.said()[-1] == RequestErrorMessage(RequestCode.NOT_SUPPORTED, 0, "")
    assert len(raw.session.responder) == 0
    assert raw.code is None


def test_namespaces_that_are_reserved():
    """Draft 18, sections 3.2.1 and 3.2.2: `.` and `.session` have nothing; others with a period are the owner's."""
    raw = Raw(client=False)
    session = b".session".hex()
    raw.receive(0, frame("50", "00 01 012e 00"))
    raw.receive(4, frame("16", "02 02 08", session, "0178 00 00"))
    raw.receive(8, frame("06", "04 01 08", session, "00"))
    raw.receive(12, frame("03", "06 01 06", b".other".hex(), "0174 00"))
    assert [message.code for message in raw.said()] == [RequestCode.DOES_NOT_EXIST] * 3
    (request,) = raw.told(Requested)
    assert request.message.namespace == (b".other",)
    assert raw.code is None


def test_goaway():
    pair = Pair()
    origin = Origin(pair, GROUPS)
    before = ask(pair)
    pair.run()
    pair.server.goaway(1500)
    pair.server.goaway(1500)
    pair.run()
    assert pair.told(True, GoingAway) == [GoingAway(b"", 1500)]
    after = ask(pair)
    pair.run()
    (refused,) = pair.told(True, Refused)
    assert (refused.request_id, refused.message.code) == (after, RequestCode.GOING_AWAY)
    assert origin.answered == 1
    assert not pair.client.requester.update(before, Parameters(priority=1))
    pair.client.goaway()
    pair.run()
    assert len(pair.told(False, GoingAway)) == 1
    pair.tidy()


def test_tokens():
    pair = Pair()
    for tokens in ((Token(b"one"),), (Token(b"two"), Token(b"three")), ()):
        ask(pair, tokens=tokens)
        pair.run()
    assert [event.tokens for event in pair.told(False, Requested)] == [(b"one",), (b"two", b"three"), ()]
    pair.healthy()


def test_tokens_are_not_kept_while_a_request_waits():
    """Each may take 64 KB, and thousands of requests may wait."""
    pair = Pair()
    ask(pair, tokens=(Token(b"x" * 60_000),))
    pair.run()
    (event,) = pair.told(False, Requested)
    (waiting,) = pair.server.responder._requests.values()
    assert event.message is waiting.message
    assert event.message.parameters.tokens == ()
    pair.healthy()


def test_tokens_that_close_the_session():
    pair = Pair()
    ask(pair, tokens=(Token(b"x", REGISTER, 5),))
    pair.run()
    assert pair.closes[False].code == SessionCode.AUTH_TOKEN_CACHE_OVERFLOW
