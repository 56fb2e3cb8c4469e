"""The fraction of random questions' passages that a store has, by naming scheme.

Each question follows a few documents in random order. Missing documents are published, and a full store evicts the
least recently used ones. Except for the small random caches, only kvabr's own code runs.

With *content*, a name depends on the document alone, as for kvabr's passages; with *prefix*, also on everything before
it, as in prefix caches. With *both*, documents are stored by prefix and looked up by content; at the beginning every
document is stored once by content (LMCache issue 4663).
"""

from __future__ import annotations

import hashlib
import random
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

import structlog
import torch

from kvabr.client.passages import find_passages
from kvabr.link.moqt.connect import connect
from kvabr.publish.frames import FrameEncoder
from kvabr.server.certificates import ServerTls, check, make
from kvabr.server.limits import ServerLimits
from kvabr.server.metrics import Metrics
from kvabr.server.published_assets import PublishedAssets
from kvabr.server.server import Server
from kvabr.store.asset_store import AssetStore
from kvabr.store.local import LocalStore
from kvabr.store.quota import FolderQuota
from kvabr.transfer.interface import Connection
from kvabr.types.kv import KVSpec, RopeSpec
from kvabr.types.passage import Passage, PassageNotes, passage_chain
from kvabr.types.peer import PeerOptions

Naming = Literal["content", "prefix", "both"]
NAMINGS: tuple[Naming, ...] = get_args(Naming)
SPEC = KVSpec.uniform("reuse", "numbers", 1, 1, 8, "float16", RopeSpec(10000.0, 8, "half"), group_tokens=32)
_TRACK = "FP16"
_LOG = structlog.wrap_logger(structlog.ReturnLogger(), processors=[])


@dataclass(frozen=True, slots=True)
class Collection:
    """Documents, and questions about them."""

    documents: int = 50
    queries: int = 200
    each: int = 5
    room: float = 1.5
    """Size of the store, relative to the bytes of all documents."""
    seed: int = 0

    def passages(self) -> list[Passage]:
        """Return the documents, of 40 to 100 tokens. In most of them the last group is short."""
        dice = random.Random(self.seed)  # noqa: S311 - test data, not secrets
        return [Passage(tuple(dice.choices(range(1000), k=dice.randint(40, 100)))) for _ in range(self.documents)]

    def draws(self) -> list[list[int]]:
        """Return the numbers of each question's documents, in the order of the prompt."""
        dice = random.Random(f"{self.seed} queries")  # noqa: S311 - test data, not secrets
        return [dice.sample(range(self.documents), self.each) for _ in range(self.queries)]


async def reuse(collection: Collection, naming: Naming, progress: Callable[[], None] = lambda: None) -> list[float]:
    """Return the fraction of its documents that each question finds."""
    with tempfile.TemporaryDirectory() as folder:
        root, pem, key = Path(folder) / "assets", Path(folder) / "cert.pem", Path(folder) / "key.pem"
        root.mkdir()
        for path, made in zip((pem, key), make(), strict=True):
            path.write_bytes(made)
        tls, library = ServerTls(pem, key), PublishedAssets(root, log=_LOG)
        server = Server(library, "127.0.0.1", 0, tls, ServerLimits(), _LOG, Metrics())
        await server.start()
        try:
            url = f"moqt://127.0.0.1:{server.address[1]}/"
            async with connect(url, PeerOptions(fingerprint=check(tls).fingerprint)) as origin:
                return await _asked(collection, naming, _Shelf(root, library, collection), origin, progress)
        finally:
            await server.close()


class _Shelf:
    def __init__(self, root: Path, library: PublishedAssets, collection: Collection) -> None:
        self._assets, self._library = AssetStore(LocalStore(root)), library
        self._documents = collection.passages()
        size = sum(self._store(passage, b"") for passage in self._documents)
        self.quota = FolderQuota(LocalStore(root), int(size * collection.room))
        self.quota.make_room(self._documents[-1].name(SPEC).prompt)
        self.look()

    def look(self) -> None:
        self._library.refresh()

    def put(self, passage: Passage, salt: bytes) -> None:
        self._store(passage, salt)
        self.quota.make_room(passage.name(SPEC, salt).prompt)

    def _store(self, passage: Passage, salt: bytes) -> int:
        chunks = passage_chain(
            passage.ids, model=SPEC.model, tokenizer=SPEC.tokenizer, group_tokens=SPEC.group_tokens, salt=salt
        )
        drawn = torch.Generator().manual_seed(int(chunks[-1][:12], 16))
        with self._assets.writer(chunks[-1], force=True) as writer:
            frames = FrameEncoder(SPEC, chunks, len(passage.ids), (_TRACK,), None, writer, passage=PassageNotes("mean"))
            frames.encode((torch.randn(SPEC.shape(len(passage.ids)), generator=drawn),))
            loss = {_TRACK: [0.0] * len(chunks)}
            writer.commit(
                frames.catalog(loss, {_TRACK: 0.0}, loss_method="not measured", estimated=True, source="a bench")
            )
        made = self._assets.open(chunks[-1])
        return sum(made.objects.values()) + made.catalog_size


def salts(naming: Naming, documents: Sequence[Passage]) -> list[tuple[bytes, bytes]]:
    """Return the salts for each document's name in a prompt: for lookup, and for storage.

    A salt that is a digest of all preceding tokens gives the name of a continued chain.
    """
    out, before = [], hashlib.sha256()
    for passage in documents:
        prefix = before.digest()
        out.append((prefix if naming == "prefix" else b"", b"" if naming == "content" else prefix))
        before.update(repr(passage.ids).encode())
    return out


async def _asked(
    collection: Collection, naming: Naming, shelf: _Shelf, origin: Connection, progress: Callable[[], None]
) -> list[float]:
    passages, out = collection.passages(), []
    for draw in collection.draws():
        documents = [passages[number] for number in draw]
        places = list(zip(documents, salts(naming, documents), strict=True))
        found = 0
        for passage, (wanted, stored) in places:
            # One by one, since each may have another salt.
            if passage in await find_passages(origin, [passage], SPEC, salt=wanted):
                found += 1
                shelf.quota.touch(passage.name(SPEC, wanted).prompt)
            if wanted != stored or passage not in await find_passages(origin, [passage], SPEC, salt=stored):
                shelf.put(passage, stored)
        shelf.look()
        out.append(found / len(documents))
        progress()
    return out
