"""Caches that an engine knows by keys of its own, and not by their tokens: published, found and played by key.

LMCache's chunks and SGLang's pages are of this kind: a hash that covers all tokens up to their end. So the digests of
their groups are made of the key. Where in a prompt such a cache stands nobody says, which leaves out the AC tracks:
they undo the rotary embedding by position. The levels that quantise need no position.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import re
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import torch

from kvabr.abr.plugins import load_policy
from kvabr.abr.policies import DEFAULT
from kvabr.client.fetcher import Fetcher, Limits
from kvabr.client.lookup import Found, fetch_catalog
from kvabr.client.orchestrator import perform, prepare
from kvabr.client.peers import Peer
from kvabr.client.result import Clock, PlayOptions
from kvabr.data import default_catalog
from kvabr.engines import settings
from kvabr.publish.publisher import Outcome, Publisher, Slot
from kvabr.quic.connect import parse_url
from kvabr.quic.library import Quic
from kvabr.types.errors import BusyError, FormatError, KvabrError, NotFoundError
from kvabr.types.kv import GROUP_TOKENS, KVSpec
from kvabr.types.naming import TrackNamespace

LOG = logging.getLogger("kvabr.engines.chunk_store")

_REMEMBERED = 4096
"""Catalogs that are kept: what an engine has asked about it soon fetches."""
_MOST_WAITING = 1 << 16
_UNSAFE = re.compile(r"[^A-Za-z0-9._/-]")
_DTYPES = {torch.float16: "float16", torch.bfloat16: "bfloat16", torch.float32: "float32"}


@dataclass(frozen=True, slots=True)
class Options:
    """What a user may set."""

    url: str | None = None
    """Where caches are fetched: an origin or a relay. None: none are."""
    publish: Path | None = None
    """Folder that caches are published in. None: none are."""
    deadline_s: float = 1.0
    """Seconds in which the caches of a request are wanted."""
    patience: float = 2.0
    """Deadlines after which a cache that is not there counts as lost, at least 1."""
    lookup_s: float = 1.0
    """Seconds that the question whether a cache is there may take; then it is not."""
    policy: str = DEFAULT
    model: str | None = None
    """Of the model, in what is published and asked for; None: as the engine has it, which may be a path."""
    tracks: tuple[str, ...] | None = None
    """What is published; None: the exact track (BF16 or FP16, as the cache is), Int8 and Int4."""
    token: str | None = None
    """For the origin; None: the environment's ``KVABR_TOKEN``, if there is one."""
    ca: Path | None = None
    fingerprint: str | None = None
    insecure: bool = False
    quic: Quic = "auto"
    store_mib: int = 256
    """Of encoded groups kept in memory, MiB."""
    disk: Path | None = None
    """Folder for encoded groups that were fetched; None: they are kept in memory only."""
    disk_mib: int = 16384
    plays: int = 256
    """Caches that may be fetched at once."""
    queue: int = 64
    """Caches that may wait to be published; what is more is not published."""
    publish_mib: int | None = None
    """MiB that what engines publish in ``publish`` takes at most: what was computed longest ago goes first. None: no
    bound."""

    def limits(self) -> Limits:
        """What the fetcher may take."""
        return Limits(
            memory_bytes=self.store_mib << 20,
            disk=self.disk,
            disk_bytes=self.disk_mib << 20,
            plays=self.plays,
            waiting=_MOST_WAITING,
        )


def _whole(value: Any) -> int:
    if type(value) is not int or value < 0:
        raise ValueError("a whole number, 0 or more")
    return value


def _patience(value: Any) -> float:
    if settings.seconds(value) < 1:
        raise ValueError("a number from 1")
    return float(value)


def _url(value: Any) -> str:
    parse_url(settings.text(value))
    return str(value)


def _quic(value: Any) -> str:
    if value not in get_args(Quic):
        raise ValueError(f"one of {', '.join(get_args(Quic))}")
    return str(value)


def _policy(value: Any) -> str:
    load_policy(settings.text(value))
    return str(value)


