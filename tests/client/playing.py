"""Short calls of a client: a play on a connection of the test's, or by a client that several plays share."""

from functools import partial

from kvabr.client.async_client import AsyncClient
from kvabr.client.options import PlayOptions
from kvabr.client.result import Played
from kvabr.server.grants import EVERYTHING
from tests.memory_transport import MemoryConnection, MemoryLink


def connection(library, rate=1e8, rtt_s=0.02, **options):
    """Return a connection to an origin in memory that has these assets; ``options`` are those of `MemoryConnection`."""
    return MemoryConnection(partial(library.find, EVERYTHING), MemoryLink(rate, rtt_s), **options)


def off_by(kv, exact):
    """Return how far a cache is from the exact one, as a share of its norm."""
    return float((kv.float() - exact).norm() / exact.norm())


async def play(
    via, tokens=(), *, deadline, parts=None, question=None, share=None, spec=None, engine=None, peer=None, **options
):
    """Play a prompt by a client, or on a connection by a client that ends with the play."""
    how = PlayOptions(**options)
    what = {"parts": parts, "question": question, "share": share, "model": spec}
    if isinstance(via, AsyncClient):
        return await via.play(tokens, deadline=deadline, options=how, engine=engine, peer=peer, **what)
    client, played = AsyncClient(via), None
    try:
        played = await client.play(tokens, deadline=deadline, options=how, engine=engine, **what)
    finally:
        if not isinstance(played, Played) or played.upgrades is None:
            await client.close()  # or upgrades go on
    return played


async def play_asset(via, asset, *, deadline, tokens=(), engine=None, peer=None, **options):
    how = PlayOptions(**options)
    if isinstance(via, AsyncClient):
        return await via.play_asset(asset, deadline=deadline, tokens=tokens, options=how, engine=engine, peer=peer)
    client = AsyncClient(via)
    try:
        return await client.play_asset(asset, deadline=deadline, tokens=tokens, options=how, engine=engine)
    finally:
        await client.close()
