"""Notices that an asset was replaced: its catalog is not the one that it was."""

from __future__ import annotations

import hashlib
from collections import OrderedDict

from kvabr.types.catalog import Catalog
from kvabr.types.errors import KvabrError
from kvabr.types.naming import TrackNamespace

_MOST = 10_000
"""Assets that are remembered."""


class CatalogWatch:
    """Looks at catalogs as they come by. Whoever keeps groups of an asset must let go of them when it is replaced."""

    def __init__(self) -> None:
        self._seen: OrderedDict[TrackNamespace, bytes] = OrderedDict()

    def replaced(self, namespace: TrackNamespace, digest: bytes) -> bool:
        """Note the catalog of an asset.

        Returns:
            Whether the asset had another one before.
        """
        before = self._seen.pop(namespace, digest)
        self._seen[namespace] = digest
        if len(self._seen) > _MOST:
            self._seen.popitem(last=False)
        return before != digest


def asset_of(data: bytes) -> tuple[TrackNamespace, bytes] | None:
    """Of which asset a catalog is, and its SHA-256; None if it is no catalog. Takes long for a long one."""
    try:
        namespace = Catalog.loads(data).namespace
    except KvabrError:
        return None  # players will say what is wrong with it
    return namespace, hashlib.sha256(data).digest()
