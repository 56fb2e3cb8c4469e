"""Hints to other nodes: what a node is asked to fetch into its own store, before a prompt comes."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable

from kvabr.client.lookup import Found
from kvabr.client.result import Hinted
from kvabr.transfer.interface import Connection, read_all
from kvabr.types.errors import NotFoundError, TransportError
from kvabr.types.hints import MAX_ANSWER_BYTES, HintAnswer, HintRequest
from kvabr.types.naming import TrackNamespace

_MORE_S = 5.0
"""Seconds for the way there and back."""


async def hint_node(
    node: Awaitable[Connection], asset: TrackNamespace | Found, within_s: float, keep_s: float
) -> Hinted:
    """Ask a node to fetch an asset within some seconds, and to keep it for some; see `AsyncClient.hint_asset`.

    Raises:
        TransportError: it cannot be reached, or does not answer in time.
        NotFoundError: there is no such asset, or the peer is no node.
    """
    groups = len(asset.catalog.chunks) if isinstance(asset, Found) else 0
    name = asset.catalog.namespace if isinstance(asset, Found) else asset
    wanted = HintRequest(within_s, keep_s, groups)
    try:
        async with asyncio.timeout(within_s + _MORE_S):
            connection = await node
            answer = HintAnswer.loads(await read_all(connection.fetch(name, wanted.track, limit=MAX_ANSWER_BYTES)))
    except TimeoutError as error:
        raise TransportError(f"the node has not answered within {within_s + _MORE_S:g} s") from error
    except NotFoundError as error:
        raise NotFoundError(
            "there is no such cache, or the peer is no node: hints are for nodes that serve what they fetch "
            "(`kvabr player --serve`)",
            reason=error.reason,
        ) from error
    return Hinted(answer.tokens, answer.nbytes, answer.loss)
