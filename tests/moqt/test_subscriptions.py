"""Subscriptions of this end: objects that are pushed, streams that overtake their answer, the end, and the bounds."""

import pytest

from kvabr.moqt import requester as requester_module
from kvabr.moqt.codes import PublishDoneCode, RequestCode, SessionCode
from kvabr.moqt.events import (
    Answered,
    Cancelled,
    Ended,
    Received,
    Refused,
    Requested,
    Stop,
    Stopped,
    SubscriptionDone,
    SubscriptionEnding,
)
from kvabr.moqt.messages import UNCOUNTED, RequestUpdate
from kvabr.moqt.objects import FREE_OBJECTS, ObjectHeader, SubgroupHeader, SubgroupWriter
from kvabr.moqt.wire import DRAFTS, Filter, Location, Parameters, write_varint
from tests.moqt.pair import NAMESPACE, TRACK, Pair, locations, payload
from tests.moqt.raw import NAME, VIOLATION, Raw, frame
from tests.moqt.tables import table

both = pytest.mark.parametrize("draft", DRAFTS)


def asked(pair: Pair, track: bytes = TRACK, **more) -> int:
    number = pair.client.subscribe(NAMESPACE, track, Parameters(filter=Filter(), **more))
    pair.run()
    return number


def subscribed(pair: Pair, alias: int = 7, track: bytes = TRACK) -> int:
    number = asked(pair, track)
    pair.server.responder.accept_subscribe(number, alias, Location(4, 2))
    pair.run()
    return number


def push(pair: Pair, number: int, group: int, *payloads: bytes, fin: bool = True, alias: int = 7) -> int:
    """Push a group, in one subgroup; return its stream."""
    header = SubgroupHeader(alias, group, 0, 10, properties=False, end_of_group=True)
    stream = pair.server.responder.push(number, header)
    writer = SubgroupWriter(header)
    data = b"".join(writer.header(index, len(each)) + each for index, each in enumerate(payloads))
    pair.write(False, stream, data, fin=fin)
    if fin:
        pair.server.responder.pushed(number, stream)
    return stream


def end(pair: Pair, number: int) -> None:
    pair.server.responder.publish_done(number, PublishDoneCode.TRACK_ENDED, "over")


@both
@table("seed", [None, *range(8)])
def test_groups_are_pushed_as_they_appear(draft, seed):
    """Also if streams overtake each other and the answer: nothing is lost, and the end comes last."""
    pair = Pair(draft, seed=seed)
    number = pair.client.subscribe(
        NAMESPACE, TRACK, Parameters(filter=Filter(groups_back=0), priority=3, group_order=1)
    )
    pair.run()
    (request,) = pair.told(False, Requested)
    assert request.message.parameters == Parameters(filter=Filter(groups_back=0), priority=3, group_order=1)
    pair.server.responder.accept_subscribe(number, 7, Location(4, 2))
    streams = {push(pair, number, group, b"head", bytes([group]) * 300): group for group in range(5, 9)}
    pair.run(5)
    streams |= {push(pair, number, 9, b""): 9}
    end(pair, number)
    pair.run()
    (answer,) = pair.told(True, Answered)
    assert (answer.message.track_alias, answer.message.parameters.largest) == (7, (4, 2))
    for stream, group in streams.items():
        mine = [event for event in pair.told(True, Received) if event.stream == stream]
        assert {event.request_id for event in mine} == {number}
        assert locations(mine) == ([(9, 0)] if group == 9 else [(group, 0), (group, 1)])
        assert payload(mine) == (b"" if group == 9 else b"head" + bytes([group]) * 300)
        assert {item.priority for event in mine for item in event.items if isinstance(item, ObjectHeader)} == {10}
    assert sorted(event.stream for event in pair.told(True, Ended)) == sorted(streams)
    (ending,) = pair.told(True, SubscriptionEnding)
    assert (ending.message.code, ending.message.streams, ending.message.reason) == (0x2, 5, "over")
    assert pair.events[True][-1] == SubscriptionDone(number)
    pair.tidy()


