"""Two sessions joined in memory: FETCH from its beginning to its end, in both drafts."""

import pytest

from kvabr.moqt.codes import RequestCode, ResetCode, SessionCode
from kvabr.moqt.events import (
    Answered,
    Cancelled,
    Ended,
    Ready,
    Received,
    Refused,
    Requested,
    Updated,
)
from kvabr.moqt.objects import FetchWriter, RangeEnd
from kvabr.moqt.parameters import Parameters, SetupOptions, Token
from kvabr.moqt.wire import DRAFTS, Location
from tests.moqt.pair import GROUPS, Origin, Pair, ask, locations, payload
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
    pair.healthy()
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
    pair.healthy()
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
    pair.healthy()
    pair.tidy()


def test_an_update_is_acknowledged_after_its_request():
    """FETCH_OK is the first message on the stream (draft 18, section 10.13)."""
    pair = Pair()
    number = ask(pair)
    assert pair.client.requester.update(number, Parameters(priority=9))
    pair.run()
    assert pair.told(False, Updated)
    assert pair.lanes.get((False, 0)) is None
    pair.server.responder.accept_fetch(number, Location(0, 1), end_of_track=False)
    pair.collect()
    assert b"".join(pair.lanes[(False, 0)].sent).hex() == "1800040000000007000100"
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
