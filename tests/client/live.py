"""A cache that is published while it is played: a producer that a test moves from group to group, and plays of it."""

import asyncio
import hashlib
import json
from contextlib import asynccontextmanager
from dataclasses import replace

import torch

from kvabr.client.async_client import AsyncClient
from kvabr.client.options import PlayOptions
from kvabr.player.assembler import Assembler
from kvabr.server.live_tracks import GrowingBytes
from kvabr.server.publication import BytesPublication
from kvabr.types.catalog import RECOMPUTED
from kvabr.types.live import UNKNOWN, LiveCatalog, LiveEnd, PublishedFrames
from kvabr.types.naming import (
    CATALOG_TRACK,
    EDGE_TRACK,
    LIVE_PREFIX_TRACK,
    LIVE_TRACK,
    MODELS_TRACK,
    parse_prefix_track,
    prefix_key,
)
from tests.memory_transport import MemoryConnection, MemoryLink
from tests.toymodel import SPEC, prompt

KEY = "0123456789abcdef"
TOKENS = prompt(160).tokens
GROUPS = 10
"""Of the asset."""


class Producer:
    """Publishes the frames of an asset, group by group, under the asset's own name."""

    def __init__(self, asset, *, pace_s=1.0, expected=1.1):
        """``expected``: the expected sizes as a multiple of the real ones."""
        self.asset, self.catalog = asset, asset.catalog
        tracks = tuple(
            replace(
                track,
                bytes=tuple(max(1, int(expected * size)) for size in track.bytes),
                digests=(UNKNOWN,) * len(track.bytes),
                measured=None,
            )
            for track in self.catalog.tracks
        )
        count = len(self.catalog.chunks)
        seconds = tuple(pace_s * (group + 1) for group in range(count))
        self.live = LiveCatalog(replace(self.catalog, tracks=tracks, mixes=()), seconds, KEY)
        self.news = GrowingBytes()
        self.levels = {
            part.track_name(track.name): GrowingBytes()
            for part in self.catalog.spec.parts
            for track in self.catalog.tracks
        }
        self.begun = True
        """Whether it can be found."""
        self.forgotten = False
        """Whether it is complete, and its news are no longer there."""
        self.published = 0

    def frames(self, chunk):
        """The frames of a group of tokens, by the name of the published track."""
        found = {}
        for group in range(self.catalog.groups):
            if self.catalog.unit(group).chunk == chunk:
                for track in self.catalog.tracks:
                    name, number = self.catalog.address(group, track.name)
                    found[name] = self.asset.frame(number, name)
        return found

    def publish(self, chunks=1, *, left_out=(), rest_s=None, spoil=None, tell=True):
        """Publish the next groups of tokens; ``spoil`` changes a frame before it is sent, given its name and bytes."""
        for _ in range(chunks):
            chunk = self.published
            frames = self.frames(chunk)
            told = {
                name: (len(frame), hashlib.sha256(frame).hexdigest())
                for name, frame in frames.items()
                if name not in left_out
            }
            for name, frame in frames.items():
                self.levels[name].append(frame if spoil is None else spoil(name, frame))
            self.published += 1
            if tell:
                self.news.append(PublishedFrames(KEY, chunk, float(chunk), told, rest_s).dumps())

    def add(self, chunk, names, rest_s=None):
        """Announce further frames of a group of tokens."""
        told = {
            name: (len(frame), hashlib.sha256(frame).hexdigest())
            for name, frame in self.frames(chunk).items()
            if name in names
        }
        self._tell(chunk, told, rest_s)

    def _tell(self, chunk, told, rest_s):
        news = PublishedFrames(KEY, chunk, float(chunk), told, rest_s)
        self.news.append(news.dumps())

    async def run(self, pace_s, chunks=None):
        """Publish the rest at a pace, and end after the last group."""
        left = len(self.catalog.chunks) - self.published
        for _ in range(left if chunks is None else chunks):
            await asyncio.sleep(pace_s)
            self.publish()
        if self.published == len(self.catalog.chunks):
            self.end()

    def end(self, reason=""):
        self.news.append(LiveEnd(KEY, reason).dumps())
        for track in (self.news, *self.levels.values()):
            track.finish(reason)

    def find(self, namespace, track):
        """The publication that an origin serves."""
        catalog = self.catalog
        if track == MODELS_TRACK:
            return BytesPublication(json.dumps({"models": [catalog.spec.to_json()]}).encode())
        if not self.begun:
            return None
        text = BytesPublication(self.live.dumps().encode())
        if track.startswith(LIVE_PREFIX_TRACK):
            same = (catalog.namespace.model, catalog.chunks[0]) == (namespace.model, namespace.prompt)
            keys = {prefix_key(catalog.chunks[0]), *parse_prefix_track(track)} if same else set()
            return text if keys & set(map(prefix_key, catalog.chunks)) else None
        if namespace != catalog.namespace:
            return None
        if track == CATALOG_TRACK and self.forgotten:
            return BytesPublication(catalog.dumps().encode())
        if track in (LIVE_TRACK, EDGE_TRACK) and not self.forgotten:
            return text if track == LIVE_TRACK else self.news
        return self.levels.get(track)


def right(found, asset, skip=0):
    """Whether a result has, of every group, exactly what the frame on its track decodes to."""
    catalog = asset.catalog.suffix(skip)
    assembler = Assembler(catalog)
    sizes = [catalog.group_tokens(group) for group in range(len(found.coverage))]
    begin = 0
    for group, (track, size) in enumerate(zip(found.coverage, sizes, strict=True)):
        place = found.kv[:, :, :, begin : begin + size]
        if track != RECOMPUTED:
            assembler.put(group, track, asset.frame(skip + group, track))
            if not torch.equal(place, assembler._place(group).whole):
                return False
        elif not place.abs().sum() > 0:
            return False
        begin += size
    return begin == found.kv.shape[3] == found.tokens


@asynccontextmanager
async def origin(producer, rate=1e6, rtt_s=0.02, **options):
    async with MemoryConnection(producer.find, MemoryLink(rate, rtt_s), **options) as link:
        yield link


@asynccontextmanager
async def working(producer, pace_s, chunks=None):
    task = asyncio.ensure_future(producer.run(pace_s, chunks))
    try:
        yield
    finally:
        task.cancel()
        await asyncio.wait({task})


async def play(link, deadline=30.0, engine=None, tokens=TOKENS, **options):
    async with AsyncClient(link, model=None if engine else SPEC) as client:
        return await client.play(tokens, deadline=deadline, engine=engine, options=PlayOptions(**options))
