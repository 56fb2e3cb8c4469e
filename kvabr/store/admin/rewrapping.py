"""Changes which keys open the sealed assets in a folder; the groups stay as they are."""

from __future__ import annotations

import stat
from dataclasses import dataclass, replace
from pathlib import Path

from kvabr.store.asset import CATALOG
from kvabr.store.asset_folder import FolderAssetStore
from kvabr.store.files import write_file
from kvabr.types.catalog import Catalog
from kvabr.types.errors import MissingAssetError, SealedError
from kvabr.types.sealing import KeyRing


@dataclass(slots=True)
class Rewrapped:
    """What was done."""

    wrapped: int = 0
    """Assets that other keys open now."""
    same: int = 0
    """Assets that these keys, and no others, have opened before."""
    open: int = 0
    """Assets that are not sealed."""


def rewrap(root: Path, ring: KeyRing) -> Rewrapped:
    """Let the keys of a ring open the sealed assets of a folder, and no others.

    Raises:
        MissingAssetError: there is no asset.
        SealedError: none of the keys opens one of them; those before it have been wrapped anew.
    """
    done = Rewrapped()
    store = FolderAssetStore(root)
    for name in sorted(store.list().versions):
        path = root / name / CATALOG
        catalog = Catalog.read(path)
        if (seal := catalog.seal) is None:
            done.open += 1
            continue
        try:
            wraps = ring.wrapped(ring.unwrap(seal.wraps).secret).wraps
        except SealedError as error:
            raise SealedError(f"{path}: {error}") from error
        if wraps == seal.wraps:
            done.same += 1
        else:
            changed = replace(catalog, seal=replace(seal, wraps=wraps))
            write_file(path, changed.dumps().encode(), mode=stat.S_IMODE(path.stat().st_mode))
            done.wrapped += 1
    if done == Rewrapped():
        raise MissingAssetError(f"{root}: has no assets; name an asset's folder, or a folder of assets")
    return done
