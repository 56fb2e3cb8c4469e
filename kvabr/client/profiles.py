"""Codec profiles by their SHA-256: from the package, from this process's memory, from a folder, or from the origin."""

from __future__ import annotations

import asyncio
import hashlib
import weakref
from collections import OrderedDict
from functools import lru_cache
from pathlib import Path

from kvabr.client.executors import decoders
from kvabr.client.fetch_small import fetch_whole
from kvabr.codec.profile import MAX_PROFILE_BYTES, Profile
from kvabr.data import default_profile_bytes
from kvabr.quic.interface import Connection
from kvabr.store.files import write_file
from kvabr.types.catalog import Catalog
from kvabr.types.errors import AssetError, FormatError
from kvabr.types.naming import PROFILE_TRACK, TrackNamespace

_KEPT = 8
"""Profiles that a process keeps."""
_profiles: OrderedDict[str, Profile] = OrderedDict()
_locks: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, dict[str, asyncio.Lock]] = weakref.WeakKeyDictionary()


def profile_at_hand(catalog: Catalog, folder: Path | None = None) -> bool:
    """Whether `fetch_profile` can do without the network."""
    if catalog.profile is None:
        return True
    wanted = _name(catalog).prompt
    if wanted in _profiles or (folder is not None and _file(folder, wanted).is_file()):
        return True
    return _shipped(wanted, catalog.profile_bytes) is not None


async def fetch_profile(origin: Connection, catalog: Catalog, folder: Path | None = None) -> Profile | None:
    """The profile that a catalog names; None if its tracks need none. Plays that want the same fetch it once.

    Args:
        origin: where to fetch it.
        catalog: the asset.
        folder: where profiles are kept from one process to the next; None: nowhere.

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
    async with _locks.setdefault(loop, {}).setdefault(wanted, asyncio.Lock()):
        profile = _profiles.get(wanted)
        if profile is None:
            profile = await loop.run_in_executor(decoders(), _at_hand, wanted, size, folder)
        if profile is None:
            data = await fetch_whole(origin, name, PROFILE_TRACK, size)
            profile = await loop.run_in_executor(decoders(), _checked, data, wanted)
            if folder is not None:
                await loop.run_in_executor(decoders(), _keep, folder, wanted, data)
        _profiles[wanted] = profile
        _profiles.move_to_end(wanted)
        while len(_profiles) > _KEPT:
            _profiles.popitem(last=False)
    profile.check(catalog.spec)
    return profile


def _name(catalog: Catalog) -> TrackNamespace:
    """Where the profile is published; its digest is checked thereby, before it names a file."""
    if catalog.profile is None or not 0 < catalog.profile_bytes <= MAX_PROFILE_BYTES:
        raise FormatError(f"catalog: a profile of {catalog.profile_bytes} bytes, not 1 to {MAX_PROFILE_BYTES}")
    return TrackNamespace(catalog.spec.model, catalog.profile)


@lru_cache(_KEPT)
def _shipped(sha256: str, size: int) -> bytes | None:
    """The profile that comes with the package, if it is the one that is wanted."""
    data = default_profile_bytes()
    return data if len(data) == size and hashlib.sha256(data).hexdigest() == sha256 else None


def _at_hand(sha256: str, size: int, folder: Path | None) -> Profile | None:
    """The profile from a folder or from the package."""
    if folder is not None:
        try:
            with _file(folder, sha256).open("rb") as file:
                return _checked(file.read(MAX_PROFILE_BYTES + 1), sha256)
        except (OSError, FormatError):
            pass  # not there, or damaged: the origin has it
    data = _shipped(sha256, size)
    return None if data is None else _checked(data, sha256)


def _checked(data: bytes, sha256: str) -> Profile:
    if hashlib.sha256(data).hexdigest() != sha256:
        raise FormatError("the profile is not the one that the catalog names (its SHA-256 differs)")
    return Profile.from_bytes(data)


def _keep(folder: Path, sha256: str, data: bytes) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_file(_file(folder, sha256), data)
    except (OSError, AssetError):
        pass  # a cache that cannot be written must not fail the play


def _file(folder: Path, sha256: str) -> Path:
    return folder / f"{sha256}.safetensors"
