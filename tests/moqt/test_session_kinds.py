"""Two sessions joined in memory: requests other than FETCH, tokens, and going away."""

import pytest

from kvabr.moqt.codes import RequestCode, ResetCode, SessionCode
from kvabr.moqt.events import (
    Answered,
    Cancelled,
    DatagramReceived,
    GoingAway,
    Received,
    Refused,
    Requested,
    SubscriptionDone,
)
from kvabr.moqt.messages import (
    JoiningFetch,
    Namespace,
    PublishNamespace,
    RequestErrorMessage,
    RequestOk,
    SubscribeNamespace,
    SubscribeTracks,
)
from kvabr.moqt.objects import (
    ObjectHeader,
    SubgroupHeader,
)
from kvabr.moqt.parameters import DELETE, REGISTER, USE_ALIAS, Filter, Parameters, SetupOptions, Token
from kvabr.moqt.wire import DRAFT_18, DRAFTS, Location
from tests.moqt.pair import NAMESPACE, TRACK, Origin, Pair, locations, payload
from tests.moqt.raw import NAME, Raw, fetch_of, frame
from tests.moqt.tables import table
from tests.moqt.writers import write_datagram, write_subgroup_header, write_subgroup_object

both = pytest.mark.parametrize("draft", DRAFTS)
GROUPS = {0: [b"a0", b"a1", b"a2"], 1: [b"b0"], 3: [b"d0", b"d1"]}


def ask(pair: Pair, start=(0, 0), end=(0, 0), **more) -> int:
    return pair.client.fetch(NAMESPACE, TRACK, Location(*start), Location(*end), Parameters(**more))


# ------------------------------------------------------------------ subscriptions


def subscribed(pair: Pair, alias: int = 7, track: bytes = TRACK) -> int:
    number = pair.client.subscribe(NAMESPACE, track, Parameters(filter=Filter(2)))
    pair.run()
    pair.server.responder.accept_subscribe(number, alias, Location(4, 2))
    pair.run()
    return number


@both
def test_subscribe(draft):
    pair = Pair(draft)
    number = subscribed(pair)
    (answer,) = pair.told(True, Answered)
    assert (answer.message.track_alias, answer.message.parameters.largest) == (7, (4, 2))
    header = SubgroupHeader(7, 5, 0, 10, properties=False, end_of_group=False)
    streams = [pair.server._channel.open_uni() for _ in range(2)]
    for index, stream in enumerate(streams):
        data = write_subgroup_header(header, draft) + write_subgroup_object(draft, header, index, None, 4)
        pair.write(False, stream, data + b"da")
    for stream in streams:
        pair.write(False, stream, b"ta", fin=True)
    pair.run()
    for index, stream in enumerate(streams):
        mine = [event for event in pair.told(True, Received) if event.stream == stream]
        assert locations(mine) == [(5, index)]
        assert payload(mine) == b"data"
    pair.server.responder.publish_done(number, 0x2, 2, "over")
    pair.run()
    (done,) = pair.told(True, SubscriptionDone)
    assert (done.message.code, done.message.streams, done.message.reason) == (0x2, 2, "over")
    pair.healthy()
    pair.tidy()


@both
def test_unsubscribe(draft):
    pair = Pair(draft)
    number = subscribed(pair)
    header = SubgroupHeader(7, 5, 0, 10, properties=False, end_of_group=False)
    stream = pair.server._channel.open_uni()
    pair.write(False, stream, write_subgroup_header(header, draft))
    pair.run()
    pair.client.requester.cancel(number)
    pair.run()
    assert pair.told(False, Cancelled)
    pair.healthy()
    pair.tidy()


@both
def test_objects_of_an_unknown_track(draft):
    """They may belong to a subscription that is over: dropped, and stopped (draft 18, section 11.4.2)."""
    pair = Pair(draft)
    header = SubgroupHeader(7, 5, 0, 10, properties=False, end_of_group=False)
    stream = pair.server._channel.open_uni()
    pair.write(False, stream, write_subgroup_header(header, draft) + b"anything")
    pair.write(False, stream, b"more", fin=False)
    pair.run()
    assert pair.lanes[(False, stream)].stopped
    assert pair.told(True, Received) == []
    pair.healthy()
    pair.tidy()


