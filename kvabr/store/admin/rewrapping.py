"""Changes which keys open the sealed assets of a store; the groups stay as they are."""

from __future__ import annotations

import os
import secrets
import stat
from contextlib import suppress
from dataclasses import dataclass, field, replace

from kvabr.store.asset import CATALOG, AssetStore
from kvabr.store.asset_folder import FolderAssetStore
from kvabr.store.files import PARTIAL, open_regular
from kvabr.store.objects.layout import (
    CATALOGS,
    MAX_STORED_CATALOG_BYTES,
    MAX_WRAPS_BYTES,
    WRAPS,
    StoredCatalog,
    StoredWraps,
    wraps_key,
)
from kvabr.store.objects.protocol import Objects
from kvabr.store.objects.reading import as_asset_errors
from kvabr.store.objects.writer import replace_version
from kvabr.types.catalog import MAX_CATALOG_BYTES, Catalog
from kvabr.types.errors import AssetError, FormatError, MissingAssetError, NotFoundError, SealedError, UsageError
from kvabr.types.sealing import KeyRing
from kvabr.types.words import counted

_TRIES = 5


@dataclass(slots=True)
class Rewrapped:
    """What was done."""

    wrapped: int = 0
    """Assets that other keys open now."""
    same: int = 0
    """Assets that these keys, and no others, have opened before."""
    open: int = 0
    """Assets that are not sealed."""
    closed: list[str] = field(default_factory=list)
    """What none of the keys opens, and what is damaged."""


def rewrap(store: AssetStore, ring: KeyRing) -> Rewrapped:
    """Let the keys of a ring open the sealed assets of a store, and no others.

    What an older version sealed is sealed anew, as buckets need it.

    Raises:
        MissingAssetError: there is no asset.
        AssetError: the store cannot be read, or written.
        SealedError: none of the keys opens some of them, or they are damaged; all others have been wrapped anew.
    """
    done = Rewrapped()
    if isinstance(store, FolderAssetStore):
        _rewrap_folder(store, ring, done)
    else:
        from kvabr.store.objects.asset_store import ObjectAssetStore  # noqa: PLC0415  # needs an extra

        if not isinstance(store, ObjectAssetStore):
            raise UsageError(f"{store.location}: this kind of store cannot be managed")
        with as_asset_errors():
            _rewrap_bucket(store.bucket, ring, done)
    if closed := done.closed:
        others = f"; {counted(len(closed) - 1, 'more asset')} cannot be opened" if closed[1:] else ""
        raise SealedError(f"{closed[0]}{others}; {counted(done.wrapped, 'other')} wrapped anew")
    if done == Rewrapped():
        raise MissingAssetError(f"{store.location}: has no assets; name an asset, or a store of assets")
    return done


def _rewrapped(catalog: Catalog, ring: KeyRing, done: Rewrapped, where: str) -> Catalog | None:
    """Return a catalog for the keys of a ring; None if it stays as it is."""
    if catalog.seal is None:
        done.open += 1
        return None
    try:
        opened = catalog.opened(ring)
    except FormatError as error:
        done.closed.append(f"{where}: {error}")
        return None
    assert opened.key is not None  # noqa: S101  # it was sealed
    maker = catalog.seal.maker or ring.maker_of(opened.key, catalog.chunks[0], catalog.profile or "")
    changed = replace(opened, key=replace(ring.wrapped(opened.key), maker=maker)).sealed
    if changed.seal == catalog.seal:
        done.same += 1
        return None
    done.wrapped += 1
    return changed


# ------------------------------------------------------- folders


def _rewrap_folder(store: FolderAssetStore, ring: KeyRing, done: Rewrapped) -> None:
    for name in sorted(store.list().versions):
        path = store.root / name
        try:
            folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError:
            continue  # a publisher removed it meanwhile
        try:
            _rewrap_asset(folder, ring, done, str(path / CATALOG))
        except OSError as error:
            raise AssetError(f"{path / CATALOG}: cannot be written ({error.strerror})") from error
        finally:
            os.close(folder)


