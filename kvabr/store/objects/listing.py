"""What a store lists, page by page, through obstore."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from kvabr.store.objects.blocking import blocks
from kvabr.store.objects.failures import UNREADABLE
from kvabr.store.objects.threads import interruptible

if TYPE_CHECKING:
    from obstore import ObjectMeta

LOG = logging.getLogger("kvabr.store.objects")

_AT_ONCE = 1000


class Listing:
    """The pages of a listing; after a failure it goes on behind the last key that came."""

    def __init__(self, begin: Callable[[str | None, int], Any]) -> None:
        """Begin: ``begin`` takes the key to go on behind, and how many objects a page may have."""
        self._begin, self._at_once = begin, _AT_ONCE
        self._after: str | None = None
        self._stream: Any = None

    async def more(self) -> Sequence[ObjectMeta]:
        """Return the next page, empty behind the last."""
        while True:
            try:
                if blocks():
                    return self._came(interruptible(lambda: next(iter(self._open()), None)))
                return self._came(await anext(aiter(self._open()), None))
            except Exception as error:  # noqa: BLE001  # raised again unless it is of one object
                self._failed(error)

    def _open(self) -> Any:
        if self._stream is None:
            self._stream = self._begin(self._after, self._at_once)
        return self._stream

    def _came(self, page: Sequence[ObjectMeta] | None) -> Sequence[ObjectMeta]:
        if page:
            self._after = page[-1]["path"]
        return page or ()

    def _failed(self, error: Exception) -> None:
        """Leave out an object whose date cannot be one, which fails its whole page; raise anything else again."""
        if isinstance(error, UNREADABLE) and self._at_once == 1:
            LOG.warning("a store lists an object whose date is out of range; it is left out")
            return
        unreadable = isinstance(error, UNREADABLE)
        if unreadable:
            self._at_once = 1
        self._stream = None
        if not unreadable:
            raise error
