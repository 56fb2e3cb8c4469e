"""Objects of stores: pages, catalogs, live catalogs and their news, encrypted objects; and the URLs of stores."""

import hashlib
import json
import zlib
from dataclasses import replace
from functools import cache

from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from kvabr.link.objects.page_search import prefix_of
from kvabr.store import encrypted
from kvabr.store.encrypted import EncryptedStore
from kvabr.store.locations import split_asset
from kvabr.store.memory import MemoryStore
from kvabr.store.names import PAGE_GROUPS
from kvabr.store.pages import Page, pages_of, placed, with_pages
from kvabr.store.removing import objects_of
from kvabr.store.url import StoreUrl
from kvabr.types.catalog import Catalog, Track
from kvabr.types.digests import unknown
from kvabr.types.errors import FormatError, RequestError, UsageError
from kvabr.types.live import LiveCatalog, LiveEnd, NewsOrder, PublishedFrames, parse_edges, published_catalog
from kvabr.types.naming import TrackNamespace, chain
from kvabr.types.units import count_of
from tests.catalogs import catalog
from tests.client.classes import HYBRID
from tests.fuzz.target import SEPARATOR, Target, family, refused

_KEY, _PREFIX = bytes(range(32)), bytes(7)


@cache
def made(*, hybrid: bool = False) -> Catalog:
    """Return the catalog of a small asset, with digests of made-up frames: two pages, of three groups of one class."""
    spec = HYBRID if hybrid else replace(catalog(1).spec, group_tokens=2)
    tokens = spec.group_tokens * (PAGE_GROUPS + 1) + 1
    chunks = chain(list(range(tokens)), model=spec.model, tokenizer=spec.tokenizer, group_tokens=spec.group_tokens)
    units = range(count_of(spec, tokens))
    tracks = [
        Track(
            name,
            tuple(unit % 5 + 7 for unit in units),
            tuple(unit / 7 for unit in units),
            tuple(hashlib.sha256(f"{name} {unit}".encode()).hexdigest() for unit in units),
            refines=below,
            decode_s=0.25,
            packs=() if hybrid else (pack,),
        )
        for name, below, pack in (("AC-L0", None, 16), ("AC-L1", "AC-L0", 4))
    ]
    return Catalog(TrackNamespace(spec.model, chunks[-1]), spec, tokens, tuple(chunks), tuple(tracks))


def page_json(page: Page) -> bytes:
    return zlib.decompress(page.dumps())


def packed(text: bytes) -> bytes:
    """Return a page as it is stored, whatever its JSON is."""
    return zlib.compress(text)


# ------------------------------------------------------- targets


def _page(data: bytes) -> bool:
    page = refused(lambda: Page.loads(data), FormatError)
    if page is None:
        return False
    assert Page.loads(page.dumps()) == page
    for track in page.tracks:
        for number, size in enumerate(track.bytes):
            found = page.place(track.name, track.first + number)
            assert found is not None
            assert found.last - found.first == size
            assert found.digest == track.digests[number]
        assert page.place(track.name, track.first + len(track.bytes)) is None
    assert 0 <= page.shared([chunk[:16] for chunk in made().chunks]) <= PAGE_GROUPS
    if page.first == 0:
        found = refused(lambda: prefix_of([page]), FormatError)
        assert found is None or found.catalog is None or found.catalog.tokens <= page.tokens
    return True


def _catalog(data: bytes) -> bool:
    found = refused(lambda: Catalog.loads(data), FormatError)
    if found is None:
        return False
    sizes = objects_of(found)
    for name, track in found.published.items():
        for group, size in enumerate(track.bytes):
            place = placed(found, name, group)
            assert place is not None
            assert place.last - place.first == size
            assert place.last <= sizes[place.name]
    if found.passage is None and not found.position:
        pages = refused(lambda: pages_of(found), FormatError)
        if pages is not None:
            assert refused(lambda: with_pages(found, pages), FormatError) in (None, found)
    return True


