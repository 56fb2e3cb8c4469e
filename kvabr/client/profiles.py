"""Codec profiles by their SHA-256: from memory, a folder, the package, or the origin."""

from __future__ import annotations

import asyncio
import hashlib
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import lru_cache
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
_MAX_KEPT = 8
_profiles: LRUCache[str, Profile] = LRUCache(_MAX_KEPT)
_shipped = lru_cache(_MAX_KEPT)(shipped_bytes)
_LOCK, _READING = threading.Lock(), threading.Lock()
"""For the profiles in memory; and for reading one, which plays share. Neither is held across network waits."""


class ProfileCache:
    """A client's profiles; the process shares those in memory."""

    def __init__(self, folder: Path | None = None, on_failure: Callable[[str], object] = lambda _why: None) -> None:
        """``folder`` keeps profiles between processes; ``on_failure`` receives write errors, in any thread."""
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
        """Return a catalog's profile, or None if its tracks need none; plays share the download.

        Raises `TransportError`, `ForeignError` if it is of another model, or `FormatError` if it is another profile.
        """
        if catalog.profile is None:
            return None
        name, size = _name(catalog), catalog.profile_bytes
        loop, wanted = asyncio.get_running_loop(), name.prompt
        profile = _known(wanted) or await loop.run_in_executor(decoders(), self._local, wanted, size, catalog.spec)
        if profile is None:
            data = await fetch_view(origin, name, PROFILE_TRACK, size)
            profile = await loop.run_in_executor(decoders(), self._received, wanted, data)
        profile.check(catalog.spec)
        return profile

    def _local(self, sha256: str, size: int, spec: KVSpec) -> Profile | None:
        if self._folder is not None and (profile := self._stored(_file(self._folder, sha256), sha256)) is not None:
            return profile
        data = _shipped(sha256, size, spec)
        return None if data is None else _checked(data, sha256)

    @staticmethod
    def _stored(file: Path, sha256: str) -> Profile | None:
        try:
            with file.open("rb") as stream:
                return _checked(stream.read(MAX_PROFILE_BYTES + 1), sha256)
        except FormatError:
            with suppress(OSError):
                file.unlink()  # damaged: fetch it again
        except OSError:
            pass  # missing
        return None

    def _received(self, sha256: str, data: memoryview) -> Profile:
        profile = _checked(data, sha256)
        try:
            if self._folder is not None and not (file := _file(self._folder, sha256)).is_file():
                self._folder.mkdir(mode=PRIVATE_FOLDER, parents=True, exist_ok=True)
                write_file(file, bytes(data), mode=PRIVATE)
        except (OSError, AssetError) as error:
            self._on_failure(str(error))  # a failed write must not fail the play
        return profile


def keep(profile: Profile) -> None:
    """Keep a local profile in memory."""
    with _LOCK:
        _profiles[profile.digest] = profile


def _known(sha256: str) -> Profile | None:
    with _LOCK:
        return _profiles.get(sha256)


def _name(catalog: Catalog) -> TrackNamespace:
    """Return the profile's namespace, checking its digest before it names a file."""
    if catalog.profile is None or not 0 < catalog.profile_bytes <= MAX_PROFILE_BYTES:
        raise FormatError(f"catalog: a profile must have 1 to {MAX_PROFILE_BYTES} bytes, got {catalog.profile_bytes}")
    return TrackNamespace(catalog.spec.model, catalog.profile)


def _checked(data: bytes | memoryview, sha256: str) -> Profile:
    if hashlib.sha256(data).hexdigest() != sha256:
        raise FormatError("the profile is not the one that the catalog names (its SHA-256 differs)")
    with _READING:
        if (profile := _known(sha256)) is None:
            profile = Profile.from_bytes(bytes(data))
            with _LOCK:
                _profiles[sha256] = profile
    return profile


def _file(folder: Path, sha256: str) -> Path:
    return folder / f"{sha256}.safetensors"
