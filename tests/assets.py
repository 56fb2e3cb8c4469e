"""Assets for tests of the origin: true names, sizes and digests; frames of noise, since no origin looks inside."""

import hashlib
import random
from collections.abc import Sequence
from pathlib import Path

from kvabr.store.asset import Asset
from kvabr.store.live import LIVE_NAME
from kvabr.store.locations import open_asset, open_store
from kvabr.store.names import LIVE
from kvabr.types.catalog import Catalog, Track
from kvabr.types.kv import KVSpec, RopeSpec
from kvabr.types.naming import TrackNamespace, chain
from kvabr.types.passage import PassageNotes, passage_chain

TOKENS_PER_GROUP = 4


def live_folders(root: Path) -> list[Path]:
    """The folders of productions below a folder, in which assets are being written that can be followed."""
    return [path.parent for path in root.rglob(f"{LIVE}*/{LIVE_NAME}")]


def frame_file(path: Path, group: int, track: str) -> Path:
    """The file of the object with a frame: of the only asset in a folder, or of one in a store."""
    asset = open_asset(path)
    return asset.store.path(asset.place(group, track).name)


def open_files(below: Path) -> int:
    """How many files below a folder this process has open, mapped ones included."""
    links = []
    for handle in Path("/proc/self/fd").iterdir():
        try:
            links.append(handle.readlink())
        except OSError:  # that of the folder itself
            continue
    return sum(link.is_relative_to(below) for link in links)


def whole(opened) -> bytes:
    """Everything that can be read from a frame or a group, which is closed then."""
    try:
        return bytes(opened.read(0, opened.size))
    finally:
        opened.close()


def spec(model: str = "test/model", frame_bytes: int = 0) -> KVSpec:
    """A small model; a larger one for groups that it could not need."""
    layers, heads = (1, 1) if frame_bytes < 1_000_000 else (512, 64)
    return KVSpec.uniform(
        model, "tokenizer", layers, heads, 2, "float16", RopeSpec(10000.0, 2), group_tokens=TOKENS_PER_GROUP
    )


def digests(tokens: Sequence[int], *, model: str = "test/model", salt: bytes = b"", passage: bool = False) -> list[str]:
    named = passage_chain if passage else chain
    return named(tokens, model=model, tokenizer="tokenizer", group_tokens=TOKENS_PER_GROUP, salt=salt)


def make_asset(
    path: Path,
    tokens: Sequence[int],
    *,
    model: str = "test/model",
    salt: bytes = b"",
    levels: Sequence[str] = ("FP16", "Int4"),
    profile: bytes | None = None,
    frame_bytes: int = 40,
    seed: int = 1,
    passage: PassageNotes | None = None,
) -> Asset:
    """Publish one into a store of its own, with an object for each frame."""
    chunks = digests(tokens, model=model, salt=salt, passage=passage is not None)
    dice = random.Random(seed)
    tracks = []
    with open_store(path).writer(force=True, live=True) as writer:
        for level in levels:
            frames = [dice.randbytes(frame_bytes + dice.randrange(8)) for _ in chunks]
            sums = tuple(hashlib.sha256(frame).hexdigest() for frame in frames)
            for group, frame in enumerate(frames):
                writer.frame(group, level, frame, sums[group])
            tracks.append(Track(level, tuple(map(len, frames)), (0.001,) * len(frames), sums))
        if profile is not None:
            writer.profile(profile)
        catalog = Catalog(
            TrackNamespace(model, chunks[-1]),
            spec(model, frame_bytes),
            len(tokens),
            tuple(chunks),
            tuple(tracks),
            profile=None if profile is None else hashlib.sha256(profile).hexdigest(),
            profile_bytes=0 if profile is None else len(profile),
            passage=passage,
        )
        writer.commit(catalog)
    return open_asset(path)
