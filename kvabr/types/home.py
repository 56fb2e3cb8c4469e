"""Detects use of an object in a forked child.

A forked child inherits the object but not its threads: queued work is lost, waits never end, and writes to a shared
socket reach the parent's peer. Objects with threads, sockets or files hold a `HomeProcess` and raise `ForkedError` in a
child; closing them there has no effect.
"""

from __future__ import annotations

import os

from kvabr.types.errors import ForkedError


class HomeProcess:
    """The process that created an object."""

    __slots__ = ("_made_in", "_what")

    def __init__(self, what: str) -> None:
        """Record this process; ``what`` starts the error message: ``the publisher``."""
        self._what, self._made_in = what, os.getpid()

    @property
    def here(self) -> bool:
        """True in the creating process."""
        return os.getpid() == self._made_in

    def check(self) -> None:
        """Raise `ForkedError` in any other process."""
        if not self.here:
            made_in, used_in = self._made_in, os.getpid()
            raise ForkedError(
                f"{self._what} was created in process {made_in} and is used in its forked child {used_in}, which does "
                "not have its threads: create another one in the child, or start the child with "
                'multiprocessing.get_context("spawn")',
                made_in=made_in,
                used_in=used_in,
            )
