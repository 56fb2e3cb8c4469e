"""A store in a folder: one file per object, written atomically and flushed to the disk.

Other users may be able to write into the folder, so reading does not follow links or open pipes and devices. Only the
owner can read an object. In a folder with the set-group-ID bit, the group can, too, except below `PRIVATE_PREFIX`.
"""

from __future__ import annotations

import asyncio
import errno
import os
import secrets
import stat
from collections.abc import AsyncIterator, Callable, Collection, Iterator
from contextlib import suppress
from io import BufferedReader
from pathlib import Path
from typing import ParamSpec, TypeVar

from kvabr.store.buffers import GROUPS as POOL
from kvabr.store.files import PARTIAL, PRIVATE, PRIVATE_FOLDER, open_regular, sweep
from kvabr.store.names import CATALOGS, PRIVATE_PREFIX
from kvabr.store.store import Store, StoredObject, is_driven
from kvabr.types.errors import (
    ForbiddenError,
    FormatError,
    Reason,
    RequestError,
    StoreError,
    TransportError,
    UsageError,
)

P = ParamSpec("P")
T = TypeVar("T")

_NO_LINKS = (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK)
_NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class LocalStore(Store):
    """A folder, created by the first write."""

    folder: Path
    immediate = True

    def __init__(self, folder: Path, *, sync: bool = True) -> None:
        """``sync``: flush each object to the disk before `put_new` returns."""
        self.folder, self.url, self._sync = folder, str(folder), sync
        self._swept = set[Path]()

    async def get(
        self, name: str, first: int = 0, last: int | None = None, *, limit: int, wait_s: float | None = None
    ) -> memoryview:
        del wait_s
        return await _in_thread(self._get, name, first, last, limit)

    async def put_new(self, name: str, data: bytes | memoryview) -> bool:
        return await _in_thread(self._put_new, name, data)

    async def list(self, prefix: str) -> AsyncIterator[StoredObject]:
        for found in await _in_thread(lambda: list(self._list(prefix))):
            yield found

    async def delete(self, names: Collection[str]) -> None:
        await _in_thread(self._delete, names)

    async def check_writable(self) -> None:
        try:
            self.folder.mkdir(mode=PRIVATE_FOLDER, parents=True, exist_ok=True)
        except OSError as error:
            raise UsageError(f"{self.url}: cannot be created ({error.strerror})") from error

    def where(self, name: str) -> str:
        return str(self.folder / name)

    def path(self, name: str) -> Path:
        """Return the path of an object's file; raise `FormatError` if the name leaves the folder."""
        parts = name.split("/")
        if any(not part or part.startswith(".") for part in parts) or "\0" in name:
            raise FormatError(f"{name[:80]!r} cannot be the name of an object")
        return self.folder.joinpath(*parts)

    def open(self, name: str) -> BufferedReader:
        """Open an object's file for reading; errors as for `get`."""
        path = self.path(name)
        for folder in list(path.parents)[: name.count("/")]:
            if folder.is_symlink():  # it may point to unpublished files, such as token ids of another user
                raise self._failed(name, "cannot be read", OSError(errno.ELOOP, f"{folder} is a link"))
        try:
            return open_regular(path, sole=True)
        except OSError as error:
            raise self._failed(name, "cannot be read", error) from error

    def flush(self, names: Collection[str]) -> None:
        """Flush objects that were written without flushing; errors as for `put_new`."""
        for name in names:
            try:
                self._flush(self.path(name))
            except OSError as error:
                raise self._failed(name, "cannot be written", error) from error

    # ------------------------------------------------------- in threads

    def _get(self, name: str, first: int, last: int | None, limit: int) -> memoryview:
        with self.open(name) as file:
            size = os.fstat(file.fileno()).st_size
            end = size if last is None else min(last, size)
            wanted = max(0, end - first)
            self.check_size(name, wanted, limit)
            data = POOL.take(wanted)
            try:
                read = os.preadv(file.fileno(), [data], first) if wanted else 0
            except OSError as error:
                raise self._failed(name, "cannot be read", error) from error
            if read != wanted:
                raise RequestError(f"{self.where(name)}: truncated while it was read", reason=Reason.WRONG)
            return data.toreadonly()

    def _put_new(self, name: str, data: bytes | memoryview) -> bool:
        path = self.path(name)
        if path.exists():
            return False
        partial = path.with_name(f".{path.name}.{secrets.token_hex(8)}{PARTIAL}")
        try:
            self._make(path.parent)
            mode = PRIVATE if name.startswith(PRIVATE_PREFIX) else self._modes[0]
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
            with open(partial, "wb", opener=lambda place, _: os.open(place, flags, mode)) as file:
                file.write(data)
                file.flush()
                if self._sync:
                    os.fsync(file.fileno())
            written = self._name(partial, path)
            if self._sync and written and name.startswith(CATALOGS):
                self._flush(path.parent)  # with a journal, objects that the catalog names are then written before it
        except OSError as error:
            raise self._failed(name, "cannot be written", error) from error
        finally:
            with suppress(OSError):
                partial.unlink()
        return written

    @staticmethod
    def _flush(path: Path) -> None:
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)

    @staticmethod
    def _name(partial: Path, path: Path) -> bool:
        try:
            os.link(partial, path, follow_symlinks=False)
        except FileExistsError:
            return False
        except OSError as error:
            if error.errno not in _NO_LINKS:
                raise
            if path.exists():  # without hard links, the last of several writers wins
                return False
            partial.rename(path)
        return True

    def _make(self, folder: Path) -> None:
        if folder in self._swept and folder.is_dir():
            return
        self.folder.mkdir(mode=PRIVATE_FOLDER, parents=True, exist_ok=True)
        depth, mode = len(folder.relative_to(self.folder).parts), self._modes[1]
        for place in reversed([folder, *folder.parents][:depth]):
            place.mkdir(mode=mode, exist_ok=True)
        sweep(folder)
        self._swept.add(folder)

    @property
    def _modes(self) -> tuple[int, int]:
        try:
            shared = self.folder.stat().st_mode & stat.S_ISGID
        except OSError:
            shared = False
        if not shared:
            return PRIVATE, PRIVATE_FOLDER
        return PRIVATE | stat.S_IRGRP, PRIVATE_FOLDER | stat.S_IRGRP | stat.S_IXGRP

    def _list(self, prefix: str) -> Iterator[StoredObject]:
        todo = [prefix.rstrip("/")]
        while todo:
            inside = todo.pop()
            place = self.folder / inside if inside else self.folder
            if inside and place.is_symlink():
                continue
            try:
                entries = sorted(os.scandir(place), key=lambda entry: entry.name)
            except (FileNotFoundError, NotADirectoryError):
                continue
            except OSError as error:
                raise self._failed(inside, "cannot be listed", error) from error
            for entry in entries:
                name = f"{inside}/{entry.name}" if inside else entry.name
                if entry.name.startswith("."):
                    continue
                if entry.is_dir(follow_symlinks=False):
                    todo.append(name)
                elif entry.is_file(follow_symlinks=False):
                    with suppress(OSError):  # deleted in the meantime
                        found = entry.stat(follow_symlinks=False)
                        yield StoredObject(name, found.st_size, found.st_mtime)

    def _delete(self, names: Collection[str]) -> None:
        folders = set[Path]()
        for name in names:
            path = self.path(name)
            try:
                path.unlink()
            except (FileNotFoundError, NotADirectoryError):
                continue
            except OSError as error:
                raise self._failed(name, "cannot be deleted", error) from error
            folders.add(path.parent)
        for folder in folders - {self.folder}:
            with suppress(OSError):  # not empty
                folder.rmdir()

    def _failed(self, name: str, what: str, error: OSError) -> Exception:
        where = self.where(name)
        if isinstance(error, FileNotFoundError | NotADirectoryError) and what != "cannot be written":
            return self.missing(name)
        if error.errno in _NO_SPACE:
            return StoreError(f"{where}: no space left ({error.strerror}); free some space, or use another disk")
        if isinstance(error, PermissionError):
            hint = "let this user read it, or publish with the group's right to read (chmod g+s on the folder)"
            return ForbiddenError(f"{where}: {what} ({error.strerror}){'; ' + hint if 'read' in what else ''}")
        return TransportError(f"{where}: {what} ({error.strerror or error})")


async def _in_thread(work: Callable[P, T], *args: P.args, **options: P.kwargs) -> T:
    """Run file operations in a thread, or directly if the caller may wait for a disk."""
    if is_driven():
        return work(*args, **options)
    return await asyncio.to_thread(work, *args, **options)
