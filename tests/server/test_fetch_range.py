"""Which objects of a track a FETCH gets."""

from __future__ import annotations

import pytest

from kvabr.codec.container import ObjectSpan
from kvabr.moqt.messages import Fetch
from kvabr.moqt.parameters import Parameters
from kvabr.moqt.wire import Location
from kvabr.server.fetch_range import FetchRange, GroupRange, InvalidRangeError, last_object

GROUPS = 4
FINAL = 200
"""ID of the last object of each group."""


def cut(start, end, *, order=None):
    parameters = Parameters() if order is None else Parameters(group_order=order)
    message = Fetch(0, (b"namespace",), b"track", Location(*start), Location(*end), parameters)
    return FetchRange.of(message, GROUPS, lambda _: FINAL)


WHOLE = [(group, 0, None) for group in range(GROUPS)]


@pytest.mark.parametrize(
    ("start", "end", "groups", "stop", "ended"),
    [
        ((1, 0), (1, 0), [(1, 0, None)], (1, FINAL + 1), False),
        ((0, 0), (9, 7), WHOLE, (3, FINAL + 1), True),
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
    assert found == FetchRange(tuple(GroupRange(*one) for one in groups), False, Location(*stop), ended)


def test_the_order_of_groups_can_be_descending():
    assert not cut((0, 0), (2, 0), order=1).descending
    backwards = cut((0, 7), (2, 9), order=2)
    assert backwards.descending
    assert backwards.groups == (GroupRange(2, 0, 9), GroupRange(1, 0, None), GroupRange(0, 7, None))
    assert backwards.end == Location(2, 9)


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
    with pytest.raises(InvalidRangeError, match=says):
        cut(start, end)


def test_last_objects():
    spans = tuple(ObjectSpan(100 * place, place, place + 1) for place in range(3))
    assert last_object(spans, dense=False) == 200
    assert last_object(spans, dense=True) == 2
