"""Budgets of a server: who gives way, who waits, and that nothing is left of clients that have gone."""

import asyncio
from functools import partial

import pytest

from kvabr.server.addresses import site_of
from kvabr.server.budgets import MIN_IN_FLIGHT_BYTES, OPEN_S, Budgets
from kvabr.server.fetch_range import GroupRange
from kvabr.server.limits import ServerLimits
from kvabr.server.publication import LevelPublication
from kvabr.server.send_queue import SendQueue
from kvabr.types.errors import RequestError, UsageError
from tests.assets import make_asset, open_files
from tests.server.test_send_queue import Coming, Quic, objects, sending

LARGE = 100_000
"""Bytes of a frame that is read from an open file."""


def budgets(**bounds):
    return Budgets(ServerLimits(**bounds), clock=lambda: 1000.0)


@pytest.fixture(scope="module")
def asset(tmp_path_factory):
    """90 groups, of 4 tokens each."""
    return make_asset(tmp_path_factory.mktemp("budgets") / "one", range(360), levels=("FP16",), frame_bytes=LARGE)


def test_a_client_that_changes_its_mind_keeps_one_file_open(asset):
    """Each of 90 answers is begun in turn by raising its priority; then all of them arrive whole."""
    most, quics, kept = [], [Quic() for _ in range(5)], budgets()
    rooms = [kept.enter("10.0.0.1") for _ in quics]
    level = LevelPublication(asset, "FP16")
    queues = [SendQueue(quic.send) for quic in quics]
    for queue, room in zip(queues, rooms, strict=True):
        for group in range(90):
            queue.add(sending(group, level, ranges=[GroupRange(group, 0, None)], room=room))
    for turn in range(2):
        for group in range(90):
            for queue in queues:
                queue.reprioritise(group, 89 - group if turn else 200 - group)
                queue.feed(1, 64 << 10)  # a piece
            most.append(open_files(asset.store.folder))
    assert max(most) == len(queues)
    for quic, queue in zip(quics, queues, strict=True):
        while len(queue):
            assert all(error is None for _, error in queue.feed(1, 64 << 10))
        for group in (0, 44, 89):
            payload = b"".join(part for _, _, part in objects(quic.streams[group + 1000]))
            assert payload == asset.frame(group, "FP16")
    assert open_files(asset.store.folder) == kept.total.memory == 0


def test_answers_on_streams_that_the_peer_does_not_allow_yet_have_no_file_open(asset, monkeypatch):
    allowed, quic, room, opened = set(), Quic(), budgets().enter("10.0.0.1"), []

    def may_send(job):
        job.stream = job.request.number  # accepts the FETCH
        return job.stream in allowed

    frame = LevelPublication.frame
    monkeypatch.setattr(LevelPublication, "frame", lambda level, group: opened.append(group) or frame(level, group))
    queue, level = SendQueue(quic.send, may_send), LevelPublication(asset, "FP16")
    for group in range(90):
        queue.add(sending(group, level, ranges=[GroupRange(group, 0, None)], room=room))
        queue.of(group)[0].stream = None
    for _ in range(3):
        assert queue.feed(1, 64 << 10) == []
        assert open_files(asset.store.folder) == 0
    assert opened == list(range(90))  # once each
    allowed.update(range(90))
    while len(queue):
        assert all(error is None for _, error in queue.feed(1, 64 << 10))
        assert open_files(asset.store.folder) <= 1
    payload = b"".join(part for _, _, part in objects(quic.streams[44]))
    assert payload == asset.frame(44, "FP16")


async def test_memory_of_open_groups_has_a_bound_per_connection_address_and_in_all():
    kept = budgets(memory_per_connection=70, memory_per_address=100, memory=130)
    rooms = [kept.enter(address) for address in ("10.0.0.1", "10.0.0.1", "10.0.0.2")]
    answers = []
    for room in rooms * 3:
        answers.append(sending(len(answers), Coming(), room=room))
        answers[-1].ready()
        own, address, total = room.accounts
        assert (own.memory <= 70, address.memory <= 100, total.memory <= 130) == (True, True, True)
    assert kept.total.memory == 120
    for answer in answers:
        pieces = b""
        while not answer.finished:
            if answer.ready():
                pieces += answer.piece(64 << 10)
            elif answer.request.publication.loaded:
                answer.request.publication.loaded[0].come(30)
            else:
                await asyncio.sleep(0)  # until it is told that there is room
        assert len(b"".join(part for _, _, part in objects(pieces))) == 30
    assert kept.total.memory == len(kept.total.open) == 0


