"""Producers that are killed (kill -9) at any moment, and how players and the origin handle their unfinished assets.

A producer is a process of its own. It publishes the groups of a short asset at its own pace, and is killed at a random
moment: before it has begun, in the middle of a group, between its last news and the asset's name, or not at all. It is
played meanwhile, from the origin or through a relay. Then a late player plays the result.
"""

import asyncio
import hashlib
import multiprocessing
import random
import signal
import time
from collections import Counter
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from multiprocessing.synchronize import Event
from pathlib import Path

from kvabr.client.async_client import AsyncClient
from kvabr.client.options import PlayOptions
from kvabr.client.result import IncompleteError, Played
from kvabr.codec.base import GroupContext
from kvabr.codec.group import framed, payload_of
from kvabr.server.certificates import development
from kvabr.server.live_assets import LiveAssets
from kvabr.store.admin import names_in
from kvabr.store.asset import Asset
from kvabr.store.live import LiveWriter, live_keys
from kvabr.store.local import LocalStore
from kvabr.store.locations import open_asset
from kvabr.store.store_tree import StoreTree
from kvabr.types.errors import TransportError
from kvabr.types.live import UNKNOWN, LiveCatalog, LiveEnd, PublishedFrames, published_catalog
from kvabr.types.naming import TrackNamespace, chain
from kvabr.types.peer import PeerOptions
from tests.client.live import right
from tests.server.live import live_origin
from tests.server.relays import relay_before, url_of
from tests.toymodel import SPEC, prompt, toy_asset

TOKENS = prompt(160).tokens
GROUPS, SPREAD_S = 10, 0.4
"""Groups of one asset, and seconds within which a producer publishes them and is killed."""
SPARED = 4
"""Of so many producers one is not killed."""
HANG_S = 60.0
"""Seconds after which something hangs."""


class FoundError(Exception):
    """Something that must never happen: its kind, and a description."""


@dataclass(frozen=True)
class Production:
    """One producer, by its seed; it publishes the frames of the asset under names of its own."""

    seed: int
    asset: Asset

    @property
    def salt(self) -> bytes:
        return b"%16d" % self.seed

    @property
    def live(self) -> LiveCatalog:
        digests = chain(TOKENS, model=SPEC.model, tokenizer=SPEC.tokenizer, group_tokens=16, salt=self.salt)
        whole, unknown = self.asset.catalog, (UNKNOWN,) * GROUPS
        tracks = tuple(replace(track, digests=unknown, packs=(), measured=None) for track in whole.tracks)
        space = TrackNamespace(SPEC.model, digests[-1])
        offer = replace(whole, namespace=space, chunks=tuple(digests), tracks=tracks, mixes=())
        seconds = tuple(round(SPREAD_S * (group + 1) / GROUPS, 6) for group in range(GROUPS))
        return LiveCatalog(offer, seconds, f"{self.seed:016x}")

    def frame(self, group: int, track: str) -> bytes:
        """Return a frame of the asset, framed for this producer's own prompt."""
        first, end = SPEC.group_range(group, len(TOKENS))
        payload = bytes(payload_of(self.asset.frame(group, track)))
        return framed(payload, track, GroupContext(SPEC, first, end - first), self.live.catalog.chunks[group], group)

    def named(self, root: Path) -> bool:
        """Return whether the store has this producer's asset."""
        return self.live.catalog.chunks[-1] in names_in(StoreTree(root))

    @property
    def killed_s(self) -> float:
        """When it is killed, seconds after its process has begun; some end before."""
        return random.Random(f"{self.seed} end").uniform(0.0, 1.5 * SPREAD_S)


def produce(root: str, asset: str, seed: int, runs: Event) -> None:
    """Publish everything; the main function of the process, which sets ``runs`` first."""
    runs.set()
    made, news = Production(seed, open_asset(Path(asset))), list[PublishedFrames]()
    live, dice = made.live, random.Random(f"{seed} pace")
    steps = 2 + GROUPS * (len(live.catalog.tracks) + 1)

    def pause() -> None:
        time.sleep(dice.expovariate(steps / SPREAD_S))

    with LiveWriter(LocalStore(Path(root)), None) as writer:
        pause()
        writer.begin_live(live)
        for group in range(GROUPS):
            frames = {}
            for track in live.catalog.tracks:
                pause()
                data = made.frame(group, track.name)
                frames[track.name] = len(data), hashlib.sha256(data).hexdigest()
                writer.frame(group, track.name, data, frames[track.name][1])
            pause()
            news.append(PublishedFrames(live.key, group, float(group), frames))
            writer.announce(news[-1])
        writer.announce(LiveEnd(live.key))
        pause()
        whole = published_catalog(live, news)
        assert whole is not None
        writer.commit(whole)


