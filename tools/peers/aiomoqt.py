"""A client of another MoQT stack, for `tests/interop/test_aiomoqt.py`: prints received objects as JSON lines.

python worker.py PORT DRAFT NAMESPACE TRACK subscribe
    the largest object of SUBSCRIBE_OK (null: none), then each object that is pushed, then the status of PUBLISH_DONE
python worker.py PORT DRAFT NAMESPACE TRACK fetch FIRST LAST
    each object of these groups, then "end"

NAMESPACE is a JSON list of fields. An object is [group, object ID, SHA-256 of its payload].
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import sys
from typing import Any

from aiomoqt.client import MOQTClient
from aiomoqt.types import FilterType

PATIENCE_S = 300.0


def say(value: object) -> None:
    """Print a line."""
    print(json.dumps(value), flush=True)


def heard(header: Any, _size: int, _received_us: int, group: int | None = None, *_: object) -> None:
    """Print an object; see `on_object` of aiomoqt."""
    payload = bytes(header.payload or b"")
    say([header.group_id if group is None else group, header.object_id, hashlib.sha256(payload).hexdigest()])


async def subscribe(session: Any, namespace: tuple[bytes, ...], track: str) -> None:
    """Subscribe to a track until the publisher ends the subscription."""
    done: asyncio.Future[int | None] = asyncio.get_running_loop().create_future()

    def ended(message: Any, *_: object) -> None:
        if not done.done():
            done.set_result(getattr(message, "status_code", None))

    answer = await session.subscribe(
        namespace, track, filter_type=FilterType.LATEST_OBJECT, wait_response=True, on_object=heard, on_done=ended
    )
    group = answer.largest_group_id
    say(None if group is None else [group, answer.largest_object_id])
    say({"done": await asyncio.wait_for(done, PATIENCE_S)})


async def fetch(session: Any, namespace: tuple[bytes, ...], track: str, first: int, last: int) -> None:
    """Fetch groups ``first`` to ``last``."""

    def fetched(header: Any, *_: object) -> None:  # unlike those of subscriptions, these know their group
        heard(header, 0, 0, header.group_id)

    answer = await session.fetch(
        namespace, track, start_group=first, end_group=last, wait_response=True, on_object=fetched
    )
    if await session.await_fetch_done(answer.request_id, PATIENCE_S):
        say("end")


async def main(port: str, draft: str, namespace: str, track: str, how: str, *more: str) -> None:
    """Connect, and run the command."""
    client = MOQTClient("127.0.0.1", int(port), path="/", use_quic=True, verify_tls=False, supported_drafts=int(draft))
    async with client.connect() as session:
        await session.client_session_init()
        fields = tuple(field.encode() for field in json.loads(namespace))
        if how == "subscribe":
            await subscribe(session, fields, track)
        else:
            await fetch(session, fields, track, *map(int, more))


if __name__ == "__main__":
    logging.disable(logging.WARNING)
    asyncio.run(main(*sys.argv[1:]))
