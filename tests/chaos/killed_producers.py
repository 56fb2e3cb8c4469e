"""Producers that are killed (kill -9) at any moment, and what decoders and the origin make of what they published.

A producer is a process of its own. It publishes the groups of a short asset at its own pace, and is killed at a random
moment: before it has begun, in the middle of a group, between its last word and the asset's name, or not at all. It is
played meanwhile: in every other run by a client, through a relay; in the others by a decoder that holds requests for
what comes next and looks at every byte. Then a late-comer plays what has become of it.
"""

from __future__ import annotations

import asyncio
import hashlib
import multiprocessing
import random
import signal
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, replace
from multiprocessing.synchronize import Event
from pathlib import Path

import structlog
from kvabr.store.live_folder import LIVE, LiveFolderWriter

from kvabr.client.async_client import AsyncClient
from kvabr.client.options import PlayOptions
from kvabr.client.result import IncompleteError, Played
from kvabr.link.moqt.connect import connect, dial
from kvabr.link.moqt.options import DialOptions
from kvabr.server.certificates import check, development
from kvabr.server.limits import ServerLimits
from kvabr.server.metrics import Metrics
from kvabr.server.published_assets import PublishedAssets
from kvabr.server.relay import Relay
from kvabr.server.server import Server, Watcher
from kvabr.store.locations import open_asset
from kvabr.transfer.interface import Connection, read_all
from kvabr.transfer.transfer import GroupRequest
from kvabr.types.catalog import Catalog
from kvabr.types.errors import NotFoundError, Reason, TransportError
from kvabr.types.live import UNKNOWN, LiveCatalog, LiveEnd, PublishedFrames, parse_edge, published_catalog
from kvabr.types.naming import (
    CATALOG_TRACK,
    EDGE_TRACK,
    LIVE_PREFIX_TRACK,
    LIVE_TRACK,
    PREFIX_TRACK,
    TrackNamespace,
    chain,
    prefix_track,
)
from tests.client.live import right
from tests.toymodel import SPEC, prompt, toy_asset

TOKENS = prompt(160).tokens
GROUPS, SPREAD_S = 10, 0.4
"""Groups of one asset, and seconds within which a producer publishes them and is killed."""
AHEAD = 3
"""Requests that a decoder has held ahead of the edge, for news and for groups each."""
HANG_S = 60.0
"""Seconds after which something hangs."""
_HELD_S = 10.0
_LIMIT = 1 << 22
_QUIET = structlog.wrap_logger(structlog.ReturnLogger(), processors=[])
_BASE = "Int4"


class FoundError(Exception):
    """Something that must never happen: its kind, and what it was."""


@dataclass(frozen=True)
class Production:
    """One producer: what it publishes, how fast, and when it is killed."""

    seed: int
    asset: FolderAsset
    """What its frames are from. The names are its own."""

    @property
    def salt(self) -> bytes:
        """What makes them its own."""
        return b"%16d" % self.seed

    @property
    def live(self) -> LiveCatalog:
        """What it announces."""
        digests = chain(TOKENS, model=SPEC.model, tokenizer=SPEC.tokenizer, group_tokens=16, salt=self.salt)
        whole, unknown = self.asset.catalog, (UNKNOWN,) * GROUPS
        tracks = tuple(replace(track, digests=unknown, measured=None) for track in whole.tracks)
        space = TrackNamespace(SPEC.model, digests[-1])
        offer = replace(whole, namespace=space, chunks=tuple(digests), tracks=tracks, mixes=())
        seconds = tuple(round(SPREAD_S * (group + 1) / GROUPS, 6) for group in range(GROUPS))
        return LiveCatalog(offer, seconds, f"{self.seed:016x}")

    def frame(self, group: int, track: str) -> bytes:
        """A frame."""
        return self.asset.frame(group, track)

    def pauses(self) -> Iterator[float]:
        """Seconds between steps: the beginning, a frame, news, the name, the last word."""
        dice = random.Random(f"{self.seed} pace")
        steps = 2 + GROUPS * (len(self.asset.catalog.tracks) + 1)
        while True:
            yield dice.expovariate(steps / SPREAD_S)

    @property
    def killed_s(self) -> float:
        """When it is killed, seconds after its process has begun; some end before."""
        return random.Random(f"{self.seed} end").uniform(0.0, 1.5 * SPREAD_S)


def produce(root: str, asset: str, seed: int, runs: Event) -> None:
    """Publish everything; the main function of the process, which says that it runs."""
    runs.set()
    made, news = Production(seed, open_asset(Path(asset))), list[PublishedFrames]()
    pauses, live = made.pauses(), made.live
    with LiveFolderWriter(Path(root) / live.catalog.namespace.prompt) as writer:
        time.sleep(next(pauses))
        writer.begin(live)
        for group in range(GROUPS):
            frames = {}
            for track in live.catalog.tracks:
                time.sleep(next(pauses))
                data = made.frame(group, track.name)
                writer.frame(group, track.name, data)
                frames[track.name] = len(data), hashlib.sha256(data).hexdigest()
            time.sleep(next(pauses))
            news.append(PublishedFrames(live.key, group, float(group), frames))
            writer.tell(news[-1])
        writer.tell(LiveEnd(live.key))
        time.sleep(next(pauses))
        whole = published_catalog(live, news)
        assert whole is not None
        writer.commit(whole)


