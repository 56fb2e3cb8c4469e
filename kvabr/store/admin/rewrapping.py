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
from kvabr.types.words import counted


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
        SealedError: none of the keys opens some of them; all others have been wrapped anew.
    """
    done, closed = Rewrapped(), list[str]()
    store = FolderAssetStore(root)
    for name in sorted(store.list().versions):
        path = root / name / CATALOG
        try:
            catalog = Catalog.read(path)
        except MissingAssetError:
            continue  # a publisher removed it meanwhile
        if (seal := catalog.seal) is None:
            done.open += 1
            continue
        try:
            wraps = ring.wrapped(ring.unwrap(seal.wraps).secret).wraps
        except SealedError as error:
            closed.append(f"{path}: {error}")
            continue
        if wraps == seal.wraps:
            done.same += 1
        else:
            changed = replace(catalog, seal=replace(seal, wraps=wraps))
            write_file(path, changed.dumps().encode(), mode=stat.S_IMODE(path.stat().st_mode))
            done.wrapped += 1
    if closed:
        others = f"; {counted(len(closed) - 1, 'more asset')} cannot be opened" if closed[1:] else ""
        raise SealedError(f"{closed[0]}{others}; {counted(done.wrapped, 'other')} wrapped anew")
    if done == Rewrapped():
        raise MissingAssetError(f"{root}: has no assets; name an asset's folder, or a folder of assets")
    return done
