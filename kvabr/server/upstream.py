"""How a relay fetches from its origin: a group goes on where it broke off, if the origin comes back in time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from kvabr.moqt.codes import RequestCode
from kvabr.quic.interface import Connection
from kvabr.types.errors import ConnectionLostError, RequestError
from kvabr.types.naming import TrackNamespace

PATIENCE_S = 10.0
"""So long a group may wait for an origin that went away, before those who wait for it are told."""
_PAUSE_S = 0.1
_SILENCE_S = 2.0
"""A group of which nothing comes for so long is asked for anew: its publisher may have forgotten it."""


async def bring(
    upstream: Connection,
    namespace: TrackNamespace,
    track: str,
    group: int,
    take: Callable[[bytes], None],
    *,
    priority: int,
    limit: int,
) -> None:
    """Fetch a group.

    Groups never change, so when the connection is lost the group is asked for again, and what had come is skipped. That
    the two parts belong together the players find out, who check the digest of the whole.

    Args:
        upstream: the origin; it dials again by itself.
        namespace: of the track.
        track: its name.
        group: which.
        take: is given the bytes as they come, each once.
        priority: 0 (most urgent) to 255.
        limit: bytes that it may have.

    Raises:
        TransportError: as `kvabr.quic.interface.Download.read`.
    """
    loop = asyncio.get_running_loop()
    received, end_s, silence_s = 0, loop.time() + PATIENCE_S, _SILENCE_S
    while True:
        download = upstream.fetch(namespace, track, group, priority=priority, limit=limit)
        skip = received
        try:
            while data := await asyncio.wait_for(download.read(), silence_s):
                if skip < len(data):
                    new = data[skip:] if skip else data
                    received += len(new)
                    take(bytes(new))
                skip = max(0, skip - len(data))
                end_s = loop.time() + PATIENCE_S
        except TimeoutError as error:
            if loop.time() > end_s:
                raise RequestError(f"{track[:80]}, group {group}: the origin fell silent", retry_after_s=1.0) from error
            silence_s *= 2
        except ConnectionLostError:
            if upstream.closed or loop.time() > end_s:
                raise
            await asyncio.sleep(_PAUSE_S)
        else:
            if skip:
                why = f"{track}, group {group}: the origin came back with less than it had"
                raise RequestError(why, code=RequestCode.MALFORMED_TRACK)
            return
        finally:
            download.cancel()