class Decoder:
    """Plays one production over a connection."""

    def __init__(self, world: World, made: Production) -> None:
        self.connection, self.root, self.made, self.live = world.connection, world.root, made, made.live
        self.namespace = self.live.catalog.namespace

    async def get(self, track: str, group: int = 0, *, namespace: TrackNamespace | None = None, wait_s: float = 0.0):
        request = GroupRequest(namespace or self.namespace, track, group, _LIMIT, wait_s=wait_s)
        return await read_all(self.connection.request(request, 128))

    async def held(self, track: str, group: int) -> bytes | None:
        """A group once it exists; None if it never will."""
        while True:
            try:
                return await self.get(track, group, wait_s=_HELD_S)
            except NotFoundError as error:
                if error.reason != Reason.NOT_YET:
                    return None

    async def play(self, process) -> int:
        """Play until the end; return the groups that came."""
        while True:
            try:
                found = LiveCatalog.loads(await self.get(LIVE_TRACK))
                break
            except NotFoundError:
                if not process.is_alive():
                    return 0  # killed before it began, or within a look of the origin
                await asyncio.sleep(0.01)
        if found != self.live:
            raise FoundError("wrong", "another live catalog")
        ahead = {(track, at): self._ask(track, at) for at in range(AHEAD) for track in (EDGE_TRACK, _BASE)}
        try:
            for group in range(GROUPS + 1):
                data = await ahead.pop((EDGE_TRACK, group))
                if data is None:
                    raise FoundError("hole", f"the news end without a word before group {group}")
                news = parse_edge(data)
                if isinstance(news, LiveEnd):
                    if not news.reason and group < GROUPS:
                        raise FoundError("hole", f"complete after {group} groups")
                    return group
                frames = {_BASE: await ahead.pop((_BASE, group)), "FP16": await self.get("FP16", group)}
                for track, frame in frames.items():
                    if frame is None:
                        raise FoundError("hole", f"group {group} of {track} was told of and is not there")
                    if frame != self.made.frame(group, track) or news.frames[track] != _described(frame):
                        raise FoundError("wrong", f"group {group} of {track}")
                for track in (EDGE_TRACK, _BASE):
                    ahead[track, group + AHEAD] = self._ask(track, group + AHEAD)
            raise FoundError("hole", "no end after the last group")
        finally:
            for task in ahead.values():
                task.cancel()
            await asyncio.gather(*ahead.values(), return_exceptions=True)

    def _ask(self, track: str, group: int) -> asyncio.Task[bytes | None]:
        return asyncio.get_running_loop().create_task(self.held(track, group))

    async def late(self, groups: int) -> int:
        """Play what a late-comer finds, which has at least as many groups; return how many."""
        while any((path / LIVE).exists() for path in self.root.glob(f".{self.namespace.prompt}.*")):  # noqa: ASYNC110
            await asyncio.sleep(0.02)  # the origin will make it an asset, or remove it
        chunks = self.live.catalog.chunks
        first = TrackNamespace(self.namespace.model, chunks[0])
        while True:
            growing = await self._found(prefix_track(chunks).replace(PREFIX_TRACK, LIVE_PREFIX_TRACK, 1), first)
            ordinary = await self._found(prefix_track(chunks), first)
            if ordinary is not None:
                break
            if growing is None and groups:
                # Between the two answers it may have become an ordinary one.
                ordinary = await self._found(prefix_track(chunks), first)
                if ordinary is None:
                    raise FoundError("hole", "there is neither a growing nor an ordinary asset")
                break
            if growing is None:
                return 0
            await asyncio.sleep(0.02)
        offer = Catalog.loads(ordinary)
        if offer.chunks != chunks[: len(offer.chunks)] or len(offer.chunks) < groups:
            raise FoundError("hole", f"{groups} groups were published, {len(offer.chunks)} are kept")
        if await self.get(CATALOG_TRACK, namespace=offer.namespace) != ordinary:
            raise FoundError("wrong", "another catalog under the name than in the lookup")
        for track in offer.tracks:
            for group in range(len(offer.chunks)):
                if await self.get(track.name, group, namespace=offer.namespace) != self.made.frame(group, track.name):
                    raise FoundError("wrong", f"group {group} of {track.name} in the ordinary asset")
        return len(offer.chunks)

    async def _found(self, track: str, namespace: TrackNamespace) -> bytes | None:
        with suppress(NotFoundError):
            return await self.get(track, namespace=namespace)
        return None


