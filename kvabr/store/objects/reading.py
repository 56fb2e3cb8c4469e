"""Reads what is stored, in threads: heads of spans, offers, catalogs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from kvabr.store.objects.bucket import Bucket
from kvabr.store.objects.layout import (
    MAX_OFFER_BYTES,
    MAX_OFFERS,
    MAX_STORED_CATALOG_BYTES,
    StoredCatalog,
    StoreOffer,
    catalog_key,
    offer_key,
)
from kvabr.store.objects.spans import HEAD_BYTES, MAX_HEAD_BYTES, SpanHead, head_bytes, parse_head
from kvabr.types.errors import AssetError, FormatError, NotFoundError, TransportError


@contextmanager
def as_asset_errors() -> Iterator[None]:
    """Turn failed requests into the `AssetError` that `AssetStore` promises."""
    try:
        yield
    except TransportError as error:
        raise AssetError(str(error)) from error


def read_head(bucket: Bucket, key: str) -> tuple[SpanHead, bytes]:
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


def read_offers(bucket: Bucket) -> Iterator[tuple[int, StoreOffer | FormatError]]:
    """Yield all offers by their number, or what is wrong with one, as with those of a newer version."""
    for number in range(MAX_OFFERS):
        try:
            data = bucket.get_sync(offer_key(number), limit=MAX_OFFER_BYTES)
        except NotFoundError:
            return
        try:
            yield number, StoreOffer.loads(data)
        except FormatError as error:
            yield number, FormatError(f"{bucket.below(offer_key(number))}: {error}")


def read_catalog(bucket: Bucket, prompt: str) -> StoredCatalog:
    """Return the stored catalog of a prompt, not checked further; `NotFoundError` if there is none."""
    key = catalog_key(prompt)
    data = bucket.get_sync(key, limit=MAX_STORED_CATALOG_BYTES)
    try:
        return StoredCatalog.loads(data)
    except FormatError as error:
        raise type(error)(f"{bucket.below(key)}: {error}") from error