def test_a_stream_that_is_reset():
    """Its objects are lost, which the subscriber learns; the subscription goes on."""
    pair = Pair()
    number = subscribed(pair)
    stream = push(pair, number, 5, b"some", fin=False)
    pair.run()
    pair.reset(False, stream, 0x2)
    pair.server.responder.pushed(number, stream)
    push(pair, number, 6, b"more")
    pair.run()
    assert Ended(number, 0x2, stream) in pair.told(True, Ended)
    assert locations(pair.told(True, Received)) == [(5, 0), (6, 0)]
    end(pair, number)
    pair.run()
    assert pair.told(True, SubscriptionDone)
    pair.tidy()


def test_unsubscribe():
    pair = Pair()
    number = subscribed(pair)
    stream = push(pair, number, 5, b"some", fin=False)
    pair.run()
    pair.client.requester.cancel(number)
    pair.run()
    assert pair.told(False, Cancelled)
    assert pair.pipes[(False, stream)].over
    pair.tidy()


def test_a_stream_that_the_subscriber_stops():
    """It alone is over."""
    pair = Pair()
    number = subscribed(pair)
    stream = push(pair, number, 5, b"some", fin=False)
    pair.run()
    pair.client._channel.commands.append(Stop(stream, 1))
    pair.run()
    assert pair.told(False, Stopped) == [Stopped(number, stream)]
    push(pair, number, 6, b"more")
    end(pair, number)
    pair.run()
    assert (6, 0) in locations(pair.told(True, Received))
    assert pair.told(True, SubscriptionDone)
    pair.tidy()


def test_one_subscription_of_a_track():
    """The drafts disagree on what a second one means."""
    pair = Pair()
    number = subscribed(pair)
    with pytest.raises(ValueError, match="is already open"):
        pair.client.subscribe(NAMESPACE, TRACK, Parameters())
    subscribed(pair, 8, b"other")
    pair.client.requester.cancel(number)
    pair.run()
    subscribed(pair)
    pair.healthy()


@table(("body", "fine"), [("07 00 0e03", True), ("07 00", False)])
def test_the_priority_of_the_track(body, fine):
    """Subgroups without their own have it (draft 18, section 12.4)."""
    raw = Raw(client=True)
    raw.session.subscribe((b"a",), b"t", Parameters())
    raw.ask(0, frame("04", body))
    raw.receive(7, "30 07 05 00 01 61", fin=True)
    (received,) = raw.told(Received)
    assert received.items == [ObjectHeader(5, 0, 0, 3 if fine else 128, 1), b"a"]


OK = "07 00"


def waiting(*tracks: bytes) -> Raw:
    raw = Raw(client=True)
    for track in tracks or (b"t",):
        raw.session.subscribe((b"a",), track, Parameters())
    return raw


@table("pieces", [("10 07 05 09 00 01 61",), ("10 07", "05 09 00 01", "61"), ("10 07 05 09 00 01 61", "")])
def test_a_stream_before_its_answer_waits(pieces):
    raw = waiting()
    for piece in pieces[:-1]:
        raw.receive(7, piece)
    raw.receive(7, pieces[-1], fin=True)
    assert raw.told(Received) == []
    raw.ask(0, frame("04", OK))
    (received,) = raw.told(Received)
    assert received.items[0] == ObjectHeader(5, 0, 0, 9, 1)
    assert raw.told(Ended) == [Ended(0, None, 7)]
    raw.drained()


def test_a_stream_whose_answer_never_comes_is_dropped():
    """Once no SUBSCRIBE is open that could name its track."""
    raw = waiting(b"t", b"u")
    raw.receive(7, "10 08 05 09 00 01 61")
    raw.ask(0, frame("04", OK))
    raw.collect()
    assert Stop(7, 1) not in raw.commands
    raw.ask(4, frame("05", "10 00 00"))
    raw.collect()
    assert Stop(7, 1) in raw.commands
    raw.receive(7, "00", fin=True)
    raw.receive(11, "10 09 05 09 00 01 61", fin=True)
    assert raw.told(Received) == []
    raw.drained()


