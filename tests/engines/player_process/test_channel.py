"""Messages as they cross: in their order, with files, profiles once, and errors as they were."""

import asyncio
import inspect
import os
import pickle
import resource
import socket
from functools import cached_property

import numpy as np
import pytest

from kvabr.client.result import IncompleteError
from kvabr.codec.fit import fit
from kvabr.codec.profile import Profile
from kvabr.engines.player_process import channel, regions
from kvabr.engines.player_process.channel import LackingError, ProcessChannel
from kvabr.player.session_types import PlayRecord
from kvabr.types.errors import FormatError, KvabrError, NotFoundError, PlayError, Reason
from tests.catalogs import catalog
from tests.toymodel import SPEC, ToyModel, prompt


class Pair:
    """Two ends: what came to the second, and what they lost."""

    def __init__(self):
        one, two = socket.socketpair()
        self.came, self.lost = asyncio.Queue(), asyncio.Queue()
        self.one = ProcessChannel(one, lambda _: None, self.lost.put_nowait)
        self.two = ProcessChannel(two, self.came.put_nowait, self.lost.put_nowait)

    async def cross(self, thing, shared=None, **how):
        self.one.send(thing, **how)
        message = await self.came.get()
        return self.two.read(message, *(() if shared is None else (shared,))), message.files

    def close(self):
        self.one.close()
        self.two.close()


@pytest.fixture
async def pair():
    pair = Pair()
    yield pair
    pair.close()


async def test_bytes_lie_in_shared_memory_that_a_file_brings(pair):
    made = regions.Regions(1 << 30, lambda _: None)
    pieces = [memoryview(os.urandom(size)) for size in (1, 70, 5000)]
    placed, size = regions.laid_out(pieces)
    region = made.take(size)
    region.fill(placed)
    _, (file,) = await pair.cross("memory", file=region.file)
    memory = regions.mapped(file, None)
    places = {id(piece): (at, len(piece)) for at, piece in placed}
    found, _ = await pair.cross(pieces, np.frombuffer(memory, np.uint8).data, places=places)
    assert found == pieces
    assert all(at % 64 == 0 for at, _ in placed)
    outside = {id(piece): (at, region.size) for at, piece in placed}
    with pytest.raises(FormatError, match="of shared memory"):
        await pair.cross(pieces, np.frombuffer(memory, np.uint8).data, places=outside)
    made.close()
    assert bytes(memory[:1]) == bytes(pieces[0])  # of both processes, the last keeps it


async def test_a_file_that_does_not_come_is_not_mistaken_for_the_next(pair):
    with open(os.devnull) as file:  # noqa: PTH123, ASYNC230
        pair.one.send("first", file=file.fileno())
        pair.one.send("second", file=file.fileno())
        free, (soft, hard) = os.dup(file.fileno()), resource.getrlimit(resource.RLIMIT_NOFILE)
        os.close(free)
        resource.setrlimit(resource.RLIMIT_NOFILE, (free, hard))
        try:
            assert "no file descriptors left" in str(await pair.lost.get())
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert pair.came.empty()


async def test_a_file_that_could_be_cut_short_is_not_mapped():
    file = os.memfd_create("x", os.MFD_ALLOW_SEALING)
    os.ftruncate(file, 4096)
    with pytest.raises(FormatError, match="not protected from truncation"):
        regions.mapped(file, None)
    with pytest.raises(OSError, match="Bad file"):
        os.fstat(file)


async def test_a_profile_crosses_once(pair):
    profile = fit(SPEC, lambda: iter([ToyModel().prefill(prompt(64).tokens)]))
    (first, _), (second, _) = await pair.cross([profile, profile]), await pair.cross(profile)
    assert isinstance(second, Profile)
    assert first == [second, second]
    assert second.digest == profile.digest
    size = len(profile.to_bytes())
    pair.one.send(profile)
    assert len((await pair.came.get()).data) < size / 4


async def test_a_catalog_crosses_once_and_is_named_by_both_ends(pair):
    sent, like, other = catalog(20), catalog(20), catalog(21)
    first, _ = await pair.cross({"found": sent})
    assert first == {"found": sent}
    for again in (sent, like):  # the origin was asked again
        pair.one.send([again, again])
        message = await pair.came.get()
        assert len(message.data) < 300
        assert all(each is first["found"] for each in pair.two.read(message))
    back = asyncio.Queue()
    pair.one._received = back.put_nowait
    for thing, wanted in ((first, sent), (other, other), (other, other)):
        pair.two.send(thing, theirs=True)
        message = await back.get()
        assert pair.one.read(message) in (wanted, {"found": wanted})
    assert len(message.data) < 300


async def test_what_a_catalog_has_worked_out_neither_crosses_nor_changes_its_name(pair):
    used, fresh = (catalog(20).suffix(4) for _ in range(2))  # with fields that no file has
    play = used.to_play
    for one in (used, play, used.spec, *used.tracks):
        for name, _ in inspect.getmembers(type(one), lambda value: isinstance(value, cached_property)):
            if name != "digest":
                getattr(one, name)
    assert used.digest == fresh.digest
    found, _ = await pair.cross(used)
    assert found == used
    assert vars(found).keys() - {"digest"} <= vars(catalog(20)).keys()
    assert found.digest == used.digest
    pair.one.send(fresh)
    assert len((await pair.came.get()).data) < 300


async def test_both_ends_forget_the_same_catalogs(pair, monkeypatch):
    """Within a message, too, which names one that a new one displaces."""
    many = [catalog(20 + number) for number in range(8)]
    monkeypatch.setattr(channel, "_MAX_CATALOG_BYTES", 3 * len(pickle.dumps(many[0])))
    came = []
    for numbers in ([0], [1], [2, 0], [3, 4], [0], [2, 5, 1], [1, 2, 3, 4, 5, 6, 7], [7, 0]):
        found, _ = await pair.cross([many[number] for number in numbers])
        assert found == [many[number] for number in numbers]
        assert list(pair.one._sent._kept) == list(pair.two._got._kept)
        came += found
    assert 0 < pair.one._sent._nbytes == pair.two._got._nbytes <= channel._MAX_CATALOG_BYTES
    back = asyncio.Queue()
    pair.one._received = back.put_nowait
    pair.one.send(many[:7])  # on its way while the other end names what this makes it forget
    pair.two.send({"call": came[-1]}, theirs=True)
    with pytest.raises(LackingError) as lacks:
        pair.one.read(await back.get())
    assert lacks.value.message == {"call": None}
    pair.two.send({"call": came[-1]})
    assert pair.one.read(await back.get()) == {"call": many[0]}


@pytest.mark.parametrize(
    "error",
    [
        KvabrError("as it was"),
        NotFoundError("not there", reason=Reason.MISSING, retry_after_s=2.0),
        IncompleteError("late", "why", (1, 2), PlayRecord([]), None),
        KeyError("of a plug-in"),
    ],
    ids=lambda error: type(error).__name__,
)
async def test_errors_are_what_they_were(pair, error):
    found, _ = await pair.cross(error)
    assert type(found) is type(error)
    assert str(found) == str(error)
    assert vars(found) == vars(error)


async def test_an_error_that_cannot_be_made_again_is_told(pair):
    found, _ = await pair.cross(ExceptionGroup("several", [KeyError("a"), ValueError("b")]))
    assert isinstance(found, PlayError)
    assert "ExceptionGroup: ('several'" in str(found)
