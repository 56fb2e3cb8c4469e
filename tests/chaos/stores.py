"""Plays of object stores in bad minutes: GETs that are never answered, cut, refused or late, and dates that are none.

A web server over objects does to each GET what a seed says; it never says that an object does not exist, as that is
believed for a minute. A client plays from it, and waits all the time for the codec profile of another store, which
never sends it. Judged is what must never happen:

  wrong     a cache is not the one that was published
  crash     a play ended with an exception that is none of kvabr's
  stuck     with the faults over, nothing could be played for `STUCK_S`
"""

import asyncio
import contextlib
import random
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path

from kvabr.client import memory
from kvabr.client.async_client import AsyncClient
from kvabr.client.options import Limits, PlayOptions
from kvabr.client.result import Played
from kvabr.codec.fit import fit
from kvabr.store.locations import open_asset
from kvabr.types.errors import KvabrError
from tests.client.stored import Fault, WebServer, memory_url, put_asset
from tests.client.test_play import close
from tests.toymodel import SPEC, ToyModel, prompt, toy_asset

PLAYS = 24
"""Plays of a round."""
STUCK_S = 60.0
BAD = ("wrong", "crash", "stuck")
LENGTHS = {"short": 70, "long": 160}
"""Tokens of the prompts, by the names of their assets; the long one has a codec profile."""
_LEAST = 0.9
"""Share of a prompt that is there: of the short one, four groups of five."""
_SHARES = (0.0, 0.02, 0.1, 0.3)
"""Share of the GETs that go wrong; a round has one of them."""


def _fault(dice: random.Random) -> Fault:
    return dice.choice(
        (
            Fault(silent=True), Fault(silent=True), Fault(delay_s=dice.choice((0.1, 0.7, 3.0))), Fault(status=503),
            Fault(cut_after=dice.randrange(200)), Fault(stop_after=dice.randrange(200)),
            Fault(replace=dice.randbytes(300)), Fault(modified="31 Jan 22026 12:00:00 GMT"), Fault(modified="never"),
        )
    )  # fmt: skip


@contextlib.asynccontextmanager
async def troubled(root: Path, dice: random.Random) -> AsyncIterator[WebServer]:
    """Yield the server of a store with both assets; the dice decide which GETs fail."""
    url = memory_url()
    for name in LENGTHS:
        put_asset(url, open_asset(root / name))
    share = dice.choice(_SHARES)
    async with WebServer(url) as server:
        server.faults.append(lambda _key, _before: _fault(dice) if dice.random() < share else None)
        yield server


def make_assets(folder: Path) -> None:
    profile = fit(SPEC, lambda: iter([ToyModel().prefill(prompt(200).tokens)]))
    toy_asset(folder / "short", ("FP16", "Int8", "Int4"))
    toy_asset(folder / "long", ("FP16", "Int4", "AC-5x"), profile=profile, tokens=LENGTHS["long"])


def campaign(folder: Path, rounds: int, first_seed: int) -> bool:
    """Run rounds from a seed on, print the outcomes of their plays, and return whether no fault was found."""
    make_assets(folder)
    good = True
    for seed in range(first_seed, first_seed + rounds):
        tally = asyncio.run(run(folder, seed))
        good = good and not any(tally[kind] for kind in BAD)
        print(f"seed {seed}: " + ", ".join(f"{count} {kind}" for kind, count in tally.most_common()), flush=True)
    return good


async def run(root: Path, seed: int) -> Counter[str]:
    """Run the round of a seed over the assets in a folder; return the outcomes of its plays, and the faults found."""
    dice, tally = random.Random(f"stores {seed}"), Counter[str]()
    limits = Limits(memory_bytes=0)
    async with contextlib.AsyncExitStack() as stack:
        server = await stack.enter_async_context(troubled(root, dice))
        frozen = await stack.enter_async_context(troubled(root, random.Random(0)))
        frozen.faults[:] = [lambda key, _before: Fault(silent=True) if key.startswith("p/") else None]
        client = await stack.enter_async_context(AsyncClient(model=SPEC, limits=limits))
        waiting = asyncio.create_task(_played(client, "long", frozen.url, 2 * STUCK_S, tally))

        async def one() -> None:
            await asyncio.sleep(dice.uniform(0.0, 2.0))
            memory._profiles.clear()
            await _played(client, dice.choice(list(LENGTHS)), server.url, dice.choice((0.5, 1.0, 2.0)), tally)

        await asyncio.gather(*(one() for _ in range(PLAYS)))
        server.faults.clear()
        for name in LENGTHS:
            try:
                async with asyncio.timeout(STUCK_S):
                    while not await _played(client, name, server.url, 5.0, tally):  # noqa: ASYNC110 # that is the test
                        await asyncio.sleep(0.05)
            except TimeoutError:
                tally["stuck"] += 1
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
    return tally


async def _played(client: AsyncClient, name: str, peer: str, deadline_s: float, tally: Counter[str]) -> bool:
    """Play a prompt, with its codec profile if it has one; count its outcome, and return whether it succeeded."""
    tokens = prompt(LENGTHS[name]).tokens
    track = "FP16"
    try:
        if name == "long":
            track = "AC-5x"
            found = await client.find(tokens, within_s=deadline_s, peer=peer)
            if found is not None:
                await client.fetch_profile(found.catalog, within_s=deadline_s, peer=peer)
        played = await client.play(tokens, deadline=deadline_s, peer=peer, options=PlayOptions(policy=f"fixed:{track}"))
    except KvabrError as error:
        tally[type(error).__name__] += 1
        return False
    except Exception as error:  # noqa: BLE001 - what this looks for
        tally["crash"] += 1
        tally[repr(error)[:200]] += 1
        return False
    if not isinstance(played, Played) or played.tokens < _LEAST * len(tokens):
        tally["little"] += 1
        return False
    right = close(played.kv, tokens[: played.tokens], 0.05)
    tally["played" if right else "wrong"] += 1
    return True
