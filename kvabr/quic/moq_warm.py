"""Tracks that moq-rs is kept acquainted with, so that their groups come a round trip sooner.

Before it asks for a group moq-rs asks about the track, unless it knows it. It forgets a track with the last handle of
it: a subscription, between two of moq-rs, or a group, towards others. A subscription that begins beyond all groups
brings nothing, and serves as such a handle.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import OrderedDict
from typing import Any

WARM_S = 5.0
"""So long tracks are kept after the last request has ended."""
WARM_TRACKS = 16
_BEYOND = 1 << 52
"""A group that no track has."""

_Key = tuple[str, str]


class WarmTracks:
    """The handles of one connection."""

    def __init__(self, moq: Any, client: Any, *, subscribe: bool) -> None:
        """None yet.

        Args:
            moq: the module.
            client: the connection.
            subscribe: whether a subscription is of use, and does no harm.
        """
        self._moq, self._client, self._subscribe = moq, client, subscribe
        self._kept: OrderedDict[_Key, Any] = OrderedDict()
        """A group, a subscription, or the task that makes one."""
        self._cooling: asyncio.TimerHandle | None = None
        self._used_s = time.monotonic()
        self._busy = False

    @property
    def busy(self) -> bool:
        """Whether anything is under way on the connection; as long as it is, nothing is forgotten."""
        return self._busy

    @busy.setter
    def busy(self, busy: bool) -> None:
        self._busy, self._used_s = busy, time.monotonic()

    def keep(self, path: str, track: str, group: Any) -> None:
        """A group has come."""
        if not self._subscribe:
            self._put((path, track), group)

    def prepare(self, path: str, track: str) -> None:
        """Groups of a track may be asked for soon."""
        key = path, track
        if not self._subscribe:
            return
        if key in self._kept:
            self._kept.move_to_end(key)
            return
        self._put(key, asyncio.get_running_loop().create_task(self._acquaint(key)))

    def clear(self) -> None:
        """Let go of all."""
        if self._cooling is not None:
            self._cooling.cancel()
            self._cooling = None
        while self._kept:
            self._let_go(self._kept.popitem()[1])

    async def _acquaint(self, key: _Key) -> None:
        path, track = key
        beyond = self._moq.Subscription(group_start=_BEYOND)
        try:
            broadcast = await self._client.request_broadcast(path)
            self._kept[key] = await broadcast.subscribe_track(track, beyond)
        except self._moq.Error:
            self._kept.pop(key, None)  # there is no such track: who asks for it will be told

    def _put(self, key: _Key, handle: Any) -> None:
        self._kept[key] = handle
        self._kept.move_to_end(key)
        if len(self._kept) > WARM_TRACKS:
            self._let_go(self._kept.popitem(last=False)[1])
        if self._cooling is None:
            self._cooling = asyncio.get_running_loop().call_later(WARM_S, self._cool)

    def _cool(self) -> None:
        self._cooling = None
        left_s = WARM_S if self._busy else self._used_s + WARM_S - time.monotonic()
        if left_s > 0:
            self._cooling = asyncio.get_running_loop().call_later(left_s, self._cool)
        else:
            self.clear()

    @staticmethod
    def _let_go(handle: Any) -> None:
        with contextlib.suppress(AttributeError):
            handle.cancel()
