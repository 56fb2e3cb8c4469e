"""Division of this process's cores among the groups being decoded or encoded. Does not import torch."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

from kvabr.types.errors import UsageError

VARIABLE = "KVABR_DECODER_THREADS"
"""Environment variable with the number of decoding threads."""
_MAX_THREADS = 1024


@cache
def decoder_threads() -> int:
    """Return the number of decoding threads: KVABR_DECODER_THREADS, else one per core of the process's affinity.

    Raises:
        UsageError: the variable is not a number of threads.
    """
    wanted = os.environ.get(VARIABLE)
    if not wanted:
        return max(1, len(os.sched_getaffinity(0)))
    if not wanted.isdecimal() or not 1 <= int(wanted) <= _MAX_THREADS:
        raise UsageError(f"{VARIABLE} must be 1 to {_MAX_THREADS} decoder threads, got {wanted!r}; correct or unset it")
    return int(wanted)


_encoding = threading.local()


@contextmanager
def encoding_on(threads: int | None) -> Iterator[None]:
    """Limit this thread's transforms of groups to ``threads`` threads; None: the default."""
    before = encoder_threads()
    _encoding.threads = threads
    try:
        yield
    finally:
        _encoding.threads = before


def encoder_threads() -> int | None:
    """Return the limit set by this thread's `encoding_on`; None: torch's number of threads."""
    found: int | None = getattr(_encoding, "threads", None)
    return found


class SharedCores:
    """Divides cores among the groups being decoded; a group that is decoded alone gets all cores."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self._lock = threading.Lock()
        self._groups = 0

    @contextmanager
    def share(self) -> Iterator[int]:
        """Count one more group; yield the number of threads for it."""
        with self._lock:
            self._groups += 1
            threads = max(1, decoder_threads() // self._groups)
        try:
            yield threads
        finally:
            with self._lock:
                self._groups -= 1

    @contextmanager
    def all_taken(self) -> Iterator[None]:
        """Decode every group in one thread inside this context, to time it as if all cores were busy."""
        with self._lock:
            self._groups += _MAX_THREADS
        try:
            yield
        finally:
            with self._lock:
                self._groups -= _MAX_THREADS


CORES = SharedCores()
if hasattr(os, "register_at_fork"):  # a child process decodes none of the parent's groups
    os.register_at_fork(after_in_child=CORES.reset)
