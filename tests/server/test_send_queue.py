"""What a connection still has to send, and in which order."""

import pytest

from kvabr.codec.container import ObjectSpan
from kvabr.link.moqt.endpoint import MAX_AHEAD_BYTES
from kvabr.moqt.messages import Fetch
from kvabr.moqt.objects import ObjectHeader, ObjectParser
from kvabr.moqt.wire import Location, Parameters
from kvabr.server.budgets import Budgets
from kvabr.server.fetch_range import FetchRange, FetchRangeError, GroupRange, last_object
from kvabr.server.grants import EVERYTHING
from kvabr.server.limits import ServerLimits
from kvabr.server.publication import ArrivingGroup, Publication, PublishedGroup
from kvabr.server.send_queue import Sending, SendQueue, TrackRequest
from kvabr.types.errors import AssetError


class Track(Publication):
    """Three groups of three objects with IDs 100 apart; one of the groups may be missing."""

    groups = 3

    def __init__(self, size=30, *, broken=None):
        self._size, self._broken, self.opened = size, broken, []

    def size(self, group):
        return self._size

    def objects(self, group):
        third = self._size // 3
        return tuple(ObjectSpan(100 * i, i * third, (i + 1) * third) for i in range(3))

    def open(self, group, priority=128, on_more=None):
        if group == self._broken:
            raise AssetError("gone")
        self.opened.append(group)
        return PublishedGroup(memoryview(bytes([group]) * self._size), self.objects(group), "0" * 64)


class Quic:
    """Takes what it is given; sends as much as it is told to."""

    def __init__(self):
        self.streams, self.ended, self.queued, self.dead = {}, [], 0, set()

    def send(self, job, pieces):
        piece = b"".join(pieces)
        if job.stream in self.dead:
            return False
        self.streams.setdefault(job.stream, bytearray()).extend(piece)
        self.queued += len(piece)
        if job.finished:
            self.ended.append(job.stream)
        return True

    def feed(self, box, most=64 << 10):
        """Feed; return finished answers, and broken ones with their errors."""
        ended = box.feed(MAX_AHEAD_BYTES - self.queued, most)
        return [job for job, error in ended if error is None], [one for one in ended if one[1] is not None]


WHOLE = (GroupRange(0, 0, None),)


def sending(number, track, *, ranges=WHOLE, priority=128, dense=False, descending=False, room=None, wake=lambda: None):
    request = TrackRequest(number, track, EVERYTHING, "T", priority, descending, dense)
    room = Budgets(ServerLimits()).enter("192.0.2.1") if room is None else room
    return Sending(request, ranges, room, wake, stream=number + 1000)


def objects(data, **options):
    """(group, object ID, payload) of each object on a stream."""
    out = []
    for item in ObjectParser(**options).feed(bytes(data)):
        if isinstance(item, ObjectHeader):
            out.append([item.group, item.object, b""])
        else:
            out[-1][2] += item
    return [tuple(each) for each in out]


def test_objects_have_the_ids_of_their_tokens_or_are_counted():
    for dense, ids in ((False, [0, 100, 200]), (True, [0, 1, 2])):
        quic = Quic()
        box = SendQueue(quic.send)
        box.add(sending(1, Track(), dense=dense))
        done, broken = quic.feed(box)
        assert ([job.request.number for job in done], broken, len(box)) == ([1], [], 0)
        assert objects(quic.streams[1001]) == [(0, each, b"\0" * 10) for each in ids]
        assert quic.ended == [1001]


def test_ranges_of_groups_either_way_and_of_objects():
    ranges = [GroupRange(0, 100, None), GroupRange(1, 0, None), GroupRange(2, 0, 200)]
    wanted = [(0, 100), (0, 200), (1, 0), (1, 100), (1, 200), (2, 0), (2, 100)]
    quic = Quic()
    box = SendQueue(quic.send)
    box.add(sending(1, Track(), ranges=ranges))
    box.add(sending(2, Track(), ranges=ranges[::-1], descending=True))
    quic.feed(box)
    assert [each[:2] for each in objects(quic.streams[1001])] == wanted
    backwards = [each[:2] for each in objects(quic.streams[1002], descending=True)]
    assert backwards == [(2, 0), (2, 100), (1, 0), (1, 100), (1, 200), (0, 100), (0, 200)]


