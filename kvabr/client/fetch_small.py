"""A small track, fetched whole: a catalog, the answer to a lookup, a profile."""

from __future__ import annotations

from kvabr.quic.interface import Connection, read_all
from kvabr.types.errors import ConnectionLostError
from kvabr.types.naming import TrackNamespace

_URGENT = 0
"""Priority: a play waits for it."""


async def fetch_whole(origin: Connection, namespace: TrackNamespace, track: str, limit: int) -> bytes:
    """Group 0 of a track; asked for a second time if the connection goes and there is another.

    A connection may have been dead for long without anyone knowing: what is asked for first is what finds out.

    Args:
        origin: where to ask.
        namespace: of the track.
        track: its name.
        limit: bytes that it may have at most.

    Raises:
        TransportError: it cannot be fetched.
    """
    try:
        return await read_all(origin.fetch(namespace, track, priority=_URGENT, limit=limit))
    except ConnectionLostError:
        if origin.closed:
            raise
        return await read_all(origin.fetch(namespace, track, priority=_URGENT, limit=limit))
