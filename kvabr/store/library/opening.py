"""Opens the library at a path or URL."""

from __future__ import annotations

from kvabr.store.asset_folder import FolderAssetStore
from kvabr.store.library.folder_library import FolderLibrary
from kvabr.store.library.library import Library
from kvabr.store.locations import Location, open_store
from kvabr.types.errors import UsageError


def open_library(location: Location) -> Library:
    """Return the library at a path or URL; `UsageError` if that cannot be managed, `AssetError` if it is not there."""
    store = open_store(location, must_exist=True)
    if isinstance(store, FolderAssetStore):
        return FolderLibrary(store)
    from kvabr.store.library.bucket_library import BucketLibrary  # noqa: PLC0415 - only who has a bucket needs it
    from kvabr.store.objects.asset_store import ObjectAssetStore  # noqa: PLC0415

    if isinstance(store, ObjectAssetStore):
        return BucketLibrary(store.bucket)
    raise UsageError(f"{location}: this kind of store cannot be managed")
