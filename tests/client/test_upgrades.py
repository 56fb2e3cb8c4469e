"""Upgrades of a cache that is in use: they come, whole groups at a time, when the engine says so, and never else."""

import asyncio
import math
import threading
import time
from functools import partial

import pytest
import torch

from kvabr.abr import Decision, Policy
from kvabr.client.async_client import AsyncClient
from kvabr.client.engine_hook import StepGate
from kvabr.client.options import PlayOptions
from kvabr.codec.fit import fit
from kvabr.server.grants import EVERYTHING
from kvabr.server.published_assets import PublishedAssets
from kvabr.types.errors import UsageError
from tests.client.playing import play
from tests.client.virtual import Hang, virtual
from tests.memory_transport import Fault, MemoryConnection, MemoryLink
from tests.toymodel import SPEC, ToyModel, prompt, toy_asset

TOKENS = prompt(70).tokens
EXACT = ToyModel().prefill(TOKENS)
LAYERS = ("AC-L0", "AC-L1", "AC-L2", "AC-L3")


@pytest.fixture(scope="module")
def layered(tmp_path_factory):
    folder = tmp_path_factory.mktemp("layers")
    profile = fit(SPEC, lambda: iter([ToyModel().prefill(prompt(200).tokens)]))
    catalog = toy_asset(folder / "asset", LAYERS, profile=profile).catalog
    library = PublishedAssets(folder)

    def make(rate, **options):
        return MemoryConnection(partial(library.find, EVERYTHING), MemoryLink(rate, 0.02), **options)

    make.catalog = catalog
    return make


def slow(catalog, share):
    """A rate at which the base of all groups takes such a share of a deadline of 2 s, beside the catalog."""
    return catalog.track("AC-L0").total_bytes / (2.0 * share)


def error(kv):
    return float((kv.float() - EXACT).square().mean())


async def begun(layered, **options):
    """A play over a link that brings little more than the base by the deadline, and the connection."""
    link = layered(1e7, **options)
    ready = asyncio.get_running_loop().create_future()

    def watch(snapshot):
        # The catalog and the profile come quickly; the groups do not.
        link.path.rate = slow(layered.catalog, 0.9)
        if not ready.done():
            ready.set_result(None)

    played = await play(link, TOKENS, deadline=2.0, spec=SPEC, after=math.inf, watch=watch)
    return link, played


@virtual
async def test_a_cache_in_use_gets_as_good_as_it_can(layered):
    link, played = await begun(layered)
    async with link:
        assert played.upgrades is not None
        before, loss = error(played.kv), played.upgrades.loss
        assert loss == pytest.approx(played.loss)
        gate = StepGate()
        played.upgrades.into(gate)
        link.path.rate = 1e6
        record = await played.upgrades.wait()
        assert played.upgrades.over
        assert set(played.upgrades.coverage) == {"AC-L3"}
        assert played.upgrades.loss < loss / 10
        assert error(played.kv) < before / 10
        assert record.bytes_wasted == 0
    async with layered(1e8) as fast:
        best = await play(fast, TOKENS, deadline=2.0, spec=SPEC, policy=_up_to("AC-L3"))
    assert torch.equal(played.kv, best.kv)


@virtual
async def test_nothing_is_written_before_the_engine_says_how(layered):
    link, played = await begun(layered)
    async with link:
        link.path.rate = 1e7
        before = played.kv.clone()
        await asyncio.sleep(4.0)
        fetched = played.upgrades.record.bytes_fetched
        await asyncio.sleep(1.0)
        assert torch.equal(played.kv, before)
        assert not played.upgrades.over
        # Some upgrades wait for the engine, and nothing more is asked for until it has let them in.
        assert 0 < fetched == played.upgrades.record.bytes_fetched
        played.upgrades.into(StepGate())
        await played.upgrades.wait()
        assert set(played.upgrades.coverage) == {"AC-L3"}


@virtual
async def test_a_step_never_sees_half_a_group(layered):
    link, played = await begun(layered)
    gate, seen, torn = StepGate(), [], []
    spec, catalog = SPEC, layered.catalog
    # What each group looks like on each track.
    async with layered(1e8) as fast:
        looks = {}
        for top in LAYERS:
            got = await play(fast, TOKENS, deadline=2.0, spec=SPEC, policy=_up_to(top))
            for group in range(catalog.groups):
                first, last = spec.group_range(group, catalog.tokens)
                looks[group, got.coverage[group]] = got.kv[:, :, :, first:last]

    def step():
        with gate.step():
            tracks = []
            for group in range(catalog.groups):
                first, last = spec.group_range(group, catalog.tokens)
                now = played.kv[:, :, :, first:last]
                tracks.append(next((t for t in LAYERS if torch.equal(looks[group, t], now)), None))
            seen.append(tracks)
            if None in tracks:
                torn.append(tracks)

    async with link:
        link.path.rate = 1e6
        played.upgrades.into(gate)
        while not played.upgrades.over:
            await asyncio.get_running_loop().run_in_executor(None, step)
            await asyncio.sleep(0.001)
        step()
    assert not torn
    assert seen[-1] == ["AC-L3"] * catalog.groups
    assert len({tuple(tracks) for tracks in seen}) > 2