@both
def test_datagrams(draft):
    pair = Pair(draft)
    number = subscribed(pair)
    header = ObjectHeader(5, None, 3, 9, 4)
    pair.client.receive_datagram(write_datagram(draft, 7, header, b"data"))
    pair.client.receive_datagram(write_datagram(draft, 8, header, b"data"))
    pair.run()
    assert pair.told(True, DatagramReceived) == [DatagramReceived(number, header, b"data")]
    pair.healthy()


def test_padding_is_dropped():
    """Draft 18, section 11.5."""
    pair = Pair(DRAFT_18)
    stream = pair.server._channel.open_uni()
    pair.write(False, stream, bytes.fromhex("f0132b3e28") + bytes(1000))
    pair.write(False, stream, bytes(1000), fin=True)
    pair.client.receive_datagram(bytes.fromhex("f0132b3e29") + bytes(100))
    pair.run()
    pair.healthy()
    pair.tidy()


@both
def test_an_alias_can_be_used_again(draft):
    pair = Pair(draft)
    for _ in range(3):
        number = subscribed(pair)
        pair.client.requester.cancel(number)
        pair.run()
    pair.healthy()
    pair.tidy()


# ------------------------------------------------------------------ other requests


def subscribed_to_namespaces(draft, raw: Raw) -> int:
    """Make the peer subscribe to namespaces; return the stream."""
    stream = 0 if draft.streams else 4
    raw.receive(stream, frame("50" if draft.streams else "11", "00 01 0161", "" if draft.streams else "01", "00"))
    (request,) = raw.told(Requested)
    assert isinstance(request.message, SubscribeNamespace)
    raw.session.responder.accept(0)
    return stream


@both
def test_track_status(draft):
    raw = Raw(draft, client=False)
    raw.ask(0, frame("0d", "00", NAME, "00"))
    raw.session.responder.accept(0, Parameters(largest=Location(3, 1)))
    assert raw.said() == [RequestOk(None if draft.streams else 0, Parameters(largest=Location(3, 1)))]
    assert len(raw.session.responder) == 0
    assert raw.code is None


@both
def test_publish_namespace(draft):
    raw = Raw(draft, client=True)
    raw.ask(1, frame("06", "01 01 0161 00"))
    (request,) = raw.told(Requested)
    assert isinstance(request.message, PublishNamespace)
    raw.session.responder.accept(1)
    assert raw.said() == [RequestOk(None if draft.streams else 1)]
    if draft.streams:
        raw.session.receive_reset(1, 1)
    else:
        raw.receive(0, frame("09", "01"))
    assert raw.told(Cancelled) == [Cancelled(1, ResetCode.CANCELLED)]
    assert len(raw.session.responder) == 0
    assert raw.code is None


@both
def test_subscribe_namespace(draft):
    raw = Raw(draft, client=False)
    stream = subscribed_to_namespaces(draft, raw)
    raw.session.responder.tell_namespace(0, (b"a", b"b"))
    raw.session.responder.tell_namespace(0, ())
    assert raw.said() == [RequestOk(None if draft.streams else 0), Namespace((b"a", b"b")), Namespace(())]
    assert {command.stream for command in raw.commands} == {stream}
    raw.session.receive_reset(stream, 1)
    assert raw.told(Cancelled)
    assert len(raw.session.responder) == 0
    assert raw.code is None


@both
def test_a_fin_ends_a_subscription_to_namespaces(draft):
    """Draft 18, section 6.1; it ends no other request."""
    raw = Raw(draft, client=False)
    stream = subscribed_to_namespaces(draft, raw)
    raw.receive(stream, fin=True)
    assert raw.told(Cancelled) == [Cancelled(0, ResetCode.CANCELLED)]
    assert len(raw.session.responder) == 0
    if draft.streams:
        raw.receive(4, fetch_of("02"), fin=True)
        assert len(raw.told(Cancelled)) == 1
        assert len(raw.session.responder) == 1
    assert raw.code is None


