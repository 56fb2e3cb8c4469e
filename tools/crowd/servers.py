"""kvabr's own servers as processes on loopback, and what their metrics say."""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
import urllib.request
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass

START_S = 300.0


@dataclass
class Command:
    """A kvabr command that serves."""

    pids: list[int]
    url: str
    metrics: str
    """URL of its metrics."""

    def counted(self) -> dict[str, float]:
        """Return its samples, by name and labels as they are written."""
        with urllib.request.urlopen(self.metrics, timeout=START_S) as answer:  # noqa: S310  # ours
            lines = answer.read().decode().splitlines()
        return {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines if line[:1] != "#")}

    def groups_sent(self, tracks: Sequence[str]) -> int:
        """Return how many groups of some tracks it has sent in full."""
        counted = self.counted()
        return round(sum(counted.get(f'kvabr_groups_sent_total{{track="{track}"}}', 0.0) for track in tracks))


@contextlib.asynccontextmanager
async def command(*words: object) -> AsyncIterator[Command]:
    """Run a kvabr command that serves, once it does."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "kvabr", *map(str, words), "--metrics", "127.0.0.1:0", "--log-json",
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    if process.stdout is None or process.stderr is None:
        raise SystemExit("a process without pipes")
    drain: asyncio.Task[bytes] | None = None
    try:
        async with asyncio.timeout(START_S):
            metrics = ""
            while not metrics:
                line = await process.stderr.readline()
                if not line:
                    raise SystemExit(f"kvabr {words[0]} has ended; run it by hand to see why")
                event = json.loads(line)
                metrics = event["url"] if event["event"] == "metrics" else ""
            url = (await process.stdout.readline()).decode().strip()
        drain = asyncio.create_task(process.stderr.read())
        yield Command([process.pid], url, metrics)
    finally:
        await _end(process)
        if drain is not None:
            await drain


async def _end(process: asyncio.subprocess.Process) -> None:
    if process.returncode is None:
        process.terminate()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(process.wait(), 15)
    if process.returncode is None:
        process.kill()
    await process.wait()
