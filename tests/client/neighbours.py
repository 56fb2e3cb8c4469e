"""Processes of one host that play the same asset. They are forked from one that has imported everything."""

from __future__ import annotations

import asyncio
import hashlib
import multiprocessing
from pathlib import Path

import torch

from kvabr.client.async_client import AsyncClient
from kvabr.client.options import Limits, PlayOptions
from kvabr.codec.base import GroupContext
from kvabr.codec.group import encode_group
from kvabr.store.asset_folder import FolderAsset, FolderAssetWriter
from kvabr.types.catalog import Catalog, Track
from kvabr.types.digests import digest_of
from kvabr.types.naming import TrackNamespace, chain
from tests import kvdata
from tests.client.served import LIMIT_S

SPEC = kvdata.spec(4, 4, 64, group_tokens=128, rope=None)
"""Groups of 512 KiB of FP16: large enough to be mapped."""


TRACKS = ("FP16", "Int8")
LOSS = {"FP16": 0.0, "Int8": 0.001}


def sha256_of(kv):
    return hashlib.sha256(kv.contiguous().view(torch.uint8).numpy()).hexdigest()


def make_asset(path, groups=12):
    """Write an asset; return it, and the SHA-256 of its exact cache."""
    kv = kvdata.cache(SPEC, groups * SPEC.group_tokens).half()
    chunks = chain(range(groups * SPEC.group_tokens), model=SPEC.model, tokenizer=SPEC.tokenizer)
    made = {track: ([], []) for track in TRACKS}
    with FolderAssetWriter(path) as writer:
        for group, chunk in enumerate(chunks):
            place = GroupContext(SPEC, group * SPEC.group_tokens, SPEC.group_tokens)
            first = group * SPEC.group_tokens
            own = kv[:, :, :, first : first + SPEC.group_tokens]
            for track, (sizes, digests) in made.items():
                frame = encode_group(own, track, place, chunk, group)
                writer.frame(group, track, frame)
                sizes.append(len(frame))
                digests.append(digest_of(frame, "sha256"))
        tracks = tuple(
            Track(name, tuple(sizes), (LOSS[name],) * groups, tuple(digests)) for name, (sizes, digests) in made.items()
        )
        space = TrackNamespace(SPEC.model, chunks[-1])
        writer.commit(Catalog(space, SPEC, groups * SPEC.group_tokens, tuple(chunks), tracks))
    return FolderAsset.open(path), sha256_of(kv)


class Neighbour:
    """A process that plays when it is told to."""

    def __init__(
        self, url, disk, catalog, *, policy="fixed:FP16", deadline=LIMIT_S, memory=1 << 30, disk_bytes=1 << 30, **how
    ):
        self._pipe, other = _FORKED.Pipe()
        limits = Limits(memory_bytes=memory, disk=disk, disk_bytes=disk_bytes)
        given = (other, url, limits, PlayOptions(policy=policy), catalog.namespace, deadline, how)
        self._process = _FORKED.Process(target=_run, args=given, daemon=True)
        self._process.start()
        other.close()
        self.pid = self._process.pid

    async def ready(self):
        assert await self.result() == "ready"

    def begin(self):
        self._pipe.send("play")

    async def result(self):
        """What it says of a play."""
        assert await asyncio.to_thread(self._pipe.poll, LIMIT_S)
        return self._pipe.recv()

    async def play(self):
        self.begin()
        return await self.result()

    async def end(self):
        """Let it close its client, and wait until it has ended."""
        self._pipe.send(None)
        await asyncio.to_thread(self._process.join, LIMIT_S)
        assert self._process.exitcode == 0

    def kill(self):
        self._process.kill()
        self._process.join()
        self._pipe.close()

    def has_claim(self, folder):
        """Whether it has a file open that it is writing."""
        names = [_target(link) for link in (Path(f"/proc/{self.pid}/fd")).iterdir()]
        return any(name.startswith(f"{folder}/.") for name in names)


def _target(link):
    try:
        return str(link.readlink())
    except OSError:
        return ""


def _run(pipe, *given):
    torch.set_num_threads(1)
    asyncio.run(_play(pipe, *given))


async def _play(pipe, url, limits, options, namespace, deadline, how):
    async with AsyncClient(url, options=options, limits=limits, **how) as client:
        await client.connect()
        pipe.send("ready")
        while await asyncio.to_thread(pipe.recv):
            played = await client.play_asset(namespace, deadline=deadline)
            count = client.metrics.value
            told = {each: count("kvabr_client_groups_total", source=each) for each in ("network", "host", "disk")}
            told |= {"sha256": sha256_of(played.kv), "met": played.met}
            told["damaged"] = count("kvabr_client_store_damaged_total", tier="disk")
            pipe.send(told)


_FORKED = multiprocessing.get_context("forkserver")
_FORKED.set_forkserver_preload([__name__])
