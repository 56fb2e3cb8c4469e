"""Buffers are used again only when no view of them is left, and no more is kept than was allowed."""

import gc
import sys
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from kvabr.codec.gpu import staging
from kvabr.store.buffers import BufferPool

SIZE = 3 << 20
STEP = 64 << 10


def test_a_buffer_is_used_again_once_its_last_view_is_gone() -> None:
    pool = BufferPool(16 << 20)
    first = pool.take(SIZE)
    assert (len(first), first.readonly, first.format) == (SIZE, False, "B")
    first[-4:] = b"last"
    part = first[-4:].toreadonly()
    del first
    gc.collect()
    other = pool.take(SIZE)
    other[-4:] = b"next"
    assert bytes(part) == b"last"
    assert (pool.spare_bytes, pool.fresh_bytes) == (0, 2 * SIZE)
    del part
    assert pool.spare_bytes == SIZE
    again = pool.take(SIZE - 1)
    assert (len(again), pool.spare_bytes, pool.fresh_bytes) == (SIZE - 1, 0, 2 * SIZE)
    assert len(pool.take(100)) == 100
    assert pool.fresh_bytes == 2 * SIZE  # small ones are the system's


@pytest.mark.parametrize("size", [SIZE + 1, 2 * SIZE, SIZE // 2])
def test_memory_of_another_size_is_not_used(size: int) -> None:
    pool = BufferPool(64 << 20)
    pool.take(SIZE)
    kept = pool.take(size)
    assert pool.spare_bytes == SIZE
    assert pool.fresh_bytes - SIZE >= len(kept)


def test_no_more_is_kept_than_was_allowed_and_the_longest_unused_goes_first() -> None:
    pool = BufferPool(3 * SIZE)
    old = pool.take(SIZE + STEP)
    buffers = [pool.take(SIZE) for _ in range(4)]
    del old
    assert pool.spare_bytes == SIZE + STEP
    while buffers:
        buffers.pop()
        assert pool.spare_bytes <= 3 * SIZE
    assert pool.spare_bytes == 3 * SIZE
    pool.take(4 * SIZE)
    assert pool.spare_bytes == 3 * SIZE  # that alone was too much


def test_too_much_is_an_error() -> None:
    with pytest.raises(MemoryError, match="cannot be allocated"):
        BufferPool(0).take(sys.maxsize)


def test_many_threads_never_share_a_buffer() -> None:
    pool, wrong = BufferPool(8 << 20), []

    def use(number: int) -> None:
        for _ in range(200):
            buffer = pool.take(1 << 18)
            buffer[:8] = number.to_bytes(8, "big")
            buffer[-8:] = number.to_bytes(8, "big")
            if buffer[:8] != buffer[-8:] or bytes(buffer[:8]) != number.to_bytes(8, "big"):
                wrong.append(number)

    threads = [threading.Thread(target=use, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert pool.fresh_bytes <= 2 * 8 << 18  # each may hold one while it takes the next
    assert pool.spare_bytes == pool.fresh_bytes


def test_memory_is_pinned_from_now_on_and_not_any_more_once_it_is_given_up() -> None:
    pool, pinned = BufferPool(4 << 20), dict[int, int]()
    before = pool.take(1 << 20)

    def pin(address: int, size: int) -> Callable[[], object]:
        pinned[address] = size
        return partial(pinned.pop, address)

    pool.pin_with(pin, 8 << 20)
    del before
    assert pool.spare_bytes == 0  # what is not pinned is not used again
    taken = pool.take(3 << 20)
    assert list(pinned.values()) == [3 << 20]
    assert np.frombuffer(taken, np.uint8).ctypes.data in pinned
    assert staging._is_pinned(taken)
    assert staging._is_pinned(taken[5:9].toreadonly())
    del taken
    assert pool.spare_bytes == 3 << 20
    again = pool.take(3 << 20)
    assert (len(pinned), pool.spare_bytes) == (1, 0)
    others = [pool.take(5 << 20) for _ in range(2)]
    assert len(pinned) == 3
    del again, others
    assert sum(pinned.values()) == pool.spare_bytes <= 8 << 20


def test_memory_that_cannot_be_pinned_is_used_as_it_is() -> None:
    pool = BufferPool(4 << 20)
    pool.pin_with(lambda _address, _size: None, 4 << 20)
    taken = pool.take(1 << 20)
    taken[:] = bytes(1 << 20)
    assert not staging._is_pinned(taken)
    assert not staging._is_pinned(bytes(10))
    del taken
    assert pool.spare_bytes == 1 << 20


def test_memory_is_unpinned_while_it_is_still_mapped() -> None:
    pool, mapped = BufferPool(1 << 20), list[bool]()

    def pin(address: int, _size: int) -> Callable[[], object]:
        return lambda: mapped.append(is_mapped(address))

    def is_mapped(address: int) -> bool:
        lines = Path("/proc/self/maps").read_text().splitlines()
        spans = [[int(end, 16) for end in line.split()[0].split("-")] for line in lines]
        return any(first <= address < last for first, last in spans)

    pool.pin_with(pin, 1 << 20)
    taken = pool.take(5 << 20)  # more than is kept
    del taken
    assert mapped == [True]
