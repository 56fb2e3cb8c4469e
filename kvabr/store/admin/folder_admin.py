"""Managing a folder of assets. Each asset owns its files."""

from __future__ import annotations

from collections.abc import Collection

from kvabr.store.admin.protocol import Inventory, Progress, holding, silent
from kvabr.store.asset_folder import FolderAssetStore
from kvabr.store.files import folder_bytes, remove_folder, sweep
from kvabr.types.errors import AssetError, FormatError, UsageError


class FolderAdmin:
    """A `StoreAdmin` over a folder of assets."""

    def __init__(self, store: FolderAssetStore) -> None:
        """Take the folder."""
        self._store, self._root = store, store.root

    @property
    def location(self) -> str:
        return self._store.location

    @property
    def tenant(self) -> str:
        return ""

    async def inventory(self, progress: Progress = silent) -> Inventory:
        """See `StoreAdmin.inventory`. Reads all catalogs."""
        listing = self._store.list()
        held, damaged, versions = [], dict(listing.unreadable), listing.versions
        for number, (name, version) in enumerate(sorted(versions.items())):
            progress("catalogs", number, len(versions))
            try:
                asset = self._store.open(name)
                size = folder_bytes(asset.path)
                held.append(holding(asset.catalog, name, version.modified_ns * 1e-9, own_bytes=size))
            except (AssetError, FormatError) as error:
                damaged[name] = str(error)
        return Inventory(tuple(held), damaged)

    async def names(self) -> list[str]:
        return list(self._store.list().versions)

    async def remove(self, names: Collection[str], *, unnamed: bool = False, progress: Progress = silent) -> int:
        freed = 0
        if "." in names:
            raise UsageError(f"{self._root}: is one asset; give the folder that it lies in")
        for number, name in enumerate(names):
            progress("removing", number, len(names))
            path = self._root / name
            size = folder_bytes(path)
            try:
                remove_folder(path)
            except FileNotFoundError:
                continue
            except OSError as error:
                raise AssetError(f"{path}: cannot be removed ({error.strerror})") from error
            freed += size
        if unnamed:
            for folder in {self._root, *((self._root / name).parent for name in self._store.list().versions)}:
                sweep(folder)
        return freed
