"""Opens stores by path or URL. Register a scheme here to add a kind of store."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from urllib.parse import unquote, urlsplit

from kvabr.store.asset import Asset, AssetStore
from kvabr.store.asset_folder import FolderAsset, FolderAssetStore
from kvabr.store.files import PRIVATE_FOLDER
from kvabr.types.catalog import Catalog
from kvabr.types.errors import AssetError, UsageError

Location = str | Path
"""A folder, or a URL whose scheme is in `SCHEMES`."""


def _folder(url: str) -> AssetStore:
    return FolderAssetStore(Path(unquote(urlsplit(url).path)))


SCHEMES: dict[str, Callable[[str], AssetStore]] = {"file": _folder}
"""Stores by URL scheme; each takes the URL. Import a client library inside the function."""


def is_store(location: Location) -> bool:
    """Return whether a location names a store: a path, or a URL whose scheme is registered."""
    scheme, separator, _ = str(location).partition("://")
    return not separator or scheme in SCHEMES


def open_store(location: Location, *, must_exist: bool = False, create: bool = False) -> AssetStore:
    """Return the store at a path or URL; a folder that does not exist may be created, or be an `AssetError`.

    Raises `UsageError` if there is no such kind of store, or the folder cannot be created.
    """
    if not is_store(location):
        raise UsageError(f"{location}: stores are folders or {', '.join(f'{name}://' for name in SCHEMES)}")
    scheme, separator, _ = str(location).partition("://")
    if separator:
        return SCHEMES[scheme](str(location))
    path = Path(location)
    if must_exist and not path.is_dir():
        raise AssetError(f"{path}: no such folder; give the folder that your assets are in, or make it first (mkdir)")
    if create:
        try:
            path.mkdir(mode=PRIVATE_FOLDER, parents=True, exist_ok=True)
        except OSError as error:
            raise UsageError(f"{path}: this folder to publish in cannot be made ({error.strerror})") from error
    return FolderAssetStore(path)


def open_asset(location: Location) -> Asset:
    """Open the asset at a path or URL; see `AssetStore.open`."""
    if "://" not in str(location):
        return FolderAsset.open(Path(location))
    return open_store(location).open()


def open_catalog(location: Location) -> tuple[Catalog, Asset | None]:
    """Read the catalog of an asset at a path or URL, or from a catalog's file, which has no asset.

    Raises `AssetError` if there is neither, `FormatError` if the catalog is damaged, or of a newer version.
    """
    if "://" not in str(location) and Path(location).is_file():
        return Catalog.read(Path(location)), None
    asset = open_asset(location)
    return asset.catalog, asset
