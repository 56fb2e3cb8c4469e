"""Plays of a store in a process with hardly any file descriptors: run by a test, which gives it the URL of the store.

Prints the outcomes of plays under each limit, and after it was lifted, one JSON object a line.
"""

import asyncio
import json
import os
import resource
import socket
import sys
from collections import Counter
from contextlib import suppress

from kvabr import AsyncClient, KvabrError, Limits, Played
from tests.store.publishing import PLAIN

PLAYS = 20


async def plays(client):
    """Play several prompts at once, and return their outcomes."""
    asked = (client.play([number] * 40, deadline=5.0) for number in range(PLAYS))
    told = await asyncio.gather(*asked, return_exceptions=True)
    return Counter(
        "played" if isinstance(each, Played) else type(each).__name__ if isinstance(each, KvabrError) else repr(each)
        for each in told
    )


async def main(url):
    most, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    for left in (0, 2, 8, 16):
        async with AsyncClient(url, model=PLAIN, limits=Limits(memory_bytes=0)) as client:
            free = os.dup(0)
            os.close(free)
            resource.setrlimit(resource.RLIMIT_NOFILE, (free + left, hard))
            try:
                with suppress(OSError, LookupError):  # whatever Python loads for this must not be missing for ever
                    socket.getaddrinfo("localhost", 1)
                few = await plays(client)
            finally:
                resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
            print(json.dumps([few, await plays(client)]), flush=True)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
