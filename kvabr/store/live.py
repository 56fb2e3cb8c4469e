"""Assets in folders that are still being written: a producer writes numbered messages, which a server polls.

``l/<key>/`` in the store has the file ``live``, a `kvabr.types.live.LiveCatalog`, and the messages ``0``, ``1`` ...,
each written after the frames that it names. The writer's process holds a lock on ``live``, so a follower notices a
killed writer. When the asset is complete, an ordinary catalog is written, and ``live`` is removed; the messages are
removed an hour later.

If a producer fails, its published groups become an asset of the shorter prompt. If it is killed, it leaves frames that
no catalog names, and messages, which `sweep_live` removes.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import time
from pathlib import Path

from kvabr.store.asset import FrameReader, as_asset_errors, open_frame
from kvabr.store.asset_writer import AssetWriter
from kvabr.store.files import STALE_S, open_regular
from kvabr.store.local import LocalStore
from kvabr.store.names import LIVE, FramePlace, catalog_name, group_name, profile_name
from kvabr.store.store import listing
from kvabr.types.errors import AssetError, FormatError, NotFoundError
from kvabr.types.live import (
    MAX_EDGE_BYTES,
    MAX_LIVE_BYTES,
    EdgeMessage,
    LiveCatalog,
    parse_edge,
)

LIVE_NAME = "live"
BATCH_MESSAGES, BATCH_BYTES = 16, 64 << 10
"""Maximum messages that a follower reads at once, and bytes after which it stops: servers read in their event loop."""
_MAX_ENTRIES = 10_000


class LiveWriter(AssetWriter):
    """An `AssetWriter` for an asset that can be played before it is complete. Frames are flushed only at the end."""

    store: LocalStore

    def __init__(self, store: LocalStore, prompt: str | None, *, force: bool = False) -> None:
        super().__init__(LocalStore(store.folder, sync=False), prompt, force=force, live=True)
        self._key, self._news, self._lock = "", 0, -1
        self._found: set[str] = set()
        """Frames that the store already had; other assets may name them."""

    def begin_live(self, live: LiveCatalog) -> None:
        """Publish the live catalog, so that players can follow the asset."""
        self._key = live.key
        with as_asset_errors():
            sweep_live(self.store)
            if live.catalog.profile is not None:
                self._put(profile_name(live.catalog.profile), self._profile)
            name = f"{LIVE}{self._key}/{LIVE_NAME}"
            self.store.blocked(self.store.put_new(name, live.dumps().encode()))
        with contextlib.suppress(OSError):  # a file system without locks
            self._lock = os.open(self.store.path(name), os.O_RDONLY | os.O_CLOEXEC)
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)

    def announce(self, message: EdgeMessage) -> None:
        """Append a message; the frames that it names must be written."""
        self._wait(0)
        with as_asset_errors():
            self.store.blocked(self.store.put_new(f"{LIVE}{self._key}/{self._news}", message.dumps()))
        self._news += 1

    def frame(self, group: int, track: str, frame: bytes | memoryview, digest: str) -> None:
        if self.store.path(group_name(digest)).exists():
            self._found.add(digest)
        super().frame(group, track, frame, digest)

    def discard(self, group: int, track: str) -> None:
        """Remove a frame that no message has named, unless another asset may use it or it is missing."""
        digest = self._digests.get(track, {}).pop(group, None)
        if digest is not None and digest not in self._found:
            with contextlib.suppress(AssetError), as_asset_errors():
                self.store.blocked(self.store.delete([group_name(digest)]))

    def __exit__(self, *given: object) -> None:
        if self._key:
            with contextlib.suppress(AssetError), as_asset_errors():
                self.store.blocked(self.store.delete([f"{LIVE}{self._key}/{LIVE_NAME}"]))
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1
        super().__exit__(*given)


class LiveFollower:
    """Follows an asset that is being written."""

    def __init__(self, store: LocalStore, key: str) -> None:
        """Read the live catalog; raise `AssetError` if it is missing or unreadable, `FormatError` if damaged."""
        self.store, self.key = store, key
        self._name = f"{LIVE}{key}/{LIVE_NAME}"
        with as_asset_errors():
            self.live = LiveCatalog.loads(bytes(store.blocked(store.get(self._name, limit=MAX_LIVE_BYTES))))
        if self.live.key != key:
            raise FormatError(f"{store.where(self._name)}: belongs to another prefill of this prompt")
        self._next = 0

    def read(self) -> list[EdgeMessage]:
        """Return the next messages, at most `BATCH_MESSAGES`; empty if there are none yet.

        Raise `FormatError` for an invalid message, `AssetError` for an unreadable one, but only after earlier messages
        were returned.
        """
        found: list[EdgeMessage] = []
        size = 0
        try:
            with as_asset_errors():
                while len(found) < BATCH_MESSAGES and size < BATCH_BYTES:
                    name = f"{LIVE}{self.key}/{self._next}"
                    data = bytes(self.store.blocked(self.store.get(name, limit=MAX_EDGE_BYTES)))
                    found.append(parse_edge(data))
                    size += len(data)
                    self._next += 1
        except AssetError as error:
            if not found and not isinstance(error.__cause__, NotFoundError):
                raise
        except FormatError:
            if not found:
                raise
        return found

    def has_writer(self) -> bool:
        """Return True if the writer is running; always True on file systems without locks."""
        return _is_locked(self.store.path(self._name))

    def open_frame(self, size: int, digest: str) -> FrameReader:
        """Open a frame that a message names; raise `AssetError` if it is missing."""
        return open_frame(self.store, FramePlace(group_name(digest), 0, size, digest))

    @property
    def is_partial(self) -> bool:
        """True if the asset is still being written, or was when its writer was killed."""
        return self.store.path(self._name).exists()

    def is_published(self, groups: int) -> bool:
        """Return True if this cache, or a prefix of at most its first ``groups`` groups, is published as an asset."""
        chunks = self.live.catalog.chunks
        return any(self.store.path(catalog_name(chunk)).exists() for chunk in (chunks[-1], *reversed(chunks[:groups])))


def _is_locked(path: Path) -> bool:
    try:
        file = open_regular(path)  # another writer of the store may have put a pipe here
    except OSError:
        return False
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError:
            return True
    return False


def sweep_live(store: LocalStore) -> None:
    """Remove productions that ended or were killed an hour ago; raise `TransportError` if this fails."""
    found = store.blocked(listing(store, LIVE))
    growing = {
        name.rpartition("/")[0] for name in found if name.endswith(f"/{LIVE_NAME}") and _is_locked(store.path(name))
    }
    old = [
        name
        for name, one in found.items()
        if name.rpartition("/")[0] not in growing and one.modified_s < time.time() - STALE_S
    ]
    store.blocked(store.delete(old))


def live_keys(store: LocalStore) -> list[str]:
    """Return the keys of running productions."""
    try:
        with os.scandir(store.folder / LIVE) as entries:
            some = [Path(entry) for _, entry in zip(range(_MAX_ENTRIES), entries, strict=False)]
        return [path.name for path in some if (path / LIVE_NAME).exists()]
    except OSError:
        return []


def new_key() -> str:
    """Return a key for a production, see `LiveCatalog.key`."""
    return secrets.token_hex(8)