def test_a_reset_before_the_answer():
    raw = waiting()
    raw.receive(7, "10 07 05 09 00 01 61")
    raw.session.receive_reset(7, 1)
    assert raw.session.requester._held_bytes == 0
    raw.ask(0, frame("04", OK))
    assert raw.told(Received) == []
    assert raw.code is None


def test_what_waits_is_bounded():
    """What comes beyond a megabyte is stopped; the session goes on, and forgets nothing else."""
    raw = waiting()
    most, piece = requester_module.MAX_EARLY_OBJECTS_BYTES, bytes(1 << 16)
    header = "10 07 05 09 00" + write_varint(1 << 30).hex()
    for stream in range(7, 7 + 4 * 20, 4):
        raw.receive(stream, header)
        raw.receive(stream, piece)
        assert raw.session.requester._held_bytes <= most
    raw.collect()
    stopped = [command.stream for command in raw.commands if isinstance(command, Stop)]
    assert stopped == [*range(7 + 4 * 15, 7 + 4 * 20, 4)]
    raw.ask(0, frame("04", OK))
    assert len({event.stream for event in raw.told(Received)}) == 15
    assert raw.code is None


def test_a_malformed_track_among_those_that_wait():
    """Its subscription ends, and what else waits for it is dropped."""
    raw = waiting()
    raw.receive(7, "11 07 05 09 00 03 0b 01 04 00 00", fin=False)
    raw.receive(11, "10 07 06 09 00 01 61")
    raw.receive(0, frame("04", OK))
    (refused,) = raw.told(Refused)
    assert refused.message.code == RequestCode.MALFORMED_TRACK
    assert {Stop(7, 1), Stop(11, 1)} <= {command for command in raw.commands if isinstance(command, Stop)}
    assert raw.session.requester._requests == raw.session.requester._by_alias == {}
    assert raw.session.requester._held_bytes == 0
    assert raw.code is None


@table(
    ("stream", "data", "code"),
    [
        (7, "05 00", VIOLATION),  # objects of a FETCH
        (7, "05 02", VIOLATION),
        (0, frame("0b", "02 00 00"), VIOLATION),  # the end before the answer
        (4, frame("04", OK), SessionCode.DUPLICATE_TRACK_ALIAS),
    ],
)
def test_what_a_peer_may_not_do(stream, data, code):
    raw = waiting(b"t", b"u")
    if stream == 4:
        raw.ask(0, frame("04", OK))
    raw.receive(stream, data)
    assert raw.code == code


def test_an_error_after_the_answer():
    """The publisher breaks off."""
    raw = waiting()
    raw.ask(0, frame("04", OK) + frame("05", "00 00 00"))
    assert len(raw.told(Refused)) == 1
    raw.forgotten()


@table(("fin", "done"), [(True, False), (False, False), (True, True), (False, True)])
def test_the_end_of_the_requests_stream(fin, done):
    """Without a PUBLISH_DONE, the publisher has broken off; with one, what it has announced is still on its way."""
    raw = waiting()
    raw.receive(0, frame("04", OK) + (frame("0b", "02 01 00") if done else b""))
    if fin:
        raw.receive(0, b"", fin=True)
    else:
        raw.session.receive_reset(0, 0)
    assert len(raw.told(Refused)) == (not done)
    if done:
        raw.receive(7, "10 07 05 09 00 01 61", fin=True)
        assert raw.told(Received, SubscriptionDone)[-1] == SubscriptionDone(0)
    raw.forgotten()


