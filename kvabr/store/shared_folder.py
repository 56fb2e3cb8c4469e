"""A folder in shared memory in which all processes of one user keep groups, and download each of them once.

Theory of operation:

1. A group is written under a hidden name and takes its own by a rename. Nothing is changed or cut afterwards, so what a
   reader has mapped stays as it is, also when the name is gone.
2. Who writes holds a lock on the file under the hidden name: that is the claim. The kernel ends it with the process,
   however that ends, and the next process begins a new file. As the file grows, the others see how far it is.
3. The bytes of all groups and claims are counted in one file, under its lock: before a file is made, and until it is
   gone. So a process that is killed leaves a count that is too high. A process that needs room looks at all files,
   counts anew, and removes what killed processes left and the least recently used groups.
4. No process waits long for that lock: if it is held up, groups are downloaded as if there were no such folder. Readers
   take no lock at all.

Nothing here checks digests: what is read is as untrusted as what comes from a network. A `GroupClaim` is a group that
this process writes, a `NeighbourGroup` one as another process has left it.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import stat
import struct
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from kvabr.store.files import PARTIAL, PRIVATE, PRIVATE_FOLDER
from kvabr.store.memory import mapped
from kvabr.types.digests import DIGEST
from kvabr.types.errors import AssetError

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


MEMORY = Path("/dev/shm")  # noqa: S108  # the folder in it is private, and checked
"""Where Linux has shared memory."""
SHARE, RESERVE = 2, 8
"""At most half of the memory's file system is used, and an eighth stays free: engines need it, too."""
TURNS = 3
"""Claims of one group that may exist at a time: where one stands still, another process tries."""
LOCK_S = 0.1
"""Seconds that the lock of the count is waited for."""
_SLACK = 20
"""A write that needs room removes 1/20 of the bound more than it needs: making room reads the whole folder."""
_MOST_DISTRUSTED = 1024
_MAX_COUNT = 1 << 50
_MOST_KEPT_S = 86_400.0
"""A day: nobody takes back what a process keeps that has ended."""
_COUNT = "kvabr.count"
_COUNTS = struct.Struct("<QQ")
"""What is in that file: bytes, groups."""
_GROUP = re.compile(rf"({DIGEST})\.group")
_CLAIM = re.compile(rf"\.{DIGEST}\.([0-9]{{1,13}})\.[0-{TURNS - 1}]{re.escape(PARTIAL)}")
_READ = os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC
_NEW = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_MOUNTS = Path("/proc/self/mountinfo")


