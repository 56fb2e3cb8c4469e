"""Which ranges go out when; no bytes move here."""

import pytest

from kvabr.link.objects.range_scheduler import KEEP_BYTES, MAX_BYTES, RangeScheduler

K = 1 << 10
NEEDED, DEARER_PRIORITY, UPGRADE = 10, 70, 200


def ranges(transfers):
    return [(one.key, one.begin, one.end) for one in transfers]


def want(scheduler, sizes, *, key="s", begin=0, priority=NEEDED):
    pieces = []
    for size in sizes:
        pieces.append(scheduler.want(key, begin, begin + size, priority))
        begin += size
    return pieces


def receive(scheduler, transfer, count):
    return [(piece, len(part)) for piece, part in transfer.take(memoryview(bytes(count)))]


def test_adjoining_pieces_go_in_one_get_while_they_are_small():
    scheduler = RangeScheduler()
    want(scheduler, [10 * K, 20 * K, 30 * K])
    assert ranges(scheduler.due()) == [("s", 0, 60 * K)]
    assert scheduler.due() == []
    first, *_ = want(scheduler, [K, K, K], key="t")
    assert scheduler.cancel(first) is None
    assert ranges(scheduler.due()) == [("t", K, 3 * K)]


def test_a_merged_get_has_at_most_a_megabyte():
    scheduler = RangeScheduler()
    want(scheduler, [300 * K] * 16)
    begun = scheduler.due()
    assert ranges(begun) == [("s", first * K, (first + 900) * K) for first in (0, 900, 1800, 2700)]
    assert all(one.end - one.begin <= MAX_BYTES for one in begun)
    scheduler.ended(begun[1])
    assert ranges(scheduler.due()) == [("s", 3600 * K, 4500 * K)]
    scheduler = RangeScheduler()
    want(scheduler, [50 * K] * 16)  # less than that is shared out
    assert ranges(scheduler.due()) == [("s", first * K, (first + 200) * K) for first in (0, 200, 400, 600)]


def test_only_a_few_rests_are_received():
    scheduler = RangeScheduler(gets=1, spare=0)
    ended = []
    for number in range(6):  # as of a player that asks again for what stands still
        (piece,) = want(scheduler, [K], key=str(number))
        scheduler.due()
        if (transfer := scheduler.cancel(piece)) is not None:
            scheduler.ended(transfer)
            ended.append(transfer.key)
    assert ended == ["0", "1"]


def test_pieces_with_a_gap_between_them_or_of_another_object_go_apart():
    scheduler = RangeScheduler()
    want(scheduler, [K])
    want(scheduler, [K], begin=2 * K)
    want(scheduler, [K], begin=K, key="t")
    assert ranges(scheduler.due()) == [("s", 0, K), ("s", 2 * K, 3 * K), ("t", K, 2 * K)]


def test_what_comes_before_the_most_urgent_piece_goes_with_it():
    scheduler = RangeScheduler()
    scheduler.want("s", 0, K, 30)
    scheduler.want("s", K, 2 * K, 20)
    scheduler.want("s", 2 * K, 3 * K, 10)
    assert ranges(scheduler.due()) == [("s", 0, 3 * K)]


def test_the_most_urgent_goes_first_and_equals_in_the_order_in_which_they_came():
    scheduler = RangeScheduler(gets=1, spare=0)
    for key, priority in (("a", 30), ("b", 10), ("c", 10)):
        scheduler.want(key, 0, K, priority)
    order = []
    while begun := scheduler.due():
        order += [one.key for one in begun]
        scheduler.ended(begun[0])
    assert order == ["b", "c", "a"]


def test_a_new_priority_counts_while_a_piece_waits():
    scheduler = RangeScheduler(gets=1, spare=0)
    (first,) = want(scheduler, [K], key="first")
    (second,) = want(scheduler, [K], key="second", priority=20)
    (third,) = want(scheduler, [K], key="third", priority=30)
    third.priority = 0
    begun = scheduler.due()
    third.priority = 255
    assert [one.key for one in begun] == ["third"]
    second.priority = 5
    scheduler.ended(begun[0])
    assert [one.key for one in scheduler.due()] == ["second"]
    assert first.transfer is None


@pytest.mark.parametrize(("one", "other"), [(NEEDED, DEARER_PRIORITY), (DEARER_PRIORITY, UPGRADE), (NEEDED, UPGRADE)])
def test_what_is_needed_never_carries_what_is_needed_less(one, other):
    scheduler = RangeScheduler()
    want(scheduler, [K], priority=one)
    want(scheduler, [K], begin=K, priority=other)
    assert ranges(scheduler.due()) == [("s", 0, K), ("s", K, 2 * K)]


def test_the_spare_get_is_for_what_is_needed_more_than_something_under_way():
    scheduler = RangeScheduler()
    want(scheduler, [MAX_BYTES] * 6, priority=UPGRADE)
    assert [one.spare for one in scheduler.due()] == [False] * 4
    want(scheduler, [K], key="urgent")
    (urgent,) = scheduler.due()
    assert (urgent.key, urgent.spare) == ("urgent", True)
    want(scheduler, [K], key="later")
    assert scheduler.due() == []
    scheduler.ended(urgent)
    assert [one.key for one in scheduler.due()] == ["later"]


def test_bytes_are_given_to_the_pieces_that_they_belong_to():
    scheduler = RangeScheduler()
    first, second, third = want(scheduler, [10, 20, 30])
    (transfer,) = scheduler.due()
    assert receive(scheduler, transfer, 15) == [(first, 10), (second, 5)]
    assert scheduler.cancel(third) is None
    assert receive(scheduler, transfer, 45) == [(second, 15)]
    assert scheduler.ended(transfer) == []


def test_a_get_of_which_nobody_wants_much_of_the_rest_is_ended_and_frees_its_slot():
    scheduler = RangeScheduler(gets=1, spare=0)
    first, second = want(scheduler, [MAX_BYTES // 2] * 2)
    (transfer,) = scheduler.due()
    assert scheduler.cancel(second) is None
    want(scheduler, [K], key="next")
    assert scheduler.due() == []
    assert scheduler.cancel(first) is transfer
    assert scheduler.ended(transfer) == []
    assert [one.key for one in scheduler.due()] == ["next"]


def test_what_lies_far_behind_cancelled_bytes_is_asked_for_again_without_them():
    scheduler = RangeScheduler(gets=1, spare=0)
    small = KEEP_BYTES // 2
    first, second, third, fourth = want(scheduler, [small] * 4)
    (transfer,) = scheduler.due()
    receive(scheduler, transfer, 10)
    assert scheduler.cancel(second) is None  # it is not far to the next
    assert scheduler.cancel(third) is None  # the first one is still coming
    assert scheduler.cancel(first) is transfer
    left = scheduler.ended(transfer)
    assert left == [fourth]
    scheduler.again(fourth)
    assert ranges(scheduler.due()) == [("s", 3 * small, 4 * small)]


def test_only_what_is_missing_is_asked_for_again():
    scheduler = RangeScheduler()
    first, second = want(scheduler, [100, 100])
    (transfer,) = scheduler.due()
    receive(scheduler, transfer, 130)
    for piece in scheduler.ended(transfer):
        scheduler.again(piece)
    assert ranges(scheduler.due()) == [("s", 130, 200)]
    assert (first.begin, second.begin) == (100, 130)
