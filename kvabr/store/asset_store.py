"""The assets of a store. An asset's name is the digest of its prompt."""

from __future__ import annotations

import re

from kvabr.store.asset import Asset, AssetVersion, as_asset_errors, version_in
from kvabr.store.asset_writer import AssetWriter
from kvabr.store.files import check_makeable
from kvabr.store.local import LocalStore
from kvabr.store.names import CATALOGS, catalog_name
from kvabr.store.store import Store, exists, listing
from kvabr.types.errors import AssetError, MissingAssetError, UsageError

MAX_LISTED = 1 << 18
DIGEST = re.compile(r"[0-9a-f]{64}")


class AssetStore:
    """The assets of one store."""

    def __init__(self, store: Store, only: str | None = None) -> None:
        """Wrap a store; ``only`` is the prompt digest of the only asset to use."""
        self.store, self.only = store, only

    @property
    def location(self) -> str:
        """Path or URL."""
        return self.store.url if self.only is None else self.store.where(self.only)

    def prepare(self) -> None:
        """Create the store if necessary, and check that it can be written; raise `UsageError` or `AssetError`."""
        with as_asset_errors():
            self.store.blocked(self.store.check_writable())

    def list(self) -> dict[str, AssetVersion]:
        """Return versions of the first `MAX_LISTED` assets by name, without opening them; raise `AssetError`."""
        with as_asset_errors():
            found = self.store.blocked(listing(self.store, CATALOGS))
        versions: dict[str, AssetVersion] = {}
        for each in found.values():
            prompt = each.name.removeprefix(CATALOGS)
            if DIGEST.fullmatch(prompt) and self.only in (None, prompt) and len(versions) < MAX_LISTED:
                versions[prompt] = AssetVersion(each.size, each.modified_s)
        return versions

    def has(self, prompt: str) -> bool:
        """Return True if this prompt has an asset; raise `AssetError` if the store is unreachable."""
        with as_asset_errors():
            return self.store.blocked(exists(self.store, catalog_name(prompt)))

    def open(self, prompt: str | None = None, name: str | None = None, version: AssetVersion | None = None) -> Asset:
        """Open an asset by its prompt digest (None: the only asset of the store), reading only the catalog.

        ``name`` is the name in messages, ``version`` the listed version, if known. Raise `AssetError` if there is no
        such asset, or several if ``prompt`` is None; `FormatError` if the catalog is damaged or of a newer version.
        """
        prompt = prompt or self.only or self._sole()
        if not DIGEST.fullmatch(prompt):
            raise UsageError(f"{self.location}: the name of an asset must have 64 hex digits, got {prompt[:80]!r}")
        if version is None and isinstance(self.store, LocalStore):
            version = version_in(self.store, prompt)
        try:
            return Asset(self.store, name or prompt, prompt, version or AssetVersion(0, 0.0))
        except AssetError as error:
            if not self.has(prompt):
                raise MissingAssetError(f"{self.store.where(prompt)}: no such asset") from error
            raise

    def writer(self, prompt: str | None = None, *, force: bool = False, live: bool = False) -> AssetWriter:
        """Return a writer for an asset with this prompt digest (None: the digest in its catalog).

        ``force`` replaces an existing asset. ``live`` stores each frame as a separate object, so that it can be played
        before the asset is complete. Raise `UsageError` if the asset exists, `AssetError` if the folder cannot be
        written.
        """
        prompt = prompt or self.only
        if prompt is not None and not DIGEST.fullmatch(prompt):
            raise UsageError(f"{self.location}: the name of an asset must have 64 hex digits, got {prompt[:80]!r}")
        if prompt is not None and not force and self.has(prompt):
            raise UsageError(f"{self.store.where(prompt)}: this asset already exists; add --force to replace it")
        if isinstance(self.store, LocalStore):
            check_makeable(self.store.folder)
        return AssetWriter(self.store, prompt, force=force, live=live)

    def close(self) -> None:
        """Release connections. A later request opens new ones."""
        self.store.close()

    def _sole(self) -> str:
        names = sorted(self.list())
        if len(names) == 1:
            return names[0]
        if not names:
            raise MissingAssetError(f"{self.location}: contains no asset; make one with: kvabr encode")
        some = ", ".join(name[:16] + "..." for name in names[:3])
        raise AssetError(
            f"{self.location}: has {len(names)} assets ({some}); give one of them: {self.store.where('DIGEST')}"
        )
