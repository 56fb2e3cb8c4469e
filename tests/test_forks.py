"""Objects with threads or sockets in a forked child: they say so, and closing them there does nothing."""

import asyncio
import logging
import os
import signal
import threading
import time
import warnings
from collections.abc import Callable

import pytest

from kvabr.client.async_client import AsyncClient
from kvabr.client.blocking import Client
from kvabr.data import default_catalog
from kvabr.engines.settings import TroubleLog
from kvabr.publish.live_publisher import LivePublisher
from kvabr.publish.publisher import Publisher, Slot
from kvabr.server.metrics import Metrics
from kvabr.store.group_cache import StoreTier
from kvabr.telemetry.hub import Telemetry
from kvabr.telemetry.listener import Listener
from kvabr.telemetry.prometheus import ScrapeServer
from kvabr.types.errors import ForkedError
from tests import kvdata
from tests.processes import LIMIT_S
from tests.toymodel import SPEC

pytestmark = pytest.mark.process

TOKENS = list(range(48))


def in_child(work: Callable[[], object]) -> str:
    """Return the name of the error that a call raises in a forked child, or `none`; `killed` if it hangs."""
    ear, mouth = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of forks of processes with threads
        child = os.fork()
    if not child:
        signal.alarm(int(LIMIT_S) // 5)
        told = "none"
        try:
            work()
        except BaseException as error:  # noqa: BLE001  # a child must not go on with the tests
            told = type(error).__name__
            if isinstance(error, ForkedError):
                told += f" {error.made_in == os.getppid()} {error.used_in == os.getpid()}"
        os.write(mouth, told.encode())
        os._exit(0)
    os.close(mouth)
    with os.fdopen(ear, "rb") as file:
        found = file.read().decode() or "killed"
    os.waitpid(child, 0)
    return found


FORKED = "ForkedError True True"


def test_troubles_can_be_logged_in_a_child_that_was_forked_meanwhile(monkeypatch):
    entered, go_on = threading.Event(), threading.Event()

    class SlowTimer(threading.Timer):
        def start(self):
            entered.set()
            go_on.wait()
            super().start()

    monkeypatch.setattr(threading, "Timer", SlowTimer)
    trouble = TroubleLog(logging.getLogger("kvabr.engines"), every_s=3600.0)
    logging_thread = threading.Thread(target=trouble.warn, args=("a play failed", "gone"))
    logging_thread.start()
    entered.wait()
    later = threading.Thread(target=lambda: (time.sleep(0.2), go_on.set()))
    later.start()
    assert in_child(lambda: trouble.warn("a play failed", "again")) == "none"
    later.join()
    logging_thread.join()


def test_a_publisher(tmp_path):
    made = Publisher(tmp_path, SPEC, prior=default_catalog(), tracks=("FP16",))
    kv, outcomes = kvdata.related(SPEC, 48), []
    slot = made.reserve(TOKENS)
    assert isinstance(slot, Slot)
    for use in (
        lambda: made.reserve(TOKENS[::-1]),
        lambda: slot.fill(kv, outcomes.append),
        made.prepare,
    ):
        assert in_child(use) == FORKED
    assert in_child(made.close) == "none"
    slot.fill(kv, outcomes.append)
    made.close()
    assert outcomes[0].verdict == "published"
    assert in_child(lambda: Publisher(tmp_path, SPEC, prior=default_catalog(), tracks=("FP16",)).close()) == "none"


def test_a_cache_that_grows(tmp_path):
    outcomes = []
    live = LivePublisher(Publisher(tmp_path, SPEC, prior=default_catalog(), tracks=("FP16",)))
    slot = live.begin(TOKENS, pace=[1.0, 2.0, 3.0], done=outcomes.append)
    kv = kvdata.related(SPEC, 48)
    for use in (lambda: slot.groups(0, kv), slot.end, lambda: slot.fail("a reason")):
        assert in_child(use) == FORKED
    assert in_child(live.close) == "none"
    slot.groups(0, kv)
    slot.end()
    live.close()
    assert outcomes[0].verdict == "published"


def test_clients():
    with Client("moqt://127.0.0.1:1/") as client:
        assert in_child(lambda: client.play(TOKENS, deadline=1.0, model=SPEC)) == FORKED
        assert in_child(client.close) == "none"

    async def main():
        async with AsyncClient("moqt://127.0.0.1:1/") as waiting:
            return waiting

    bare = asyncio.run(main())
    assert in_child(lambda: asyncio.run(bare.models())) == FORKED
    assert in_child(lambda: asyncio.run(bare.close())) == "none"


def test_a_store_of_groups(tmp_path):
    async def use(store):
        await store.put("0" * 64, memoryview(b"x"))

    store = StoreTier(tmp_path / "groups", 1 << 20)
    assert in_child(lambda: asyncio.run(use(store))) == FORKED
    assert in_child(lambda: asyncio.run(store.close())) == "none"
    asyncio.run(use(store))
    asyncio.run(store.close())


def test_telemetry_and_its_server():
    class Ear(Listener):
        name = "ear"

        def receive(self, record):
            pass

    with Telemetry(Ear()) as telemetry:
        telemetry.feed([])
        assert in_child(lambda: telemetry.feed([])) == FORKED
        assert in_child(lambda: telemetry.play().__enter__()) == FORKED
        assert in_child(telemetry.close) == "none"
    with ScrapeServer(Metrics(), "127.0.0.1", 0) as server:
        assert in_child(lambda: server.__exit__(None, None, None)) == "none"
