"""Buffers for reading a FETCH: payload at its final place in the group, the headers in between elsewhere.

Most objects of a group have the same size, so the next header is predictable, and one system call reads many objects
without a copy. After another header, the pieces are joined and parsed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from kvabr.moqt.requester import NextPayload
from kvabr.transfer.transfer import GroupTransfer

_MAX_BUFFERS = 64
"""Buffers filled at a time; Linux allows 1,024."""


def place(payload: NextPayload, transfer: GroupTransfer, most: int) -> list[memoryview]:
    """Return buffers for at most ``most`` bytes: payload, header, payload, and so on; empty if the group is full."""
    allowed = min(most, transfer.request.limit - transfer.received)
    if allowed <= 0:
        return []
    whole, step = transfer.room(allowed), len(payload.follower)
    headers = memoryview(bytearray(step * (_MAX_BUFFERS // 2)))
    buffers = [whole[: payload.left]]
    at, left = len(buffers[0]), most - len(buffers[0])
    while step and left > step and at < len(whole) and len(buffers) < _MAX_BUFFERS:
        number = len(buffers) // 2
        part = whole[at : at + min(payload.size, left - step)]
        buffers += headers[number * step : (number + 1) * step], part
        at, left = at + len(part), left - step - len(part)
    return buffers


def filled(buffers: Sequence[memoryview], count: int) -> Iterator[memoryview]:
    """Yield the first ``count`` bytes of buffers."""
    for buffer in buffers:
        if count <= 0:
            return
        yield buffer[:count]
        count -= len(buffer)