def _rewrap_asset(folder: int, ring: KeyRing, done: Rewrapped, where: str) -> None:
    """Rewrite the catalog in an open folder: a publisher that replaces the asset meanwhile swaps the folder."""
    try:
        with open_regular(CATALOG, dir_fd=folder) as file:
            mode, data = stat.S_IMODE(os.fstat(file.fileno()).st_mode), file.read(MAX_CATALOG_BYTES + 1)
        catalog = Catalog.loads(data)
    except FileNotFoundError:
        return  # a publisher removed it meanwhile
    except OSError as error:
        done.closed.append(f"{where}: cannot be read ({error.strerror})")
        return
    except FormatError as error:
        done.closed.append(f"{where}: {error}")
        return
    changed = _rewrapped(catalog, ring, done, where)
    if changed is None:
        return
    partial = f".{CATALOG}.{secrets.token_hex(8)}{PARTIAL}"
    handle = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode, dir_fd=folder)
    try:
        with os.fdopen(handle, "wb") as file:
            os.fchmod(handle, mode)  # whatever the umask: who could read it still can
            file.write(changed.dumps().encode())
            file.flush()
            os.fsync(file.fileno())
        os.rename(partial, CATALOG, src_dir_fd=folder, dst_dir_fd=folder)
    except BaseException:
        os.unlink(partial, dir_fd=folder)
        raise


# ------------------------------------------------------- buckets


def _rewrap_bucket(bucket: Objects, ring: KeyRing, done: Rewrapped) -> None:
    """Rewrap catalogs, and the objects that open what is found by its spans; those that are missing are made."""
    left = {info.key for info in bucket.list_sync(WRAPS)}
    wanted: dict[str, StoredWraps] = {}
    for key in sorted(info.key for info in bucket.list_sync(CATALOGS)):
        if (found := _rewrap_stored(bucket, key, ring, done)) is not None:
            wanted[found[0]] = found[1]
    for key in sorted(left - wanted.keys()):  # of assets that were evicted, whose spans may be there still
        with suppress(NotFoundError, FormatError):
            known = StoredWraps.loads(bucket.get_sync(key, limit=MAX_WRAPS_BYTES))
            wanted[key] = StoredWraps(ring.wrapped(ring.unwrap(known.wraps)).wraps)
    for key, wraps in wanted.items():
        bucket.put_sync(key, wraps.dumps())


def _rewrap_stored(bucket: Objects, key: str, ring: KeyRing, done: Rewrapped) -> tuple[str, StoredWraps] | None:
    """Rewrap one catalog; return what opens its spans, and the key of that. None: it is not sealed, or was not opened.

    A publisher may replace it meanwhile: then it is read again.
    """
    for _ in range(_TRIES):
        if (info := bucket.head_sync(key)) is None:
            return None  # a collector removed it meanwhile
        try:
            stored = StoredCatalog.loads(bucket.get_sync(key, limit=MAX_STORED_CATALOG_BYTES))
            catalog = stored.parsed()
        except NotFoundError:
            return None
        except FormatError as error:
            done.closed.append(f"{bucket.below(key)}: {error}")
            return None
        counts = replace(done, closed=list(done.closed))
        changed = _rewrapped(catalog, ring, counts, bucket.below(key))
        if changed is None or replace_version(bucket, info, replace(stored, catalog=changed.dumps().encode()).dumps()):
            done.wrapped, done.same, done.open, done.closed = counts.wrapped, counts.same, counts.open, counts.closed
            seal = (changed or catalog).seal
            opened = seal is not None and {wrap.key for wrap in seal.wraps} == {one.id for one in ring.keys}
            if seal is None or not opened:
                return None
            return wraps_key(stored.offer, catalog.chunks[0]), StoredWraps(seal.wraps)
    raise AssetError(f"{bucket.below(key)}: is replaced all the time; try again")