READERS: dict[str, settings.Reader] = {
    "url": _url,
    "publish": settings.path,
    "publish_mib": settings.count,
    "deadline_s": settings.seconds,
    "patience": _patience,
    "lookup_s": settings.seconds,
    "policy": _policy,
    "model": settings.text,
    "tracks": settings.names,
    "token": settings.text,
    "ca": settings.path,
    "fingerprint": settings.text,
    "insecure": settings.flag,
    "quic": _quic,
    "store_mib": _whole,
    "disk": settings.path,
    "disk_mib": _whole,
    "plays": settings.count,
    "queue": settings.count,
}


def spec_of(model: str, engine: str, layers: int, heads: int, dim: int, dtype: torch.dtype) -> KVSpec:
    """What an engine's caches are.

    Args:
        model: the model's name as the engine has it; a folder's path will do.
        engine: its name, which stands where a tokenizer's belongs: keys tell of none.
        layers: of the cache.
        heads: KV heads of one rank.
        dim: of a head.
        dtype: of the cache.

    Raises:
        FormatError: a cache that the engine quantises itself.
    """
    if dtype not in _DTYPES:
        raise FormatError(f"a cache of {dtype}: the engine quantises it itself; kvabr's tracks need 16 or 32 bits")
    name = _UNSAFE.sub("-", model).strip("/") or "model"
    return KVSpec(name[-256:], engine, layers, heads, dim, _DTYPES[dtype])


