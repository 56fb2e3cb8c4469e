"""Between the QUIC library and the tensor a group is copied once and hashed once, also if many plays share it.

It is decoded into the cache itself, and a play takes no new memory if earlier ones left some.
"""

import asyncio
import hashlib
import threading
from collections import Counter

import pytest

from kvabr.client import play
from kvabr.client.async_client import AsyncClient
from kvabr.client.driver import Driver
from kvabr.client.options import Limits, PlayOptions
from kvabr.codec import paged
from kvabr.player.assembler import Assembler
from kvabr.store import buffers
from kvabr.transfer.interface import GroupTransfer
from kvabr.types.peer import PeerOptions
from tests.client.served import LIMIT_S, Served
from tests.client.test_play import close
from tests.client.virtual import virtual
from tests.memory_transport import Fault
from tests.toymodel import SPEC, prompt

TOKENS = prompt(70).tokens
OPTIONS = PlayOptions(policy="fixed:FP16")


class Counts:
    """What was copied, hashed and decoded, by instruments in place of the real ones."""

    def __init__(self, monkeypatch):
        self.copied = 0
        self.memory = []
        """The memory that was copied into; kept, so that no two have the same identity."""
        self.hashed = Counter()
        """SHA-256 that were computed."""
        self.decoded = []
        """The memory that groups were decoded from."""
        append, sha256, decode = GroupTransfer.append, hashlib.sha256, paged.decode_payload

        def appending(transfer, part):
            append(transfer, part)
            if transfer.request.exact:
                self.copied += len(part)
                if not any(memory is transfer._memory.obj for memory in self.memory):
                    self.memory.append(transfer._memory.obj)

        def hashing(data=b"", **more):
            made = sha256(data, **more)
            self.hashed[made.hexdigest()] += 1
            return made

        def decoding(payload, *arguments):
            self.decoded.append(payload.obj)
            return decode(payload, *arguments)

        monkeypatch.setattr(GroupTransfer, "append", appending)
        monkeypatch.setattr(hashlib, "sha256", hashing)
        monkeypatch.setattr(paged, "decode_payload", decoding)

    def check(self, track, plays):
        assert self.copied == track.total_bytes
        assert len(self.memory) == len(track.digests)
        assert [self.hashed[digest] for digest in track.digests] == [1] * len(track.digests)
        assert len(self.decoded) == plays * len(track.digests)
        assert all(any(frame is memory for memory in self.memory) for frame in self.decoded)


@virtual
async def test_plays_that_share_downloads_and_plays_from_memory(origin, short, monkeypatch):
    counts = Counts(monkeypatch)
    async with origin(rate=short.fp16_bytes) as link, AsyncClient(link, model=SPEC, options=OPTIONS) as client:
        await asyncio.gather(*(client.play(TOKENS, deadline=5.0) for _ in range(4)))
        assert close((await client.play(TOKENS, deadline=2.0)).kv, error=1e-5)
    counts.check(short.track("FP16"), 5)


async def test_over_quic(root, short, tmp_path, monkeypatch):
    counts = Counts(monkeypatch)
    with Served(root / "short", tmp_path) as served:
        how = PeerOptions(fingerprint=served.fingerprint, quic="aioquic", timeout_s=LIMIT_S)
        async with AsyncClient(served.url, how, model=SPEC, options=OPTIONS) as client:
            assert close((await client.play(TOKENS, deadline=120.0)).kv, error=1e-5)
    counts.check(short.track("FP16"), 1)


async def test_from_a_folder_a_group_is_hashed_once_a_play_and_takes_no_new_memory(
    origin, short, tmp_path, monkeypatch
):
    # Groups and caches as small as these are not worth pooling otherwise.
    monkeypatch.setattr(buffers, "_MIN_POOLED_BYTES", 1)
    monkeypatch.setattr(play, "_MIN_HUGE_BYTES", 1)
    track, limits = short.track("FP16"), Limits(memory_bytes=0, disk=tmp_path / "groups")
    async with origin() as link:
        async with AsyncClient(link, model=SPEC, options=OPTIONS, limits=limits) as client:
            nbytes = (await client.play(TOKENS, deadline=60.0)).kv.nbytes
        # Closing it has written the groups.
        for pool, size in ((buffers.GROUPS, max(track.bytes)), (buffers.CACHES, nbytes)):
            left = [pool.take(size) for _ in track.bytes]
            del left
        fresh = [pool.fresh_bytes for pool in (buffers.GROUPS, buffers.CACHES)]
        counts = Counts(monkeypatch)
        async with AsyncClient(link, model=SPEC, options=OPTIONS, limits=limits) as client:
            assert close((await client.play(TOKENS, deadline=60.0)).kv, error=1e-5)
    assert [pool.fresh_bytes for pool in (buffers.GROUPS, buffers.CACHES)] == fresh
    assert counts.copied == 0
    assert [counts.hashed[digest] for digest in track.digests] == [1] * len(track.digests)


@pytest.fixture
def batches(monkeypatch):
    """Have every play decode in batches; return how many groups each had."""
    sizes, put_many, decode, came = [], Assembler.put_many, Driver._decode, threading.Event()

    def counted(self, asked):
        sizes.append(len(asked))
        if len(sizes) == 1:
            assert came.wait(300)
        return put_many(self, asked)

    def coming(self, action):
        decode(self, action)
        if not self._reads:
            came.set()

    monkeypatch.setattr(Driver, "_decode", coming)
    monkeypatch.setattr(Assembler, "together", True)
    monkeypatch.setattr(Assembler, "put_many", counted)
    return sizes


async def test_a_bad_frame_in_a_batch_is_fetched_again_alone(origin, batches):
    asked = []

    def faults(ask):
        asked.extend([ask] if (ask.track, ask.group) == ("FP16", 2) else [])
        return Fault(corrupt_at=2000) if len(asked) == 1 and asked[0] is ask else None

    async with (
        origin(rate=1e9, faults=faults) as link,
        AsyncClient(link, model=SPEC, options=PlayOptions(policy="fixed:FP16")) as client,
    ):
        played = await client.play(TOKENS, deadline=120.0)
    assert close(played.kv, error=1e-5)
    assert [damage[0] for damage in played.record.damaged] == [2]
    assert max(batches) > 1
