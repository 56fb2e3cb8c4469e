"""Where the bytes of a FETCH are read to: payload to its place in the group, the headers in between beside it.

Most objects of a group are equally long, so that the header of the next one is known before it comes, and one system
call brings many objects without a copy. Where another header comes, the bytes behind it lie in pieces that are joined.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from kvabr.moqt.requester import NextPayload
from kvabr.transfer.transfer import GroupTransfer

_MOST_BUFFERS = 64
"""Buffers that are filled at a time; Linux takes 1,024."""


def place(payload: NextPayload, transfer: GroupTransfer, most: int) -> list[memoryview]:
    """Return buffers for the next bytes, ``most`` at most: payload, a header, payload, and so on; none if none fit."""
    room = min(most, transfer.request.limit - transfer.received)
    if room <= 0:
        return []
    whole, step = transfer.room(room), len(payload.follower)
    headers = memoryview(bytearray(step * (_MOST_BUFFERS // 2)))
    buffers = [whole[: payload.left]]
    at, left = len(buffers[0]), most - len(buffers[0])
    while step and left > step and at < len(whole) and len(buffers) < _MOST_BUFFERS:
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
