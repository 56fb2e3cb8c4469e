"""Origins by the scheme of a URL.

    moqt://HOST[:PORT]/                          an origin or a relay (`kvabr.link.moqt.connect`)
    s3://BUCKET/PREFIX, gs://..., az://...       an object store; credentials from the environment
    http://HOST/PREFIX, https://...              the same objects through any HTTP cache
    file:///PATH, memory://NAME                  the same objects in a folder, or in this process (tests)

``#kvcache:<model>/<prompt digest>`` at the end names an asset.
"""

from __future__ import annotations

import asyncio

from kvabr.link.moqt.connect import asset_of, connect, parse_namespace, parse_url
from kvabr.link.objects.connection import StoreConnection
from kvabr.store.local import LocalStore
from kvabr.store.locations import SCHEMES, open_objects, split_asset
from kvabr.store.url import WEB
from kvabr.transfer.peer import Peer
from kvabr.types.errors import ConnectionLostError, NoAnswerError, UsageError
from kvabr.types.peer import PeerOptions

__all__ = ["asset_of", "check_url", "dialling", "is_object_store", "parse_namespace"]


def is_object_store(url: str) -> bool:
    """Return True if the URL is of an object store, or of an HTTP cache of one."""
    scheme, separator, _ = url.partition("://")
    return bool(separator) and scheme in SCHEMES


def check_url(url: str) -> None:
    """Raise `UsageError` unless plays can use the URL."""
    if is_object_store(url):
        _store_url(url)
    else:
        parse_url(url)


def dialling(url: str, how: PeerOptions | None = None, *, needed: bool = True) -> Peer:
    """Return the peer of a URL; its context manager or its first request dials.

    ``how`` are the options of the connection; stores take no tokens and certificates. ``needed`` is as for
    `kvabr.link.moqt.connect.connect`.

    Raises:
        UsageError: the URL or an option is wrong, or the package for object stores is missing.
        TransportError: from ``async with``: the peer cannot be reached.
    """
    how = how or PeerOptions()
    if not is_object_store(url):
        return connect(url, how, needed=needed)
    if not how.for_stores:
        raise UsageError(
            f"{url.partition('?')[0]}: tokens and certificates are for moqt:// URLs; the credentials of an object "
            "store come from the environment, and its certificate is checked by the system"
        )
    return Peer(StoreDialler(_store_url(url), how.timeout_s), needed=needed)


class StoreDialler:
    """Opens a store; a `kvabr.transfer.peer.Dialler`."""

    max_connections = 1

    def __init__(self, url: str, timeout_s: float) -> None:
        """Raise `UsageError` if the package for object stores is missing."""
        self._store, self._timeout_s = open_objects(url), timeout_s
        if isinstance(self._store, LocalStore) and not self._store.folder.is_dir():
            raise UsageError(f"{url}: no such folder; publish something there first, or correct the URL")
        self.names: tuple[str, ...] = (self._store.url,)

    async def dial(self) -> StoreConnection:
        connection = StoreConnection(self._store)
        try:
            async with asyncio.timeout(self._timeout_s):
                await connection.index.open()
        except BaseException as error:
            await connection.close()
            if isinstance(error, TimeoutError):
                raise NoAnswerError(f"{self._store.url}: no answer within {self._timeout_s:.3g} s") from error
            if self._store.url.partition("://")[0] in WEB and type(error) is ConnectionLostError:
                raise ConnectionLostError(f"{error}; the URL of an origin or relay begins with moqt://") from error
            raise
        return connection


def _store_url(url: str) -> str:
    plain = url.partition("#")[0]
    where, prompt = split_asset(plain)
    if prompt is not None:
        raise UsageError(f"{where}: the URL must name a store; to play one asset, give {where}#kvcache:MODEL/{prompt}")
    open_objects(plain)  # raises if the package is missing
    return plain
