"""Opens the library at a path or URL, or those of all tenants there."""

from __future__ import annotations

from kvabr.store.asset_folder import FolderAssetStore
from kvabr.store.locations import Location, open_store
from kvabr.store.managing.folder_library import FolderLibrary
from kvabr.store.managing.protocol import Library
from kvabr.types.errors import UsageError


def open_library(location: Location) -> Library:
    """Return the library at a path or URL; `UsageError` if that cannot be managed, `AssetError` if it is not there."""
    return _opened(location, everybody=False)[0]


def open_libraries(location: Location) -> list[Library]:
    """Return the libraries of all tenants at a URL, that of a folder alone; errors as `open_library`."""
    return _opened(location, everybody=True)


def _opened(location: Location, *, everybody: bool) -> list[Library]:
    store = open_store(location, must_exist=True)
    if isinstance(store, FolderAssetStore):
        return [FolderLibrary(store)]
    from kvabr.store.managing.bucket_library import BucketLibrary  # noqa: PLC0415 - only who has a bucket needs it
    from kvabr.store.objects.asset_store import ObjectAssetStore  # noqa: PLC0415

    if isinstance(store, ObjectAssetStore):
        bucket = store.bucket
        names = bucket.tenants_sync() if everybody else (bucket.where.tenant,)
        return [BucketLibrary(bucket.of_tenant(name)) for name in names]
    raise UsageError(f"{location}: this kind of store cannot be managed")
