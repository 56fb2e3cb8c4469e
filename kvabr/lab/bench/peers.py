"""Peers: other people's codecs, each a program in an environment of its own that tools/setup-peers makes.

A peer reads requests as JSON lines and answers each with one; caches are handed over as safetensors files. So nothing
of it is imported here, and what it imports meets nothing of kvabr.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from kvabr.types.errors import AssetError

_INSTALL = "tools/setup-peers makes it"


class PeerError(AssetError):
    """A peer is not there, or failed."""


class Peer:
    """A running peer; starts with its first request, ends with the context."""

    def __init__(self, folder: Path, name: str) -> None:
        """Find it.

        Args:
            folder: what tools/setup-peers made.
            name: ``lmcache`` or ``zstd``.

        Raises:
            PeerError: it is not there.
        """
        self.name = name
        self._command = [str(folder / name / "bin" / "python"), str(folder / name / "worker.py")]
        self._process: subprocess.Popen[str] | None = None
        for path in self._command:
            if not Path(path).is_file():
                raise PeerError(f"the peer {name} is not in {folder}; {_INSTALL}")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.communicate()

    def ask(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Send one request and wait for its answer.

        Raises:
            PeerError: the peer ended, or says that it failed.
        """
        if self._process is None:
            self._process = subprocess.Popen(  # noqa: S603  # a program that the user set up
                self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
            )
        stdin, stdout = self._process.stdin, self._process.stdout
        if stdin is None or stdout is None:
            raise PeerError(f"the peer {self.name} has no pipes")
        try:
            stdin.write(json.dumps(request) + "\n")
            stdin.flush()
            line = stdout.readline()
        except OSError as error:
            raise PeerError(self._ended()) from error
        if not line:
            raise PeerError(self._ended())
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise PeerError(f"the peer {self.name} failed: {answer['error']}")
        return answer

    def _ended(self) -> str:
        return f"the peer {self.name} has ended; run it by hand to see why: {' '.join(self._command)}"


def find_peers(folder: Path, names: Sequence[str] = ("lmcache", "zstd")) -> tuple[dict[str, Peer], list[str]]:
    """The peers that are there, and what to say of those that are not."""
    found, missing = {}, []
    for name in names:
        try:
            found[name] = Peer(folder, name)
        except PeerError as error:
            missing.append(str(error))
    return found, missing
