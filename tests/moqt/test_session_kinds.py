"""Two sessions joined in memory: requests other than FETCH, tokens, and going away."""

import pytest

from kvabr.moqt.codes import RequestCode, ResetCode, SessionCode
from kvabr.moqt.events import (
    Answered,
    Cancelled,
    DatagramReceived,
    GoingAway,
    NamespaceChanged,
    Received,
    Refused,
    Requested,
    SubscriptionDone,
)
from kvabr.moqt.messages import JoiningFetch, PublishNamespace, SubscribeNamespace, SubscribeTracks
from kvabr.moqt.objects import (
    ObjectHeader,
    SubgroupHeader,
    write_datagram,
    write_subgroup_header,
    write_subgroup_object,
)
from kvabr.moqt.parameters import DELETE, REGISTER, USE_ALIAS, Filter, Parameters, SetupOptions, Token
from kvabr.moqt.wire import DRAFT_18, DRAFTS, Location
from tests.moqt.pair import NAMESPACE, TRACK, Origin, Pair, locations, payload
from tests.moqt.tables import table

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


@both
def test_track_status(draft):
    pair = Pair(draft)
    number = pair.client.track_status(NAMESPACE, TRACK, Parameters())
    pair.run()
    properties = ((0x30, 1),) if draft.streams else ()
    pair.server.responder.accept(number, Parameters(largest=Location(3, 1)), properties)
    pair.run()
    (answer,) = pair.told(True, Answered)
    assert answer.message.parameters.largest == (3, 1)
    assert answer.message.properties == properties
    pair.healthy()
    pair.tidy()


@both
def test_publish_namespace(draft):
    pair = Pair(draft)
    number = pair.server.publish_namespace((b"root",))
    pair.run()
    (request,) = pair.told(True, Requested)
    assert isinstance(request.message, PublishNamespace)
    pair.client.responder.accept(number)
    pair.run()
    assert len(pair.told(False, Answered)) == 1
    pair.server.requester.cancel(number)
    pair.run()
    assert pair.told(True, Cancelled)
    pair.healthy()
    pair.tidy()


@both
def test_subscribe_namespace(draft):
    pair = Pair(draft)
    number = pair.client.subscribe_namespace((b"root",))
    pair.run()
    (request,) = pair.told(False, Requested)
    assert isinstance(request.message, SubscribeNamespace)
    responder = pair.server.responder
    responder.accept(number)
    responder.tell_namespace(number, (b"a", b"b"))
    responder.tell_namespace(number, ())
    responder.tell_namespace(number, (b"a", b"b"), gone=True)
    pair.run()
    assert pair.told(True, NamespaceChanged) == [
        NamespaceChanged(number, (b"a", b"b"), gone=False),
        NamespaceChanged(number, (), gone=False),
        NamespaceChanged(number, (b"a", b"b"), gone=True),
    ]
    pair.client.requester.cancel(number)
    pair.run()
    assert pair.told(False, Cancelled)
    pair.healthy()
    pair.tidy()


@both
@table("how", ["fin", "reset"])
def test_a_subscription_to_namespaces_that_breaks(draft, how):
    """As if each namespace had gone (draft 18, section 10.18)."""
    pair = Pair(draft)
    number = pair.client.subscribe_namespace((b"root",))
    pair.run()
    pair.server.responder.accept(number)
    pair.server.responder.tell_namespace(number, (b"a",))
    pair.run()
    stream = 0 if draft.streams else 4
    if how == "fin":
        pair.write(False, stream, b"", fin=True)
    else:
        pair.reset(False, stream, 0)
    pair.run()
    assert pair.told(True, NamespaceChanged)[-1] == NamespaceChanged(number, (b"a",), gone=True)
    assert len(pair.told(True, Refused)) == 1
    pair.healthy()


@both
def test_a_fin_ends_a_subscription_to_namespaces(draft):
    """Draft 18, section 6.1; it ends no other request."""
    pair = Pair(draft)
    number = pair.client.subscribe_namespace((b"root",))
    pair.run()
    pair.server.responder.accept(number)
    pair.run()
    pair.write(True, 0 if draft.streams else 4, b"", fin=True)
    pair.run()
    assert pair.told(False, Cancelled) == [Cancelled(number, ResetCode.CANCELLED)]
    assert len(pair.server.responder) == 0
    if draft.streams:
        other = ask(pair)
        pair.run()
        pair.write(True, 4, b"", fin=True)
        pair.run()
        assert len(pair.told(False, Cancelled)) == 1
        assert pair.server.responder.message_of(other) is not None
    pair.healthy()


@both
def test_prefix_overlap(draft):
    """Which prefixes overlap is for the owner to say; the refusal travels, and ends the request."""
    pair = Pair(draft)
    first, second = pair.client.subscribe_namespace((b"root",)), pair.client.subscribe_namespace((b"root", b"model"))
    pair.run()
    pair.server.responder.accept(first)
    pair.server.responder.refuse(second, RequestCode.PREFIX_OVERLAP, "you have that already")
    pair.run()
    (refused,) = pair.told(True, Refused)
    assert (refused.request_id, refused.message.code) == (second, RequestCode.PREFIX_OVERLAP)
    assert pair.server.responder.message_of(first) is not None
    pair.healthy()


def test_subscribe_tracks_and_joining_fetches_are_heard():
    pair = Pair(DRAFT_18)
    number = pair.client.requester.request(lambda number: SubscribeTracks(number, (b"a",)))
    joining = pair.client.requester.request(lambda other: JoiningFetch(other, number, 1, relative=True))
    pair.run()
    assert [event.request_id for event in pair.told(False, Requested)] == [number, joining]
    pair.server.responder.refuse(number, RequestCode.NOT_SUPPORTED, "")
    pair.server.responder.refuse(joining, RequestCode.INVALID_JOINING_REQUEST_ID, "")
    pair.run()
    assert len(pair.told(True, Refused)) == 2
    pair.healthy()
    pair.tidy()


def test_namespaces_that_are_reserved():
    """Draft 18, sections 3.2.1 and 3.2.2: `.` and `.session` have nothing; others with a period are the owner's."""
    pair = Pair(DRAFT_18)
    pair.client.subscribe_namespace((b".",))
    pair.client.fetch((b".session", b"x"), b"", Location(0, 0), Location(0, 0), Parameters())
    pair.client.publish_namespace((b".session",))
    pair.client.subscribe((b".other",), b"t", Parameters())
    pair.run()
    assert [event.message.code for event in pair.told(True, Refused)] == [RequestCode.DOES_NOT_EXIST] * 3
    (request,) = pair.told(False, Requested)
    assert request.message.namespace == (b".other",)
    pair.healthy()


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
