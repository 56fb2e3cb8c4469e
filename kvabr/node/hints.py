"""A node's neighbours, routers and agents say what will be played there next: it is fetched before it is.

They show the token of neighbours. What they make the node do is bounded: fetches at a time, the minute that each may
take, for how long what is kept is kept, and how much that is (`Limits.keep_bytes`, `kvabr.client.options`).
"""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import TYPE_CHECKING

from kvabr.client.async_client import AsyncClient
from kvabr.client.peers import PeerLike
from kvabr.transfer.work import cancel_all
from kvabr.types.errors import BusyError, KvabrError, Reason, RequestError, TransportError
from kvabr.types.hints import HintAnswer, HintRequest
from kvabr.types.naming import TrackNamespace

if TYPE_CHECKING:
    from structlog.typing import FilteringBoundLogger

KEEP_S = 3600.0
"""Default of the longest time for which a cache is kept, seconds."""
_MOST = 16
"""Fetches at a time."""
_AGAIN_S = 1.0
_OWNER = "neighbours"


class NodeHints:
    """Fetches for one client what others say will be played with it."""

    def __init__(
        self, client: AsyncClient, origin: PeerLike, log: FilteringBoundLogger, *, most_keep_s: float = KEEP_S
    ) -> None:
        """Begin; caches come from ``origin``, None: from those of the client."""
        self._client, self._origin, self._log, self._most_keep_s = client, origin, log, most_keep_s
        self._fetches: dict[tuple[TrackNamespace, HintRequest], asyncio.Task[HintAnswer]] = {}

    async def fetch(self, namespace: TrackNamespace, wanted: HintRequest) -> bytes:
        """Fetch an asset, and return the answer. It goes on if the one who asked does not wait.

        Raises:
            NotFoundError: there is no such asset.
            RequestError: there are too many fetches, or it cannot be fetched.
        """
        key = namespace, wanted
        if (task := self._fetches.get(key)) is None:
            if len(self._fetches) >= _MOST:
                why = f"this node fetches {_MOST} caches for others already"
                raise RequestError(why, reason=Reason.BUSY, retry_after_s=_AGAIN_S)
            task = self._fetches[key] = asyncio.get_running_loop().create_task(self._fetch(namespace, wanted))
            task.add_done_callback(lambda done: self._over(key, done))
        return (await asyncio.shield(task)).dumps()

    async def close(self) -> None:
        """End all fetches."""
        await cancel_all(list(self._fetches.values()))

    def _over(self, key: tuple[TrackNamespace, HintRequest], done: asyncio.Task[HintAnswer]) -> None:
        del self._fetches[key]
        if not done.cancelled() and (error := done.exception()) is not None:
            self._log.warning("not fetched ahead", **_where(key[0]), why=str(error))

    async def _fetch(self, namespace: TrackNamespace, wanted: HintRequest) -> HintAnswer:
        client, peer = self._client, self._origin
        try:
            found = await client.find_asset(namespace, within_s=max(wanted.within_s, 1e-3), peer=peer, live=False)
            if 0 < wanted.groups < len(found.catalog.chunks) and (most := found.catalog.playable(wanted.groups)[0]):
                found = replace(found, catalog=found.catalog.prefix(most))
            hinted = await client.hint_asset(
                found,
                within_s=max(wanted.within_s, 1e-3),
                keep_s=min(wanted.keep_s, self._most_keep_s),
                peer=peer,
                owner=_OWNER,
                time_price=client.options.time_price,
            )
        except TransportError:
            raise
        except KvabrError as error:
            reason = Reason.BUSY if isinstance(error, BusyError) else Reason.UNSUPPORTED
            raise RequestError(f"the node cannot fetch it: {error}", reason=reason) from error
        self._log.info("fetched ahead", **_where(namespace), tokens=hinted.tokens, bytes=hinted.bytes)
        return HintAnswer(hinted.tokens, hinted.bytes, hinted.loss)


def _where(namespace: TrackNamespace) -> dict[str, str]:
    """Return how the log names an asset, as a relay's does."""
    return {"model": namespace.model[:80], "prompt": namespace.prompt[:16]}
