"""The requests of one connection that wait: for their track to be found, or for the first bytes of their group.

Both wait for something outside of this process, a disk or a relay's origin. A request is in one of the two states, or
it is answered; from then on it is the send queue's.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

from kvabr.server.budgets import Host, Room
from kvabr.server.grants import Grant
from kvabr.server.publication import ArrivingGroup, Publication
from kvabr.types.errors import TransportError


class Expected:
    """A FETCH that is answered once the first bytes of its group have arrived; a `Holder` of room for the group."""

    dear = True

    def __init__(
        self,
        group: ArrivingGroup,
        accept: Callable[[], None],
        room: Room | None,
        grant: Grant,
        publication: Publication,
    ) -> None:
        """Wait for ``group`` of a publication, requested under a grant; ``accept`` answers."""
        self.group, self._accept, self._room = group, accept, room
        self.grant, self.publication = grant, publication
        self.on_more: Callable[[], None] = lambda: None
        if room is not None:
            room.take(self, group.files, group.memory)

    def accept(self) -> None:
        """Answer the request, which takes over the group."""
        self._leave()
        self._accept()

    def close(self) -> None:
        """Give up."""
        self._leave()
        self.group.close()

    def may_park(self) -> bool:
        return False

    def park(self) -> None:
        raise NotImplementedError  # it may not be parked

    def _leave(self) -> None:
        if self._room is not None:
            self._room.leave(self)


class WaitingRequests:
    """Requests by their ID. They count among the server's requests in flight."""

    def __init__(self, server: Host[Any], run: Callable[[Callable[[], None]], None]) -> None:
        """Begin without any; ``run`` is given what answers a request once its track is found."""
        self._server, self._run = server, run
        self._lookups: dict[int, asyncio.Task[None]] = {}
        self._expected: dict[int, Expected] = {}

    def __len__(self) -> int:
        return len(self._lookups) + len(self._expected)

    @property
    def expected(self) -> dict[int, Expected]:
        """Those that wait for the first bytes of their group; a copy."""
        return dict(self._expected)

    def look(
        self,
        number: int,
        find: Callable[[], Awaitable[Publication | None]],
        answer: Callable[[Publication | None], None],
        refuse: Callable[[TransportError], None],
    ) -> None:
        """Have a track found in a task of its own, then run ``answer`` or ``refuse``.

        If the request is stopped before the task begins, nothing is looked for.
        """
        self._server.requests += 1
        task = asyncio.get_running_loop().create_task(self._look(number, find, answer, refuse))
        self._lookups[number] = task

    def expect(self, number: int, expected: Expected) -> None:
        """Have a request wait for its group; see `arrived`."""
        self._server.requests += 1
        self._expected[number] = expected

    def arrived(self, number: int) -> None:
        """Accept a request that waits for its group if the first bytes have arrived.

        Raises:
            TransportError: the group cannot be had; the request is stopped.
        """
        if (expected := self._expected.get(number)) is None:
            return
        try:
            if expected.group.available:
                del self._expected[number]
                self._server.requests -= 1
                expected.accept()
        except TransportError:
            self.stop(number)
            raise

    def prioritise(self, number: int, priority: int) -> None:
        """Pass on the new priority of a request that waits for its group."""
        if (expected := self._expected.get(number)) is not None:
            expected.group.prioritise(priority)

    def stop(self, number: int) -> None:
        """Forget a request, if it waits."""
        if (task := self._forget(number)) is not None:
            task.cancel()
        if (expected := self._expected.pop(number, None)) is not None:
            self._server.requests -= 1
            expected.close()

    def stop_all(self) -> None:
        """Forget all requests."""
        for number in [*self._lookups, *self._expected]:
            self.stop(number)

    async def _look(
        self,
        number: int,
        find: Callable[[], Awaitable[Publication | None]],
        answer: Callable[[Publication | None], None],
        refuse: Callable[[TransportError], None],
    ) -> None:
        then: Callable[[], None]
        try:
            then = partial(answer, await find())
        except TransportError as error:
            then = partial(refuse, error)
        except Exception as error:  # noqa: BLE001  # a bug, which `run` tells of
            then = partial(_raise, error)
        self._forget(number)
        self._run(then)

    def _forget(self, number: int) -> asyncio.Task[None] | None:
        task = self._lookups.pop(number, None)
        if task is not None:
            self._server.requests -= 1
        return task


def _raise(error: Exception) -> None:
    raise error
