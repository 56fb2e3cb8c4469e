"""When a request to an object store that failed is made again."""

from __future__ import annotations

import random
from typing import Protocol

from kvabr.store.objects.failures import Failure

TRIES = 3
_BACKOFF_S = 0.1


class Asked(Protocol):
    """What failed requests are made again of: a bucket."""

    made: int

    def renew(self, made: int, failure: Failure) -> bool:
        """See `Bucket.renew`."""

    def failed(self, key: str, what: str, error: Exception) -> Exception:
        """See `Bucket.failed`."""

    def close(self) -> None:
        """See `Bucket.close`."""


class Tries:
    """Tries of one request: of what may pass three, and one more with credentials that were read again."""

    def __init__(self, bucket: Asked, tries: int = TRIES) -> None:
        """Begin a request of a bucket."""
        self._bucket, self._left, self._made, self._renewed = bucket, tries, bucket.made, False

    def failed(self, key: str, what: str, error: Exception) -> float:
        """Return the seconds to wait before the next try; raise if there is none."""
        failure = Failure.of(error)
        if failure.exhausted:
            self._bucket.close()  # its idle connections may be what there are too many of
        if not self._renewed and self._bucket.renew(self._made, failure):
            self._renewed = True
            return 0.0
        self._left -= 1
        if self._left and failure.passes:
            return _BACKOFF_S * 2.0 ** (TRIES - self._left) * random.uniform(0.5, 1.5)  # noqa: S311 - no secret
        told = self._bucket.failed(key, what, error)
        try:
            if told is error:
                raise error
            raise told from error
        finally:
            del told, error  # they know this frame: the two would keep each other, and with them a store's connections
