"""Messages between two processes of one user: pickled objects and open files, over a Unix socket.

Bytes of groups are in shared memory (`regions`). Profiles and catalogs are sent once, and later referred to by digest;
`LackingError` is raised for a catalog that the receiver has dropped.
"""

from __future__ import annotations

import array
import asyncio
import io
import os
import pickle
import socket
import struct
from collections import OrderedDict, deque
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

from kvabr.codec.profile import Profile
from kvabr.types.catalog import Catalog
from kvabr.types.errors import ConnectionLostError, FormatError, PlayError

_HEAD = struct.Struct("=QB")
"""Header of a message: its size in bytes, and the number of its files."""
_MAX_BYTES = 1 << 30
_READ_BYTES = 256 << 10
_MAX_FILES = 8
_NO_BYTES = memoryview(b"")
_MAX_CATALOG_BYTES = 16 << 20
"""Limit of cached catalogs per direction, in pickled bytes: two catalogs for a million tokens, or hundreds for 8,192. A
larger catalog is cached alone.
"""
_BYTES, _PROFILE, _CATALOG = 0, 1, 2
_CREDENTIALS = struct.Struct("=iii")
"""Process, user and group id of the other end of a socket on Linux."""


class ChannelMessage(NamedTuple):
    """A received message."""

    data: bytes
    files: tuple[int, ...]
    """Descriptors for the receiver to close."""


class LackingError(FormatError):
    """A message refers to a catalog that is no longer cached."""

    def __init__(self, message: Any) -> None:
        super().__init__("a catalog is no longer kept")
        self.message = message


class ProcessChannel:
    """One end of a connection. Use it on the event loop's thread."""

    def __init__(
        self, link: socket.socket, received: Callable[[ChannelMessage], None], lost: Callable[[Exception], None]
    ) -> None:
        """Take over a connected socket; raise `ConnectionLostError` for a process of another user.

        ``received`` receives each message; ``lost`` once if the connection ends other than by `close`.
        """
        credentials = link.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        if (user := _CREDENTIALS.unpack(credentials)[1]) != os.geteuid():
            link.close()
            raise ConnectionLostError(f"the peer process belongs to user {user}, this process to {os.geteuid()}")
        link.setblocking(False)
        self._link, self._received, self._lost = link, received, lost
        self._loop = asyncio.get_running_loop()
        self._arrived, self._files = bytearray(), deque[int]()
        self._waiting: deque[tuple[memoryview, Sequence[int]]] = deque()
        self._sent_profiles: set[str] = set()
        self._profiles: dict[str, Profile] = {}
        self._sent, self._got = _Catalogs(), _Catalogs()
        self._open = True
        self._loop.add_reader(link, self._read)

    def send(
        self,
        message: object,
        *,
        places: Mapping[int, tuple[int, int]] = MappingProxyType({}),
        file: int | None = None,
        theirs: bool = False,
    ) -> None:
        """Send an object; do nothing if the connection has ended.

        ``places`` has the offset and size, in shared memory, of each view in the message, by the view's `id`. ``file``
        is sent along, and may be closed afterwards. With ``theirs``, catalogs that the other end has sent are referred
        to by digest, although it may have dropped them.
        """
        if not self._open:
            return
        out = io.BytesIO()
        out.write(bytes(_HEAD.size))
        pickler = _Pickler(out, places, set(self._sent_profiles), self._sent, self._got if theirs else _Catalogs())
        pickler.dump(message)
        self._sent_profiles = pickler.profiles  # only after pickling has succeeded
        self._sent.use(pickler.used)
        data = out.getbuffer()
        _HEAD.pack_into(data, 0, len(data) - _HEAD.size, file is not None)
        files = () if file is None else (os.dup(file),)
        self._waiting.append((data, files))
        if len(self._waiting) == 1:
            self._write()

    def read(self, message: ChannelMessage, shared: memoryview = _NO_BYTES) -> Any:
        """Return the object of a message, with views of ``shared``. Messages must be read in order.

        Raises:
            LackingError: the message refers to a catalog that this end has dropped.
            FormatError: the message is not from this version of kvabr.
        """
        unpickler = _Unpickler(message.data, shared, self._profiles, self._got, self._sent)
        try:
            thing = unpickler.load()
        except FormatError:
            raise
        except Exception as error:  # unpickling may raise anything
            raise FormatError(f"a message that cannot be read: {error!r}") from error
        self._got.use(unpickler.used)
        if unpickler.lacks:
            raise LackingError(thing)
        return thing

    def close(self) -> None:
        """End the connection."""
        if self._open:
            self._open = False
            self._loop.remove_reader(self._link)
            self._loop.remove_writer(self._link)
            self._link.close()
            for file in (*self._files, *(file for _, files in self._waiting for file in files)):
                os.close(file)
            self._waiting.clear()

    def _fail(self, error: Exception) -> None:
        if self._open:
            self.close()
            self._lost(error)

    def _write(self) -> None:
        try:
            while self._waiting:
                data, files = self._waiting[0]
                rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", files))] if files else []
                sent = self._link.sendmsg([data], rights)
                for file in files:
                    os.close(file)
                self._waiting[0] = (data[sent:], ())
                if sent == len(data):
                    self._waiting.popleft()
        except BlockingIOError:
            self._loop.add_writer(self._link, self._write)
        except OSError as error:
            self._fail(error)
        else:
            self._loop.remove_writer(self._link)

    def _read(self) -> None:
        try:
            data, files, flags, _ = socket.recv_fds(self._link, _READ_BYTES, _MAX_FILES)
        except BlockingIOError:
            return
        except OSError as error:
            self._fail(error)
            return
        self._files.extend(files)
        if flags & socket.MSG_CTRUNC:  # a later message's file would be assigned to this one
            self._fail(ConnectionLostError("a file was not received: this process has no file descriptors left"))
            return
        if not data:
            self._fail(ConnectionLostError("the peer process has closed the connection"))
            return
        self._arrived += data
        while self._open and len(self._arrived) >= _HEAD.size:
            size, count = _HEAD.unpack_from(self._arrived)
            if size > _MAX_BYTES or count > _MAX_FILES:
                self._fail(FormatError(f"a message is too large: {size:,} bytes, {count} files"))
                return
            end = _HEAD.size + size
            if len(self._arrived) < end:
                return
            message = ChannelMessage(bytes(memoryview(self._arrived)[_HEAD.size : end]), tuple(self._take_files(count)))
            del self._arrived[:end]
            self._received(message)

    def _take_files(self, count: int) -> list[int]:
        return [self._files.popleft() for _ in range(min(count, len(self._files)))]


