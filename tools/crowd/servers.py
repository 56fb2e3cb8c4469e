"""What a crowd plays from, as processes on loopback: kvabr's own servers, and nginx as documented over SeaweedFS."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import shutil
import socket
import sys
import urllib.request
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from crowd.machine import children, raise_files

ROOT = Path(__file__).resolve().parents[2]
NGINX = shutil.which("nginx", path=f"{os.environ.get('PATH', '')}:/usr/sbin")
CONFIG = ROOT / "docs" / "deploy" / "nginx.conf"
START_S = 60.0


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


# ---------------------------------------------------------------------- nginx


@dataclass
class HttpCache:
    """nginx, configured as `docs/deploy/nginx.conf` says, in front of a store."""

    url: str
    """Of its server, without a path."""
    pids: list[int]
    """Of its workers."""
    _asked: Path
    _answered: Path

    def gets_at_store(self) -> Counter[tuple[str, str, str]]:
        """Return how often the store was asked for each path and range, with which status."""
        return Counter(
            (found[1], found[2], found[3])
            for found in map(re.compile(r"GET (\S+) (\S+) (\d+)").match, self._asked.read_text().splitlines())
            if found
        )

    def gets(self) -> int:
        """Return how many requests it got itself."""
        return self._answered.read_text().count("\n")


def config(folder: Path, store: str, bucket: str, ports: Mapping[str, int], files: int) -> str:
    """Return the documented configuration for this machine.

    The store is reached through a server that does nothing but write down what it is asked for.
    """
    text = CONFIG.read_text(encoding="utf-8")
    changes = {
        r"worker_rlimit_nofile \d+;": f"worker_rlimit_nofile {files};",
        r"access_log off;": f"log_format asked '$request_method $uri $http_range $status'; "
        f"access_log {folder}/answered.log asked; client_body_temp_path {folder}/body; "
        f"proxy_temp_path {folder}/temp; fastcgi_temp_path {folder}/fastcgi; uwsgi_temp_path {folder}/uwsgi; "
        f"scgi_temp_path {folder}/scgi;",
        r"/var/cache/nginx": f"{folder}/cache",
        r"server store:8333;": f"server 127.0.0.1:{ports['asked']};",
        r"listen 8080\b": f"listen 127.0.0.1:{ports['cache']}",
        r"location /kvabr/": f"location /{bucket}/",
        r"\}\s*\Z": f"""
  upstream behind {{ server {store}; keepalive 64; }}
  server {{
    listen 127.0.0.1:{ports["asked"]};
    access_log {folder}/asked.log asked;
    location / {{
      proxy_pass http://behind;
      proxy_http_version 1.1;
      proxy_set_header Connection "";
      proxy_buffering off;
    }}
  }}
}}
""",
    }
    for pattern, here in changes.items():
        text, count = re.subn(pattern, here.replace("\\", r"\\"), text)
        if count != 1:
            raise SystemExit(f"{CONFIG}: {pattern} is there {count} times; tools/crowd must be told of its new form")
    user = "user root; " if os.getuid() == 0 else ""
    return f"{user}daemon off; pid {folder}/pid;\n{text}"


@contextlib.asynccontextmanager
async def http_cache(folder: Path, store: str, bucket: str) -> AsyncIterator[HttpCache]:
    """Run nginx in front of a store, ``HOST:PORT``, of which one bucket may be read by everybody."""
    if NGINX is None:
        raise SystemExit("bench-crowd: nginx is not installed")
    folder.mkdir()
    ports = {name: _free_port() for name in ("cache", "asked")}
    (folder / "nginx.conf").write_text(config(folder, store, bucket, ports, raise_files()), encoding="utf-8")
    log = folder / "error.log"
    process = await asyncio.create_subprocess_exec(NGINX, "-p", folder, "-c", folder / "nginx.conf", "-e", log)
    try:
        async with asyncio.timeout(START_S):
            while not await _listens(ports["cache"]):
                if process.returncode is not None:
                    raise SystemExit(f"nginx does not start: {log.read_text()}")
                await asyncio.sleep(0.05)
        yield HttpCache(
            f"http://127.0.0.1:{ports['cache']}", children(process.pid), folder / "asked.log", folder / "answered.log"
        )
        print(log.read_text())
    finally:
        await _end(process)


async def _listens(port: int) -> bool:
    try:
        _, writer = await asyncio.open_connection("127.0.0.1", port)
    except OSError:
        return False
    writer.close()
    return True


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])