def _live(data: bytes) -> bool:
    """A live catalog, and after a separator its news."""
    text, _, told = data.partition(SEPARATOR)
    live = refused(lambda: LiveCatalog.loads(text), FormatError)
    messages = refused(lambda: parse_edges(told), FormatError)
    if live is None or messages is None:
        return False
    assert LiveCatalog.loads(live.dumps().encode()).key == live.key
    order, news = NewsOrder(live), list[PublishedFrames]()
    for message in messages:
        if isinstance(message, LiveEnd) or refused(lambda: order.take(message) or True, FormatError) is None:  # noqa: B023
            break
        if message.group == len(news):
            news.append(message)
    shorter = refused(lambda: published_catalog(live, news), FormatError)
    assert shorter is None or len(shorter.chunks) <= len(news)
    return True


def _sealed(data: bytes) -> bool:
    """An object as it is stored encrypted; no range of it is taken for anything else than the whole."""
    memory = MemoryStore()
    store = EncryptedStore(memory, _KEY)
    store.blocked(memory.put_new("g/x", data))
    whole = refused(lambda: store.blocked(store.get("g/x", limit=1 << 20)), RequestError)
    for first, last in ((0, 5), (3, 4), (2, 1 << 16)):
        part = refused(lambda: store.blocked(store.get("g/x", first, last, limit=last - first)), RequestError)  # noqa: B023
        assert (part is None) == (whole is None)
        assert part is None or whole is None or bytes(part) == bytes(whole[first:last])
    assert whole is None or bytes(whole) in _PLAIN
    return whole is not None


_PLAIN = (b"", b"x", b"some bytes of a frame")


def _valid_sealed() -> list[bytes]:
    known = hashlib.sha256(b"kvabr.store-key/1\0" + _KEY).digest()[:4]
    head = b"KVEN\x01" + known + _PREFIX
    return [head + AESGCM(_KEY).encrypt(encrypted._nonce(_PREFIX, 0, last=True), plain, b"g/x") for plain in _PLAIN]


def _url(data: bytes) -> bool:
    text = data.decode("utf-8", "replace")
    found = refused(lambda: StoreUrl.parse(text), UsageError)
    split_asset(text)
    if found is None:
        return False
    assert StoreUrl.parse(str(found)) == found
    assert not any(part in ("", ".", "..") for part in found.root.split("/")[:-1])
    before, question, options = str(found).partition("?")
    assert split_asset(f"{before}/{'ab' * 32}{question}{options}") == (str(found), "ab" * 32)
    return True


def _json(text: str) -> bytes:
    return json.dumps(json.loads(text)).encode()


@cache
def live_catalog(*, hybrid: bool = False) -> LiveCatalog:
    found = made(hybrid=hybrid)
    tracks = [replace(track, digests=(unknown(),) * len(track.digests), packs=()) for track in found.tracks]
    times = tuple(float(group + 1) for group in range(len(found.chunks)))
    return LiveCatalog(replace(found, tracks=tuple(tracks)), times, "0123456789abcdef")


def _valid_live() -> list[bytes]:
    live = live_catalog()
    frames = {track.name: (track.bytes[0], made().tracks[0].digests[0]) for track in live.catalog.tracks}
    base = dict(list(frames.items())[:1])
    first = PublishedFrames(live.key, 0, 1.0, frames), PublishedFrames(live.key, 1, 2.0, base, 0.5)
    told = b"".join((*(each.dumps() for each in first), LiveEnd(live.key, "stopped").dumps()))
    return [live.dumps().encode() + SEPARATOR + told, live_catalog(hybrid=True).dumps().encode()]


def _pages() -> list[Page]:
    return [page for hybrid in (False, True) for page in pages_of(made(hybrid=hybrid))]


STORED = family(
    Target(_page, lambda: [page.dumps() for page in _pages()], most_bytes=8192),
    Target(lambda data: _page(packed(data)), lambda: [page_json(page) for page in _pages()], most_bytes=24 << 10),
    Target(_sealed, _valid_sealed),
    Target(_live, _valid_live, most_bytes=24 << 10),
    Target(_catalog, lambda: [_json(made(hybrid=hybrid).dumps()) for hybrid in (False, True)], most_bytes=24 << 10),
    Target(
        _url,
        lambda: [
            b"s3://bucket/a/b?endpoint=http://h:1&region=r&anonymous=true", b"gs://bucket", b"http://h:80/p",
            b"az://box/p?account=a",
        ],
    ),
)  # fmt: skip
