"""Threads that check and decode groups."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from functools import cache

from kvabr.codec.threads import decoder_threads

SMALL_BYTES = 32 << 10
"""Fewer bytes are checked and decoded on the event loop's thread: next to a busy loop, a thread needs 5 ms just to
acquire the interpreter's lock."""


@cache
def decoders() -> ThreadPoolExecutor:
    """Return this process's pool of decoder threads."""
    return ThreadPoolExecutor(decoder_threads(), thread_name_prefix="kvabr-decode")


if hasattr(os, "register_at_fork"):  # threads do not survive a fork
    os.register_at_fork(after_in_child=decoders.cache_clear)