class SharedFolder:
    """One process's access to the folder. Its methods may be called from several threads."""

    def __init__(self, path: Path, max_bytes: int, *, keep_bytes: int | None = None) -> None:
        """Open the folder, make it if necessary, and remove what killed processes left.

        At most ``keep_bytes`` of groups are kept (`keep`); None: there is no bound.

        Raises:
            AssetError: it cannot be made, is a link, is not in memory, or others may read or write it.
        """
        self.path, self._max_bytes, self._keep_bytes = path, max_bytes, keep_bytes
        self._mutex = threading.Lock()
        """Guards the count among the threads of this process."""
        self._claims: set[GroupClaim] = set()
        self._distrusted: set[int] = set()
        """Files whose writers were waited for in vain."""
        self.evicted = 0
        """Groups that this process removed to make room."""
        self.kept_bytes = 0
        """Bytes of the groups that any process keeps, when this one last kept some."""
        self.released = 0
        """Groups that were to be kept for longer, and that this process released because of the bound."""
        if not path.parent.is_dir():
            raise AssetError(
                f"{path.parent}: there is no shared memory here; mount it (Docker: --shm-size 16g, Kubernetes: an "
                "emptyDir with medium: Memory), name another tmpfs (shm:///PATH), or use a folder"
            )
        try:
            _check_memory(path if path.exists() else path.parent)
            path.mkdir(mode=PRIVATE_FOLDER, exist_ok=True)
            self._folder = os.open(path, _READ | os.O_DIRECTORY)
        except OSError as error:
            why = (
                "is a link or no folder"
                if error.errno in (errno.ELOOP, errno.ENOTDIR, errno.EEXIST)
                else error.strerror
            )
            raise AssetError(f"{path}: groups cannot be shared there ({why}); name another folder") from error
        try:
            self._check()
            flags = os.O_RDWR | os.O_CREAT | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC
            self._count = os.open(_COUNT, flags, PRIVATE, dir_fd=self._folder)
        except OSError as error:
            os.close(self._folder)
            raise AssetError(f"{path}: groups cannot be shared there ({error.strerror})") from error
        except AssetError:
            os.close(self._folder)
            raise
        self.sweep()

    @property
    def max_bytes(self) -> int:
        """Bytes that all groups may take at present."""
        return self._limits()[0]

    @property
    def total_bytes(self) -> int:
        """Bytes of all groups, as counted."""
        return (self._counted() or (0, 0))[0]

    def __len__(self) -> int:
        """Return the number of groups, as counted; those that are being written count, too."""
        return (self._counted() or (0, 0))[1]

    def has(self, digest: str) -> bool:
        """Return whether a group is here."""
        try:
            return stat.S_ISREG(os.stat(_group(digest), dir_fd=self._folder, follow_symlinks=False).st_mode)
        except OSError:
            return False

    def read(self, digest: str, start: int = 0, end: int | None = None) -> tuple[memoryview, int] | None:
        """Return bytes of a group, unchecked, and its size; None if it is not here. It counts as used.

        Raises:
            OSError: the file is damaged.
        """
        try:
            handle = os.open(_group(digest), _READ, dir_fd=self._folder)
        except OSError:
            return None
        try:
            status = os.fstat(handle)
            if not is_solid(status) or not status.st_size:
                raise OSError(errno.EINVAL, "a damaged group")
            first, last, _ = slice(start, end).indices(status.st_size)
            data = view(handle, status.st_size, first, max(first, last))
            if status.st_mtime_ns < time.time_ns():  # otherwise it is kept
                with contextlib.suppress(OSError):
                    os.utime(handle)
        finally:
            os.close(handle)
        return data, status.st_size

    def claim(self, digest: str, size: int, wait_s: float = LOCK_S) -> GroupClaim | NeighbourGroup | None:
        """Return the right to write a group, or what another process has written of it.

        None: it is to be downloaded for this process alone, because there is no room, because those who write it stand
        still, or because the count is locked for more than ``wait_s`` seconds. With 0 seconds, raise `BlockingIOError`
        if it would take time.
        """
        try:
            with self._locked(wait_s):
                return self._claim(digest, size, wait=wait_s > 0)
        except BlockingIOError:
            if wait_s > 0:
                return None
            raise
        except OSError:
            return None

    def publish(self, claim: GroupClaim) -> bool:
        """Let a group that is complete and has been checked take its name; return whether it is there now."""
        complete = claim.written == claim.size
        with self._counting() as uncount:
            if complete and not self.has(claim.digest):
                with contextlib.suppress(OSError):
                    claim.seal()
                    names = claim.name, _group(claim.digest)
                    os.rename(*names, src_dir_fd=self._folder, dst_dir_fd=self._folder)
                    self._end(claim)
                    return True
            self._remove(claim.name)
            uncount(claim.size)
        self._end(claim)
        return complete and self.has(claim.digest)

    def drop(self, claim: GroupClaim) -> None:
        """Give up a claim; others may write the group. Harmless once it has ended."""
        if claim in self._claims:
            with self._counting() as uncount:
                self._remove(claim.name)
                uncount(claim.size)
            self._end(claim)

    def distrust(self, arriving: NeighbourGroup) -> None:
        """Do not wait for this writer again."""
        if len(self._distrusted) >= _MOST_DISTRUSTED:
            self._distrusted.clear()
        self._distrusted.add(arriving.inode)

    def delete(self, digest: str) -> bool:
        """Delete a group; return whether it was here."""
        with self._counting() as uncount:
            try:
                size = os.stat(_group(digest), dir_fd=self._folder, follow_symlinks=False).st_size
                os.unlink(_group(digest), dir_fd=self._folder)
            except OSError:
                return False
            uncount(size)
        return True

    def keep(self, digests: Iterable[str], seconds: float) -> None:
        """Have other groups make room before these for some time: until it is over, they were used at its end.

        If those that are kept take more than the bound, or than half of what this memory has room for, the ones that
        are kept for the shortest time are released, and of ``digests`` the last ones.
        """
        now = time.time_ns()
        until = now + int(min(seconds, _MOST_KEPT_S) * 1e9)
        for place, digest in enumerate(digests):
            with contextlib.suppress(OSError):  # it is not here
                before = os.stat(_group(digest), dir_fd=self._folder, follow_symlinks=False).st_mtime_ns
                self._used(digest, max(before, until - place))
        kept = sorted(one for one in self.groups() if one[0] > now)
        self.kept_bytes = sum(size for *_, size in kept)
        limit, _ = self._limits()
        most = limit if self._keep_bytes is None else self._keep_bytes
        if limit < self._max_bytes:
            most = min(most, limit // 2)
        for _, digest, size in kept:
            if self.kept_bytes <= most:
                break
            with contextlib.suppress(OSError):
                self._used(digest, now)
            self.kept_bytes -= size
            self.released += 1

    def groups(self) -> list[tuple[int, str, int]]:
        """Return every group: when it was used last, ns, or is kept until; its digest; its size."""
        found = []
        with contextlib.suppress(OSError), os.scandir(self._folder) as entries:
            for entry in entries:
                with contextlib.suppress(OSError):  # evicted meanwhile
                    if (name := _GROUP.fullmatch(entry.name)) and entry.is_file(follow_symlinks=False):
                        status = entry.stat(follow_symlinks=False)
                        found.append((status.st_mtime_ns, name[1], status.st_size))
        return found

    def sweep(self) -> None:
        """Remove what killed processes left, and count anew; not if the count is held up."""
        with contextlib.suppress(OSError), self._locked(LOCK_S):
            sizes = [size for *_, size in self.groups()] + self._claimed()
            self._write_count(sum(sizes), len(sizes))

    def close(self) -> None:
        """Drop all claims; the groups stay. Call it once."""
        for claim in list(self._claims):
            self.drop(claim)
        self.sweep()
        os.close(self._count)
        os.close(self._folder)

    # -------------------------------------------------------------- internals

    def _check(self) -> None:
        """Raise `AssetError` if other users can read or write the folder."""
        status = os.fstat(self._folder)
        if status.st_uid != os.geteuid():
            raise AssetError(f"{self.path}: belongs to another user (uid {status.st_uid}); name another: shm:///PATH")
        if mode := stat.S_IMODE(status.st_mode) & 0o077:
            raise AssetError(f"{self.path}: others may use it (mode {mode:03o} for them); chmod 700 {self.path}")

    def _claim(self, digest: str, size: int, *, wait: bool) -> GroupClaim | NeighbourGroup | None:
        """See `claim`; the count is locked."""
        with contextlib.suppress(FileNotFoundError):
            arriving = NeighbourGroup(os.open(_group(digest), _READ, dir_fd=self._folder), size)
            if arriving.look()[0] == size:
                return arriving
            arriving.close()
            return None  # a catalog lies about its size, or it is damaged: then its next reader deletes it
        for turn in range(TURNS):
            name = f".{digest}.{size}.{turn}{PARTIAL}"
            try:
                handle = os.open(name, _READ, dir_fd=self._folder)
            except FileNotFoundError:
                break
            arriving = NeighbourGroup(handle, size)
            if arriving.is_left():
                arriving.close()
                self._remove(name)  # never cut short: somebody may have mapped it
                self._uncount(size)
                break
            if arriving.inode not in self._distrusted:
                return arriving
            arriving.close()
        else:
            return None
        if not self._reserve(size, wait=wait):
            return None
        handle = os.open(name, _NEW, PRIVATE, dir_fd=self._folder)
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        claim = GroupClaim(digest, size, name, handle)
        self._claims.add(claim)
        return claim

    def _reserve(self, size: int, *, wait: bool) -> bool:
        """Count bytes that are to be written; return whether there is room for them. The count is locked."""
        counted, (limit, free) = self._counted(), self._limits()
        if size > limit:
            return False
        if counted is None or counted[0] + size > limit or size > free:
            if not wait:
                raise BlockingIOError
            counted = self._make_room(size, limit, free)
            if counted[0] + size > limit or size > self._limits()[1]:
                self._write_count(*counted)
                return False
        used, number = counted
        self._write_count(used + size, number + 1)
        return True

    def _make_room(self, size: int, limit: int, free: int) -> tuple[int, int]:
        """Remove the groups that were not used for longest; return what is left, as counted. The count is locked."""
        groups, claimed = sorted(self.groups()), self._claimed()
        used, number = sum(claimed) + sum(nbytes for *_, nbytes in groups), len(claimed) + len(groups)
        goal = max(0, limit - size - limit // _SLACK)
        for _, digest, nbytes in groups:
            if used <= goal and size <= free:
                break
            self._remove(_group(digest))
            used, free, number = used - nbytes, free + nbytes, number - 1
            self.evicted += 1
        return used, number

    def _claimed(self) -> list[int]:
        """Return the sizes of all claims; remove those that killed processes left. The count is locked."""
        sizes = []
        with contextlib.suppress(OSError), os.scandir(self._folder) as entries:
            for entry in entries:
                if (name := _CLAIM.fullmatch(entry.name)) and entry.is_file(follow_symlinks=False):
                    with contextlib.suppress(OSError):
                        claim = NeighbourGroup(os.open(entry.name, _READ, dir_fd=self._folder), int(name[1]))
                        left = claim.is_left()
                        claim.close()
                        if left:
                            self._remove(entry.name)
                        else:
                            sizes.append(claim.size)
        return sizes

    def _limits(self) -> tuple[int, int]:
        """Return the bytes that all groups may take, and those that are free for further ones."""
        found = os.fstatvfs(self._folder)
        size, free = found.f_blocks * found.f_frsize, found.f_bavail * found.f_frsize
        if not size:  # a tmpfs without a bound
            return self._max_bytes, self._max_bytes
        return min(self._max_bytes, size // SHARE), max(0, free - size // RESERVE)

    @contextmanager
    def _locked(self, wait_s: float) -> Iterator[None]:
        """Hold the lock of the count; raise `BlockingIOError` if others hold it for too long."""
        end_s = time.monotonic() + wait_s
        if not self._mutex.acquire(timeout=wait_s):
            raise BlockingIOError
        try:
            while True:
                try:
                    fcntl.flock(self._count, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    if time.monotonic() >= end_s:
                        raise
                    time.sleep(0.001)
            try:
                yield
            finally:
                fcntl.flock(self._count, fcntl.LOCK_UN)
        finally:
            self._mutex.release()

    @contextmanager
    def _counting(self) -> Iterator[Callable[[int], None]]:
        """Yield what discounts a group. If the lock cannot be had in time, that does nothing: the count is too high."""
        with ExitStack() as stack:
            try:
                stack.enter_context(self._locked(LOCK_S))
                uncount = self._uncount
            except BlockingIOError:
                uncount = _ignored
            yield uncount

    def _counted(self) -> tuple[int, int] | None:
        """Return the bytes and the groups counted; None if there is no count that can be true."""
        with contextlib.suppress(OSError):
            found = os.pread(self._count, _COUNTS.size, 0)
            if len(found) == _COUNTS.size and max(counts := _COUNTS.unpack(found)) < _MAX_COUNT:
                return counts[0], counts[1]
        return None

    def _uncount(self, nbytes: int) -> None:
        """Discount one group. The count is locked."""
        if (counted := self._counted()) is not None:
            self._write_count(counted[0] - nbytes, counted[1] - 1)

    def _write_count(self, nbytes: int, groups: int) -> None:
        with contextlib.suppress(OSError):  # no memory for it: then everybody counts
            os.pwrite(self._count, _COUNTS.pack(max(0, nbytes), max(0, groups)), 0)

    def _used(self, digest: str, time_ns: int) -> None:
        os.utime(_group(digest), ns=(time_ns, time_ns), dir_fd=self._folder, follow_symlinks=False)

    def _remove(self, name: str) -> None:
        with contextlib.suppress(OSError):
            os.unlink(name, dir_fd=self._folder)

    def _end(self, claim: GroupClaim) -> None:
        claim.close()
        self._claims.discard(claim)


def counted(path: Path) -> tuple[int, int]:
    """Return how many groups a folder has, and their bytes, as counted by those who use it; zeros if there is none."""
    with contextlib.suppress(OSError):
        found = (path / _COUNT).read_bytes()
        if len(found) == _COUNTS.size and max(counts := _COUNTS.unpack(found)) < _MAX_COUNT:
            return counts[1], counts[0]
    return 0, 0


def _ignored(nbytes: int) -> None:
    del nbytes


def _group(digest: str) -> str:
    return f"{digest}.group"


def _check_memory(path: Path) -> None:
    """Raise `AssetError` unless a path is in a tmpfs, and `OSError` if it cannot be looked at."""
    if (kind := _file_system(path.stat().st_dev)) != "tmpfs":
        raise AssetError(f"{path}: is not in memory ({kind}); name a folder of a tmpfs, or a folder without shm://")


def _file_system(device: int) -> str:
    """Return the kind of a file system; "unknown" where the system does not tell."""
    wanted = f"{os.major(device)}:{os.minor(device)}"
    with contextlib.suppress(OSError), _MOUNTS.open(encoding="utf-8", errors="replace") as lines:
        for line in lines:
            fields, _, kind = line.partition(" - ")
            if fields.split()[2:3] == [wanted]:
                return kind.split()[0]
    return "unknown"
