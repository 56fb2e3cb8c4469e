"""Assets for tests of the origin: true names, sizes and digests; frames of noise, since no origin looks inside."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Sequence
from pathlib import Path

from kvabr.store.asset import CATALOG, PROFILE, Asset
from kvabr.store.asset_folder import FolderAsset, frame_path
from kvabr.store.live_folder import LIVE, partial_folders
from kvabr.types.catalog import Catalog, Track
from kvabr.types.kv import KVSpec, RopeSpec
from kvabr.types.naming import TrackNamespace, chain
from kvabr.types.passage import PassageNotes, passage_chain

TOKENS_PER_GROUP = 4


def live_folders(root: Path) -> list[Path]:
    """The folders in one in which assets are being written that can be followed."""
    return [path for path in partial_folders(root) if (path / LIVE).exists()]


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


def spec(model: str = "test/model") -> KVSpec:
    return KVSpec.uniform(model, "tokenizer", 1, 1, 2, "float16", RopeSpec(10000.0, 2), group_tokens=TOKENS_PER_GROUP)


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
    """Write one, and give it its name when it is whole, as `kvabr encode` does."""
    chunks = digests(tokens, model=model, salt=salt, passage=passage is not None)
    dice = random.Random(seed)
    partial = path.parent / f".{path.name}.partial"
    tracks = []
    for level in levels:
        frames = [dice.randbytes(frame_bytes + dice.randrange(8)) for _ in chunks]
        frame_path(partial, 0, level).parent.mkdir(parents=True)
        for group, frame in enumerate(frames):
            frame_path(partial, group, level).write_bytes(frame)
        sums = tuple(hashlib.sha256(frame).hexdigest() for frame in frames)
        tracks.append(Track(level, tuple(map(len, frames)), (0.001,) * len(frames), sums))
    if profile is not None:
        (partial / PROFILE).write_bytes(profile)
    catalog = Catalog(
        TrackNamespace(model, chunks[-1]),
        spec(model),
        len(tokens),
        tuple(chunks),
        tuple(tracks),
        profile=None if profile is None else hashlib.sha256(profile).hexdigest(),
        profile_bytes=0 if profile is None else len(profile),
        passage=passage,
    )
    (partial / CATALOG).write_text(catalog.dumps())
    partial.rename(path)
    return FolderAsset.open(path)
