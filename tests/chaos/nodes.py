"""The servers of the laboratory as processes: `kvabr serve` and `kvabr relay`, killed, frozen and started again."""

from __future__ import annotations

import hashlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

_START_S = 300.0
"""Most seconds for a server to start, on any machine."""
_REPOSITORY = Path(__file__).resolve().parents[2]
_BUGS = ("Traceback", "was never retrieved", "was never awaited")


@dataclass(frozen=True, slots=True)
class Sample:
    rss: int
    """Resident memory, bytes."""
    files: int
    threads: int

    @classmethod
    def of(cls, pid: int) -> Sample | None:
        """Look at a process; None if it is gone."""
        try:
            pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
            files, threads = (len(list(Path(f"/proc/{pid}/{what}").iterdir())) for what in ("fd", "task"))
        except OSError:
            return None
        return cls(pages * os.sysconf("SC_PAGE_SIZE"), files, threads)


@dataclass
class Node:
    name: str
    words: tuple[str, ...]
    """Of the command line, behind `kvabr`."""
    port: int
    log: Path
    deaths: list[str] = field(default_factory=list)
    """How it ended when nobody had killed it."""

    def __post_init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._read = 0
        """Bytes of the log that `bugs` has seen."""

    @property
    def address(self) -> tuple[str, int]:
        return "127.0.0.1", self.port

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    def start(self) -> None:
        self.check()
        if self._process is not None:
            return
        environment = os.environ | {"PYTHONPATH": str(_REPOSITORY), "KVABR_CONFIG": "", "PYTHONFAULTHANDLER": "1"}
        words = (sys.executable, "-m", "kvabr", *self.words, "--bind", f"127.0.0.1:{self.port}", "--log-json")
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(  # noqa: S603  # ours
                words, stdout=log, stderr=log, env=environment, cwd=_REPOSITORY
            )

    def wait_until_up(self) -> None:
        """Wait until a server that was started for the first time has its address."""
        end_s = time.monotonic() + _START_S
        while b"moqt://" not in self.log.read_bytes():
            self.check()
            if self._process is None or time.monotonic() > end_s:
                raise AssertionError(f"{self.name} does not start: {self.tail()}")
            time.sleep(0.05)

    def kill(self) -> None:
        self.check()
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def freeze(self, *, on: bool) -> None:
        """Stop the process, or let it continue."""
        self.check()
        if self._process is not None:
            self._process.send_signal(signal.SIGSTOP if on else signal.SIGCONT)

    def end(self) -> None:
        self.check()
        if self._process is None:
            return
        self._process.send_signal(signal.SIGCONT)
        self._process.terminate()
        try:
            code = self._process.wait(60)
        except subprocess.TimeoutExpired:
            self.deaths.append("did not end within 60 s of SIGTERM")
            self.kill()
            return
        if code not in (0, -signal.SIGTERM):
            self.deaths.append(f"exit status {code} after SIGTERM: {self.tail()}")
        self._process = None

    def check(self) -> None:
        """Note it if it has died by itself."""
        if self._process is not None and (code := self._process.poll()) is not None:
            self.deaths.append(f"died with exit status {code}: {self.tail()}")
            self._process = None

    def sample(self) -> Sample | None:
        return None if self._process is None else Sample.of(self._process.pid)

    def bugs(self) -> list[str]:
        """Log lines since the last call that must not appear: unhandled exceptions."""
        with self.log.open("rb") as log:
            log.seek(self._read)
            data = log.read()
        self._read += len(data)
        lines = data.decode(errors="replace").splitlines()
        return [
            " ".join(lines[max(0, at - 1) : at + 30])[-3000:]
            for at, line in enumerate(lines)
            if any(word in line for word in _BUGS)
        ]

    def tail(self) -> str:
        return self.log.read_text(errors="replace")[-1500:]


def free_port() -> int:
    """A UDP port that is free at the moment."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def write_grants(path: Path, *tokens: str) -> None:
    """Write an origin's file of grants in one step; each token opens everything."""
    entries = [
        {"name": token[:6], "token_sha256": hashlib.sha256(token.encode()).hexdigest(), "assets": ["*"]}
        for token in tokens
    ]
    replace_text(path, json.dumps({"schema": "kvabr.grants/1", "grants": entries}))


def replace_text(path: Path, text: str) -> None:
    new = path.with_suffix(".new")
    new.write_text(text)
    new.replace(path)


def partial_files(*folders: Path) -> list[Path]:
    """Half-written files and folders that somebody left."""
    partial = re.compile(r"\..*\.partial")
    return [path for folder in folders if folder.exists() for path in folder.rglob("*") if partial.fullmatch(path.name)]
