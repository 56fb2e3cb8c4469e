"""Builds process-wide objects and types once, under a single lock.

`functools.cache` can run its function in several threads at once and return different results.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Hashable
from functools import cache
from typing import TypeVar, cast

F = TypeVar("F", bound=Callable[..., object])

_BUILDING = threading.RLock()
"""Also held during a fork, so that a child never inherits half-built objects."""
if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_BUILDING.acquire, after_in_parent=_BUILDING.release, after_in_child=_BUILDING.release)


def once(work: F) -> F:
    """Return ``work`` with a cache by positional arguments; it runs in one thread at a time.

    ``work`` must not wait for another thread. Errors are not cached.
    """
    first = cache(work)

    def build(*args: Hashable) -> object:
        with _BUILDING:
            return first(*args)

    return cast("F", cache(build))