async def played(client: AsyncClient, made: Production, process) -> int:
    """Play a production with a client; return the groups that came."""
    options = PlayOptions(salt=made.salt, time_price=0.0)
    while await client.find(TOKENS, salt=made.salt) is None:
        if not process.is_alive():
            return 0
        await asyncio.sleep(0.01)
    try:
        found = await client.play(TOKENS, deadline=HANG_S / 2, options=options)
    except IncompleteError as error:
        groups = len(error.prefix.coverage) if error.prefix is not None else 0
        if groups and not right(error.prefix, made.asset):
            raise FoundError("wrong", f"the first {groups} groups of a play") from error
        return groups
    if not isinstance(found, Played):
        return 0
    if not all(found.coverage) or found.tokens not in range(16, 161, 16):
        raise FoundError("hole", f"{found.coverage}")
    if not right(found, made.asset):
        raise FoundError("wrong", f"the {found.tokens} tokens of a play")
    return len(found.coverage)


async def one(world: World, seed: int) -> tuple[str, str]:
    """Run one production; return what came of it, and details."""
    made = Production(seed, world.asset)
    context = multiprocessing.get_context("forkserver")
    runs = context.Event()
    process = context.Process(target=produce, args=(str(world.root), str(world.asset.path), seed, runs), daemon=True)
    process.start()
    watched = played(world.client, made, process) if seed % 2 else Decoder(world, made).play(process)
    play = asyncio.get_running_loop().create_task(watched)
    try:
        await asyncio.to_thread(runs.wait, HANG_S)
        await asyncio.sleep(made.killed_s)
        ended = not process.is_alive()
        process.kill()
        await asyncio.to_thread(process.join)
        async with asyncio.timeout(HANG_S):
            groups = await play
            kept = await Decoder(world, made).late(groups)
    except FoundError as error:
        return str(error.args[0]), f"{error.args[1]} (seed {seed})"
    except TimeoutError:
        return "hang", f"no end within {HANG_S:g} s (seed {seed})"
    except TransportError as error:
        return "error", f"{error} (seed {seed})"
    finally:
        play.cancel()
        process.kill()
    if ended and process.exitcode not in {0, -signal.SIGKILL}:
        return "crash", f"the producer ended with {process.exitcode} (seed {seed})"
    return ("ended" if kept == GROUPS else "killed" if kept else "nothing"), f"{groups} played, {kept} kept"


@dataclass(frozen=True)
class World:
    """An origin of a folder, and those who play what is published there."""

    root: Path
    asset: FolderAsset
    connection: Connection
    """To the origin."""
    client: AsyncClient
    """Of a relay."""


@asynccontextmanager
async def world_of(root: Path):
    """Start an origin and a relay."""
    asset, folder = toy_asset(root / "template", ("FP16", "Int8", _BASE), tokens=len(TOKENS)), root / "published"
    folder.mkdir()
    async with AsyncExitStack() as stack:
        tls = development()
        published, metrics = PublishedAssets(folder, None, _QUIET), Metrics()
        limits, fingerprint = ServerLimits(held_per_connection=1024), check(tls).fingerprint
        await stack.enter_async_context(Watcher(published, _QUIET, metrics))
        origin = Server(published, "127.0.0.1", 0, tls, limits, _QUIET, metrics)
        await stack.enter_async_context(origin)
        options = DialOptions("localhost", port=origin.address[1], fingerprint=fingerprint)
        connection = await stack.enter_async_context(await dial(options, "aioquic"))
        url = f"moqt://localhost:{origin.address[1]}/"
        upstream = await stack.enter_async_context(connect(url, fingerprint=fingerprint))
        relay = await stack.enter_async_context(Relay(upstream, _QUIET, Metrics()))
        behind = await stack.enter_async_context(Server(relay, "127.0.0.1", 0, tls, limits, _QUIET, Metrics()))
        url = f"moqt://localhost:{behind.address[1]}/"
        client = await stack.enter_async_context(AsyncClient(url, fingerprint=fingerprint, model=SPEC))
        yield World(folder, asset, connection, client)


async def kill_many(root: Path, runs: int, seed: int = 1, *, at_a_time: int = 4, told=lambda _: None) -> Counter[str]:
    """Run many productions; count what came of them, and have ``told`` hear of what must never happen."""
    multiprocessing.get_context("forkserver").set_forkserver_preload([__name__])
    outcomes: Counter[str] = Counter()
    seeds = iter(range(seed, seed + runs))
    async with world_of(root) as world:

        async def worker() -> None:
            for number in seeds:
                outcome, details = await one(world, number)
                outcomes[outcome] += 1
                if outcome not in {"ended", "killed", "nothing"}:
                    told(f"{outcome}: {details}")

        await asyncio.gather(*(worker() for _ in range(at_a_time)))
    return outcomes


def _described(frame: bytes) -> tuple[int, str]:
    return len(frame), hashlib.sha256(frame).hexdigest()
