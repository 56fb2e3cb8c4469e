"""Things of which a process has one, and types that only one thread may work out: built once, under one lock.

`functools.cache` runs its function in every thread that has no result yet, and gives each its own.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Hashable
from functools import cache
from typing import TypeVar, cast

F = TypeVar("F", bound=Callable[..., object])

_BUILDING = threading.RLock()
"""Held while something is built, in any thread, and while the process forks: a child has nothing half-built."""
if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_BUILDING.acquire, after_in_parent=_BUILDING.release, after_in_child=_BUILDING.release)


def once(work: F) -> F:
    """Return a function whose results are kept by its positional arguments, and which runs in one thread at a time.

    The function must not wait for another thread. An error is raised to the caller, and the next one tries again.
    """
    first = cache(work)

    def build(*args: Hashable) -> object:
        with _BUILDING:
            return first(*args)

    return cast("F", cache(build))
