"""`AsyncClient`: plays caches from origins and relays.

    async with AsyncClient("moqt://origin.example/", engine=engine) as client:
        played = await client.play(tokens, deadline=2.0)

Plays share one connection per peer, open downloads, received groups and link measurements. A bounded number runs at
once, earliest deadline first. Cancelling a play cancels its downloads unless another play needs them.
"""

from __future__ import annotations

import asyncio
import math
import os
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from itertools import zip_longest
from pathlib import Path
from typing import Self

import torch

from kvabr.abr.estimators import Prior
from kvabr.abr.tail import TailOffer
from kvabr.client.compute import compute
from kvabr.client.engine_work import measure_prefill, on_engine
from kvabr.client.lookup import Found, Unplayable, check_tokens, fetch_models
from kvabr.client.memory import COSTS_FILE, PROFILES, SPEEDS_FILE, Memory, ProfileCache, costs_at, history_at, speeds_at
from kvabr.client.options import Limits, PlayOptions, warn_not_stored
from kvabr.client.origins import dialling, parse_namespace
from kvabr.client.passages import PassagePrompt
from kvabr.client.peers import ClientPeer, PeersLike, Query, combined
from kvabr.client.play import play_coded, play_prefix, play_whole
from kvabr.client.prepare import (
    check_engine,
    check_prompt,
    computes_at_once,
    engine_of,
    lookup_time,
    model_of,
    prepare,
    tail_choices,
)
from kvabr.client.report import report_coded, report_prefix, report_whole
from kvabr.client.result import Hinted, NothingCached, Played, PlayedPrefix
from kvabr.client.runner import PlayRunner, check_deadline
from kvabr.client.sources import PlaySources, first_found, first_reached
from kvabr.client.warming import warm_engine
from kvabr.codec.block_slots import BlockLayers
from kvabr.codec.threads import decoder_threads
from kvabr.player.play_policy import choose_tail
from kvabr.store.files import sweep
from kvabr.store.group_cache import GroupCache, StoreTier
from kvabr.telemetry.client_metrics import ClientMetrics
from kvabr.transfer.interface import Connection, PeerConnection
from kvabr.transfer.work import decoders
from kvabr.types.catalog import Catalog
from kvabr.types.cost import PrefillCost
from kvabr.types.engine import Engine
from kvabr.types.errors import (
    FormatError,
    HomeProcess,
    ModelError,
    PlayError,
    TransportError,
    UsageError,
    exhaustion_as_error,
)
from kvabr.types.events import LookupFailed
from kvabr.types.kv import KVSpec
from kvabr.types.naming import TrackNamespace
from kvabr.types.passage import Part
from kvabr.types.peer import PeerOptions

_FIND_S = 5.0
_MIN_S = 1e-3
_WAIT_SHARE = 0.9
"""Fraction of a lookup's time that may be spent waiting for a producer to publish."""


