"""Publishes assets of noise into stores of any kind, the same bytes for the same groups."""

from __future__ import annotations

import hashlib
import random
import secrets

from kvabr.store.locations import open_store
from kvabr.types.catalog import Catalog, Track
from kvabr.types.naming import TrackNamespace
from tests.assets import digests, spec

MODEL = "test/model"
LEVELS = ("FP16", "Int4")
LONG = list(range(200))
"""Three spans of 16 groups of 4 tokens, and one of two."""


def noise(chunk, level):
    """The frame of a group on a level."""
    return random.Random(f"{chunk} {level}").randbytes(200)


def publish(place, tokens, *, model=MODEL, measured=False, frame_of=noise, force=False, profile=b""):
    """Publish an asset; return its name."""
    chunks = digests(tokens, model=model)
    tracks = []
    with open_store(place, create=True).writer(chunks[-1], force=force) as writer:
        for level in LEVELS:
            frames = [frame_of(chunk, level) for chunk in chunks]
            for group, frame in enumerate(frames):
                writer.frame(group, level, frame)
            sums = tuple(hashlib.sha256(frame).hexdigest() for frame in frames)
            tracks.append(Track(level, tuple(map(len, frames)), (0.001,) * len(frames), sums))
        if profile:
            writer.profile(profile)
        writer.commit(
            Catalog(
                TrackNamespace(model, chunks[-1]),
                spec(model),
                len(tokens),
                tuple(chunks),
                tuple(tracks),
                profile=hashlib.sha256(profile).hexdigest() if profile else None,
                profile_bytes=len(profile),
                estimated=not measured,
            )
        )
    return chunks[-1]


def new_place(kind, tmp_path):
    """An empty store: a folder, or a bucket in memory or in a folder."""
    if kind == "folder":
        return str(tmp_path / "assets")
    return f"memory://{secrets.token_hex(6)}" if kind == "memory" else f"file://{tmp_path}/objects?layout=objects"


def names(place):
    """The assets of a store, by their names."""
    return set(open_store(place).list().versions)