def test_the_most_urgent_first_and_no_more_than_quic_can_use():
    quic = Quic()
    box = SendQueue(quic.send)
    size = 3 * MAX_AHEAD_BYTES
    for number, priority in ((1, 5), (2, 9), (3, 5)):
        box.add(sending(number, Track(size), priority=priority))
    order = []
    while len(box):
        done, _ = quic.feed(box)
        order += [job.request.number for job in done]
        assert quic.queued < 2 * MAX_AHEAD_BYTES
        quic.queued = 0
    assert order == [1, 3, 2]


def test_what_breaks_does_not_hold_up_the_rest():
    quic = Quic()
    quic.dead = {1002}
    box = SendQueue(quic.send)
    box.add(sending(1, Track(broken=0)))
    box.add(sending(2, Track()))
    box.add(sending(3, Track()))
    done, broken = quic.feed(box)
    assert [(job.request.number, str(error)) for job, error in broken] == [(1, "gone")]
    assert [job.request.number for job in done] == [2, 3]
    assert set(quic.streams) == {1003}


class Growing(ArrivingGroup):
    """A group of which the test says how much has arrived."""

    digest, size = "00" * 32, 30

    def __init__(self, objects, on_more=lambda: None):
        self.objects, self.here, self.priority, self.open, self.error = objects, 0, None, True, None
        self.on_more = on_more

    @property
    def memory(self):
        return self.size

    def come(self, here):
        self.here = here
        self.on_more()

    @property
    def available(self):
        if self.error is not None:
            raise self.error
        return self.here

    def read(self, begin, end):
        return memoryview(bytes(range(30)))[begin:end]

    def prioritise(self, priority):
        self.priority = priority

    def close(self):
        self.open = False


class Coming(Publication):
    """A track whose groups must be loaded; the test says when they are there."""

    groups, dear = 1, True

    def __init__(self):
        self.loaded = []

    def objects(self, group):
        return Track(30).objects(group)

    def open(self, group, priority=128, on_more=lambda: None):
        self.loaded.append(Growing(self.objects(0), on_more))
        return self.loaded[-1]


def test_a_group_is_sent_as_it_arrives_and_lets_others_pass_meanwhile():
    quic, track = Quic(), Track()
    box, coming = SendQueue(quic.send), Coming()
    box.add(sending(1, coming, priority=1))
    box.add(sending(2, track, priority=9))
    box.of(1)[0].ready()
    growing = coming.loaded[0]
    growing.come(13)
    done, broken = quic.feed(box)
    assert ([job.request.number for job in done], broken, len(box)) == ([2], [], 1)
    assert b"".join(payload for _, _, payload in objects(quic.streams[1001])) == bytes(range(13))
    for here, ended in ((13, []), (14, []), (30, [1])):
        growing.come(here)
        done, broken = quic.feed(box)
        assert ([job.request.number for job in done], broken) == (ended, [])
    assert b"".join(payload for _, _, payload in objects(quic.streams[1001])) == bytes(range(30))
    assert quic.ended == [1002, 1001]
    assert not growing.open
    assert track.opened == [0]  # only the other answer had to be opened


def test_an_answer_that_is_often_interrupted_closes_its_file_meanwhile():
    quic, track = Quic(), Track(3000)
    box = SendQueue(quic.send)
    box.add(sending(1, track, ranges=[GroupRange(0, 0, None), GroupRange(1, 0, None)]))
    for number in range(2, 6):
        box.feed(1, 1000)
        box.add(sending(number, Track(), priority=0))
        box.feed(1, 1000)
    while len(box):
        box.feed(1, 1000)
    assert len(track.opened) > 2  # its file is closed while others are sent
    assert b"".join(payload for _, _, payload in objects(quic.streams[1001])) == b"\0" * 3000 + b"\1" * 3000


