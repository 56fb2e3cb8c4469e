"""The process that an object with threads, sockets or files of its own belongs to.

A forked child has a copy of the object and none of its threads: what it hands over is lost, what it waits for never
happens, and what it writes to a shared socket reaches the parent's peer. Such an object has a `HomeProcess` and raises
`ForkedError` in a child; closing it there does nothing, because it is the parent's.
"""

from __future__ import annotations

import os

from kvabr.types.errors import ForkedError


class HomeProcess:
    """The process in which an object was made."""

    __slots__ = ("_made_in", "_what")

    def __init__(self, what: str) -> None:
        """Take the current process; ``what`` begins the error's message: ``the publisher``."""
        self._what, self._made_in = what, os.getpid()

    @property
    def here(self) -> bool:
        """Whether this is that process."""
        return os.getpid() == self._made_in

    def check(self) -> None:
        """Raise `ForkedError` in any other process."""
        if not self.here:
            made_in, used_in = self._made_in, os.getpid()
            raise ForkedError(
                f"{self._what} was made in process {made_in} and is used in its forked child {used_in}, which has none "
                "of its threads: make another one in the child, or start the child with "
                'multiprocessing.get_context("spawn")',
                made_in=made_in,
                used_in=used_in,
            )
