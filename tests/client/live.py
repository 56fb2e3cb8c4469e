"""A cache that is published while it is played: a producer that a test moves from group to group."""

from __future__ import annotations

import asyncio
import hashlib
import json
from dataclasses import replace

from kvabr.server.growing import GrowingBytes
from kvabr.server.publication import BytesPublication
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

KEY = "0123456789abcdef"


class Producer:
    """Publishes the frames of an asset, group by group, under the asset's own name."""

    def __init__(self, asset, *, pace_s=1.0, expected=1.1):
        """``expected``: what sizes are expected, as a multiple of the real ones."""
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

    def publish(self, chunks=1, *, left_out=(), spoil=None, tell=True):
        """Publish the next groups of tokens; ``spoil`` changes what is sent of a frame, given its name and bytes."""
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
                self.news.append(PublishedFrames(KEY, chunk, float(chunk), told).dumps())

    async def run(self, pace_s, chunks=None):
        """Publish what is left at a pace, and end if that is all."""
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
        """What an origin serves of it."""
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
