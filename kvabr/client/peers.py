"""The peers of a client, with one connection each, and lookups at them."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass

from kvabr.abr.estimator import Estimator, Prior
from kvabr.client.lookup import Found, Unplayable, fetch_catalog, fetch_models, find_prefix
from kvabr.client.shared_bandwidth import PeerHistory, link_of
from kvabr.store.group_cache import GroupCache
from kvabr.telemetry.client_metrics import ClientMetrics
from kvabr.transfer.downloads import Download, Downloads
from kvabr.transfer.interface import Connection, PeerConnection
from kvabr.transfer.peer import Peer
from kvabr.types.errors import (
    FormatError,
    NotFoundError,
    Reason,
    RequestError,
    TransportError,
    UsageError,
)
from kvabr.types.kv import KVSpec
from kvabr.types.naming import TrackNamespace

_MODELS_S = 1.0
"""Seconds to reuse a peer's list of models."""
_MAX_SHAPES = 4
OTHER_SIZES_FACTOR, MIN_OTHER_SIZES_S = 4.0, 0.25
"""Time for lookups in other group sizes: a multiple of the first lookup's, with a floor."""
_AGAIN_S = 0.05
_Answer = Found | Unplayable | None
Answered = tuple[_Answer, KVSpec | None]


@dataclass(frozen=True, slots=True)
class Query:
    """A lookup of a prompt's longest cached prefix."""

    tokens: Sequence[int]
    model: KVSpec | str | None
    """A spec, a name (looked up in up to four group sizes and shapes), or None for the peer's only model."""
    any_group_tokens: bool = False
    """Try other group sizes too."""
    salt: bytes = b""
    any_dtype: bool = False
    live: bool = False
    """Include assets still being prefilled."""
    wait_s: float = 0.0
    """Seconds to repeat a ``live`` lookup without an asset."""


