"""Which ranges go out when; no bytes move here."""

import pytest

from kvabr.link.objects.lanes import KEEP_BYTES, MAX_BYTES, Lanes

K = 1 << 10
NEEDED, DEARER_PRIORITY, UPGRADE = 10, 70, 200


def ranges(transfers):
    return [(one.key, one.begin, one.end) for one in transfers]


def want(lanes, sizes, *, key="s", begin=0, priority=NEEDED):
    pieces = []
    for size in sizes:
        pieces.append(lanes.want(key, begin, begin + size, priority))
        begin += size
    return pieces


def receive(lanes, transfer, count):
    return [(piece, len(part)) for piece, part in transfer.take(memoryview(bytes(count)))]


def test_adjoining_pieces_go_in_one_get_while_they_are_small():
    lanes = Lanes()
    want(lanes, [10 * K, 20 * K, 30 * K])
    assert ranges(lanes.due()) == [("s", 0, 60 * K)]
    assert lanes.due() == []
    first, *_ = want(lanes, [K, K, K], key="t")
    assert lanes.cancel(first) is None
    assert ranges(lanes.due()) == [("t", K, 3 * K)]


def test_a_merged_get_has_at_most_a_megabyte():
    lanes = Lanes()
    want(lanes, [300 * K] * 16)
    begun = lanes.due()
    assert ranges(begun) == [("s", first * K, (first + 900) * K) for first in (0, 900, 1800, 2700)]
    assert all(one.end - one.begin <= MAX_BYTES for one in begun)
    lanes.ended(begun[1])
    assert ranges(lanes.due()) == [("s", 3600 * K, 4500 * K)]
    lanes = Lanes()
    want(lanes, [50 * K] * 16)  # less than that is shared out
    assert ranges(lanes.due()) == [("s", first * K, (first + 200) * K) for first in (0, 200, 400, 600)]


def test_only_a_few_rests_are_received():
    lanes = Lanes(lanes=1, spare=0)
    ended = []
    for number in range(6):  # as of a player that asks again for what stands still
        (piece,) = want(lanes, [K], key=str(number))
        lanes.due()
        if (transfer := lanes.cancel(piece)) is not None:
            lanes.ended(transfer)
            ended.append(transfer.key)
    assert ended == ["0", "1"]


def test_pieces_with_a_gap_between_them_or_of_another_object_go_apart():
    lanes = Lanes()
    want(lanes, [K])
    want(lanes, [K], begin=2 * K)
    want(lanes, [K], begin=K, key="t")
    assert ranges(lanes.due()) == [("s", 0, K), ("s", 2 * K, 3 * K), ("t", K, 2 * K)]


def test_what_comes_before_the_most_urgent_piece_goes_with_it():
    lanes = Lanes()
    lanes.want("s", 0, K, 30)
    lanes.want("s", K, 2 * K, 20)
    lanes.want("s", 2 * K, 3 * K, 10)
    assert ranges(lanes.due()) == [("s", 0, 3 * K)]


def test_the_most_urgent_goes_first_and_equals_in_the_order_in_which_they_came():
    lanes = Lanes(lanes=1, spare=0)
    for key, priority in (("a", 30), ("b", 10), ("c", 10)):
        lanes.want(key, 0, K, priority)
    order = []
    while begun := lanes.due():
        order += [one.key for one in begun]
        lanes.ended(begun[0])
    assert order == ["b", "c", "a"]


def test_a_new_priority_counts_while_a_piece_waits():
    lanes = Lanes(lanes=1, spare=0)
    (first,) = want(lanes, [K], key="first")
    (second,) = want(lanes, [K], key="second", priority=20)
    (third,) = want(lanes, [K], key="third", priority=30)
    third.priority = 0
    begun = lanes.due()
    third.priority = 255
    assert [one.key for one in begun] == ["third"]
    second.priority = 5
    lanes.ended(begun[0])
    assert [one.key for one in lanes.due()] == ["second"]
    assert first.transfer is None


@pytest.mark.parametrize(("one", "other"), [(NEEDED, DEARER_PRIORITY), (DEARER_PRIORITY, UPGRADE), (NEEDED, UPGRADE)])
def test_what_is_needed_never_carries_what_is_needed_less(one, other):
    lanes = Lanes()
    want(lanes, [K], priority=one)
    want(lanes, [K], begin=K, priority=other)
    assert ranges(lanes.due()) == [("s", 0, K), ("s", K, 2 * K)]


def test_the_spare_lane_is_for_what_is_needed_more_than_something_under_way():
    lanes = Lanes()
    want(lanes, [MAX_BYTES] * 6, priority=UPGRADE)
    assert [one.spare for one in lanes.due()] == [False] * 4
    want(lanes, [K], key="urgent")
    (urgent,) = lanes.due()
    assert (urgent.key, urgent.spare) == ("urgent", True)
    want(lanes, [K], key="later")
    assert lanes.due() == []
    lanes.ended(urgent)
    assert [one.key for one in lanes.due()] == ["later"]


def test_bytes_are_given_to_the_pieces_that_they_belong_to():
    lanes = Lanes()
    first, second, third = want(lanes, [10, 20, 30])
    (transfer,) = lanes.due()
    assert receive(lanes, transfer, 15) == [(first, 10), (second, 5)]
    assert lanes.cancel(third) is None
    assert receive(lanes, transfer, 45) == [(second, 15)]
    assert lanes.ended(transfer) == []


def test_a_get_of_which_nobody_wants_much_of_the_rest_is_ended_and_frees_its_lane():
    lanes = Lanes(lanes=1, spare=0)
    first, second = want(lanes, [MAX_BYTES // 2] * 2)
    (transfer,) = lanes.due()
    assert lanes.cancel(second) is None
    want(lanes, [K], key="next")
    assert lanes.due() == []
    assert lanes.cancel(first) is transfer
    assert lanes.ended(transfer) == []
    assert [one.key for one in lanes.due()] == ["next"]


def test_what_lies_far_behind_cancelled_bytes_is_asked_for_again_without_them():
    lanes = Lanes(lanes=1, spare=0)
    small = KEEP_BYTES // 2
    first, second, third, fourth = want(lanes, [small] * 4)
    (transfer,) = lanes.due()
    receive(lanes, transfer, 10)
    assert lanes.cancel(second) is None  # it is not far to the next
    assert lanes.cancel(third) is None  # the first one is still coming
    assert lanes.cancel(first) is transfer
    left = lanes.ended(transfer)
    assert left == [fourth]
    lanes.again(fourth)
    assert ranges(lanes.due()) == [("s", 3 * small, 4 * small)]


def test_only_what_is_missing_is_asked_for_again():
    lanes = Lanes()
    first, second = want(lanes, [100, 100])
    (transfer,) = lanes.due()
    receive(lanes, transfer, 130)
    for piece in lanes.ended(transfer):
        lanes.again(piece)
    assert ranges(lanes.due()) == [("s", 130, 200)]
    assert (first.begin, second.begin) == (100, 130)
