"""Routers place a prompt where kvabr has its prefix: `kvabr serve` as a process, and a router of each kind."""

import asyncio
import json
import os
import shutil
import subprocess
import time
import urllib.error
import urllib.request
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import zmq
import zmq.asyncio

from kvabr.cli.main import main
from kvabr.store.locations import open_asset
from kvabr.telemetry.kv_events.hashes import BlockHashes
from tests.processes import LIMIT_S
from tests.server.test_serve_process import serving
from tests.telemetry.kv_events.routers import LlmdIndex, NamedIndex
from tests.toymodel import prompt, toy_asset

pytestmark = pytest.mark.process

DYNAMO = os.environ.get("KVABR_DYNAMO")
NEEDED = "there is no Dynamo: KVABR_DYNAMO=DIR tools/test -k dynamo, DIR an environment with ai-dynamo-runtime"
PROMPT = prompt(70).tokens
TOPIC = "kv@node-1@served-name"
MODEL = "served-name"
OPTIONS = ("--kv-events", "tcp://127.0.0.1:0", "--kv-events-replay", "tcp://127.0.0.1:0", "--kv-events-topic", TOPIC)


@pytest.fixture
def root(tmp_path):
    path = tmp_path / "assets"
    path.mkdir()
    toy_asset(path / "long")
    toy_asset(path / "salted", tokens=60, salt=b"tenant")
    return path


class Routers:
    def __init__(self, endpoint):
        self._context = zmq.asyncio.Context()
        self._sub = self._context.socket(zmq.SUB)
        self._sub.connect(endpoint)
        self._sub.subscribe(b"kv@")  # as llm-d does
        self.named, self.llmd = NamedIndex(), LlmdIndex()

    def places(self, tokens):
        """Tokens of a prompt that are to be had, as each router sees it."""
        named = self.named.place(BlockHashes(16).numbers(tokens)).get(TOPIC, 0)
        return 16 * named, 16 * self.llmd.place(MODEL, tokens).get("node-1", 0)

    async def until(self, count):
        """Listen until all routers place the prompt by that many tokens."""
        async with asyncio.timeout(LIMIT_S):
            while self.places(PROMPT) != (count, count):
                topic, _, payload = await self._sub.recv_multipart()
                for router in (self.named, self.llmd):
                    router.take(topic, payload)

    def close(self):
        self._context.destroy(linger=0)


@asynccontextmanager
async def telling(root):
    async with serving(root, *OPTIONS) as served:
        yield served, await served.event("KV events")


async def test_a_router_of_each_kind_places_a_prompt(root, tmp_path, capsys):
    async with telling(root) as (served, told):
        untold = await served.event("not announced in KV events")
        assert untold["asset"] == f"salted/{open_asset(root / 'salted').name}"
        assert untold["why"] == "tokens of salted prompts are never announced"
        routers = Routers(told["endpoint"])
        await routers.until(64)
        toy_asset(root / "short", tokens=40)
        shutil.rmtree(root / "long")
        await routers.until(32)  # what is left is that of another asset
        assert routers.places([1, *PROMPT]) == (0, 0)

        (tmp_path / "prompt").write_text(json.dumps(PROMPT))
        where = f"{told['endpoint']},{told['replay']}"
        words = ["--prompt", str(tmp_path / "prompt"), "--remote-events", where, "--listen", "300"]
        assert await asyncio.to_thread(main, ["route", "--link", "100", *words]) == 0
        assert "remote: 32 of 70 tokens are cached" in capsys.readouterr().out
        shutil.rmtree(root / "short")
        await routers.until(0)
        routers.close()


class Dynamo:
    """Dynamo's own indexer, which hears a publisher by itself."""

    def __init__(self, port, log):
        self.port = port
        command = [str(Path(DYNAMO, "bin/python")), "-m", "dynamo.indexer", "--port", str(port)]
        self.process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)  # noqa: S603

    def post(self, path, **body):
        data, kind = json.dumps(body).encode(), {"content-type": "application/json"}
        request = urllib.request.Request(f"http://127.0.0.1:{self.port}{path}", data, kind)
        with urllib.request.urlopen(request, timeout=LIMIT_S) as answer:  # noqa: S310
            return json.load(answer)

    def register(self, told):
        end_s = time.monotonic() + LIMIT_S
        sockets = {"endpoint": told["endpoint"], "replay_endpoint": told["replay"]}
        while True:
            try:
                return self.post("/register", instance_id=7, **sockets, model_name=MODEL, block_size=16)
            except urllib.error.URLError:  # it is starting
                assert time.monotonic() < end_s
                time.sleep(0.1)

    def until(self, count):
        end_s = time.monotonic() + LIMIT_S
        while True:
            found = self.post("/query", token_ids=list(PROMPT), model_name=MODEL)["instances"].get("7", {})
            if found.get("longest_matched", 0) == count:
                return
            assert time.monotonic() < end_s, found
            time.sleep(0.1)


@pytest.mark.skipif(not DYNAMO, reason=NEEDED)
async def test_dynamo_places_a_prompt(root, tmp_path, unused_tcp_port):
    with (tmp_path / "log").open("w") as log:
        dynamo = Dynamo(unused_tcp_port, log)
    try:
        async with telling(root) as (_, told):
            await asyncio.to_thread(dynamo.register, told)
            await asyncio.to_thread(dynamo.until, 64)
            toy_asset(root / "short", tokens=40)
            shutil.rmtree(root / "long")
            await asyncio.to_thread(dynamo.until, 32)
            shutil.rmtree(root / "short")
            await asyncio.to_thread(dynamo.until, 0)
    finally:
        dynamo.process.kill()
        dynamo.process.wait()
