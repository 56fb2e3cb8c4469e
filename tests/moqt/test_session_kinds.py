"""Two sessions joined in memory: requests other than FETCH, tokens, and going away."""

from kvabr.moqt.codes import RequestCode, ResetCode, SessionCode
from kvabr.moqt.events import (
    Cancelled,
    GoingAway,
    Received,
    Refused,
    Requested,
)
from kvabr.moqt.messages import (
    Namespace,
    PublishNamespace,
    RequestErrorMessage,
    RequestOk,
    SubscribeNamespace,
    SubscribeTracks,
)
from kvabr.moqt.parameters import DELETE, REGISTER, USE_ALIAS, Parameters, Token
from tests.moqt.pair import GROUPS, Origin, Pair, ask
from tests.moqt.raw import Raw, frame
from tests.moqt.tables import table


@table("kind", ["10", "1d", "3a"])
def test_objects_of_an_unknown_track(kind):
    """They may belong to one that is over: dropped, and stopped (draft 18, section 11.4.2)."""
    pair = Pair()
    stream = pair.server._channel.open_uni()
    pair.write(False, stream, bytes.fromhex(kind + "07 05 00 0a") + b"anything")
    pair.write(False, stream, b"more", fin=False)
    pair.run()
    assert pair.lanes[(False, stream)].stopped
    assert pair.told(True, Received) == []
    pair.healthy()
    pair.tidy()


def test_padding_is_dropped():
    """Draft 18, section 11.5."""
    pair = Pair()
    stream = pair.server._channel.open_uni()
    pair.write(False, stream, bytes.fromhex("f0132b3e28") + bytes(1000))
    pair.write(False, stream, bytes(1000), fin=True)
    pair.run()
    pair.healthy()
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
    raw.session.responder.tell_namespace(0, (b"a", b"b"))
    raw.session.responder.tell_namespace(0, ())
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
    pair.healthy()
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


@table(
    ("token", "code"),
    [
        (Token(b"", USE_ALIAS, 5), SessionCode.UNKNOWN_AUTH_TOKEN_ALIAS),
        (Token(b"", DELETE, 5), SessionCode.UNKNOWN_AUTH_TOKEN_ALIAS),
        (Token(b"x", REGISTER, 5), SessionCode.AUTH_TOKEN_CACHE_OVERFLOW),
    ],
)
def test_tokens_that_close_the_session(token, code):
    pair = Pair()
    ask(pair, tokens=(token,))
    pair.run()
    assert pair.closes[False].code == code
