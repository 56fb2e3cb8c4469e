"""What an engine's prefills cost: learnt from every computation, kept between processes, and never spoilt by one."""

import asyncio
import gc
import json
import math
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

from kvabr.client.async_client import AsyncClient
from kvabr.client.engine_work import WorkThread, measure_prefill, on_engine
from kvabr.client.memory import COSTS_FILE, SCHEMA, EngineCosts, costs_at, digest, engine_key, this_machine
from kvabr.client.play import allocate
from kvabr.client.prefill_timings import MOST, PrefillTimings, guess_of
from kvabr.types import engine as engines
from kvabr.types.cost import PrefillCost
from kvabr.types.errors import ModelError
from tests.client.playing import play
from tests.client.served import LIMIT_S
from tests.toymodel import SPEC, ToyModel, prompt

TRUE = PrefillCost(0.004, 30e-6, 4.8e-10, 1.7e-6, 0.02)
GUESS = PrefillCost(0.0, 1e-5, 1e-10, floor_s=0.02)
SIZES = [(0, 200), (0, 2010), (2010, 500), (0, 8000), (8000, 300), (4000, 4000)]


def learnt(timings: PrefillTimings, shape: tuple[int, int] = (0, 4096)) -> float:
    """How many times the true seconds the cost says."""
    return timings.cost().seconds(*shape) / TRUE.seconds(*shape)


def taught(noise: float = 0.03, seed: int = 1, rounds: int = 3) -> PrefillTimings:
    timings, dice = PrefillTimings(GUESS), np.random.default_rng(seed)
    for _ in range(rounds):
        for shape in SIZES:
            timings.note(*shape, float(TRUE.seconds(*shape) * dice.normal(1, noise)))
    return timings


@pytest.mark.parametrize("seed", range(5))
def test_a_few_noisy_computations_tell_the_cost_of_all_sizes(seed: int) -> None:
    timings = taught(seed=seed)
    for shape in [(0, 1 << n) for n in range(7, 17)] + [(2048, 128), (32768, 2048)]:
        assert learnt(timings, shape) == pytest.approx(1, abs=0.15), shape


@pytest.mark.parametrize("seconds", [100.0, 1e-7, 0.0, -1.0, math.nan, math.inf, 1e9])
def test_one_answer_that_was_late_or_a_clock_that_jumped_changes_little(seconds: float) -> None:
    timings = taught()
    before = learnt(timings)
    timings.note(0, 4096, seconds)
    timings.note(0, 200, seconds)
    assert learnt(timings) == pytest.approx(before, rel=0.05)
    assert learnt(timings, (0, 128)) == pytest.approx(1, abs=0.1)


def test_the_first_call_of_a_process_also_loads_and_compiles() -> None:
    timings = PrefillTimings(TRUE)
    timings.note(0, 2010, 5.0)
    assert learnt(timings) < 4.5
    for _ in range(2):
        timings.note(0, 2010, TRUE.seconds(0, 2010))
    assert learnt(timings) == pytest.approx(1, abs=0.1)


def test_an_engine_that_is_slower_for_good_is_known_soon() -> None:
    timings = taught()
    for _ in range(4):
        for shape in SIZES:
            timings.note(*shape, 3 * TRUE.seconds(*shape))
    assert learnt(timings) == pytest.approx(3, rel=0.1)
    assert len(timings.rows()) <= MOST


def test_until_something_was_timed_a_publisher_is_believed_if_that_may_be() -> None:
    assert PrefillTimings(GUESS).cost(GUESS.scaled(8)) == GUESS.scaled(8)
    for wrong in (GUESS.scaled(1e6), GUESS.scaled(1e-6)):
        assert PrefillTimings(GUESS).cost(wrong) == GUESS
    timings = taught()
    before = learnt(timings)
    timings.cost(GUESS.scaled(20))
    assert learnt(timings) == pytest.approx(before, rel=0.05)


class Timed(ToyModel):
    """An engine that says where it computes."""

    device = torch.device("cpu")


