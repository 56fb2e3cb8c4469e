"""One group in a folder of shared memory: while this process writes it, or as another one has left it.

`kvabr.store.shared_folder` says who writes. What is read is as untrusted as what comes from a network.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import stat

from kvabr.store.memory import mapped

_MIN_MAPPED_BYTES = 256 << 10
"""Smaller groups are copied: that is as fast, and a process can have 65,530 mappings."""
_BLOCK = 512


class GroupClaim:
    """The right of this process to write one group."""

    def __init__(self, digest: str, size: int, name: str, handle: int) -> None:
        self.digest, self.size, self.name = digest, size, name
        self.written = 0
        self._handle = handle

    def write(self, part: memoryview) -> bool:
        """Append bytes, which others see at once; return whether there was room for them."""
        try:
            while part:
                count = os.write(self._handle, part)
                self.written += count
                part = part[count:]
        except OSError:
            self.written = -1
            return False
        return True

    def vouch(self) -> None:
        """Show that the download is not stuck, although nothing comes: it waits for its turn."""
        with contextlib.suppress(OSError):
            os.utime(self._handle)

    def seal(self) -> None:
        """Make it read-only."""
        os.fchmod(self._handle, stat.S_IRUSR)

    def close(self) -> None:
        """End the claim, and leave the file. May be called twice."""
        handle, self._handle = self._handle, -1
        if handle >= 0:
            os.close(handle)


class NeighbourGroup:
    """A group that another process has written, or is writing."""

    def __init__(self, handle: int, size: int) -> None:
        self.size = size
        self._handle = handle
        self.inode = os.fstat(handle).st_ino

    def look(self) -> tuple[int, int]:
        """Return how many bytes are there, and when its writer last gave a sign, ns; (-1, 0) if it is damaged."""
        status = os.fstat(self._handle)
        damaged = status.st_size > self.size or not is_solid(status)
        return (-1, 0) if damaged else (status.st_size, status.st_mtime_ns)

    def data(self, count: int) -> memoryview:
        """Return the first ``count`` bytes, which must be there, unchecked; raise `OSError` if that fails."""
        return view(self._handle, self.size, 0, count)

    def is_left(self) -> bool:
        """Return whether its writer has gone."""
        try:
            fcntl.flock(self._handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError:
            return False
        fcntl.flock(self._handle, fcntl.LOCK_UN)
        return True

    def close(self) -> None:
        """Look no more; what `data` returned stays. May be called twice."""
        handle, self._handle = self._handle, -1
        if handle >= 0:
            os.close(handle)


def is_solid(status: os.stat_result) -> bool:
    """Return whether a file is an ordinary one without holes: to read a hole of a mapped file may end the process."""
    return stat.S_ISREG(status.st_mode) and status.st_blocks * _BLOCK >= status.st_size


def view(handle: int, size: int, first: int, last: int) -> memoryview:
    """Return bytes of a file: mapped if it has a large ``size``; raise `OSError` if they are not there."""
    if size >= _MIN_MAPPED_BYTES:
        return mapped(handle, last)[first:] if last else memoryview(b"")
    data = os.pread(handle, last - first, first)
    if len(data) != last - first:
        raise OSError(errno.EINVAL, "a damaged group")
    return memoryview(data)