def key_digests(spec: KVSpec, key: str, tokens: int) -> list[str]:
    """A digest for each group of a cache; the last one names the asset."""
    groups = -(-tokens // GROUP_TOKENS)
    return [_digest(spec, key, None if index == groups - 1 else index) for index in range(groups)]


def namespace(spec: KVSpec, key: str) -> TrackNamespace:
    """Where a cache is published, however many tokens it has."""
    return TrackNamespace(spec.model, _digest(spec, key, None))


def _digest(spec: KVSpec, key: str, index: int | None) -> str:
    # The last group's does not tell how many there are: who asks does not know.
    place = "last" if index is None else str(index)
    return hashlib.sha256(f"kvabr.{spec.tokenizer}/1\0{place}\0{key}".encode()).hexdigest()


class Trouble:
    """Warns once for each kind of trouble: what is logged a thousand times is read by nobody."""

    def __init__(self) -> None:
        self._told: set[str] = set()

    def tell(self, what: str, why: object) -> None:
        """Something went wrong; the engine computes what it does not get."""
        level = logging.DEBUG if what in self._told else logging.WARNING
        self._told.add(what)
        LOG.log(level, "%s: %s", what, str(why) or repr(why))


class KeyedCaches:
    """Caches by key, behind a fetcher; for its event loop."""

    def __init__(
        self, fetcher: Fetcher, spec: KVSpec, options: Options, trouble: Trouble, *, most_tokens: int,
        least_tokens: int = 1,
    ) -> None:  # fmt: skip
        """Begin; nothing is dialled.

        Args:
            fetcher: of the node.
            spec: of the caches.
            options: what the user set.
            trouble: told of what goes wrong.
            most_tokens: of one cache: what claims to be longer is none of the engine's.
            least_tokens: of one cache: an engine that reads as many as its key stands for must not be given fewer.

        Raises:
            UsageError: an option makes no sense.
        """
        self._fetcher, self._spec, self._options, self._trouble = fetcher, spec, options, trouble
        self._least_tokens, self._most_tokens = least_tokens, most_tokens
        self._found: OrderedDict[str, Found] = OrderedDict()
        self.peer: Peer | None = None
        if options.url is not None:
            self.peer = fetcher.peer(
                options.url,
                token=options.token,
                ca=options.ca,
                fingerprint=options.fingerprint,
                insecure=options.insecure,
                quic=options.quic,
            )

    async def leading(self, keys: Sequence[str]) -> int:
        """How many caches, from the first on, can be fetched; in one round trip."""
        found = await asyncio.gather(*(self.find(key) for key in keys))
        return next((place for place, one in enumerate(found) if one is None), len(found))

    async def find(self, key: str) -> Found | None:
        """The catalog of a cache; None if it cannot be had, or is of another kind of cache."""
        if self.peer is None:
            return None
        if (known := self._found.get(key)) is not None:
            self._found.move_to_end(key)
            return known
        within_s = self._options.lookup_s
        try:
            async with asyncio.timeout(within_s), self._fetcher.seat(self.peer, deadline=within_s) as seat:
                found = await fetch_catalog(seat, namespace(self._spec, key))
        except NotFoundError:
            return None
        except (KvabrError, TimeoutError) as error:
            self._trouble.tell("the origin cannot be asked", error)
            return None
        if found.catalog.spec.digest() != self._spec.digest():
            self._trouble.tell(
                "the origin's caches are of another kind", f"{found.catalog.spec}; this engine's {self._spec}"
            )
            return None
        if not self._least_tokens <= found.catalog.tokens <= self._most_tokens:
            what = f"{found.catalog.tokens} tokens, where one has {self._least_tokens} to {self._most_tokens}"
            self._trouble.tell("the origin's caches are of another kind", what)
            return None
        self._found[key] = found
        while len(self._found) > _REMEMBERED:
            self._found.popitem(last=False)
        return found

    async def play(self, key: str, deadline_s: float) -> torch.Tensor | None:
        """A cache, [layer, K/V, head, token, dim]; None if it is not there, or not in time."""
        clock = Clock(deadline_s)
        found = await self.find(key)
        if found is None or self.peer is None:
            return None
        options = self._options
        try:
            async with self._fetcher.seat(self.peer, deadline=max(clock.left(), 1e-3)) as seat:
                how = PlayOptions(seat.begun_with_s, policy=options.policy, patience=options.patience)
                playing = Clock(how.deadline_s)
                prepared = await prepare(seat, found, how, playing)
                return (await perform(seat, prepared, (), how, playing)).kv
        except (KvabrError, TimeoutError) as error:
            if not isinstance(error, BusyError):
                self._found.pop(key, None)  # it may be gone, or be there again, but not as it was
            self._trouble.tell("a cache did not come", error)
            return None


class KeyedPublisher:
    """Publishes caches by key, in a thread of its own."""

    def __init__(self, spec: KVSpec, options: Options, trouble: Trouble, source: str) -> None:
        """Make the folder; without one, nothing is published.

        Raises:
            UsageError: the folder cannot be made, or a track is not known.
        """
        self._spec, self._trouble = spec, trouble
        self.publisher: Publisher | None = None
        if options.publish is not None:
            exact = "BF16" if spec.dtype == "bfloat16" else "FP16"
            self.publisher = Publisher(
                options.publish,
                spec,
                prior=default_catalog(),
                tracks=options.tracks or (exact, "Int8", "Int4"),
                queue=options.queue,
                most_bytes=settings.mib(options.publish_mib),
                source=source,
            )

    def put(self, key: str, kv: torch.Tensor, done: Callable[[bool], None]) -> None:
        """Publish a cache.

        Args:
            key: of the cache.
            kv: [layer, K/V, head, token, dim]; not to be changed before ``done``.
            done: told whether it is published, now or before; on the publishing thread, or at once.
        """
        tokens = kv.shape[3]
        if self.publisher is None:
            done(False)
            return
        slot = self.publisher.reserve_named(key_digests(self._spec, key, tokens), tokens)
        if isinstance(slot, Slot):

            def over(outcome: Outcome) -> None:
                if outcome.verdict == "failed":
                    self._trouble.tell("a cache was not published", outcome.why)
                done(outcome.verdict == "published")

            slot.fill(kv, over)
        else:
            if slot == "full":
                self._trouble.tell("caches were not published", "they came faster than they can be encoded")
            done(slot == "known")

    def close(self) -> None:
        """Publish what waits, and end."""
        if self.publisher is not None:
            self.publisher.close()
