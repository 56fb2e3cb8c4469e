"""The player process' end of an engine's connection, on a socket pair: what is left when things end out of order."""

import asyncio
import socket
import threading
from types import SimpleNamespace

import numpy as np
import pytest
import structlog

from kvabr import __version__
from kvabr.engines.player_process import regions
from kvabr.engines.player_process.channel import ProcessChannel
from kvabr.engines.player_process.messages import CallMethod, CancelCall, OpenClient
from kvabr.engines.player_process.process import PlayerProcess, _Engine
from kvabr.telemetry.client_metrics import ClientMetrics
from kvabr.types.errors import PlayError

SIZE = 3 << 20


@pytest.fixture
async def engine():
    """An engine that has connected, and the other end of its socket."""
    here, there = socket.socketpair()
    process = PlayerProcess(socket.socket(socket.AF_UNIX), structlog.get_logger(), ClientMetrics())
    engine = _Engine(process, here)
    process._engines.add(engine)
    yield engine, there
    engine.close()
    there.close()
    process._listener.close()


def played(byte):
    """What `_hand_over` reads of a play."""
    return SimpleNamespace(groups=[SimpleNamespace(payload=memoryview(bytes([byte]) * SIZE), below=())])


async def test_memory_that_a_cancelled_play_is_still_copied_to_is_not_used_for_the_next(engine, monkeypatch):
    engine, _ = engine
    begun, goes_on, done, fill = threading.Event(), threading.Event(), threading.Event(), regions.Region.fill

    def slowly(region, pieces):
        begun.set()
        goes_on.wait(300)
        fill(region, pieces)
        done.set()

    monkeypatch.setattr(engine._channel, "send", lambda *_, **__: None)
    monkeypatch.setattr(regions.Region, "fill", slowly)
    first = asyncio.create_task(engine._hand_over(1, played(1)))
    await asyncio.to_thread(begun.wait, 300)
    first.cancel()
    await asyncio.wait({first})
    monkeypatch.setattr(regions.Region, "fill", fill)
    await engine._hand_over(2, played(2))
    goes_on.set()
    await asyncio.to_thread(done.wait, 300)
    (region,) = engine._regions._used.values()
    assert (np.frombuffer(region._memory, np.uint8, count=SIZE) == 2).all()


async def test_memory_whose_file_cannot_be_sent_is_given_up(engine, monkeypatch):
    engine, _ = engine

    def full(_):
        raise OSError(24, "Too many open files")

    monkeypatch.setattr("kvabr.engines.player_process.channel.os.dup", full)
    with pytest.raises(PlayError, match="Too many open files"):
        await engine._hand_over(1, played(1))
    assert not engine._regions._used


async def test_an_engine_is_told_whatever_goes_wrong_when_it_joins(engine, monkeypatch):
    engine, there = engine

    def unforeseen(_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(engine._process, "take", unforeseen)
    told = asyncio.Queue()
    channel = ProcessChannel(there, told.put_nowait, told.put_nowait)
    channel.send(OpenClient(__version__, None))
    answer = channel.read(await told.get())
    assert "No space left" in str(answer.error)
    channel.close()


@pytest.mark.parametrize(
    "message",
    [
        OpenClient(__version__, [1]), CallMethod([1], "find", (), {}), CallMethod(1, ["find"], (), {}),
        CancelCall([1]), CallMethod(1, "close", (), {}),
    ],
    ids=repr,
)  # fmt: skip
async def test_every_malformed_message_is_answered(engine, message):
    engine, there = engine
    engine._client = None if isinstance(message, OpenClient) else object()
    told = asyncio.Queue()
    channel = ProcessChannel(there, told.put_nowait, lambda _: None)
    channel.send(message)
    answer = channel.read(await told.get())
    assert isinstance(answer.error, Exception)
    assert not engine._calls
    channel.close()
