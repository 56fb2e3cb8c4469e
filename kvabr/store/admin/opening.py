"""Opens a store for its administration, of one tenant or of all."""

from __future__ import annotations

from kvabr.store.admin.folder_admin import FolderAdmin
from kvabr.store.admin.protocol import StoreAdmin
from kvabr.store.asset_folder import FolderAssetStore
from kvabr.store.locations import Location, open_store
from kvabr.types.errors import UsageError


def open_admin(location: Location) -> StoreAdmin:
    """Return the administration of a store; `UsageError` if that has none, `AssetError` if the store is not there."""
    return _opened(location, everybody=False)[0]


def open_admins(location: Location) -> list[StoreAdmin]:
    """Return that of each tenant at a URL, one for a folder; errors as `open_admin`."""
    return _opened(location, everybody=True)


def _opened(location: Location, *, everybody: bool) -> list[StoreAdmin]:
    store = open_store(location, must_exist=True)
    if isinstance(store, FolderAssetStore):
        return [FolderAdmin(store)]
    from kvabr.store.admin.bucket_admin import BucketAdmin  # noqa: PLC0415 - only who has a bucket needs it
    from kvabr.store.objects.asset_store import ObjectAssetStore  # noqa: PLC0415

    if isinstance(store, ObjectAssetStore):
        bucket = store.bucket
        names = bucket.tenants_sync() if everybody else (bucket.where.tenant,)
        return [BucketAdmin(bucket.of_tenant(name)) for name in names]
    raise UsageError(f"{location}: this kind of store cannot be managed")