class ClientPeer(Downloads):
    """An origin or a relay, created by `AsyncClient.peer`; the client's plays share its downloads and its link."""

    def __init__(
        self, name: str, peer: PeerConnection, store: GroupCache, metrics: ClientMetrics, *, own: bool = False
    ) -> None:
        """``own``: close the peer with this, and count it while connected."""
        super().__init__(peer, store, metrics)
        self.name = name
        self.link = link_of(peer.names[0] if peer.names else peer)
        self._own = own
        if own and isinstance(peer, Peer):
            peer.first_dialled = self._dialled
        self._models: Sequence[KVSpec] = ()
        self._models_s = -math.inf

    def expected(self, history: PeerHistory) -> Prior:
        """Return a cautious estimate of the link before a play, see `PeerHistory.link`."""
        return history.link(self.peer.names, self._announced())

    def _announced(self) -> Prior:
        return Prior(self.peer.announced_rate, self.peer.stats().rtt_s or 0.0)

    @contextmanager
    def estimating(self, estimator: Estimator, history: PeerHistory) -> Iterator[Estimator]:
        """Yield a play's estimator, primed from the history; record its measurements at the end."""
        names = self.peer.names
        with self.link.joined(estimator, history.before(names, self._announced())) as share:
            try:
                yield share
            finally:
                # A play without bytes must not refresh old records; a play redialled over another transport is not
                # recorded.
                if share.sampled and len(self.peer.names) == 1 and self.peer.names[0] in names:
                    history.record(self.peer.names[0], share.link_rate(), share.ttfb())

    def arrived(self, download: Download, count: int) -> None:
        if download.received_from == "network" and download.limit != "kept":
            self.link.received(count)
        super().arrived(download, count)

    async def close(self) -> None:
        """End all downloads, failing their readers. Idempotent."""
        if self._own and self.peer.reached and not self._closed:
            self.metrics.peers.dec()
        await super().close()
        if self._own:
            await self.peer.close()

    def _dialled(self, error: BaseException | None) -> None:
        if self._closed:
            return
        if error is None:
            self.metrics.peers.inc()
            return
        self.metrics.dials_failed_total.inc()
        if isinstance(error, RequestError) and error.reason == Reason.WRONG:
            self.metrics.wrong_answers_total.inc()

    async def find(self, connection: Connection, query: Query) -> Answered:
        """Return a prompt's longest cached prefix and its model's spec; errors as `AsyncClient.find`."""
        clock = asyncio.get_running_loop().time
        end_s = clock() + (query.wait_s if query.live else 0.0)
        await self.peer.connected()
        answer = await self._find(connection, query)
        with suppress(TimeoutError):  # the last answer stands
            async with asyncio.timeout_at(end_s):
                while not isinstance(answer[0], Found) and clock() + _AGAIN_S <= end_s:
                    await asyncio.sleep(_AGAIN_S)
                    answer = await self._find(connection, query)
        return answer

    async def _find(self, connection: Connection, query: Query) -> Answered:
        model = query.model
        if isinstance(model, KVSpec):
            lookup = self._in_any_size if query.any_group_tokens else _longest
            return await lookup(connection, query, [model]), model
        specs = _shapes(await self._specs(connection), model)
        found = await _longest(connection, query, specs)
        if not isinstance(found, Found):  # there may be new models
            self._models_s = -math.inf
        return found, specs[0] if specs else None

    async def catalog(self, connection: Connection, name: TrackNamespace, *, live: bool) -> Answered:
        """Return an asset's catalog; errors as `AsyncClient.find_asset`."""
        await self.peer.connected()
        return await fetch_catalog(connection, name, live=live), None

    async def _in_any_size(self, connection: Connection, query: Query, specs: Sequence[KVSpec]) -> _Answer:
        clock = asyncio.get_running_loop().time
        begun_s = clock()
        others = asyncio.create_task(self._in_other_sizes(connection, query, *specs))
        try:
            found = await _longest(connection, query, specs)
            if tokens_of(found) < len(query.tokens):
                with suppress(TimeoutError):
                    async with asyncio.timeout(max(MIN_OTHER_SIZES_S, OTHER_SIZES_FACTOR * (clock() - begun_s))):
                        return max(found, await others, key=tokens_of)
        finally:
            others.cancel()
        return found

    async def _in_other_sizes(self, connection: Connection, query: Query, model: KVSpec) -> _Answer:
        with suppress(TransportError, FormatError, UsageError):
            listed = await self._specs(connection)
            others = [spec for spec in listed if spec != model and spec.same_cache(model)]
            return await _longest(connection, query, others[:_MAX_SHAPES])
        return None

    async def _specs(self, connection: Connection) -> Sequence[KVSpec]:
        """Return the peer's models, as they were a moment ago."""
        now_s = asyncio.get_running_loop().time()
        if now_s > self._models_s + _MODELS_S:
            self._models = ()
            try:
                self._models = await fetch_models(connection)
            except NotFoundError as error:
                raise UsageError(
                    "the origin does not list its models: give a spec, model=KVSpec(...), or an engine"
                ) from error
            self._models_s = now_s
        return self._models


PeerLike = ClientPeer | PeerConnection | str | None
"""A peer as named by a play; None: the client's."""
PeersLike = PeerLike | Sequence[PeerLike]


def _shapes(listed: Sequence[KVSpec], model: str | None) -> list[KVSpec]:
    specs = [spec for spec in listed if model in (None, spec.model)]
    names = sorted({spec.model for spec in specs})
    if len(names) > 1:
        raise UsageError(f"the origin has caches of several models: give model=..., one of {', '.join(names)}")
    if len(specs) > _MAX_SHAPES:
        raise UsageError(
            f"the origin has caches of {names[0]} in {len(specs)} shapes: give the spec of one, model=KVSpec(...)"
        )
    return specs


async def _longest(connection: Connection, query: Query, specs: Sequence[KVSpec]) -> _Answer:
    lookups = (
        find_prefix(connection, query.tokens, spec, salt=query.salt, any_dtype=query.any_dtype, live=query.live)
        for spec in specs
    )
    answers = await asyncio.gather(*lookups, return_exceptions=True)
    found = [answer for answer in answers if isinstance(answer, Found)]
    for answer in answers:
        if isinstance(answer, BaseException) and not found:
            raise answer
    unplayable = next((answer for answer in answers if isinstance(answer, Unplayable)), None)
    return max(found, key=tokens_of, default=unplayable)


def tokens_of(answer: Found | Unplayable | None) -> int:
    """Return the tokens of a found prefix, or 0."""
    return answer.catalog.tokens if isinstance(answer, Found) else 0
