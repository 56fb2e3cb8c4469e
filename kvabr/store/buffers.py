"""Memory for large buffers, in huge pages if available, and reused.

The system clears each page of new memory at its first write. With 4 KiB pages this takes as long as hashing the data,
with huge pages usually a quarter of that.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import sys
import threading
import weakref
from collections.abc import Callable
from functools import cache
from typing import TypeVar

_HUGE_BYTES = 2 << 20
_MIN_HUGE_BYTES = 4 << 20
"""Minimum bytes to round up to whole huge pages."""
_MIN_POOLED_BYTES = 256 << 10
"""Minimum bytes of pooled memory; the system's allocator reuses smaller memory."""
_STEP_BYTES = 64 << 10
"""Sizes of pooled memory are multiples of this, in bytes, to suit groups of similar size."""
_MAP_FAILED = ctypes.c_void_p(-1).value


class PinnedMemory(mmap.mmap):
    """Memory with pages that never move, so that a device can copy from it directly."""

    pinned = True
    """Identifies pinned memory as the base of an array, without importing this module."""
    undo: Callable[[], object] | None = None

    def __del__(self) -> None:
        # Not with `weakref.finalize`, which runs after the memory is unmapped and possibly reused.
        if self.undo is not None and not sys.is_finalizing():
            self.undo()


_Map = TypeVar("_Map", bound=mmap.mmap)
Pin = Callable[[int, int], Callable[[], object] | None]
"""Pins memory, given its address and size in bytes; returns a function that unpins it, or None if it failed."""


class BufferPool:
    """Buffers that are reused once no view of them is left. Thread-safe."""

    def __init__(self, max_idle_bytes: int) -> None:
        """Create a pool that keeps up to ``max_idle_bytes`` of unused memory, which the system may reclaim."""
        self._max_idle_bytes = max_idle_bytes
        self.spare_bytes = 0
        self.fresh_bytes = 0
        self._spare: list[mmap.mmap] = []
        """Unused memory; the first has been unused for longest."""
        self._pin: Pin | None = None
        self._gave_up = False
        self._lock = threading.RLock()
        """Reentrant, as garbage collection within `take` may give memory back."""

    def take(self, size: int) -> memoryview:
        """Return a writable buffer with arbitrary contents; raise `MemoryError` if there is no memory."""
        if size < _MIN_POOLED_BYTES:
            return memoryview(bytearray(size))
        import numpy as np  # noqa: PLC0415  # loads slowly, and not every origin has large groups

        length = _rounded(size, _STEP_BYTES)
        memory = self._reused(length)
        if memory is None:
            memory = self._fresh(length)
            with self._lock:
                self.fresh_bytes += len(memory)
        # Views refer to the array, and the array to the memory, so the array is freed after the last view.
        shown = np.frombuffer(memory, dtype=np.uint8, count=size)
        weakref.finalize(shown, self._give_back, memory).atexit = False
        return shown.data

    @property
    def pin(self) -> Pin | None:
        """Function that pins memory; None if memory is not pinned."""
        return self._pin

    def pin_with(self, pin: Pin, max_idle_bytes: int) -> None:
        """Pin memory that is allocated from now on. Pinning takes long, so keep up to ``max_idle_bytes`` unused."""
        with self._lock:
            if self._pin is None and not self._gave_up:
                self._pin, self._max_idle_bytes, self._spare = pin, max_idle_bytes, []
                self.spare_bytes = 0

    def _reused(self, length: int) -> mmap.mmap | None:
        with self._lock:
            for index in reversed(range(len(self._spare))):
                if length <= len(self._spare[index]) <= length + length // 4:
                    memory = self._spare.pop(index)
                    self.spare_bytes -= len(memory)
                    return memory
        return None

    def _fresh(self, length: int) -> mmap.mmap:
        pin = self._pin
        if pin is not None:
            memory = _fresh(length, PinnedMemory)
            undo = pin(ctypes.addressof(ctypes.c_char.from_buffer(memory)), len(memory))
            if undo is not None:
                memory.undo = undo
                return memory
            self._pin, self._gave_up = None, True  # the system allows no more pinned memory
        return _fresh(length, mmap.mmap)

    def _give_back(self, memory: mmap.mmap) -> None:
        pinned = isinstance(memory, PinnedMemory)
        if len(memory) > self._max_idle_bytes or (self._pin is not None and not pinned):
            return
        if not pinned and len(memory) >= _MIN_HUGE_BYTES and hasattr(mmap, "MADV_FREE"):
            with contextlib.suppress(OSError):
                memory.madvise(mmap.MADV_FREE)  # costs nothing while the system has enough memory
        with self._lock:
            self._spare.append(memory)
            self.spare_bytes += len(memory)
            while self.spare_bytes > self._max_idle_bytes:
                self.spare_bytes -= len(self._spare.pop(0))


def _fresh(size: int, kind: type[_Map]) -> _Map:
    if size >= _MIN_HUGE_BYTES:
        # Systems align memory to huge pages only if its size is a multiple of them.
        size = _rounded(size, _HUGE_BYTES)
    try:
        memory = kind(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, ValueError, OverflowError) as error:
        raise MemoryError(f"{size:,} bytes cannot be allocated ({error})") from error
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel without huge pages
            memory.madvise(mmap.MADV_HUGEPAGE)
    return memory


def _rounded(size: int, step: int) -> int:
    return -(-size // step) * step


GROUPS = BufferPool(256 << 20)
"""Pool for encoded groups from the network or a disk: as many as wait for decoders on a fast link."""
CACHES = BufferPool(512 << 20)
"""Pool for caches that plays fill."""


def mapped(handle: int, size: int) -> memoryview:
    """Map the first ``size`` bytes of an open file read-only until no view is left; raise `OSError`.

    The file must not be truncated during that time. Unlike `mmap.mmap`, this does not keep the file open.
    """
    libc = _libc()
    address = libc.mmap(None, size, mmap.PROT_READ, mmap.MAP_SHARED, handle, 0)
    if address in (None, _MAP_FAILED):
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    shown = (ctypes.c_ubyte * size).from_address(address)
    weakref.finalize(shown, libc.munmap, address, size).atexit = False
    return memoryview(shown).cast("B").toreadonly()


@cache
def _libc() -> ctypes.CDLL:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = (
        ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_longlong,
    )  # fmt: skip
    libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
    return libc
