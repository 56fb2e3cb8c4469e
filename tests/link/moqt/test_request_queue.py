"""Requests that wait are sent in order, within the limits, and cost the same however many they are."""

from hypothesis import given, settings
from hypothesis import strategies as st

from kvabr.link.moqt.connection import MAX_IN_FLIGHT, MoqtRequest, RequestQueue
from kvabr.transfer.interface import GroupRequest, GroupTransfer
from kvabr.types.naming import TrackNamespace
from tests.counting import lines

SPACE = TrackNamespace("a/model", "0" * 64)


def download(group, priority=0):
    transfer = GroupTransfer(GroupRequest(SPACE, "AC-L0", group, 1000))
    transfer.priority = priority
    return MoqtRequest(transfer, ())


class Plain:
    """A reference for the queue, which looks at every request each time."""

    def __init__(self):
        self.asked, self.waiting = {}, []

    def next(self):
        if not self.waiting or len(self.asked) >= MAX_IN_FLIGHT:
            return None
        entry = min(self.waiting, key=lambda entry: entry[:2])
        self.waiting.remove(entry)
        return entry[2]


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 9)), max_size=300))
def test_it_does_what_looking_at_every_request_would_do(steps):
    queue, plain, numbers, made = RequestQueue(), Plain(), 0, []
    for kind, which in steps:
        waiting = [entry[2] for entry in plain.waiting]
        if kind <= 1:
            for _ in range(which + 1):
                made.append(download(len(made), which))
                queue.wait(made[-1])
                plain.waiting.append((which, len(made), made[-1]))
        elif kind == 2 and waiting:
            one = waiting[which % len(waiting)]
            queue.leave(one)
            plain.waiting = [entry for entry in plain.waiting if entry[2] is not one]
        elif kind == 3 and waiting:
            one = waiting[which % len(waiting)]
            one.transfer.priority = which
            queue.wait(one)
            made.append(one)
            plain.waiting = [entry for entry in plain.waiting if entry[2] is not one]
            plain.waiting.append((which, len(made), one))
        elif kind == 4 and plain.asked:
            number = list(plain.asked)[which % len(plain.asked)]
            assert queue.in_flight.pop(number) is plain.asked.pop(number)
        while (found := queue.next()) is not None:
            assert found is plain.next()
            numbers += 1
            queue.in_flight[numbers] = found
            plain.asked[numbers] = found
        assert plain.next() is None
        assert len(queue) == len(plain.waiting)
        assert queue.in_flight == plain.asked
    assert queue.clear() == [entry[2] for entry in sorted(plain.waiting, key=lambda entry: entry[1])]
    assert len(queue) == 0


def all_of(count):
    """Request many groups at once, cancel some, make others more urgent, and receive the rest."""
    queue, begun, ended = RequestQueue(), 0, 0
    made = [download(group, group * 64 // count) for group in range(count)]
    for one in made:
        queue.wait(one)
    for group in range(0, count, 8):
        queue.leave(made[group])
        made[group + 1].transfer.priority = 0
        queue.wait(made[group + 1])
    while True:
        while (found := queue.next()) is not None:
            begun += 1
            queue.in_flight[begun] = found
        if ended == begun:
            return begun
        ended += 1
        del queue.in_flight[ended]


def test_many_requests_cost_no_more_each():
    assert all_of(64) == 56
    few, some, many = (lines(lambda count=count: all_of(count)) / count for count in (64, 1024, 8192))
    assert some <= 1.3 * few
    assert many <= 1.3 * few