def test_costs_are_there_in_the_next_process_for_the_same_engine_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, engine = tmp_path / "deeper" / COSTS_FILE, Timed()
    costs = EngineCosts(path)
    for shape in SIZES:
        costs.of(engine).note(*shape, TRUE.seconds(*shape))
    costs.save_engine(engine)
    written = path.read_text()
    costs.save_engine(engine)
    assert path.read_text() == written
    again = EngineCosts(path)
    assert again.of(Timed()).cost() == costs.of(engine).cost()
    assert again.of(ToyModel()).empty  # another engine
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "a card")
    monkeypatch.setattr(Timed, "device", torch.device("cuda"))
    assert again.of(Timed()).empty


@pytest.mark.parametrize(
    "rows",
    [[], [[0, 0, 1.0]], [[0, 5, -1.0]], [[0, 5, math.nan]], [[0, 5]], [[0, 5, 1]], [[0.0, 5, 1.0]], 7, "x",
     [[0, 5, 1.0]] * (MOST + 1)],
)  # fmt: skip
def test_timings_that_cannot_be_are_not_read(tmp_path: Path, rows: object) -> None:
    models = {engine_key(Timed()): rows}
    whole = {"schema": SCHEMA, "machine": this_machine(), "sha256": digest(models), "prefill_costs": models}
    path = tmp_path / COSTS_FILE
    path.write_text(json.dumps(whole))
    engine, costs = Timed(), EngineCosts(path)
    assert costs.of(engine).cost() == guess_of(engine)


class Slow(Timed):
    """A toy whose prefill takes a while."""

    def prefill(self, tokens: Sequence[int], before: torch.Tensor | None = None) -> torch.Tensor:
        time.sleep(0.05)
        return super().prefill(tokens, before)


async def test_a_play_learns_what_its_engine_takes_and_times_nothing_before(origin, tmp_path: Path) -> None:
    tokens = prompt(70).tokens
    engine = Slow()
    async with origin() as link, AsyncClient(link, engine=engine, cache=tmp_path) as client:
        assert engine.prefilled == 0
        played = await play(client, tokens[::-1], deadline=LIMIT_S)
        assert played.record.tokens_recomputed == len(tokens)
        assert engine.prefilled == len(tokens)
    learnt_s = costs_at(tmp_path / COSTS_FILE).of(engine).cost().seconds(0, 70)
    assert learnt_s > guess_of(engine).seconds(0, 70)
    async with asyncio.timeout(LIMIT_S):
        while not (tmp_path / COSTS_FILE).exists():  # noqa: ASYNC110  # a thread writes it
            await asyncio.sleep(0.01)
    assert EngineCosts(tmp_path / COSTS_FILE).of(Slow()).cost().seconds(0, 70) == pytest.approx(learnt_s, rel=0.5)


async def test_an_engine_that_takes_much_longer_than_was_guessed_is_waited_for_once(origin) -> None:
    tokens = prompt(70).tokens[::-1]
    async with origin() as link, AsyncClient(link, engine=Slow()) as client:
        played = await play(client, tokens, deadline=0.02)
    assert played.record.tokens_recomputed == len(tokens)
    assert not played.met


def test_too_much_is_refused() -> None:
    with pytest.raises(RuntimeError, match="bytes cannot be allocated"):
        allocate((1 << 50,), torch.float16)


class Clocked:
    """An engine whose prefill takes what a formula says, on a clock of its own."""

    mode = "hole"
    spec = SPEC
    cost = PrefillCost(0.02, 3e-4, 2e-8)

    def __init__(self, window: int, cost: PrefillCost = cost) -> None:
        self.now, self.window, self.cost = 0.0, window, cost
        self.seen: set[tuple[int, int]] = set()

    def perf_counter(self) -> float:
        return self.now

    def prefill(self, tokens: Sequence[int], before: torch.Tensor | None = None) -> torch.Tensor:
        cached = 0 if before is None else before.shape[3]
        if cached + len(tokens) > self.window:
            raise ModelError("too long")
        self.seen.add((cached, len(tokens)))
        self.now += self.cost.seconds(cached, len(tokens)) + 1e-12
        return torch.zeros(self.spec.shape(len(tokens)))

    def score(self, kv: torch.Tensor | None, tokens: Sequence[int]) -> torch.Tensor:
        raise NotImplementedError