class AsyncClient:
    """Plays caches; an async context manager for one event loop. `Client` is its blocking twin."""

    def __init__(
        self,
        origin: PeersLike = None,
        connection: PeerOptions | None = None,
        *,
        model: KVSpec | str | None = None,
        engine: Engine | None = None,
        options: PlayOptions | None = None,
        limits: Limits | None = None,
        cache: str | os.PathLike[str] | None = None,
        metrics: ClientMetrics | None = None,
    ) -> None:
        """Set up the client without connecting; `connect` or the first play dials.

        Args:
            origin: an origin or relay, ``moqt://host[:port]/``; an object store, such as ``s3://bucket/prefix``
                (`kvabr.client.origins`); or an open connection, which the caller closes after this client. With
                several, a play takes each group from the fastest peer that has the same asset. None: every play names
                its peer.
            connection: how to reach the origins, and which certificates to trust.
            model: the caches' model, by spec or name. None: the engine's, or the only one at the origin.
            engine: computes groups that would be late or are not cached; plays measure its prefill cost.
            options: default options of plays.
            limits: resource limits of all plays together.
            cache: folder that keeps codec profiles, speeds of peers, decode speeds and prefill costs; None: memory
                only.
            metrics: counts and timings, for `kvabr.telemetry.prometheus.ScrapeServer`.

        Raises:
            UsageError: an argument is wrong, or the folder for groups belongs to another client.
            AssetError: the folder for groups cannot be used.
        """
        self.engine, self.options = engine, options or PlayOptions()
        self.metrics = metrics or ClientMetrics()
        self._model = model
        if engine is not None and isinstance(model, KVSpec):
            check_engine(engine, model)
        bounds = limits or Limits()
        disk = None
        if bounds.disk is not None:
            warn = partial(warn_not_stored, self.metrics, "groups")
            disk = StoreTier(os.fspath(bounds.disk), bounds.disk_bytes, warn)
        self.store = GroupCache(
            bounds.memory_bytes, disk, executor=decoders(), on_change=lambda: self.metrics.show_store(self.store)
        )
        self.metrics.show_store(self.store)
        folder = None if cache is None else Path(cache)
        for place in () if folder is None else (folder, folder / PROFILES):
            sweep(place)
        warn = partial(warn_not_stored, self.metrics, "profile")
        self._memory = Memory(
            ProfileCache(None if folder is None else folder / PROFILES, warn),
            history_at(None if folder is None else folder / "peers.json"),
            speeds_at(None if folder is None else folder / SPEEDS_FILE),
            costs_at(None if folder is None else folder / COSTS_FILE),
        )
        if engine is not None and self.options.recompute:
            self._memory.costs.of(engine).cost()  # fits earlier timings, which takes milliseconds
        self._runner = PlayRunner(bounds, self._memory, self.metrics)
        self._peers: dict[object, ClientPeer] = {}
        self._origins: tuple[ClientPeer, ...] = ()
        self._home = HomeProcess("the client")
        named = [self.peer(one, connection) if isinstance(one, str) else self._peer(one) for one in _listed(origin)]
        self._origins = tuple(dict.fromkeys(named))

    # ------------------------------------------------------------------ peers

    def peer(self, url: str, connection: PeerOptions | None = None) -> ClientPeer:
        """Return another origin or relay, for the ``peer`` of plays, without dialling; raise `UsageError` if wrong."""
        how = connection or PeerOptions()
        if (url, how) not in self._peers:
            self._peers[url, how] = ClientPeer(url, dialling(url, how), self.store, self.metrics, own=True)
        return self._peers[url, how]

    async def connect(self, peer: PeersLike = None) -> Connection:
        """Connect before the first play, and return the shared connection.

        Raises `TransportError` if the peer cannot be reached, speaks another protocol, or refuses us.
        """
        some = self._some(peer)
        with exhaustion_as_error():
            peers = [one.peer for one in some]
            return peers[await first_reached(peers)]

    async def round_trip(self, *, probe_s: float | None = None, peer: PeersLike = None) -> float | None:
        """Return the round-trip time to a peer in seconds; connect if necessary.

        ``probe_s``: seconds to wait for the answer to a probe; None: return the connection's own measurement, or None.
        Raises `TransportError` as `connect`, or if no answer arrives in time.
        """
        if probe_s is None:
            return (await self.connect(peer)).stats().rtt_s
        try:
            async with asyncio.timeout(probe_s):
                connection = await self.connect(peer)
                began_s = time.monotonic()
                if await connection.answers(probe_s):
                    return time.monotonic() - began_s
        except TimeoutError:
            pass
        raise TransportError(_unanswered(self._some(peer), probe_s))

    async def known_link(self, catalog: Catalog | None = None, *, peer: PeersLike = None) -> tuple[Prior, int]:
        """Return the estimated link, and the bytes of a cache's cheapest track that are not stored locally."""
        some = self._some(peer)
        links = []
        for one in some:
            known, now = one.expected(self._memory.history), one.link.known()
            links.append(Prior(now, known.ttfb_s) if now else known)
        if catalog is None:
            return combined(links), 0
        cheapest = min((track for track in catalog.tracks if track.refines is None), key=lambda one: one.total_bytes)
        here = self.store.present([digest for digest in cheapest.digests if digest is not None])
        pairs = zip(cheapest.bytes, cheapest.digests, strict=False)
        lacks = sum(nbytes for nbytes, digest in pairs if digest not in here) if here else cheapest.total_bytes
        return combined(links), lacks

    async def measure_prefill(self, engine: Engine | None = None, tokens: Sequence[int] = ()) -> PrefillCost:
        """Return the cost of an engine's prefill; the first call for an engine runs and times a few prefills.

        Optional, since plays time every computation. ``tokens``: ids of any text to run on.

        Raises:
            UsageError: there is no engine.
            ModelError: the tokens do not fit the model.
        """
        engine = engine or self.engine
        if engine is None:
            raise UsageError("measure_prefill needs an engine: give one here or to the client")
        cost = await on_engine(engine, partial(measure_prefill, engine, tokens))
        await asyncio.get_running_loop().run_in_executor(None, self._memory.costs.save_engine, engine)
        return cost

    # ------------------------------------------------------------------ plays

    async def play(
        self,
        tokens: Sequence[int] = (),
        *,
        parts: Sequence[Part] | None = None,
        question: Sequence[int] | None = None,
        share: float | None = None,
        deadline: float,
        options: PlayOptions | None = None,
        model: KVSpec | str | None = None,
        engine: Engine | None = None,
        peer: PeersLike = None,
    ) -> Played | NothingCached:
        """Get the KV cache of a prompt: the longest prefix at the origin, at the best quality that the deadline allows.

        Args:
            tokens: ids of the prompt; `MediaTokens` if some stand for pictures, sound or films.
            parts: the prompt in parts, if passages of it may be cached separately, see `Played.approximate`.
            question: ids of a question. By attention to it, tokens are selected for a `BlendEngine` to recompute. None:
                the text that ends `parts`.
            share: fraction of the passages' tokens to recompute, if time allows; None: the fraction that pays off.
            deadline: seconds from this call to a usable cache, including connecting, waiting for other plays, and
                computing uncached tokens.
            options: how to play; None: the client's.
            model: the cache's model; None: the client's, else the engine's, else the only one at the origin. A spec
                fixes the group size; with a name or an engine, the group size with the longest prefix is used.
            engine: computes groups that would be late; None: the client's.
            peer: one or several origins or relays, each from `peer`, as a URL, or an open connection; None: the
                client's origins.

        Raises:
            UsageError: an argument is wrong, or the model is ambiguous.
            BusyError: there are too many plays; compute the prompt instead.
            IncompleteError: groups are missing at the deadline, and there is no engine. The error has the cache of the
                groups before them. `PlayOptions.patience` allows more time.
            PlayError: the cache can be neither fetched nor computed.
            ModelError: the engine failed, and its groups could not be fetched instead.
            PolicyError: the policy or the estimator failed.
        """
        options = options or self.options
        wanted, any_size = model_of(model or self._model, engine or self.engine)
        computing, cost = engine_of(engine or self.engine, options, self._memory.costs)
        prompt = None
        if parts is not None or question is not None or share is not None:
            prompt = PassagePrompt.of(parts, tokens, wanted, computing, options, question, share)
        tokens = tokens if prompt is None else prompt.tokens
        check_prompt(tokens, computing)
        peers = self._some(peer)  # fixed now: peers may be added later

        alone = computing if prompt is None else None
        at_once, deadline = await self._computed(tokens, deadline, options, alone, cost, peers)
        if at_once is not None:
            return at_once
        async with self._runner.play(peers, deadline, options, computing, cost, tokens) as play:
            clock = play.clock
            spec, prepared, limit = None, None, None
            found: Found | Unplayable | None
            try:
                lookup_s = lookup_time(clock, cost, len(tokens))
                async with asyncio.timeout(lookup_s):
                    wait_s = min(options.wait_for_producer_s, _WAIT_SHARE * lookup_s)
                    if prompt is not None:
                        await play.connection.reach()
                        play.connection.alone()
                        found, spec = await prompt.find(play.connection)
                    else:
                        query = Query(tokens, wanted, any_size, options.salt, live=options.live, wait_s=wait_s)
                        look = partial(ClientPeer.find, query=query)
                        found, spec = await first_found(play.connection, peers, look, len(tokens), lookup_s)
                if isinstance(found, Unplayable):
                    limit = found.limited_by
                elif found is not None:
                    prepared = await prepare(play, found, uncached=len(tokens) - found.catalog.tokens)
            except (TransportError, FormatError, TimeoutError) as error:
                reason = str(error) or play.with_trouble(f"no answer within {clock.now():.2g} s")
                play.options.note(LookupFailed(0.0, reason))
                if computing is None:
                    raise PlayError(f"the prompt cannot be played: {reason}") from error
            if prepared is not None:
                return play.finish(await report_whole(play, await play_whole(play, prepared, prompt)))
            if computing is not None:
                return play.finish(replace(await compute(play), limited_by=limit))
            return play.finish(NothingCached(spec, clock.now(), limit))

    async def play_asset(
        self,
        asset: TrackNamespace | Found | str,
        *,
        deadline: float,
        tokens: Sequence[int] = (),
        options: PlayOptions | None = None,
        engine: Engine | None = None,
        peer: PeersLike = None,
    ) -> Played:
        """Get the cache published under a name; otherwise as `play`.

        ``asset`` is a namespace, ``MODEL/DIGEST``, or a result of `find_asset`. ``tokens`` are the ids of the asset's
        tokens; they are required with an engine, and to check an asset that has a salt.

        Raises:
            NotFoundError: the asset does not exist, or we may not read it.
            TransportError: its catalog cannot be fetched.
            FormatError: its catalog does not match its name, or none of its tracks can be decoded here.
        """
        options = options or self.options
        if engine is not None and not len(tokens):
            raise UsageError("play_asset: an engine needs the prompt to recompute: give tokens=...")
        computing, cost = engine_of(engine or self.engine, options, self._memory.costs) if len(tokens) else (None, None)
        if len(tokens):
            check_prompt(tokens, computing)
        name, peers = parse_namespace(asset) if isinstance(asset, str) else asset, self._some(peer)

        async with self._runner.play(peers, deadline, options, computing, cost, tokens) as play:
            if isinstance(name, Found):
                found = name
            else:
                try:
                    async with asyncio.timeout(play.clock.left()):
                        found = await _catalog(play.connection, peers, name, play.clock.left(), live=options.live)
                except TimeoutError as error:
                    late = f"the catalog was not received within the deadline of {deadline:g} s"
                    raise PlayError(play.with_trouble(late)) from error
            if computing is not None:
                check_engine(computing, found.catalog.spec)
            if len(tokens):
                await check_tokens(found.catalog, tokens, options.salt)
            return play.finish(await report_whole(play, await play_whole(play, await prepare(play, found))))

    async def warm(
        self, spec: KVSpec, device: torch.device, dtype: torch.dtype, like: Sequence[BlockLayers] = ()
    ) -> None:
        """Compile and check a GPU's kernels, and measure its speed, in the background; see `warm_engine`."""
        warm_engine(spec, device, dtype, like, self._memory.speeds)

    async def play_coded(
        self, found: Found, *, deadline: float, options: PlayOptions | None = None, peer: PeersLike = None
    ) -> PlayedPrefix:
        """Play a whole cache, and leave it compressed until its destination is known; see `PlayedPrefix`.

        ``found`` is from `find` or `find_asset`; the deadline includes expansion. The options ``recompute``, ``out``
        and ``after`` have no effect. Errors as `play`, but `IncompleteError` has no cache; and `FormatError` if none of
        the asset's tracks can be decoded here.
        """
        options = replace(options or self.options, out=None, after=None)
        async with self._runner.play(self._some(peer), deadline, options) as play:
            return play.finish(report_coded(play, await play_coded(play, await prepare(play, found))))

    async def hint_asset(
        self,
        asset: TrackNamespace | Found | str,
        *,
        within_s: float,
        keep_s: float = 0.0,
        options: PlayOptions | None = None,
        peer: PeersLike = None,
        time_price: float = 0.0,
    ) -> Hinted:
        """Fetch the groups of an expected play into the local store, without decoding them.

        Plays have priority: hints have a separate limit (also `Limits.plays`) and use only spare bandwidth. Groups
        received within ``within_s`` seconds are stored; for ``keep_s`` seconds the store evicts other groups first.
        Protected groups take at most half of each tier (an object store never evicts). ``time_price`` is the price of a
        second of fetching, nats per generated token; 0: fetch as much as possible. Of the options, only the policy, the
        estimator and the salt matter. Errors as `play_asset`.
        """
        check_deadline(within_s)
        if not 0 <= keep_s < math.inf:
            raise UsageError(f"keep_s must be 0 or more seconds, got {keep_s:g}")
        options = replace(options or self.options, time_price=time_price, live=False, out=None, after=None)
        name = parse_namespace(asset) if isinstance(asset, str) else asset
        ends_s = asyncio.get_running_loop().time() + within_s
        if not isinstance(name, Found):
            name = await self.find_asset(name, within_s=within_s, peer=peer, live=False)
        left_s = max(_MIN_S, ends_s - asyncio.get_running_loop().time())
        async with self._runner.play(self._some(peer), left_s, options, hint=True) as play:
            ended = await play_coded(play, await prepare(play, name))
            played = play.finish(report_prefix(play, ended, 1))
        if keep_s > 0:
            # In the order of groups, over all tracks: the store drops the protection of the last ones first.
            groups = zip_longest(*(track.digests for track in name.catalog.tracks))
            digests = [digest for group in groups for digest in group if digest is not None]
            await self.store.keep(digests, time.monotonic() + keep_s)
        return Hinted(played.tokens, played.bytes_fetched, played.loss)

    async def play_prefix(
        self,
        found: Found,
        *,
        deadline: float,
        cost: PrefillCost,
        skip: int = 0,
        uncached: int = 0,
        block: int = 1,
        options: PlayOptions | None = None,
        peer: PeersLike = None,
    ) -> PlayedPrefix:
        """Fetch a prefix up to the first missing group, for an engine that computes the rest of the prompt.

        ``cost``, the engine's prefill cost, gives the first groups priority. The engine has the first ``skip`` groups,
        with the state to continue after them (`Catalog.suffix`). The deadline includes computing the prompt's
        ``uncached`` tokens. The prefix ends at a multiple of ``block`` tokens; for a model with windows, cut ``found``
        to such an end too (`Catalog.prefix`).

        The options ``recompute``, ``prefill_cost``, ``mode``, ``out`` and ``after`` have no effect. Errors as `play`;
        and `FormatError` if none of the asset's tracks can be decoded here.
        """
        if block < 1:
            raise UsageError(f"block must be at least 1 token, got {block}")

        options = replace(options or self.options, out=None)
        async with self._runner.play(self._some(peer), deadline, options, cost=cost) as play:
            prepared = await prepare(play, found, skip, uncached=uncached, block=block)
            return play.finish(report_prefix(play, await play_prefix(play, prepared, uncached), block))

    async def tail_of(
        self,
        catalog: Catalog,
        *,
        deadline: float,
        cost: PrefillCost,
        uncached: int,
        block: int = 1,
        options: PlayOptions | None = None,
        peer: PeersLike = None,
    ) -> int:
        """Return the number of final tokens of a cache that the engine should compute with the rest of the prompt.

        For engines that need the length of the prefix before the play; otherwise, the play chooses it. ``deadline``:
        the seconds left to fetch the ``catalog``; other arguments as for `play_prefix`. Raises `UsageError` or
        `PolicyError`.
        """
        check_deadline(deadline)
        options, some = options or self.options, self._some(peer)

        def choices() -> tuple[list[TailOffer], list[float]]:
            self._memory.history.refresh()  # another process of the engine may have updated the file
            link = combined(one.expected(self._memory.history) for one in some)
            following = uncached + options.question_tokens
            return tail_choices(
                catalog.to_play, cost, options, link, deadline, following=following, block=block,
                decoders=decoder_threads(),
            )  # fmt: skip

        offers, costs = await asyncio.get_running_loop().run_in_executor(decoders(), choices)
        return choose_tail(options.policy, offers, costs).tokens

    async def find(
        self,
        tokens: Sequence[int],
        *,
        model: KVSpec | str | None = None,
        salt: bytes | None = None,
        within_s: float = _FIND_S,
        any_dtype: bool = False,
        peer: PeersLike = None,
        live: bool | None = None,
    ) -> Found | None:
        """Return the asset that shares the longest prefix with a prompt, cut to that prefix; None if there is none.

        ``any_dtype`` accepts a cache of another element type, since groups are decoded to any type. ``live`` includes
        caches that are still being prefilled (None: as in the client's options). ``within_s``: limit in seconds.

        Raises:
            UsageError: an argument is wrong, or the model is ambiguous.
            TransportError: the origin cannot be reached, or not in time.
            ForeignError: the cache is of another model or shape.
            FormatError: the answer is not a catalog.
        """
        check_prompt(tokens)
        wanted, any_size = model_of(model or self._model, self.engine)
        chosen = self.options.salt if salt is None else salt
        live, peers = self.options.live if live is None else live, self._some(peer)
        query = Query(tokens, wanted, any_size, chosen, any_dtype=any_dtype, live=live)
        async with self._lookup(within_s, peers) as connection:
            look = partial(ClientPeer.find, query=query)
            found, _ = await first_found(connection, peers, look, len(tokens), within_s)
            return found if isinstance(found, Found) else None

    async def find_asset(
        self,
        asset: TrackNamespace | str,
        *,
        within_s: float = _FIND_S,
        peer: PeersLike = None,
        live: bool | None = None,
    ) -> Found:
        """Return an asset's catalog by its name; ``live`` and ``within_s`` as for `find`.

        Raises:
            NotFoundError: the asset does not exist, or we may not read it.
            TransportError: it cannot be fetched, or not in time.
            FormatError: it does not match its name.
        """
        name = parse_namespace(asset) if isinstance(asset, str) else asset
        live, peers = self.options.live if live is None else live, self._some(peer)
        async with self._lookup(within_s, peers) as connection:
            return await _catalog(connection, peers, name, within_s, live=live)

    async def fetch_profile(self, catalog: Catalog, *, within_s: float = _FIND_S, peer: PeersLike = None) -> None:
        """Fetch an asset's codec profile unless it is cached; a play fetches it only if that pays for this play.

        Raises `TransportError`, or `FormatError` if the answer is another profile or of another model.
        """
        if not self._memory.profiles.has(catalog):
            async with self._lookup(within_s, peer) as connection:
                await connection.reach()
                await self._memory.profiles.fetch(connection, catalog)

    async def models(self, *, within_s: float = _FIND_S, peer: PeersLike = None) -> Sequence[KVSpec]:
        """Return the specs of the models with assets that we may read.

        Raises:
            NotFoundError: the origin does not list its models.
            TransportError: it cannot be reached, or not in time.
            FormatError: the answer is not a list of models.
        """
        async with self._lookup(within_s, peer) as connection:
            await connection.reach()
            return await fetch_models(connection)

    async def close(self) -> None:
        """End all plays and connections, and refuse waiting plays. In a forked child, do nothing."""
        if not self._home.here:
            return
        await self._runner.close()
        for peer in list(self._peers.values()):  # a caller may still add one
            await peer.close()
        await self.store.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    # -------------------------------------------------------------- internals

    async def _computed(
        self,
        tokens: Sequence[int],
        deadline: float,
        options: PlayOptions,
        engine: Engine | None,
        cost: PrefillCost | None,
        peers: Sequence[ClientPeer],
    ) -> tuple[Played | None, float]:
        """Compute a prompt without a lookup, if that pays; return the result or None, and the seconds left."""
        link = combined(one.expected(self._memory.history) for one in peers)
        if engine is None or not computes_at_once(options, cost, len(tokens), link):
            return None, deadline
        async with self._runner.play(peers, deadline, options, engine, cost, tokens) as play:
            try:
                return play.finish(await compute(play)), play.clock.left()
            except ModelError:  # the origin may have the cache
                if play.clock.left() <= 0:
                    raise
        return None, play.clock.left()

    def _peer(self, peer: PeerConnection | ClientPeer | str) -> ClientPeer:
        if isinstance(peer, ClientPeer):
            return peer
        if isinstance(peer, str):
            return self.peer(peer)
        if peer not in self._peers:
            for key, each in list(self._peers.items()):
                if isinstance(key, PeerConnection) and key.closed and each not in self._origins:
                    del self._peers[key]
            self._peers[peer] = ClientPeer(peer.peer or peer.backend, peer, self.store, self.metrics, own=False)
        return self._peers[peer]

    def _some(self, peers: PeersLike) -> Sequence[ClientPeer]:
        self._home.check()
        named = self._origins if peers is None else tuple(dict.fromkeys(self._peer(peer) for peer in _listed(peers)))
        if not named:
            raise UsageError("no origin: pass origin= to the client or peer= to play()")
        return named

    @asynccontextmanager
    async def _lookup(self, seconds: float, peers: PeersLike) -> AsyncIterator[PlaySources]:
        some = self._some(peers)
        try:
            with exhaustion_as_error():
                async with asyncio.timeout(seconds), PlaySources(some) as connection:
                    yield connection
        except TimeoutError as error:
            raise TransportError(_unanswered(some, seconds)) from error


async def _catalog(
    connection: PlaySources, peers: Sequence[ClientPeer], name: TrackNamespace, within_s: float, *, live: bool
) -> Found:
    look = partial(ClientPeer.catalog, name=name, live=live)
    found, _ = await first_found(connection, peers, look, within_s=within_s)
    assert isinstance(found, Found)  # noqa: S101  # first_found raises if there is none
    return found


def _unanswered(peers: Sequence[ClientPeer], seconds: float) -> str:
    troubles = "; ".join(dict.fromkeys(one.peer.trouble for one in peers if one.peer.trouble))
    return f"no answer within {seconds:.3g} s" + (f" ({troubles})" if troubles else "")


def _listed(peers: PeersLike) -> Sequence[ClientPeer | PeerConnection | str]:
    if isinstance(peers, Sequence) and not isinstance(peers, str):
        return [peer for peer in peers if peer is not None]
    return () if peers is None else (peers,)
