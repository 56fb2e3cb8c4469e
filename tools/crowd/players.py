"""Players in processes of their own: each is a client that plays one cache, and checks what it got."""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import random
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from multiprocessing.connection import Connection as Pipe
from multiprocessing.process import BaseProcess
from pathlib import Path

import torch
from crowd.assets import GROUP_TOKENS, Truth
from crowd.machine import raise_files

from kvabr import AsyncClient, Played, PlayOptions
from kvabr.link.objects.connection import StoreConnection
from kvabr.transfer.redial import RedialledConnection
from kvabr.types.events import PlayEvent, RequestDone, RequestFailed

CONNECTING = 8
"""Players of a process that connect at the same time."""
CONNECT_S = 120.0
QUESTION_TOKENS = (10, 3 * GROUP_TOKENS)
"""Tokens of a player's prompt that nobody else has: less than a group, or some groups, which are looked for, too."""


@dataclass(frozen=True)
class Crowd:
    """Who plays what, and from where."""

    url: str
    assets: tuple[Path, ...]
    """The most popular one first."""
    players: int
    processes: int = 2
    zipf: float = 1.0
    """Exponent of the assets' popularity."""
    within_s: float = 0.0
    """Seconds in which they all begin; 0: at once."""
    deadline_s: float = 120.0
    policy: str = PlayOptions().policy
    fingerprint: str | None = None
    quic: str = "auto"

    def drawn(self, asset_of: random.Random) -> int:
        """Draw an asset."""
        weights = [(rank + 1) ** -self.zipf for rank in range(len(self.assets))]
        return asset_of.choices(range(len(self.assets)), weights)[0]


@dataclass(frozen=True)
class Outcome:
    """What became of one player."""

    asset: int
    seconds: float
    """From its start to its cache, or to its failure."""
    wrong: int = 0
    """Groups that are not what was published."""
    error: str = ""
    dials: int = 0
    """Times that it had to connect anew."""
    gets: int = 0
    """Requests to a store or its cache."""
    failed: int = 0
    """Requests for groups that failed and were made again."""


@dataclass
class Outcomes:
    """What became of the players of one process."""

    players: list[Outcome] = field(default_factory=list)
    groups: set[tuple[int, int, str]] = field(default_factory=set)
    """Asset, group and track of all that came."""


class Players:
    """All players of a crowd, in their processes: enter it, wait for `connected`, and let them `play`."""

    def __init__(self, crowd: Crowd) -> None:
        self._pipes: list[Pipe] = []
        self._processes: list[BaseProcess] = []
        context = multiprocessing.get_context("spawn")
        for number in range(crowd.processes):
            count = crowd.players // crowd.processes + (number < crowd.players % crowd.processes)
            pipe, theirs = context.Pipe()
            process = context.Process(target=play_many, args=(theirs, crowd, count, number), daemon=True)
            process.start()
            theirs.close()
            self._pipes.append(pipe)
            self._processes.append(process)

    @property
    def pids(self) -> list[int]:
        """Ids of the processes."""
        return [process.pid for process in self._processes if process.pid is not None]

    async def connected(self) -> None:
        """Wait until every player has its connection."""
        await self._answers()

    async def play(self) -> Outcomes:
        """Let them all begin, and wait for the last."""
        for pipe in self._pipes:
            pipe.send("go")
        found = Outcomes()
        for one in await self._answers():
            found.players += one.players
            found.groups |= one.groups
        return found

    async def _answers(self) -> Sequence[Outcomes]:
        loop = asyncio.get_running_loop()
        # A process that ended closes its pipe, and receiving raises.
        return [await loop.run_in_executor(None, pipe.recv) for pipe in self._pipes]

    def close(self) -> None:
        """End the processes."""
        for pipe in self._pipes:
            with contextlib.suppress(OSError):
                pipe.send("stop")
        for process in self._processes:
            process.join(10)
            process.kill()


def play_many(pipe: Pipe, crowd: Crowd, count: int, seed: int) -> None:
    """Run ``count`` players in this process."""
    raise_files()
    torch.set_num_threads(1)
    pipe.send(asyncio.run(_play_many(pipe, crowd, count, seed)))
    pipe.recv()  # so that its memory and its CPU time can still be read


async def _play_many(pipe: Pipe, crowd: Crowd, count: int, seed: int) -> Outcomes:
    dice, found = random.Random(seed), Outcomes()  # noqa: S311  # no secret
    truths = [Truth(folder) for folder in crowd.assets]
    async with contextlib.AsyncExitStack() as stack:
        clients: list[AsyncClient] = []
        turns = asyncio.Semaphore(CONNECTING)

        async def connect() -> None:
            async with turns:
                client = AsyncClient(
                    crowd.url, fingerprint=crowd.fingerprint, quic=crowd.quic, timeout_s=CONNECT_S,  # type: ignore[arg-type]
                    model=truths[0].catalog.spec,
                )  # fmt: skip
                await client.connect()
                clients.append(client)
                stack.push_async_exit(client)

        await asyncio.gather(*(connect() for _ in range(count)))
        pipe.send(Outcomes())
        await asyncio.get_running_loop().run_in_executor(None, pipe.recv)
        plays = []
        for client in clients:
            asset, question = crowd.drawn(dice), [dice.randrange(50_000) for _ in range(dice.choice(QUESTION_TOKENS))]
            plays.append(_play(crowd, client, asset, truths[asset], question, dice.uniform(0, crowd.within_s), found))
        found.players += await asyncio.gather(*plays)
        return found


async def _play(
    crowd: Crowd,
    client: AsyncClient,
    asset: int,
    truth: Truth,
    question: Sequence[int],
    pause_s: float,
    found: Outcomes,
) -> Outcome:
    await asyncio.sleep(pause_s)
    start_s, failed, ended = time.monotonic(), 0, partial(Outcome, asset)

    def note(event: PlayEvent) -> None:
        nonlocal failed
        if isinstance(event, RequestDone):
            found.groups.add((asset, event.group, event.track))
        failed += isinstance(event, RequestFailed)

    options = PlayOptions(policy=crowd.policy, log=note)
    try:
        played = await client.play((*truth.tokens, *question), deadline=crowd.deadline_s, options=options)
    except Exception as error:  # noqa: BLE001  # whatever it is, it is to be counted
        ended = partial(ended, error=f"{type(error).__name__}: {error}")
        played = None
    seconds = time.monotonic() - start_s
    if isinstance(played, Played):
        ended = partial(ended, wrong=truth.wrong(played))
    elif played is not None:
        ended = partial(ended, error="nothing was found of its prompt")
    connection = await client.connect()
    if isinstance(connection, StoreConnection):
        return ended(seconds, gets=connection.gets + connection.index.requests, failed=failed)
    dials = connection.dials if isinstance(connection, RedialledConnection) else 0
    return ended(seconds, dials=dials, failed=failed)


@contextlib.asynccontextmanager
async def players_of(crowd: Crowd) -> AsyncIterator[Players]:
    """Start the processes of a crowd, and yield them once every player has its connection."""
    players = Players(crowd)
    try:
        await players.connected()
        yield players
    finally:
        players.close()