def _up_to(top):
    """A policy that plays every group in layers up to one, from a file of its own name."""
    return f"{__file__}:UpTo{top[-1]}"


class _UpTo(Policy):
    def decide(self, view):
        if (group := view.first_missing()) is not None:
            return Decision.fetch(group, "AC-L0", "the base")
        for group in view.settled:
            above = LAYERS.index(view.track_of[group]) + 1
            if above <= LAYERS.index(self.top):
                return Decision.upgrade(group, LAYERS[above], "one more")
        return Decision.wait("all there")


class UpTo0(_UpTo):
    top = "AC-L0"


class UpTo1(_UpTo):
    top = "AC-L1"


class UpTo2(_UpTo):
    top = "AC-L2"


class UpTo3(_UpTo):
    top = "AC-L3"


@virtual
async def test_an_engine_that_says_no_is_asked_again(layered):
    link, played = await begun(layered)
    asked, written = [], []

    def hook(first, last, write):
        asked.append((first, last))
        if len(asked) % 3:
            return False
        write()
        written.append((first, last))
        return True

    async with link:
        link.path.rate = 1e6
        played.upgrades.into(hook)
        await played.upgrades.wait()
    assert set(played.upgrades.coverage) == {"AC-L3"}
    assert len(asked) >= 3 * len(written) - 2


@virtual
async def test_cancelling_ends_it_at_once_and_for_good(layered):
    link, played = await begun(layered)
    held, entered = Hang(), threading.Event()

    def hook(first, last, write):
        entered.set()
        held.wait()
        write()  # too late: this was cancelled meanwhile
        return True

    async with link:
        link.path.rate = 1e6
        before = played.kv.clone()
        played.upgrades.into(hook)
        while not entered.is_set():  # noqa: ASYNC110  # a thread sets it
            await asyncio.sleep(0.001)
        played.upgrades.cancel()
        assert torch.equal(played.kv, before)
        held.release()
        await played.upgrades.wait()
        assert played.upgrades.over
        assert played.upgrades.join(0)
        await asyncio.sleep(1.0)
        assert link.downloads == 0
    assert torch.equal(played.kv, before)
    assert played.upgrades.coverage == played.coverage


@virtual
async def test_an_engine_that_raises_wants_no_more(layered):
    link, played = await begun(layered)

    def hook(first, last, write):
        raise RuntimeError("the text is complete")

    async with link:
        link.path.rate = 1e6
        played.upgrades.into(hook)
        with pytest.raises(RuntimeError, match="the text is complete"):
            await played.upgrades.wait()
        assert link.downloads == 0
    assert played.upgrades.coverage == played.coverage


@virtual
async def test_a_hook_that_lies_is_found_out(layered):
    link, played = await begun(layered)
    async with link:
        link.path.rate = 1e6
        played.upgrades.into(lambda *_: True)
        with pytest.raises(UsageError, match="did not write"):
            await played.upgrades.wait()


@virtual
async def test_it_ends_with_the_connection(layered):
    link, played = await begun(layered)
    async with link:
        played.upgrades.into(StepGate())
    await played.upgrades.wait()
    assert played.upgrades.over


@virtual
async def test_closing_a_client_right_after_a_play_ends_its_upgrades(layered):
    link = layered(1e7)

    def watch(snapshot):
        link.path.rate = slow(layered.catalog, 0.5)

    client = AsyncClient(link, model=SPEC)
    played = await client.play(TOKENS, deadline=2.0, options=PlayOptions(after=math.inf, time_price=1.0, watch=watch))
    written = []

    def hook(*groups_and_write):
        written.append(groups_and_write)
        groups_and_write[-1]()
        return True

    played.upgrades.into(hook)
    await client.close()
    link.path.rate = 1e6
    await asyncio.wait_for(played.upgrades.wait(), 10.0)
    assert not written
    assert link.downloads == 0
    assert played.upgrades.coverage == played.coverage


@virtual
async def test_a_corrupt_upgrade_changes_nothing(layered):
    bad = lambda ask: Fault(corrupt_at=40) if ask.track == "AC-L2" else None  # noqa: E731
    link, played = await begun(layered, faults=bad)
    async with link:
        link.path.rate = 1e6
        played.upgrades.into(StepGate())
        await played.upgrades.wait()
    assert set(played.upgrades.coverage) == {"AC-L1"}
    assert played.upgrades.loss < played.loss


def test_an_engine_that_goes_from_step_to_step_lets_a_write_in_between_two():
    gate, stepping, order = StepGate(), threading.Semaphore(0), []

    def engine():
        for _ in range(40):
            with gate.step():
                order.append("step")
                stepping.release()
                while not gate._next.locked():  # until the writer waits at the gate
                    time.sleep(0.0005)

    thread = threading.Thread(target=engine, daemon=True)
    thread.start()
    for _ in range(40):
        assert stepping.acquire(timeout=300)
        assert gate(0, 1, lambda: order.append("write"))
    thread.join(300)
    assert order == ["step", "write"] * 40
