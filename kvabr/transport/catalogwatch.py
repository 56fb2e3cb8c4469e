"""Notices that an asset was replaced: its catalog is not the one that it was."""

from __future__ import annotations

import hashlib
from collections import OrderedDict

from kvabr.catalog import Catalog
from kvabr.errors import KvabrError
from kvabr.naming import TrackNamespace

_MOST = 10_000
"""Assets that are remembered."""


class CatalogWatch:
    """Looks at catalogs as they come by. Whoever keeps groups of an asset must let go of them when it is replaced."""

    def __init__(self) -> None:
        self._seen: OrderedDict[TrackNamespace, bytes] = OrderedDict()

    def replaced(self, data: bytes) -> TrackNamespace | None:
        """Look at a catalog.

        Returns:
            The namespace of its asset, if that had another catalog before; None also for what is no catalog.
        """
        try:
            namespace = Catalog.loads(data).namespace
        except KvabrError:
            return None  # players will say what is wrong with it
        digest = hashlib.sha256(data).digest()
        before = self._seen.pop(namespace, digest)
        self._seen[namespace] = digest
        if len(self._seen) > _MOST:
            self._seen.popitem(last=False)
        return namespace if before != digest else None
