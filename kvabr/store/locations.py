"""Opens stores by path or URL. Object stores are those of `kvabr.store.objects.url.SCHEMES`."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Executor
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from kvabr.store.asset import Asset, AssetStore
from kvabr.store.asset_folder import FolderAsset, FolderAssetStore
from kvabr.store.group_store import FolderGroupStore, LocalGroupStore
from kvabr.store.objects import url
from kvabr.types.catalog import Catalog
from kvabr.types.errors import MissingAssetError, UsageError

Location = str | Path
"""A folder, or a URL whose scheme is in `SCHEMES`."""


def _folder(location: str) -> AssetStore:
    parts = urlsplit(location)
    return _objects(location) if parts.query else FolderAssetStore(Path(unquote(parts.path)))


def _objects(location: str) -> AssetStore:
    from kvabr.store.objects.asset_store import ObjectAssetStore  # noqa: PLC0415  # needs an extra

    return ObjectAssetStore(location)


SCHEMES: dict[str, Callable[[str], AssetStore]] = {
    "file": _folder,
    **{scheme: _objects for scheme in url.SCHEMES if scheme not in ("file", *url.WEB)},
}
"""Stores by URL scheme; each takes the URL."""


def is_store(location: Location) -> bool:
    """Return whether a location names a store: a path, or a URL whose scheme is registered."""
    scheme, separator, _ = str(location).partition("://")
    return not separator or scheme in SCHEMES


def open_store(location: Location, *, must_exist: bool = False, create: bool = False) -> AssetStore:
    """Return the store at a path or URL; a folder that does not exist may be created, or be an `AssetError`.

    Raises `UsageError` if there is no such kind of store; with ``create`` also as `AssetStore.prepare`.
    """
    if not is_store(location):
        raise UsageError(f"{location}: stores are folders or {', '.join(f'{name}://' for name in SCHEMES)}")
    scheme, separator, _ = str(location).partition("://")
    path = Path(location)
    if not separator and must_exist and not path.is_dir():
        raise MissingAssetError(
            f"{path}: no such folder; give the folder that your assets are in, or make it first (mkdir)"
        )
    store = SCHEMES[scheme](str(location)) if separator else FolderAssetStore(path)
    if create:
        store.prepare()
    return store


def open_groups(
    location: Location,
    max_bytes: int,
    *,
    executor: Executor | None = None,
    on_failure: Callable[[str], object] = lambda _why: None,
) -> LocalGroupStore[Any]:
    """Return the store of single groups in a folder, or at the URL of an object store.

    Args:
        location: a folder, which is made if necessary, or another URL.
        max_bytes: bound, see `FolderGroupStore` and `ObjectGroupStore`.
        executor: computes digests.
        on_failure: hears why a folder cannot be written, or an object store not be used for a while.

    Raises as `FolderGroupStore`, or `UsageError` for a URL of something else.
    """
    if max_bytes < 0:
        raise UsageError(f"a store of {max_bytes} bytes; it must not be negative")
    if "://" not in str(location):
        return FolderGroupStore(Path(location), max_bytes, executor=executor, on_failure=on_failure)
    from kvabr.store.objects.group_store import ObjectGroupStore  # noqa: PLC0415  # needs an extra

    return ObjectGroupStore(str(location), max_bytes, executor=executor, on_failure=on_failure)


def open_asset(location: Location) -> Asset:
    """Open the asset at a path or URL; see `AssetStore.open`."""
    if "://" not in str(location):
        return FolderAsset.open(Path(location))
    return open_store(location).open()


def open_catalog(location: Location) -> tuple[Catalog, Asset | None]:
    """Read the catalog of an asset at a path or URL, or from a catalog's file, which has no asset.

    Raises `AssetError` if there is neither, and `FormatError` if the catalog is damaged, or of another version.
    """
    if "://" not in str(location) and Path(location).is_file():
        return Catalog.read(Path(location)), None
    asset = open_asset(location)
    return asset.catalog, asset
