"""Reads what is stored, in threads: heads of spans, offers, catalogs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from kvabr.store.objects.layout import (
    MAX_OFFER_BYTES,
    MAX_OFFERS,
    MAX_STORED_CATALOG_BYTES,
    StoredCatalog,
    StoreOffer,
    catalog_key,
    offer_key,
)
from kvabr.store.objects.protocol import Objects
from kvabr.store.objects.spans import HEAD_BYTES, MAX_HEAD_BYTES, SpanHead, head_bytes, parse_head
from kvabr.types.errors import AssetError, FormatError, NotFoundError, TransportError


@contextmanager
def as_asset_errors() -> Iterator[None]:
    """Turn failed requests into the `AssetError` that `AssetStore` promises."""
    try:
        yield
    except TransportError as error:
        raise AssetError(str(error)) from error


def read_head(bucket: Objects, key: str) -> tuple[SpanHead, bytes]:
    """Return the head of a span, and the bytes before its first frame.

    Raises `NotFoundError` if there is no such span, `FormatError` if its head is damaged or of a newer version.
    """
    data: bytes | memoryview = bucket.get_sync(key, 0, HEAD_BYTES, limit=HEAD_BYTES)
    try:
        wanted = head_bytes(data)
        if wanted > len(data) and len(data) == HEAD_BYTES:
            data = bytes(data) + bucket.get_sync(key, HEAD_BYTES, wanted, limit=MAX_HEAD_BYTES)
        return parse_head(data), bytes(data[:wanted])
    except FormatError as error:
        raise type(error)(f"{bucket.below(key)}: {error}") from error


def read_offers(bucket: Objects) -> Iterator[tuple[str, StoreOffer | FormatError]]:
    """Yield all offers by their key, in the order of their numbers.

    An offer that cannot be read, such as one of a newer version, is yielded as the error.
    """
    for number in range(MAX_OFFERS):
        key = offer_key(number)
        try:
            found = StoreOffer.loads(bucket.get_sync(key, limit=MAX_OFFER_BYTES))
        except NotFoundError:
            return
        except FormatError as error:
            yield key, FormatError(f"{bucket.below(key)}: {error}")
        else:
            yield key, found


def read_catalog(bucket: Objects, prompt: str) -> StoredCatalog:
    """Return the stored catalog of a prompt, not checked further; `NotFoundError` if there is none."""
    key = catalog_key(prompt)
    data = bucket.get_sync(key, limit=MAX_STORED_CATALOG_BYTES)
    try:
        return StoredCatalog.loads(data)
    except FormatError as error:
        raise type(error)(f"{bucket.below(key)}: {error}") from error
