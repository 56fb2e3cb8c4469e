"""Files of what was measured on this machine, by model and device: how fast it decodes, and how fast engines prefill.

Such a file belongs to one machine, and to one version of kvabr and torch; another's is measured anew. It is JSON with a
checksum, written whole or not at all, and a writer merges what other processes have written.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import threading
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch

from kvabr import __version__
from kvabr.client.peer_history import this_host
from kvabr.codec.threads import decoder_threads
from kvabr.store.files import PRIVATE, PRIVATE_FOLDER, read_text, write_text
from kvabr.types.errors import FormatError, KvabrError

V = TypeVar("V")

MAX_BYTES = 1 << 18
MAX_MODELS = 64
"""Entries that are kept; the ones measured first make room."""
_MOST_NAME = 300


class MachineFile(Generic[V]):
    """What a file says, and what was measured since. May be used from several threads."""

    def __init__(self, path: Path | None, schema: str, read: Callable[[Any], V | None]) -> None:
        """Read the file if it exists; never raises.

        Args:
            path: None: nothing is kept.
            schema: what the file says that it is.
            read: returns an entry from plain JSON values; None if it cannot be one. It is then measured anew.
        """
        self.path, self._schema, self._parse = path, schema, read
        self._lock = threading.Lock()
        self._known = self._read()

    def get(self, key: str) -> V | None:
        """Return an entry, if it is known."""
        with self._lock:
            return self._known.get(key)

    def keep(self, key: str, value: V) -> None:
        """Set an entry, and write the file if there is one; never raises."""
        with self._lock:
            # Other processes may have written meanwhile. If two write at once, the other measures again some day.
            merged = {**self._known, **self._read()} if self.path is not None else dict(self._known)
            merged.pop(key, None)
            merged[key] = value
            self._known = dict(list(merged.items())[-MAX_MODELS:])
            if self.path is None:
                return
            whole = {"schema": self._schema, "machine": this_machine(), "sha256": digest(self._known)}
            text = json.dumps(whole | {"models": self._known}) + "\n"
            with contextlib.suppress(OSError, KvabrError):  # then it is measured again by the next process
                self.path.parent.mkdir(mode=PRIVATE_FOLDER, parents=True, exist_ok=True)
                write_text(self.path, text, mode=PRIVATE)

    def _read(self) -> dict[str, V]:
        if self.path is None or not self.path.exists():
            return {}
        try:
            return self._loads(read_text(self.path, MAX_BYTES, unreadable=FormatError, unfit=FormatError))
        except (FormatError, OSError):
            return {}  # whatever it is, it is measured and written anew

    def _loads(self, text: str) -> dict[str, V]:
        try:
            whole = json.loads(text)
            if whole["schema"] != self._schema or whole["machine"] != this_machine():
                raise FormatError("of another machine or version")
            models = whole["models"]
            if whole["sha256"] != digest(models) or len(models) > MAX_MODELS:
                raise FormatError("damaged")
            found = {key: self._parse(value) for key, value in models.items() if len(key) <= _MOST_NAME}
            return {key: value for key, value in found.items() if value is not None}
        except (AttributeError, KeyError, TypeError, ValueError, RecursionError) as error:
            raise FormatError(f"not a file of {self._schema} ({error!r})") from error


@cache
def this_machine() -> dict[str, str | int]:
    """Return what times depend on: host, processor, versions, and the threads that decode at once."""
    processor = ""
    with contextlib.suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text(encoding="ascii", errors="replace")[: 1 << 14].splitlines()
        processor = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")
    return {
        "host": this_host(),
        "processor": processor,
        "kvabr": __version__,
        "torch": torch.__version__,
        "threads": decoder_threads(),
    }


def digest(models: Any) -> str:
    """Return the checksum of all entries."""
    return hashlib.sha256(json.dumps(models, sort_keys=True).encode()).hexdigest()
