"""The peers of a client: one connection each, estimates of their links, and lookups."""

from __future__ import annotations

import asyncio
import math
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, TypeVar

from kvabr.abr.estimators import Estimator, Prior
from kvabr.client.lookup import Found, Unplayable, fetch_catalog, fetch_models, find_prefix
from kvabr.client.memory import PeerHistory
from kvabr.store.group_cache import GroupCache
from kvabr.telemetry.client_metrics import ClientMetrics
from kvabr.transfer.downloads import Download, Downloads
from kvabr.transfer.interface import Connection, PeerConnection
from kvabr.transfer.peer import Peer
from kvabr.types.errors import FormatError, NotFoundError, PolicyError, Reason, RequestError, TransportError, UsageError
from kvabr.types.kv import KVSpec
from kvabr.types.naming import TrackNamespace

_MODELS_S = 1.0
"""Seconds to reuse a peer's list of models."""
_MAX_SHAPES = 4
OTHER_SIZES_FACTOR, MIN_OTHER_SIZES_S = 4.0, 0.25
"""Time limit for lookups in other group sizes: this multiple of the first lookup's time, but at least these seconds."""
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
    """True: also try other group sizes."""
    salt: bytes = b""
    any_dtype: bool = False
    live: bool = False
    """True: include assets still being prefilled."""
    wait_s: float = 0.0
    """Seconds to repeat a ``live`` lookup until it finds an asset."""


class ClientPeer(Downloads):
    """An origin or a relay, created by `AsyncClient.peer`. The client's plays share its downloads and its link."""

    def __init__(
        self, name: str, peer: PeerConnection, store: GroupCache, metrics: ClientMetrics, *, own: bool = False
    ) -> None:
        """``own``: close ``peer`` with this object, and count it in the metrics while connected."""
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
        """Yield a play's estimator, primed from the history; at the end, record its measurements there."""
        names = self.peer.names
        with self.link.joined(estimator, history.before(names, self._announced())) as share:
            try:
                yield share
            finally:
                # A play without bytes must not refresh old records. A play that redialled over another transport is not
                # recorded.
                # recorded.
                if share.sampled and len(self.peer.names) == 1 and self.peer.names[0] in names:
                    history.record(self.peer.names[0], share.link_rate(), share.ttfb())

    def arrived(self, download: Download, count: int) -> None:
        if download.received_from == "network" and download.limit != "kept":
            self.link.received(count)
        super().arrived(download, count)

    async def close(self) -> None:
        """End all downloads; their readers fail. Idempotent."""
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
        with suppress(TimeoutError):  # keep the previous answer
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
        """Return the peer's models, from a list at most `_MODELS_S` old."""
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
    """Return the number of tokens of a found prefix, or 0."""
    return answer.catalog.tokens if isinstance(answer, Found) else 0


def combined(links: Iterable[Prior]) -> Prior:
    """Return the estimate of several links together: the sum of the rates, the lowest time to first byte."""
    known = [link for link in links if link.rate > 0]
    return Prior(sum(link.rate for link in known), min((link.ttfb_s for link in known), default=0.0))


V = TypeVar("V")

_MAX_QUIET_S = 0.5
"""Seconds without bytes after which a play counts as inactive, unless it waits for others."""
_STEP_S = 1e-3
"""Bytes that arrive within this many seconds are counted together."""
_MAX_STEPS = 1 << 15
_MAX_FRESH_PLAYS, _REUSE_S = 32, 0.05
"""With more plays than this, a result over all plays is reused for this many seconds: computing it at each tick would
be too slow."""


class SharedLink:
    """Measurements of the path to one peer, shared by the plays of this process.

    If a play counted only its own bytes, it would mistake other plays' transfers for a slow link. So the link's rate is
    estimated from the bytes of all plays, as they arrive, and each active play expects an equal share of it.
    """

    def __init__(self, clock: Callable[[], float] | None = None) -> None:
        """``clock`` returns seconds; None: use the event loop's clock."""
        self.clock = clock or _now
        self._lock = threading.Lock()
        self._members: list[LinkShare] = []
        self._steps = deque([(-math.inf, 0)], _MAX_STEPS)
        self._cached: dict[object, tuple[float, Any]] = {}
        """Cached results over all plays, with their times, by the function that computed them."""

    @contextmanager
    def joined(self, estimator: Estimator, known: Prior | None = None) -> Iterator[LinkShare]:
        """Yield a play's estimator of its share, from a fresh ``estimator`` of the whole link and its prior."""
        share = _named(estimator)(self, estimator)
        if known is not None:
            share.prime(known)
        with self._lock:
            others = [one.link_rate() for one in self._members if one.active()]
            self._members.append(share)
        if rate := max(others, default=0.0):
            share.prime(Prior(rate, 0.0))
        try:
            yield share
        finally:
            with self._lock:
                self._members.remove(share)

    def received(self, nbytes: int) -> None:
        """Count bytes that just arrived for any play."""
        now, steps = self.clock(), self._steps
        with self._lock:
            at, total = steps[-1]
            if now - at < _STEP_S:
                steps[-1] = at, total + nbytes
            else:
                steps.append((now, total + nbytes))

    def bytes_within(self, seconds: float) -> int:
        """Return the bytes that arrived within the last ``seconds``."""
        since_s = self.clock() - seconds
        with self._lock:
            before = next((total for at, total in reversed(self._steps) if at <= since_s), self._steps[0][1])
            return self._steps[-1][1] - before

    def known(self) -> float:
        """Return the highest rate estimated by an active play; 0.0 if none."""
        return _known(self._all())[0]

    def of_others(self, share: LinkShare, find: Callable[[list[LinkShare]], V]) -> V:
        """Return ``find`` applied to the other plays; if there are many, applied to all plays and cached briefly."""
        if len(self._members) <= _MAX_FRESH_PLAYS:
            return find([one for one in self._all() if one is not share])
        now = self.clock()
        cached = self._cached.get(find)
        if cached is None or not 0 <= now - cached[0] < _REUSE_S:
            cached = self._cached[find] = now, find(self._all())
        found: V = cached[1]
        return found

    def _all(self) -> list[LinkShare]:
        with self._lock:
            return list(self._members)