def test_a_prefix_that_changes():
    """Not supported here; the request ends with that (draft 18, section 10.9.1)."""
    raw = Raw(DRAFT_18, client=False)
    subscribed_to_namespaces(DRAFT_18, raw)
    raw.receive(0, frame("02", "02 01 34 01 0162"))
    assert raw.told(Cancelled) == [Cancelled(0, ResetCode.CANCELLED)]
    refusal = raw.said()[-1]
    assert isinstance(refusal, RequestErrorMessage)
    assert refusal.code == RequestCode.NOT_SUPPORTED
    assert len(raw.session.responder) == 0
    assert raw.code is None


def test_subscribe_tracks_and_joining_fetches_are_heard():
    raw = Raw(DRAFT_18, client=False)
    raw.receive(0, frame("51", "00 01 0161 00"))
    raw.receive(4, frame("16", "02 02 00 01 00"))
    assert [type(event.message) for event in raw.told(Requested)] == [SubscribeTracks, JoiningFetch]
    for number, code in ((0, RequestCode.NOT_SUPPORTED), (2, RequestCode.INVALID_JOINING_REQUEST_ID)):
        raw.session.responder.refuse(number, code, "")
        assert raw.said()[-1] == RequestErrorMessage(None, code, 0, "")
    assert len(raw.session.responder) == 0
    assert raw.code is None


def test_namespaces_that_are_reserved():
    """Draft 18, sections 3.2.1 and 3.2.2: `.` and `.session` have nothing; others with a period are the owner's."""
    raw = Raw(DRAFT_18, client=False)
    session = b".session".hex()
    raw.receive(0, frame("50", "00 01 012e 00"))
    raw.receive(4, frame("16", "02 01 02 08", session, "0178 00 0000 0000 00"))
    raw.receive(8, frame("06", "04 01 08", session, "00"))
    raw.receive(12, frame("03", "06 01 06", b".other".hex(), "0174 00"))
    assert [message.code for message in raw.said()] == [RequestCode.DOES_NOT_EXIST] * 3
    (request,) = raw.told(Requested)
    assert request.message.namespace == (b".other",)
    assert raw.code is None


# ------------------------------------------------------------------ going away


@both
def test_goaway(draft):
    pair = Pair(draft)
    origin = Origin(pair, GROUPS)
    before = ask(pair)
    pair.run()
    pair.server.goaway(1500)
    pair.server.goaway(1500)
    pair.run()
    assert pair.told(True, GoingAway) == [GoingAway(b"", 1500 if draft.streams else 0)]
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


def test_goaway_names_the_first_request_that_was_not_processed():
    """Draft 18, section 10.4: 0 at a server, 1 at a client, if there was none."""
    for client, first in ((False, 0), (True, 1)):
        pair = Pair(DRAFT_18)
        pair.ends[client].goaway()
        pair.collect()
        sent = pair.lanes[(client, 2 if client else 3)].sent[-1]
        assert sent.hex() == f"10 0003 00 00 {first:02x}".replace(" ", "")


# ------------------------------------------------------------------ tokens


@both
def test_tokens(draft):
    pair = Pair(draft, server=SetupOptions(max_auth_token_cache_size=100))
    for token in (Token(b"one"), Token(b"two", REGISTER, 5), Token(b"", USE_ALIAS, 5), Token(b"", DELETE, 5)):
        ask(pair, tokens=(token,))
        pair.run()
    assert [event.tokens for event in pair.told(False, Requested)] == [(b"one",), (b"two",), (b"two",), ()]
    pair.healthy()


@both
@table(
    ("tokens", "code"),
    [
        ((Token(b"", USE_ALIAS, 5),), SessionCode.UNKNOWN_AUTH_TOKEN_ALIAS),
        ((Token(b"x", REGISTER, 5), Token(b"y", REGISTER, 5)), SessionCode.DUPLICATE_AUTH_TOKEN_ALIAS),
        ((Token(b"x" * 100, REGISTER, 5),), SessionCode.AUTH_TOKEN_CACHE_OVERFLOW),
    ],
)
def test_tokens_that_close_the_session(draft, tokens, code):
    pair = Pair(draft, server=SetupOptions(max_auth_token_cache_size=100))
    ask(pair, tokens=tokens)
    pair.run()
    assert pair.closes[False].code == code
