"""A cache, open and sealed, for tests of both."""

from __future__ import annotations

from kvabr.client.async_client import AsyncClient
from kvabr.client.options import PlayOptions
from kvabr.server.published_assets import PublishedAssets
from kvabr.types.sealing import KeyRing, new_key
from tests.client.playing import connection
from tests.toymodel import SPEC, prompt

RING = KeyRing((new_key("ours"), new_key("tenant")))
READER, STRANGER = KeyRing(RING.keys[1:]), KeyRing((new_key("stranger"),))
TRACKS = ("FP16", "AC-L0", "AC-L1")
TOKENS = prompt(160).tokens


async def played(folder, keys, policy):
    """Play the prompt from a folder."""
    async with connection(PublishedAssets(folder)) as link:
        client = AsyncClient(link, keys=keys)
        try:
            return await client.play(TOKENS, deadline=2.0, options=PlayOptions(policy=policy), model=SPEC)
        finally:
            await client.close()
