"""Publishes assets of noise into stores of any kind, the same bytes for the same groups."""

import hashlib
import random

from kvabr.store.locations import open_store
from kvabr.store.pages import page_kind
from kvabr.types.catalog import Catalog, Track
from kvabr.types.naming import TrackNamespace
from tests.assets import digests, spec

MODEL = "test/model"
LEVELS = ("FP16", "Int4")
LONG = list(range(200))
"""Three pages of 16 groups of 4 tokens, and one of two."""


def noise(chunk, level, size=200):
    """The frame of a group on a level."""
    return random.Random(f"{chunk} {level}").randbytes(size)


def publish(
    place, tokens, *, model=MODEL, measured=False, frame_of=noise, force=False, profile=b"", loss=0.001, **options
):
    """Publish an asset; return its name and whether it is this one that is there now."""
    chunks = digests(tokens, model=model)
    made = spec(model)
    with open_store(place, create=True).writer(chunks[-1], force=force, **options) as writer:
        sha256 = hashlib.sha256(profile).hexdigest() if profile else None
        writer.begin(made, chunks, page_kind(made, [Track(level, (), (), ()) for level in LEVELS], sha256, "sha256"))
        every = {level: [frame_of(chunk, level) for chunk in chunks] for level in LEVELS}
        sums = {level: tuple(hashlib.sha256(frame).hexdigest() for frame in every[level]) for level in LEVELS}
        for group in range(len(chunks)):
            for level in LEVELS:
                writer.frame(group, level, every[level][group], sums[level][group])
        losses = (loss,) * len(chunks)
        tracks = [Track(level, tuple(map(len, every[level])), losses, sums[level]) for level in LEVELS]
        if profile:
            writer.profile(profile)
        writer.commit(
            Catalog(
                TrackNamespace(model, chunks[-1]),
                made,
                len(tokens),
                tuple(chunks),
                tuple(tracks),
                profile=sha256,
                profile_bytes=len(profile),
                estimated=not measured,
            )
        )
    return chunks[-1], writer.published


def names(place):
    return set(open_store(place).list())


def objects(place, prefix=""):
    store = open_store(place).store

    async def listed():
        return [found.name async for found in store.list(prefix)]

    return sorted(store.blocked(listed()))


def replace_object(place, name, data):
    """Put other bytes in the place of an object; None: remove it."""
    store = open_store(place).store
    store.blocked(store.delete([name]))
    if data is not None:
        assert store.blocked(store.put_new(name, data))


def read_object(place, name):
    store = open_store(place).store
    return bytes(store.blocked(store.get(name, limit=1 << 30)))