GROUPS = 4
FINAL = 200
"""ID of the last object of each group."""


class Long(Track):
    groups = GROUPS

    def objects(self, group):
        return (ObjectSpan(FINAL, 0, 1),)


def cut(start, end, *, order=None):
    parameters = Parameters() if order is None else Parameters(group_order=order)
    message = Fetch(0, (b"namespace",), b"track", Location(*start), Location(*end), parameters)
    return FetchRange.of(message, Long(), dense=False)


EVERY_GROUP = [(group, 0, None) for group in range(GROUPS)]


@pytest.mark.parametrize(
    ("start", "end", "groups", "stop", "ended"),
    [
        ((1, 0), (1, 0), [(1, 0, None)], (1, FINAL + 1), False),
        ((0, 0), (9, 7), EVERY_GROUP, (3, FINAL + 1), True),
        ((2, 5), (2, 101), [(2, 5, 101)], (2, 101), False),
        ((2, 100), (3, 100), [(2, 100, None), (3, 0, 100)], (3, 100), False),
        ((2, 100), (3, FINAL), [(2, 100, None), (3, 0, FINAL)], (3, FINAL), False),
        ((2, 100), (3, FINAL + 1), [(2, 100, None), (3, 0, FINAL + 1)], (3, 201), True),
        ((2, 100), (3, 9999), [(2, 100, None), (3, 0, 9999)], (3, 201), True),
        ((1, FINAL + 1), (2, 0), [(1, FINAL + 1, None), (2, 0, None)], (2, FINAL + 1), False),
    ],
)
def test_ranges(start, end, groups, stop, ended):
    found = cut(start, end)
    assert list(found.groups(Long())) == [GroupRange(*one) for one in groups]
    assert (found.end, found.end_of_track) == (Location(*stop), ended)


def test_the_order_of_groups_can_be_descending():
    assert [part.group for part in cut((0, 0), (2, 0), order=1).groups(Long())] == [0, 1, 2]
    backwards = cut((0, 7), (2, 9), order=2)
    assert list(backwards.groups(Long())) == [GroupRange(2, 0, 9), GroupRange(1, 0, None), GroupRange(0, 7, None)]
    assert backwards.end == Location(2, 9)


class Endless(Long):
    """A track of 100,000 groups, every third of which the producer left out."""

    groups = 100_000

    def __init__(self):
        super().__init__(1)
        self.looked_at = []

    def has(self, group):
        self.looked_at.append(group)
        return group % 3 > 0


def test_a_fetch_looks_only_at_the_groups_that_it_is_about_to_send():
    quic, track = Quic(), Endless()
    message = Fetch(0, (b"namespace",), b"track", Location(3, 0), Location(1 << 60, 0), Parameters())
    box = SendQueue(quic.send)
    box.add(sending(1, track, ranges=FetchRange.of(message, track, dense=False).groups(track)))
    for _ in range(3):
        box.feed(1, 1)
    assert max(track.looked_at) <= 8
    while len(quic.streams[1001]) < 1000:
        box.feed(1000, 1000)
    sent = [group for group, _, _ in objects(quic.streams[1001])]
    assert sent == [group for group in range(3, sent[-1] + 1) if group % 3]
    assert max(track.looked_at) <= sent[-1] + 3


@pytest.mark.parametrize(
    ("start", "end", "says"),
    [
        ((4, 0), (4, 0), "the track has 4 groups"),
        ((9, 0), (12, 0), "the track has 4 groups"),
        ((2, FINAL + 1), (2, 0), "the last object of group 2 is 200"),
        ((3, FINAL + 1), (7, 0), "the last object of group 3 is 200"),
    ],
)
def test_what_begins_behind_the_end_is_refused(start, end, says):
    with pytest.raises(FetchRangeError, match=says):
        cut(start, end)


def test_last_objects():
    spans = tuple(ObjectSpan(100 * place, place, place + 1) for place in range(3))
    assert last_object(spans, dense=False) == 200
    assert last_object(spans, dense=True) == 2
