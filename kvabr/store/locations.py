"""Opens stores by path or URL.

    FOLDER, file:///FOLDER                       a folder (`LocalStore`)
    s3://BUCKET/PREFIX, gs://..., az://...       a bucket; credentials from the environment (`CloudStore`)
    http://HOST/PREFIX, https://...              the same objects through an HTTP cache, read-only
    memory://NAME                                in this process (`MemoryStore`)

A path or URL that ends with 64 hex digits names one asset.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from urllib.parse import unquote, urlsplit

from kvabr.store import url
from kvabr.store.asset import Asset
from kvabr.store.asset_store import DIGEST, AssetStore
from kvabr.store.encrypted import EncryptedStore, read_key
from kvabr.store.local import LocalStore
from kvabr.store.memory import MemoryStore
from kvabr.store.store import Store
from kvabr.types.catalog import Catalog
from kvabr.types.errors import MissingAssetError, UsageError

Location = str | Path | Store
"""A folder, a URL with a scheme in `SCHEMES`, or a store."""
KEY_FILE, PREVIOUS_KEY_FILE = "KVABR_STORE_KEY_FILE", "KVABR_STORE_PREVIOUS_KEY_FILE"
"""Environment variables with key files of encrypted stores: the current key, and the previous one, for reading."""


def _folder(location: str) -> Store:
    return LocalStore(Path(unquote(urlsplit(location).path)))


def _cloud(location: str) -> Store:
    from kvabr.store.cloud import CloudStore  # noqa: PLC0415  # needs an extra

    return CloudStore(location)


SCHEMES: dict[str, Callable[[str], Store]] = {
    "file": _folder,
    "memory": MemoryStore.named,
    **dict.fromkeys(url.SCHEMES, _cloud),
}


def open_objects(location: Location, *, encrypted: bool = True) -> Store:
    """Return the store at a path or URL, without making a request.

    ``encrypted``: use the key from the environment, if there is one. Raise `UsageError` for an unknown scheme or an
    invalid key.
    """
    if isinstance(location, Store):
        return location
    scheme, separator, _ = str(location).partition("://")
    if separator and scheme not in SCHEMES:
        raise UsageError(
            f"{location}: unknown kind of store; give a folder, or {', '.join(f'{name}://' for name in SCHEMES)}"
        )
    store = SCHEMES[scheme](str(location)) if separator else LocalStore(Path(location))
    key, previous = os.environ.get(KEY_FILE), os.environ.get(PREVIOUS_KEY_FILE)
    if not key or not encrypted:
        return store
    return EncryptedStore(store, read_key(Path(key)), read_key(Path(previous)) if previous else None)


def is_store(location: Location) -> bool:
    """Return True if a location can be listed: a path, or a URL of a bucket."""
    scheme, separator, _ = str(location).partition("://")
    return isinstance(location, Store) or not separator or (scheme in SCHEMES and scheme not in url.WEB)


def split_asset(location: Location) -> tuple[Location, str | None]:
    """Return the location of the store, and the prompt digest of the asset if the location names one, else None."""
    if isinstance(location, Store):
        return location, None
    before, question, options = str(location).partition("?")
    store, _, last = before.rstrip("/").rpartition("/")
    if DIGEST.fullmatch(last) is None:
        return str(location), None
    return (store or ("/" if before.startswith("/") else ".")) + question + options, last


def open_store(location: Location, *, must_exist: bool = False, create: bool = False) -> AssetStore:
    """Return the assets at a path or URL.

    ``must_exist``: raise `MissingAssetError` for a missing folder. ``create``: prepare the store, see
    `AssetStore.prepare`. Raise `UsageError` for an unknown kind of store.
    """
    if not is_store(location):
        open_objects(location)  # raises for an unknown scheme
        raise UsageError(f"{location}: an HTTP cache is read-only; give the URL of its bucket")
    where, prompt = split_asset(location)
    store = open_objects(where)
    if must_exist and isinstance(store, LocalStore) and not store.folder.is_dir():
        raise MissingAssetError(
            f"{store.folder}: no such folder; give the folder of your assets, or create it first (mkdir)"
        )
    made = AssetStore(store, prompt)
    if create:
        made.prepare()
    return made


def open_asset(location: Location) -> Asset:
    """Open the asset at a path or URL; see `AssetStore.open`."""
    store = open_store(location)
    if isinstance(store.store, LocalStore) and not store.store.folder.is_dir():
        raise MissingAssetError(
            f"{location}: no such asset; make one with: kvabr encode --text FILE --tokens N --out {location}"
        )
    return store.open()


def open_catalog(location: Location) -> tuple[Catalog, Asset | None]:
    """Read the catalog of an asset; also return the asset, or None for a catalog in a separate file.

    Raise `AssetError` if there is neither, `FormatError` if the catalog is damaged or has another version.
    """
    if not isinstance(location, Store) and "://" not in str(location) and Path(location).is_file():
        return Catalog.read(Path(location)), None
    asset = open_asset(location)
    return asset.catalog, asset