@table(("streams", "over"), [("00", True), ("01", True), ("02", False), (None, False)])
def test_streams_that_a_publisher_counts(streams, over):
    """Fewer than there were are as good as all; while more are missing, or nobody knows, the owner decides."""
    raw = waiting()
    raw.ask(0, frame("04", OK))
    raw.receive(7, "10 07 05 09 00 01 61")
    raw.ask(0, frame("0b", "02", streams or write_varint(UNCOUNTED).hex(), "00"))
    assert raw.told(SubscriptionDone) == []
    raw.receive(7, b"", fin=True)
    assert bool(raw.told(SubscriptionDone)) == over
    raw.session.requester.cancel(0)
    raw.forgotten()


def test_small_objects_without_end():
    """Counted over all streams of the subscription."""
    raw = waiting()
    raw.ask(0, frame("04", OK))
    for index in range(FREE_OBJECTS // 8):
        raw.receive(7 + 4 * index, "10 07 05 09" + "00 01 61" * 4 + "00 00 00" * 4, fin=True)
    assert raw.told(Refused) == []
    for index in range(FREE_OBJECTS, FREE_OBJECTS + 9):
        raw.receive(7 + 4 * index, "10 07 05 09", fin=True)
    (refused,) = raw.told(Refused)
    assert refused.message.code == RequestCode.MALFORMED_TRACK
    assert raw.code is None


def test_incomplete_headers_are_bounded(monkeypatch):
    monkeypatch.setattr(requester_module, "MAX_PARTIAL_BYTES", 3000)
    raw = waiting()
    raw.receive(0, frame("04", OK))
    for index in range(4):
        assert raw.code is None
        raw.receive(7 + 4 * index, bytes.fromhex("11 07 05 09 00 83e8") + bytes(900))
    assert raw.code == SessionCode.INTERNAL_ERROR


def test_updates_that_the_peer_limits():
    """MAX_REQUEST_UPDATES (draft 20, section 10.3.1): the last of those that wait is sent when one is answered."""
    raw = Raw(client=True, ready=False)
    raw.setup("08 02")
    number = raw.session.subscribe((b"a",), b"t", Parameters())
    raw.receive(0, frame("04", OK))
    for priority in range(6):
        assert raw.session.requester.update(number, Parameters(priority=priority))

    def sent() -> list[int | None]:
        return [each.parameters.priority for each in raw.said() if isinstance(each, RequestUpdate)]

    assert sent() == [0, 1]
    raw.receive(0, frame("07", "00"))
    assert sent() == [0, 1, 5]
    raw.receive(0, frame("07", "00") * 2)
    assert sent() == [0, 1, 5]
    assert raw.code is None


def test_a_changed_state_is_only_news():
    raw = waiting()
    notice = frame("22", "01 10 00")
    raw.receive(0, frame("04", OK) + notice)
    assert raw.told(Refused) == []
    assert raw.code is None
    raw = waiting()
    raw.receive(0, notice)
    assert raw.code == VIOLATION


@table("draft", DRAFTS)
@table("what", ["25 02 0001", "23 04 01 25 01 00"])
def test_filters_by_range_are_refused(draft, what):
    """This end allows none, by not sending MAX_FILTER_RANGES."""
    raw = Raw(draft, client=False)
    raw.receive(0, frame("03", "00", NAME, "01", what))
    raw.receive(4, frame("03", "02", NAME, "00"))
    raw.session.responder.accept_subscribe(2, 1, None)
    raw.receive(4, frame("02", "04 01", what))
    assert [message.code for message in raw.said() if hasattr(message, "code")] == [RequestCode.INVALID_FILTER] * 2
    assert len(raw.session.responder) == 0
    assert raw.code is None


def test_a_fetch_that_ends_before_it_starts():
    """No fault of the session."""
    raw = Raw(client=False)
    raw.receive(0, frame("16", "00", NAME, "01", "21 04 05030001"))
    (refused,) = raw.said()
    assert refused.code == RequestCode.INVALID_RANGE
    assert raw.told(Requested) == []
    assert raw.code is None