async def test_only_a_group_that_the_server_has_no_memory_for_is_refused():
    kept = budgets(memory_per_connection=10, memory_per_address=20, memory=29)
    answer = sending(0, Coming(), room=kept.enter("10.0.0.1"))
    with pytest.raises(RequestError, match="30 bytes does not fit"):
        answer.ready()
    assert kept.total.memory == len(answer.request.publication.loaded) == 0
    kept = budgets(memory_per_connection=10, memory_per_address=20, memory=30)
    answer = sending(0, Coming(), room=kept.enter("10.0.0.1"))
    assert not answer.ready()
    assert len(answer.request.publication.loaded) == 1
    answer.close()


async def test_what_must_be_loaded_waits_for_room_in_order():
    now = [1000.0]
    kept = Budgets(ServerLimits(memory_per_connection=70, memory=80), clock=lambda: now[0])
    room, told = kept.enter("10.0.0.1"), []
    answers = [sending(number, Coming(), room=room, wake=partial(told.append, number)) for number in range(5)]
    assert not any(answer.ready() for answer in answers)
    assert [len(answer.request.publication.loaded) for answer in answers] == [1, 1, 0, 0, 0]
    assert len(kept._waiting) == 3
    answers[3].close()
    answers[0].close()
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert told == [2, 4]
    assert not answers[2].ready()  # but it is being loaded
    assert [len(answer.request.publication.loaded) for answer in answers] == [1, 1, 1, 0, 0]
    # What is there and has been open for long gives way; what is still coming does not.
    answers[1].request.publication.loaded[0].here = 30
    now[0] += OPEN_S - 1
    assert not answers[4].ready()
    assert not answers[4].request.publication.loaded
    now[0] += 2
    answers[4].on_more()
    answers[4].ready()
    assert len(answers[4].request.publication.loaded) == 1
    assert not answers[1].request.publication.loaded[0].open
    answers[1].on_more()
    assert not answers[1].ready()  # its turn to wait
    assert len(answers[1].request.publication.loaded) == 1
    # A group of another connection waits, too: the bound of all of them holds.
    other = sending(9, Coming(), room=kept.enter("10.0.0.2"))
    other.ready()
    assert not other.request.publication.loaded
    assert kept.total.memory <= 80
    for answer in (*answers, other):
        answer.close()
    assert len(kept._waiting) == kept.total.memory == 0
    await asyncio.sleep(0)


def test_data_on_the_way_has_a_bound_and_everybody_gets_a_part():
    kept = budgets(in_flight_per_connection=5 << 20, in_flight_per_address=8 << 20, in_flight=9 << 20)
    one, other, elsewhere = (kept.enter(address) for address in ("10.0.0.1", "10.0.0.1", "10.0.0.2"))
    assert one.allowance() == 5 << 20
    one.note(5 << 20)
    assert one.allowance() == 0
    other.note(4 << 20)
    assert kept.total.in_flight == 9 << 20
    # Address and total are used up: each may have an equal part.
    assert one.allowance() == other.allowance() - (1 << 20) == (3 << 20) - (5 << 20)
    assert elsewhere.allowance() == 3 << 20
    more = [kept.enter("10.0.0.1") for _ in range(100)]
    assert more[0].allowance() == MIN_IN_FLIGHT_BYTES
    one.note(1 << 20)
    assert more[0].allowance() == 5 << 20
    for room in (one, other, elsewhere, *more):
        kept.left(room)
    assert kept.total.in_flight == kept.total.connections == 0
    assert not kept.addresses


def test_connections_of_one_address():
    kept = budgets(connections_per_address=2)
    rooms = [kept.enter("192.0.2.1"), kept.enter("::ffff:192.0.2.1")]
    assert kept.enter("192.0.2.1") is None
    assert kept.enter("192.0.2.2") is not None
    sites = [kept.enter(f"2001:db8::{number}") for number in range(3)]
    assert [room is None for room in sites] == [False, False, True]
    assert kept.enter("2001:db8:0:1::1") is not None
    kept.left(rooms[0])
    assert kept.enter("192.0.2.1") is not None
    assert len(kept.addresses) == 4


@pytest.mark.parametrize("name", ServerLimits.__slots__)
def test_a_budget_of_nothing_is_refused(name):
    for value in (0, -1, float("nan")):
        with pytest.raises(UsageError, match=f"limit {name.replace('_', '-')}: .* is not positive"):
            ServerLimits(**{name: value})


def test_addresses_of_one_site():
    assert site_of("192.0.2.7") == "192.0.2.7"
    assert site_of("::ffff:192.0.2.7") == "192.0.2.7"
    assert site_of("2001:db8:1:2:3::4") == site_of("2001:db8:1:2::") != site_of("2001:db8:1:3::")
    assert site_of("fe80::1%eth0") == site_of("fe80::2%eth1")
    assert site_of("no address") == "no address"
