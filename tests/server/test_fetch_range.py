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


def test_a_whole_group():
    whole = cut((1, 0), (1, 0))
    assert whole == FetchRange((GroupRange(1, 0, None),), False, Location(1, FINAL + 1), False)


def test_a_track_and_more_is_the_track():
    all_of_it = cut((0, 0), (9, 7))
    assert [each.group for each in all_of_it.groups] == [0, 1, 2, 3]
    assert all(each.first_object == 0 and each.end_object is None for each in all_of_it.groups)
    assert (all_of_it.end, all_of_it.end_of_track) == (Location(3, FINAL + 1), True)


def test_objects_within_a_group():
    assert cut((2, 5), (2, 101)).groups == (GroupRange(2, 5, 101),)


@pytest.mark.parametrize(
    ("end", "stop", "ended"), [(100, 100, False), (FINAL, FINAL, False), (FINAL + 1, 201, True), (9999, 201, True)]
)
def test_the_end_is_that_of_the_last_group_at_most(end, stop, ended):
    some = cut((2, 100), (3, end))
    assert [(each.group, each.first_object) for each in some.groups] == [(2, 100), (3, 0)]
    assert [each.end_object for each in some.groups] == [None, end]
    assert (some.end, some.end_of_track) == (Location(3, stop), ended)


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


def test_what_begins_behind_the_end_of_an_inner_group_has_the_groups_after_it():
    assert cut((1, FINAL + 1), (2, 0)).groups == (GroupRange(1, FINAL + 1, None), GroupRange(2, 0, None))


def test_last_objects():
    spans = tuple(ObjectSpan(100 * place, place, place + 1) for place in range(3))
    assert last_object(spans, dense=False) == 200
    assert last_object(spans, dense=True) == 2