async def played(client: AsyncClient, made: Production, policy: str = "anytime") -> int:
    """Play the existing part of a production; return the number of received groups."""
    options = PlayOptions(salt=made.salt, time_price=0.0, policy=policy)
    try:
        found = await client.play(TOKENS, deadline=HANG_S / 2, options=options)
    except IncompleteError as error:
        if (found := error.prefix) is None:
            return 0
    if not isinstance(found, Played):
        return 0
    if not all(found.coverage) or found.tokens not in range(16, 161, 16):
        raise FoundError("hole", f"{found.coverage}")
    if not right(found, made.asset):
        raise FoundError("wrong", f"the {found.tokens} tokens of a play")
    return len(found.coverage)


async def meanwhile(client: AsyncClient, made: Production, process) -> int:
    """Play a production while it goes on; return the number of received groups."""
    while await client.find(TOKENS, salt=made.salt) is None:
        if not process.is_alive():
            return 0  # killed before it began, or within a look of the origin
        await asyncio.sleep(0.01)
    return await played(client, made)


@dataclass(frozen=True)
class World:
    """A store that is published, an asset with the frames, and clients of the origin and of a relay."""

    root: Path
    asset: Asset
    live: LiveAssets
    clients: tuple[AsyncClient, AsyncClient]

    def noticed(self, made: Production) -> bool:
        """Return whether the origin has read everything that an ended producer left."""
        key = made.live.key
        if key not in live_keys(LocalStore(self.root)):
            return True  # it had not begun, or is complete
        return any(asset.follower.key == key and asset.settled for asset in self.live.assets)


async def late(world: World, made: Production, groups: int) -> int:
    """Play every track of the asset that is left, which must have at least ``groups`` groups; return their number.

    The origin has noticed the end by then: until that, it may take in groups between two plays.
    """
    while not world.noticed(made):  # noqa: ASYNC110
        await asyncio.sleep(0.02)
    client = world.clients[0]
    if made.named(world.root):
        while await client.find(TOKENS, salt=made.salt) is None:  # noqa: ASYNC110
            await asyncio.sleep(0.02)  # it is in the store, and the origin has not looked since
    kept = {await played(client, made, f"fixed:{track.name}") for track in made.asset.catalog.tracks}
    if len(kept) > 1 or min(kept) < groups:
        raise FoundError("hole", f"{groups} groups were played, {sorted(kept)} are kept")
    return kept.pop()


async def one(world: World, seed: int) -> tuple[str, str]:
    """Run one production; return its outcome, and details."""
    made, client = Production(seed, world.asset), world.clients[seed % 2]
    context = multiprocessing.get_context("forkserver")
    runs = context.Event()
    process = context.Process(target=produce, args=(str(world.root), world.asset.store.url, seed, runs), daemon=True)
    process.start()
    play = asyncio.get_running_loop().create_task(meanwhile(client, made, process))
    try:
        await asyncio.to_thread(runs.wait, HANG_S)
        if seed % SPARED:
            await asyncio.sleep(made.killed_s)
        else:
            await asyncio.to_thread(process.join, HANG_S)
        ended = not process.is_alive()
        process.kill()
        await asyncio.to_thread(process.join)
        async with asyncio.timeout(HANG_S):
            groups = await play
            kept = await late(world, made, groups)
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
    if made.named(world.root) and kept < GROUPS:
        return "hole", f"{kept} of {GROUPS} groups of a complete asset"
    return ("ended" if made.named(world.root) else "killed"), f"{groups} played, {kept} kept"


async def kill_many(root: Path, runs: int, seed: int = 1, *, at_a_time: int = 4, told=lambda _: None) -> Counter[str]:
    """Run many productions, and count their outcomes; call ``told`` for everything that must never happen."""
    multiprocessing.get_context("forkserver").set_forkserver_preload([__name__])
    outcomes: Counter[str] = Counter()
    seeds = iter(range(seed, seed + runs))
    asset = toy_asset(root / "template", ("FP16", "Int8", "Int4"), tokens=len(TOKENS))
    (folder := root / "published").mkdir()
    async with AsyncExitStack() as stack:
        origin = await stack.enter_async_context(live_origin(folder, tls := development()))
        relay = await relay_before(stack, origin, tls)
        clients = [
            AsyncClient(url_of(at), PeerOptions(fingerprint=at.fingerprint, timeout_s=60.0), model=SPEC)
            for at in (origin, relay)
        ]
        world = World(
            folder, asset, origin.source.live, tuple([await stack.enter_async_context(client) for client in clients])
        )

        async def worker() -> None:
            for number in seeds:
                outcome, details = await one(world, number)
                outcomes[outcome] += 1
                if outcome not in {"ended", "killed"}:
                    told(f"{outcome}: {details}")

        await asyncio.gather(*(worker() for _ in range(at_a_time)))
    return outcomes
