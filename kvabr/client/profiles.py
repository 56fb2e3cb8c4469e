"""Codec profiles by their SHA-256: from this process's memory, from a folder, from the package, or from the origin."""

from __future__ import annotations

import asyncio
import hashlib
import weakref
from functools import lru_cache
from pathlib import Path

from cachetools import LRUCache

from kvabr.client.lookup import fetch_small
from kvabr.client.resources import decoders
from kvabr.codec.profile import Profile
from kvabr.data.profiles import shipped_bytes
from kvabr.quic.interface import Connection
from kvabr.store.files import PRIVATE, PRIVATE_FOLDER, write_file
from kvabr.types.catalog import MAX_PROFILE_BYTES, Catalog
from kvabr.types.errors import AssetError, FormatError
from kvabr.types.kv import KVSpec
from kvabr.types.naming import PROFILE_TRACK, TrackNamespace

PROFILES = "profiles"
"""Folder of profiles in that of a client."""
_MAX_KEPT = 8
"""Profiles that a process keeps in memory."""
_profiles: LRUCache[str, Profile] = LRUCache(_MAX_KEPT)
_Locks = weakref.WeakValueDictionary[str, asyncio.Lock]
_locks: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, _Locks] = weakref.WeakKeyDictionary()
"""Held while a profile is fetched; gone as soon as nobody waits for it."""


class ProfileCache:
    """Profiles of one client. What is in memory is shared by the whole process."""

    def __init__(self, folder: Path | None = None) -> None:
        """Use a folder, in which profiles outlive the process; None: memory only."""
        self._folder = folder

    def has(self, catalog: Catalog) -> bool:
        """Return whether `fetch` needs no network."""
        if catalog.profile is None:
            return True
        wanted = _name(catalog).prompt
        if wanted in _profiles or (self._folder is not None and _file(self._folder, wanted).is_file()):
            return True
        return _shipped(wanted, catalog.profile_bytes, catalog.spec) is not None

    async def fetch(self, origin: Connection, catalog: Catalog) -> Profile | None:
        """Return the profile that a catalog names; None if its tracks need none. Callers share one download.

        Raises:
            TransportError: it cannot be fetched.
            ForeignError: it is of another model.
            FormatError: it is not what the catalog names.
        """
        if catalog.profile is None:
            return None
        name = _name(catalog)
        wanted, size = name.prompt, catalog.profile_bytes
        loop = asyncio.get_running_loop()
        async with _locks.setdefault(loop, _Locks()).setdefault(wanted, asyncio.Lock()):
            profile = _profiles.get(wanted)
            if profile is None:
                profile = await loop.run_in_executor(decoders(), self._local, wanted, size, catalog.spec)
            if profile is None:
                data = await fetch_small(origin, name, PROFILE_TRACK, size)
                profile = await loop.run_in_executor(decoders(), _checked, data, wanted)
                await loop.run_in_executor(decoders(), self._keep, wanted, data)
            _profiles[wanted] = profile
        profile.check(catalog.spec)
        return profile

    def _local(self, sha256: str, size: int, spec: KVSpec) -> Profile | None:
        """Return the profile from the folder or from the package."""
        if self._folder is not None:
            try:
                with _file(self._folder, sha256).open("rb") as file:
                    return _checked(file.read(MAX_PROFILE_BYTES + 1), sha256)
            except (OSError, FormatError):
                pass  # not there, or damaged: the origin has it
        data = _shipped(sha256, size, spec)
        return None if data is None else _checked(data, sha256)

    def _keep(self, sha256: str, data: bytes) -> None:
        if self._folder is None:
            return
        try:
            self._folder.mkdir(mode=PRIVATE_FOLDER, parents=True, exist_ok=True)
            write_file(_file(self._folder, sha256), data, mode=PRIVATE)
        except (OSError, AssetError):
            pass  # a cache that cannot be written must not fail the play


def keep(profile: Profile) -> None:
    """Keep a profile in memory that need not be fetched, for all clients of this process."""
    _profiles[profile.digest] = profile


def _name(catalog: Catalog) -> TrackNamespace:
    """Return where the profile is published, which checks its digest before it names a file."""
    if catalog.profile is None or not 0 < catalog.profile_bytes <= MAX_PROFILE_BYTES:
        raise FormatError(f"catalog: a profile of {catalog.profile_bytes} bytes, not 1 to {MAX_PROFILE_BYTES}")
    return TrackNamespace(catalog.spec.model, catalog.profile)


@lru_cache(_MAX_KEPT)
def _shipped(sha256: str, size: int, spec: KVSpec) -> bytes | None:
    """Return the profile that comes with the package if it is the one that is wanted, see `shipped_bytes`."""
    return shipped_bytes(sha256, size, spec)


def _checked(data: bytes, sha256: str) -> Profile:
    if hashlib.sha256(data).hexdigest() != sha256:
        raise FormatError("the profile is not the one that the catalog names (its SHA-256 differs)")
    return Profile.from_bytes(data)


def _file(folder: Path, sha256: str) -> Path:
    return folder / f"{sha256}.safetensors"
