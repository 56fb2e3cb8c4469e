"""Codec profiles by their SHA-256: from memory, a folder, the package, or the origin."""

from __future__ import annotations

import asyncio
import hashlib
import threading
import weakref
from collections.abc import Callable, Hashable
from contextlib import suppress
from functools import lru_cache, partial
from pathlib import Path

from cachetools import LRUCache

from kvabr.client.lookup import fetch_view
from kvabr.codec.profile import Profile
from kvabr.data.profiles import shipped_bytes
from kvabr.store.files import PRIVATE, PRIVATE_FOLDER, write_file
from kvabr.transfer.interface import Connection
from kvabr.transfer.work import decoders
from kvabr.types.catalog import MAX_PROFILE_BYTES, Catalog
from kvabr.types.errors import AssetError, FormatError
from kvabr.types.kv import KVSpec
from kvabr.types.naming import PROFILE_TRACK, TrackNamespace

PROFILES = "profiles"
"""Name of the profiles' folder in a client's."""
_MAX_KEPT = 8
_profiles: LRUCache[str, Profile] = LRUCache(_MAX_KEPT)
_LOCK = threading.Lock()
_Reading = dict[Hashable, asyncio.Future[Profile | None]]
_reading: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, _Reading] = weakref.WeakKeyDictionary()
"""By source, profiles being read and checked, shared by plays of a loop. This never waits for a network: one peer must
not delay plays from others."""


class ProfileCache:
    """Profiles of one client. The process shares those in memory."""

    def __init__(self, folder: Path | None = None, on_failure: Callable[[str], object] = lambda _why: None) -> None:
        """Use a folder to keep profiles between processes; None: memory only.

        ``on_failure`` receives the error of a failed write, in any thread.
        """
        self._folder, self._on_failure = folder, on_failure

    def has(self, catalog: Catalog) -> bool:
        """Return whether `fetch` needs no network."""
        if catalog.profile is None:
            return True
        wanted = _name(catalog).prompt
        if _known(wanted) is not None or (self._folder is not None and _file(self._folder, wanted).is_file()):
            return True
        return _shipped(wanted, catalog.profile_bytes, catalog.spec) is not None

    async def fetch(self, origin: Connection, catalog: Catalog) -> Profile | None:
        """Return a catalog's profile; None if its tracks need none.

        Plays of one client share the download.

        Raises:
            TransportError: it cannot be fetched.
            ForeignError: it is of another model.
            FormatError: it is not the catalog's profile.
        """
        if catalog.profile is None:
            return None
        name = _name(catalog)
        wanted, size = name.prompt, catalog.profile_bytes
        profile = _known(wanted)
        if profile is None and self._folder is not None:
            profile = await _once(("file", self._folder, wanted), partial(self._stored, wanted))
        if profile is None:
            packaged = partial(_packaged, wanted, size, catalog.spec)
            profile = await _once(("package", wanted, size, catalog.spec), packaged)
        if profile is None:
            profile = await self._fetch(origin, name, size)
        profile.check(catalog.spec)
        return profile

    async def _fetch(self, origin: Connection, name: TrackNamespace, size: int) -> Profile:
        wanted = name.prompt
        with suppress(FormatError):  # another peer's data was wrong
            if (profile := _known(wanted) or await _under_way(("peer", wanted))) is not None:
                return profile
        data = await fetch_view(origin, name, PROFILE_TRACK, size)
        check = partial(_checked, data, wanted)
        try:
            profile = await _once(("peer", wanted), check)
        except FormatError:
            # It may be another peer's data.
            profile = await asyncio.get_running_loop().run_in_executor(decoders(), check)
        assert profile is not None  # noqa: S101  # or an error was raised
        await asyncio.get_running_loop().run_in_executor(decoders(), self._keep, wanted, data)
        return profile

    def _stored(self, sha256: str) -> Profile | None:
        assert self._folder is not None  # noqa: S101  # or this is not called
        file = _file(self._folder, sha256)
        try:
            with file.open("rb") as stream:
                return _checked(stream.read(MAX_PROFILE_BYTES + 1), sha256)
        except FormatError:
            with suppress(OSError):
                file.unlink()  # damaged: fetch it again
        except OSError:
            pass  # missing
        return None

    def _keep(self, sha256: str, data: bytes | memoryview) -> None:
        if self._folder is None or _file(self._folder, sha256).is_file():
            return
        try:
            self._folder.mkdir(mode=PRIVATE_FOLDER, parents=True, exist_ok=True)
            write_file(_file(self._folder, sha256), bytes(data), mode=PRIVATE)
        except (OSError, AssetError) as error:
            self._on_failure(str(error))  # a failed write must not fail the play


def keep(profile: Profile) -> None:
    """Keep a local profile in memory, for all clients of this process."""
    with _LOCK:
        _profiles[profile.digest] = profile


def _known(sha256: str) -> Profile | None:
    with _LOCK:
        return _profiles.get(sha256)


async def _once(key: Hashable, work: Callable[[], Profile | None]) -> Profile | None:
    """Return the result of ``work`` in a decoder thread, shared by calls with the same key."""
    loop = asyncio.get_running_loop()
    reading = _reading.setdefault(loop, {})
    if key not in reading:
        reading[key] = loop.run_in_executor(decoders(), work)
        reading[key].add_done_callback(lambda _: reading.pop(key))
    return await asyncio.shield(reading[key])


async def _under_way(key: Hashable) -> Profile | None:
    """Return the result of running work; None if there is none."""
    reading = _reading.get(asyncio.get_running_loop(), {}).get(key)
    return None if reading is None else await asyncio.shield(reading)


def _name(catalog: Catalog) -> TrackNamespace:
    """Return the profile's namespace, which checks its digest before it names a file."""
    if catalog.profile is None or not 0 < catalog.profile_bytes <= MAX_PROFILE_BYTES:
        raise FormatError(f"catalog: a profile of {catalog.profile_bytes} bytes, not 1 to {MAX_PROFILE_BYTES}")
    return TrackNamespace(catalog.spec.model, catalog.profile)


@lru_cache(_MAX_KEPT)
def _shipped(sha256: str, size: int, spec: KVSpec) -> bytes | None:
    return shipped_bytes(sha256, size, spec)


def _packaged(sha256: str, size: int, spec: KVSpec) -> Profile | None:
    data = _shipped(sha256, size, spec)
    return None if data is None else _checked(data, sha256)


def _checked(data: bytes | memoryview, sha256: str) -> Profile:
    """Return a profile, and keep it in memory even if its caller is gone."""
    if hashlib.sha256(data).hexdigest() != sha256:
        raise FormatError("the profile is not the one that the catalog names (its SHA-256 differs)")
    profile = Profile.from_bytes(bytes(data))
    with _LOCK:
        _profiles[sha256] = profile
    return profile


def _file(folder: Path, sha256: str) -> Path:
    return folder / f"{sha256}.safetensors"