class _Catalogs:
    """Catalogs sent in one direction. Both ends have the same ones, as messages stay in order."""

    def __init__(self) -> None:
        self._kept: OrderedDict[str, tuple[Catalog, int]] = OrderedDict()
        """Catalogs with their pickled sizes, least recently used first."""
        self._nbytes = 0

    def __contains__(self, digest: str) -> bool:
        return digest in self._kept

    def get(self, digest: str) -> Catalog | None:
        return self._kept[digest][0] if digest in self._kept else None

    def use(self, used: Mapping[str, tuple[Catalog, int]]) -> None:
        """Add a message's catalogs, and drop old ones only afterwards, since the message may refer to those."""
        for digest, (catalog, nbytes) in used.items():
            if digest not in self._kept:
                self._kept[digest] = catalog, nbytes
                self._nbytes += nbytes
            self._kept.move_to_end(digest)
        while self._nbytes > _MAX_CATALOG_BYTES and len(self._kept) > 1:
            self._nbytes -= self._kept.popitem(last=False)[1][1]


class _Pickler(pickle.Pickler):
    def __init__(
        self,
        out: io.BytesIO,
        places: Mapping[int, tuple[int, int]],
        profiles: set[str],
        sent: _Catalogs,
        got: _Catalogs,
    ) -> None:
        super().__init__(out, pickle.HIGHEST_PROTOCOL)
        self.profiles, self.used = profiles, dict[str, tuple[Catalog, int]]()
        self._places, self._sent, self._got = places, sent, got

    def persistent_id(self, thing: object) -> tuple[object, ...] | None:
        if isinstance(thing, memoryview):
            return (_BYTES, *self._places[id(thing)])
        if isinstance(thing, Profile):
            new = thing.digest not in self.profiles
            self.profiles.add(thing.digest)
            return _PROFILE, thing.digest, thing.to_bytes() if new else None
        if isinstance(thing, Catalog):
            return _CATALOG, thing.digest, self._new(thing)
        return None

    def _new(self, catalog: Catalog) -> bytes | None:
        digest, data = catalog.digest, None
        if digest in self._sent or digest in self.used:
            self.used.setdefault(digest, (catalog, 0))
        elif digest not in self._got:
            data = pickle.dumps(catalog, pickle.HIGHEST_PROTOCOL)
            self.used[digest] = catalog, len(data)
        return data

    def reducer_override(self, thing: object) -> Any:
        if isinstance(thing, BaseException):  # errors with other arguments cannot be rebuilt by calling them
            return _error, (type(thing), thing.args, vars(thing))
        return NotImplemented


def _error(kind: type[BaseException], args: tuple[object, ...], facts: dict[str, object]) -> BaseException:
    try:
        error = kind.__new__(kind)
    except TypeError:  # for example a group of errors
        return PlayError(f"{kind.__name__}: {args}")
    error.args = args
    vars(error).update(facts)
    return error


class _Unpickler(pickle.Unpickler):
    def __init__(
        self, data: bytes, shared: memoryview, profiles: dict[str, Profile], got: _Catalogs, sent: _Catalogs
    ) -> None:
        super().__init__(io.BytesIO(data))
        self.used, self.lacks = dict[str, tuple[Catalog, int]](), False
        self._shared, self._profiles, self._got, self._sent = shared, profiles, got, sent

    def persistent_load(self, place: Any) -> memoryview | Profile | Catalog | None:
        kind, first, second = place
        if kind == _BYTES:
            if not 0 <= first <= first + second <= len(self._shared):
                raise FormatError(f"{second} bytes at {first} exceed the {len(self._shared)} bytes of shared memory")
            return self._shared[first : first + second]
        if kind == _CATALOG:
            return self._catalog(first, second)
        if second is not None and first not in self._profiles:
            self._profiles[first] = Profile.from_bytes(second)
        return self._profiles[first]

    def _catalog(self, digest: str, data: bytes | None) -> Catalog | None:
        if data is not None:
            self.used[digest] = pickle.loads(data), len(data)  # noqa: S301  # like all messages
        elif (found := self._got.get(digest)) is not None:
            self.used.setdefault(digest, (found, 0))
        elif digest not in self.used:
            found = self._sent.get(digest)
            self.lacks |= found is None
            return found
        return self.used[digest][0]