@pytest.mark.parametrize("tokens", [(), range(50), range(5000)])
@pytest.mark.parametrize(("window", "longest"), [(1 << 20, 16384), (2000, 1024), (700, 512)])
def test_a_prefill_is_timed_on_short_and_long_prompts(monkeypatch, window, longest, tokens) -> None:
    engine = Clocked(window)
    monkeypatch.setattr(engines, "time", engine)
    cost = measure_prefill(engine, tokens)
    assert max(cached + new for cached, new in engine.seen) == longest
    assert {8, min(longest, 1024) * 3 // 4} <= {new for _, new in engine.seen}
    for before, new in ((0, 100), (0, 8000), (7000, 1000)):
        assert cost.seconds(before, new) == pytest.approx(engine.cost.seconds(before, new), rel=1e-3)


def test_a_gpus_rate_and_floor_are_found_by_long_prefills(monkeypatch) -> None:
    true = PrefillCost(0.004, 30e-6, 3e-10, 1e-6, 0.03)
    engine = Clocked(1 << 20, true)
    monkeypatch.setattr(engines, "time", engine)
    cost = measure_prefill(engine)
    for shape in ((0, 128), (0, 2010), (0, 65536), (32768, 128), (32768, 4096)):
        assert cost.seconds(*shape) == pytest.approx(true.seconds(*shape), rel=0.01)


def test_timing_long_prefills_has_a_budget(monkeypatch) -> None:
    engine = Clocked(1 << 20, PrefillCost(0.0, 3e-3))
    monkeypatch.setattr(engines, "time", engine)
    measure_prefill(engine)
    assert engine.now < 20
    before = engine.now
    measure_prefill(engine)
    assert engine.now == before


def test_a_model_that_takes_hardly_any_tokens_cannot_be_timed() -> None:
    with pytest.raises(ModelError, match="too long"):
        measure_prefill(Clocked(100))


@pytest.mark.parametrize(
    ("error", "raised"), [(KeyError(1), KeyError), (StopIteration(), RuntimeError), (SystemExit(3), RuntimeError)]
)
async def test_whatever_a_thread_raises_arrives(error: BaseException, raised: type[Exception]) -> None:
    def work() -> None:
        raise error

    thread = WorkThread()
    with pytest.raises(raised):
        await thread.run(work)
    assert await thread.run(lambda: 5) == 5
    thread.close()


async def test_an_engine_has_one_thread_as_long_as_it_lives() -> None:
    engine, other = Clocked(4096), Clocked(4096)
    first, second = [await on_engine(engine, threading.current_thread) for _ in range(2)]
    assert first is second
    with pytest.raises(KeyError):
        await on_engine(engine, lambda: {}["nothing"])
    assert await on_engine(engine, threading.current_thread) is first
    assert await on_engine(other, threading.current_thread) is not first
    del engine
    gc.collect()
    await asyncio.to_thread(first.join, 60)
    assert not first.is_alive()


LEFT_ALONE = """
import asyncio, threading, time, torch
from kvabr.client.engine_work import WorkThread

began = threading.Event()

def compute():
    some = torch.ones(64, 64)
    for _ in range(50):  # each returns to Python from C++, and needs the interpreter for that
        began.set()
        some = (some @ some).clamp(max=1.0)
        time.sleep(0.005)
    print("computed")

async def give_up():
    work = asyncio.ensure_future(WorkThread().run(compute))
    await asyncio.to_thread(began.wait)
    work.cancel()

asyncio.run(give_up())
"""


def test_a_process_that_ends_while_an_engine_computes_ends_in_order() -> None:
    done = subprocess.run([sys.executable, "-c", LEFT_ALONE], capture_output=True, text=True, timeout=300, check=False)  # noqa: S603
    assert (done.returncode, done.stdout, done.stderr) == (0, "computed\n", "")