class LinkShare(Estimator):
    """Estimates the rate that one play gets of a shared link."""

    name = "share"

    def __init__(self, link: SharedLink, inner: Estimator) -> None:
        super().__init__()
        self._link, self._inner = link, inner
        self._active_at = -math.inf
        self.sampled = False

    def start(self, horizon_s: float) -> None:
        self._inner.start(horizon_s)

    def prime(self, prior: Prior) -> None:
        """Prime with the link's prior; raise `PolicyError` if the estimator raises."""
        super().prime(prior)
        try:
            self._inner.prime(prior)
        except Exception as error:
            raise PolicyError(
                f"estimator {type(self._inner).__name__} raised {error!r} when given the link's history"
            ) from error

    def sample(self, nbytes: float, seconds: float, now: float) -> None:
        self.sampled, self._active_at = True, self._link.clock()
        self._inner.sample(max(nbytes, float(self._link.bytes_within(seconds))), seconds, now)

    def waited(self, now: float) -> None:
        seconds = self._link.clock() - self._active_at
        self._active_at = self._link.clock()
        if 0 < seconds < math.inf:
            self._inner.sample(float(self._link.bytes_within(seconds)), seconds, now)

    def active(self) -> bool:
        """Return True if the play recently received bytes, or waited for other plays."""
        return self._link.clock() - self._active_at <= _MAX_QUIET_S

    def link_rate(self, *, lower: bool = False) -> float:
        """Return the rate of the whole link, or its lower bound, in bytes per second; 0 if the estimator fails."""
        return _positive(self._inner.lower_bound if lower else self._inner.rate)

    def link_ttfb(self) -> float:
        """Return the minimum time to first byte in seconds; 0 if the estimator fails."""
        return _positive(self._inner.ttfb)

    def rate(self) -> float:
        return self._share(self._inner.rate(), lower=False)

    def lower_bound(self) -> float:
        return self._share(self._inner.lower_bound(), lower=True)

    def _share(self, own: float, *, lower: bool) -> float:
        if own <= 0 and not self.sampled:  # no bytes yet: use the others' estimate
            own = self._link.of_others(self, _known)[lower]
        return own / (1 + self._link.of_others(self, _active))

    def first_byte(self, seconds: float) -> None:
        self._inner.first_byte(seconds)

    def ttfb(self) -> float:
        """Return the minimum time to first byte of this play and the others, in seconds."""
        own, other = self._inner.ttfb(), self._link.of_others(self, _least_ttfb)
        return min(own, other) if own > 0 and other > 0 else own or other


def _known(shares: list[LinkShare]) -> tuple[float, float]:
    return max(((one.link_rate(), one.link_rate(lower=True)) for one in shares if one.active()), default=(0.0, 0.0))


def _least_ttfb(shares: list[LinkShare]) -> float:
    return min((seconds for one in shares if (seconds := one.link_ttfb()) > 0), default=0.0)


def _active(shares: list[LinkShare]) -> int:
    return sum(one.active() for one in shares)


def _positive(what: Callable[[], float]) -> float:
    try:
        value = float(what())
    except Exception:  # noqa: BLE001  # any error of a plug-in
        return 0.0
    return value if math.isfinite(value) and value > 0 else 0.0


def _named(estimator: Estimator) -> type[LinkShare]:
    cls = type(estimator)
    return type(cls.__name__, (LinkShare,), {"name": getattr(cls, "name", cls.__name__)})


def _now() -> float:
    try:
        return asyncio.get_running_loop().time()
    except RuntimeError:
        return time.monotonic()


_LINKS: weakref.WeakValueDictionary[str | Connection, SharedLink] = weakref.WeakValueDictionary()
_LOCK = threading.Lock()


def link_of(peer: str | Connection) -> SharedLink:
    """Return the link to a peer, the same object while any play uses it."""
    with _LOCK:
        return _LINKS.setdefault(peer, SharedLink())
