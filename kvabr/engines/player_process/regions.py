"""Shared memory with played groups, written by a player process and read by an engine's process.

Regions are reused, since allocating memory and pinning it each take as long as a copy. A region is an anonymous file.
It is freed when no process has it open or mapped.
"""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
from collections.abc import Callable, Iterable, Sequence

import numpy as np

from kvabr.store import buffers
from kvabr.types.errors import FormatError

_STEP_BYTES = 2 << 20
_ALIGN = 64
"""Alignment of groups in bytes: a cache line."""
_FIXED = 2 | 4
"""Linux' F_SEAL_SHRINK and F_SEAL_GROW. They prevent truncation of the file, which would crash a process that has
mapped it.
"""


class Region:
    """A region, in the process that writes to it."""

    def __init__(self, number: int, size: int) -> None:
        """Allocate at least ``size`` bytes; raise `OSError` if there is no memory."""
        self.number = number
        self.size = -(-size // _STEP_BYTES) * _STEP_BYTES
        file = os.memfd_create("kvabr-played", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        self.file: int | None = file
        """Descriptor of the file; None once the other process has received it."""
        try:
            os.ftruncate(file, self.size)
            fcntl.fcntl(file, fcntl.F_ADD_SEALS, _FIXED)
            self._memory = mmap.mmap(file, self.size)
        except BaseException:
            os.close(file)
            raise

    def fill(self, pieces: Sequence[tuple[int, memoryview]]) -> None:
        """Copy pieces to their offsets, without the GIL."""
        here = np.frombuffer(self._memory, np.uint8)
        for at, piece in pieces:
            here[at : at + len(piece)] = np.frombuffer(piece, np.uint8)

    def close(self) -> None:
        """Close the file. The memory in this process is freed with its last use."""
        if self.file is not None:
            os.close(self.file)
            self.file = None


class Regions:
    """The regions of one connection."""

    def __init__(self, max_idle_bytes: int, forget: Callable[[int], None]) -> None:
        """Start without regions; keep up to ``max_idle_bytes`` unused. ``forget`` gets the numbers of freed regions."""
        self._max_idle_bytes, self._forget = max_idle_bytes, forget
        self._used: dict[int, Region] = {}
        self._spare: list[Region] = []
        self._made = 0

    def take(self, size: int) -> Region:
        """Return a region for ``size`` bytes; raise `OSError` if there is no memory."""
        fitting = [region for region in self._spare if size <= region.size <= 2 * size + _STEP_BYTES]
        if fitting:
            region = min(fitting, key=lambda one: one.size)
            self._spare.remove(region)
        else:
            self._made += 1
            region = Region(self._made, size)
        self._used[region.number] = region
        return region

    def give_back(self, number: int) -> None:
        """Take back a region that the other process has released."""
        region = self._used.pop(number, None)
        if region is None:
            return
        self._spare.append(region)
        while sum(one.size for one in self._spare) > self._max_idle_bytes:
            self._end(self._spare.pop(0))

    def drop(self, number: int) -> None:
        """Retire a region that a thread may still write to."""
        region = self._used.pop(number, None)
        if region is not None:
            self._end(region)

    def close(self) -> None:
        """Free all memory."""
        for region in (*self._used.values(), *self._spare):
            region.close()
        self._used.clear()
        self._spare.clear()

    def _end(self, region: Region) -> None:
        if region.file is None:
            self._forget(region.number)
        region.close()


def laid_out(pieces: Iterable[memoryview]) -> tuple[list[tuple[int, memoryview]], int]:
    """Return each piece with its offset in a region, and the total size in bytes."""
    placed, end = [], 0
    for piece in pieces:
        placed.append((end, piece))
        end += -(-len(piece) // _ALIGN) * _ALIGN
    return placed, end


def mapped(file: int, pin: buffers.Pin | None) -> mmap.mmap | memoryview:
    """Map a region in the reading process, and close the file; ``pin`` pins the memory for a device.

    Raise `FormatError` if the file is not a region, `OSError` if there is no memory.
    """
    try:
        if fcntl.fcntl(file, fcntl.F_GET_SEALS) & _FIXED != _FIXED:
            raise FormatError("the shared memory is not protected from truncation")
        size = os.fstat(file).st_size
        if pin is not None:
            pinned = buffers.PinnedMemory(file, size)
            pinned.undo = pin(ctypes.addressof(ctypes.c_char.from_buffer(pinned)), size)
            if pinned.undo is not None:
                return pinned
        return buffers.mapped(file, size)
    finally:
        os.close(file)
