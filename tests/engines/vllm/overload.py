"""Many requests at once, in virtual time: real promises and real plays over one link in memory, and a simulated engine.

The engine asks in steps, as vLLM does, and computes one prompt after the other, in the order in which they are ready.
"""

import asyncio
import hashlib
import math
from dataclasses import dataclass, replace
from itertools import product

from kvabr.client.async_client import AsyncClient
from kvabr.client.options import Limits, PlayOptions
from kvabr.codec.container import pack, unpack
from kvabr.engines.vllm.plays import sizes, usable, within
from kvabr.engines.vllm.promises import Promises, Terms
from kvabr.server.published_assets import PublishedAssets
from kvabr.store.locations import open_store
from kvabr.store.prompt import Prompt
from kvabr.types.cost import PrefillCost
from kvabr.types.naming import TrackNamespace, chain
from tests.client.playing import connection
from tests.client.virtual import VirtualLoop
from tests.toymodel import SPEC, VOCABULARY, toy_asset

BLOCK, STEP_S, RTT_S = 16, 0.005, 0.02
OWN = 16
"""Tokens of each prompt that no cache covers."""


@dataclass
class Asked:
    """A request, and its outcome."""

    name: str
    tokens: tuple[int, ...]
    deadline_s: float
    catalog: object
    max_loss: float = math.inf
    loaded: int = 0
    loss: float = 0.0
    ttft_s: float = 0.0

    @property
    def met(self):
        return self.ttft_s <= self.deadline_s


def published(folder, count, tokens=64):
    """Publish a toy model's cache under as many prompts; return the library, the prompts, and their catalog."""
    asset = toy_asset(folder / "once", ("Int8", "Int4"), tokens=tokens)
    catalog, prompts = asset.catalog, []
    for number in range(count):
        ids = (number % VOCABULARY, number // VOCABULARY, *asset.prompt().tokens[2:])
        chunks = tuple(chain(ids, model=SPEC.model, tokenizer=SPEC.tokenizer, group_tokens=BLOCK))
        with open_store(folder / "all" / f"{tokens}-{number}").writer() as writer:
            tracks = []
            for track in catalog.tracks:
                digests = []
                for group, chunk in enumerate(chunks):
                    header, payload = unpack(asset.frame(group, track.name))
                    frame = pack(payload, replace(header, chunk=chunk))
                    digests.append(hashlib.sha256(frame).hexdigest())
                    writer.frame(group, track.name, frame, digests[-1])
                tracks.append(replace(track, digests=tuple(digests)))
            writer.prompt(Prompt(ids, ()))
            name = TrackNamespace(SPEC.model, chunks[-1])
            writer.commit(replace(catalog, namespace=name, chunks=chunks, tracks=tuple(tracks), mixes=()))
        prompts.append(ids)
    return PublishedAssets(folder / "all"), prompts, catalog


def at_once(library, asked, rate, cost, *, known=True):
    """Serve simultaneous requests; ``known``: earlier plays have measured the link."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        runner.run(_Engine(cost, rate).serve(library, asked, known=known))
    return sum(one.met for one in asked)


class _Engine:
    def __init__(self, cost, rate):
        self.cost, self.rate = cost, rate
        self.promises = Promises(ranks=1, block=BLOCK, max_bytes=1 << 30, max_plays=64)
        self.plays = {}

    async def serve(self, library, asked, *, known):
        loop = asyncio.get_running_loop()
        link = connection(library, self.rate, RTT_S)
        async with AsyncClient(link, model=SPEC, limits=Limits(plays=1024, memory_bytes=0)) as client:
            found = {one.name: await client.find(one.tokens, within_s=60) for one in asked}
            self.start_s = free_s = loop.time()
            waiting, by_name = list(asked), {one.name: one for one in asked}
            while waiting:
                now = loop.time()
                for one in list(waiting):
                    last, due_s = _last(one), self.start_s + one.deadline_s
                    got = self.promises.promised_tokens(
                        one.name, 0, last, terms=lambda _, one=one: self._terms(one), due_s=due_s, now=now
                    )
                    if got is None:
                        continue
                    self.promises.use(one.name, got, now)
                    waiting.remove(one)
                    free_s = max(free_s, now) + self.cost.added_s(got, _all(one) - got)
                    one.loaded, one.ttft_s = got, free_s - self.start_s
                if now >= free_s:
                    self.promises.idle(now)
                seen, _ = await client.known_link()
                self.promises.link(seen.rate or 0.8 * self.rate * known, RTT_S)
                begun, dropped, *_ = self.promises.take(now)
                for play in begun:
                    work = self._play(client, found[play.request], play, by_name[play.request])
                    self.plays[play.play] = loop.create_task(work)
                for number in dropped:
                    self.plays[number].cancel()
                await asyncio.sleep(STEP_S)
            await asyncio.gather(*self.plays.values(), return_exceptions=True)
        assert not self.promises.held_bytes
        return by_name

    async def _play(self, client, found, play, one):
        prefix = await client.play_prefix(
            within(found, 0, play.bytes),
            deadline=max(1e-3, play.due_s - asyncio.get_running_loop().time()),
            cost=self.cost,
            uncached=OWN,
            block=BLOCK,
            options=PlayOptions(gpu_price=play.engine_price, max_loss=one.max_loss, patience=1.0, tail=0),
        )
        one.loss = prefix.loss
        self.promises.report(play.play, prefix.tokens // BLOCK * BLOCK, prefix.nbytes)

    def _terms(self, one):
        tracks = usable(one.catalog, None, one.max_loss)
        every = sizes(one.catalog, tracks)
        played_s, computed_s = (self.cost.added_s(first, _all(one) - first) for first in (_last(one), 0))
        return Terms(every, every[-1], played_s, computed_s, max(track.total_loss for track in tracks))


def feasible(asked, rate, cost):
    """Return how many could be in time together, by the capacity of link and engine until each deadline."""
    classes = {}
    for one in sorted(asked, key=lambda one: one.deadline_s):
        classes.setdefault((len(one.tokens), one.deadline_s), []).append(one)
    best = 0
    kinds = [(some[0], deadline_s, len(some)) for (_, deadline_s), some in classes.items()]
    for counts in product(*([(p, c) for p in range(n + 1) for c in range(n + 1 - p)] for _, _, n in kinds)):
        if sum(map(sum, counts)) > best and _fits(kinds, counts, rate, cost):
            best = sum(map(sum, counts))
    return best


def _fits(kinds, counts, rate, cost):
    link_s = engine_s = 0.0
    for (one, deadline_s, _), (played, computed) in zip(kinds, counts, strict=True):
        nbytes = min(track.total_bytes for track in one.catalog.tracks)
        own_s = cost.added_s(_last(one), _all(one) - _last(one))
        link_s += played * nbytes / rate
        engine_s += played * own_s + computed * cost.added_s(0, _all(one))
        if engine_s > deadline_s or (played and RTT_S + link_s + own_s > deadline_s):
            return False
    return True


def _last(one):
    return one.catalog.tokens // BLOCK * BLOCK


def _all(one):
    return one.catalog.tokens + OWN


def engine_of(computes, tokens, deadline_s):
    """Return the cost of an engine that computes a number of prompts by a deadline."""
    return PrefillCost.from_rate(computes * (tokens + OWN) / deadline_s)
