"""Files of measurements on this machine: decode speeds, prefill times of engines, and speeds of peers.

A file belongs to one host, or even one version of kvabr and torch there. It is JSON with a checksum, written
atomically. Writers merge the entries of other processes; of two that write at once one may lose an entry, which it
writes again with its next one.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import platform
import threading
from collections.abc import Callable
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch

from kvabr import __version__
from kvabr.codec.threads import decoder_threads
from kvabr.store.files import PRIVATE, PRIVATE_FOLDER, read_text, write_text
from kvabr.types.errors import FormatError, KvabrError

V = TypeVar("V")

SCHEMA = "kvabr.machine/1"
MAX_BYTES = 1 << 18
MAX_MODELS = 64
_MAX_NAME = 300


class MachineFile(Generic[V]):
    """Entries of a file, and new measurements. Thread-safe."""

    owner, most = "machine", MAX_MODELS

    def __init__(self, path: Path | None, table: str, read: Callable[[Any], V | None]) -> None:
        """Read the file if it exists; never raises. Without a ``path``: memory only.

        ``table``: key of the entries, and kind of the file. ``read`` returns an entry from JSON values, None to drop
        it; a `FormatError` drops the whole file.
        """
        self.path, self.table, self._parse = path, table, read
        self._lock = threading.Lock()
        self._known = self._read()
        self._changed: set[str] = set()
        """Entries that are newer than the file's."""

    def get(self, key: str) -> V | None:
        """Return an entry, or None."""
        with self._lock:
            return self._known.get(key)

    def put(self, key: str, value: V) -> None:
        """Set an entry, and write the file if there is one; never raises."""
        with self._lock:
            self._set(key, value)
        self.save()

    def refresh(self) -> None:
        """Read other processes' changes; never raises."""
        merged = self._read()
        with self._lock:
            for key, known in self._known.items():
                if key not in merged or key in self._changed:
                    merged.pop(key, None)
                    merged[key] = known
            self._known = merged
            self._trim()

    def save(self) -> None:
        """Refresh and write the file, if there is one; never raises."""
        if self.path is None:
            return
        try:
            self.path.parent.mkdir(mode=PRIVATE_FOLDER, parents=True, exist_ok=True)
            self.refresh()
            with self._lock:
                text = self.dumps(self._known)
                self._changed.clear()
            # Not under the lock: a starting play must not wait for a disk.
            write_text(self.path, text, mode=PRIVATE)
        except (OSError, KvabrError) as error:
            self.warn(f"{self.path} cannot be saved: {error}")

    def identity(self) -> Any:
        """Return the file's owner as plain JSON values."""
        return this_machine()

    def warn(self, what: str) -> None:
        """Report an unreadable or unwritable file."""

    def dumps(self, known: dict[str, V]) -> str:
        """Return the file's text with these entries."""
        head = {"schema": SCHEMA, self.owner: self.identity(), "sha256": digest(known)}
        return json.dumps(head | {self.table: known}, default=asdict) + "\n"

    def loads(self, text: str) -> dict[str, V]:
        """Return a file's entries; raise `FormatError` if it is damaged, or of another machine."""
        try:
            whole = json.loads(text)
            if whole["schema"] != SCHEMA or whole[self.owner] != self.identity():
                raise FormatError("of another machine or version")
            entries = whole[self.table]
            long = any(len(key) > _MAX_NAME for key in entries)
            if whole["sha256"] != digest(entries) or len(entries) > self.most or long:
                raise FormatError("damaged")
            found = {key: self._parse(value) for key, value in entries.items()}
            return {key: value for key, value in found.items() if value is not None}
        except (AttributeError, KeyError, TypeError, ValueError, RecursionError) as error:
            raise FormatError(f"not a file of {self.table} ({error!r})") from error

    def _read(self) -> dict[str, V]:
        try:
            if self.path is None or not self.path.exists():
                return {}
            return self.loads(read_text(self.path, MAX_BYTES, unreadable=FormatError, unfit=FormatError))
        except (FormatError, OSError) as error:
            self.warn(f"{self.path}: {error}; the file is ignored, and will be replaced")
            return {}

    def _set(self, key: str, value: V) -> None:
        self._known.pop(key, None)
        self._known[key] = value
        self._changed.add(key)
        self._trim()

    def _trim(self) -> None:
        for key in list(self._known)[: -self.most]:
            del self._known[key]
            self._changed.discard(key)


@cache
def this_machine() -> dict[str, str | int]:
    """Return the facts that affect timings."""
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


def digest(entries: Any) -> str:
    """Return the checksum of all entries: JSON values, or dataclasses of them."""
    return hashlib.sha256(json.dumps(entries, sort_keys=True, default=asdict).encode()).hexdigest()


@cache
def this_host() -> str:
    """Return a digest that identifies this host without revealing its name."""
    parts = [platform.node(), platform.machine()]
    with contextlib.suppress(OSError):
        parts.append(Path("/etc/machine-id").read_text(encoding="ascii", errors="replace")[:64])
    return hashlib.sha256("\0".join(("kvabr.host", *parts)).encode()).hexdigest()[:16]
