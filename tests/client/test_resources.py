"""Memory for a cache, and the cost of an engine's prefill."""

from __future__ import annotations

import asyncio
import gc
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence

import pytest
import torch

from kvabr.client.async_client import AsyncClient
from kvabr.client.play import allocate
from kvabr.client.resources import in_thread, measure_prefill, on_engine
from kvabr.codec.threads import decoder_threads
from kvabr.types import engine as engines
from kvabr.types.cost import PrefillCost
from kvabr.types.errors import ModelError
from tests.toymodel import SPEC


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

    with pytest.raises(raised):
        await in_thread(work)


async def test_what_computes_on_a_gpu_has_one_thread_as_long_as_it_lives() -> None:
    class OnGpu(Clocked):
        device = torch.device("cuda", 0)

    engine, other = OnGpu(4096), Clocked(4096)
    first, second = [await on_engine(engine, threading.current_thread) for _ in range(2)]
    assert first is second
    assert first.name == "kvabr-gpu-engine"
    with pytest.raises(KeyError):
        await on_engine(engine, lambda: {}["nothing"])
    assert await on_engine(engine, threading.current_thread) is first
    assert await on_engine(other, threading.current_thread) is not first
    del engine
    gc.collect()
    await asyncio.to_thread(first.join, 60)
    assert not first.is_alive()


async def test_prefills_on_a_gpu_are_timed_in_the_thread_that_computes() -> None:
    class OnGpu(Clocked):
        device = torch.device("meta")  # whatever is not the processor

        def prefill(self, tokens: Sequence[int], before: torch.Tensor | None = None) -> torch.Tensor:
            threads.add(threading.current_thread())
            return super().prefill(tokens, before)

    threads: set[threading.Thread] = set()
    async with AsyncClient() as client:
        engine = OnGpu(4096)
        await client.measure_prefill(engine)
        assert threads == {await on_engine(engine, threading.current_thread)}


LEFT_ALONE = """
import asyncio, threading, time, torch
from kvabr.client.resources import in_thread

began = threading.Event()

def compute():
    some = torch.ones(64, 64)
    for _ in range(50):  # each returns to Python from C++, and needs the interpreter for that
        began.set()
        some = (some @ some).clamp(max=1.0)
        time.sleep(0.005)
    print("computed")

async def give_up():
    work = asyncio.ensure_future(in_thread(compute))
    await asyncio.to_thread(began.wait)
    work.cancel()

asyncio.run(give_up())
"""


def test_a_process_that_ends_while_an_engine_computes_ends_in_order() -> None:
    done = subprocess.run([sys.executable, "-c", LEFT_ALONE], capture_output=True, text=True, timeout=300, check=False)  # noqa: S603
    assert (done.returncode, done.stdout, done.stderr) == (0, "computed\n", "")


@pytest.fixture
def threads(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """The environment, with the number of threads not known yet."""
    decoder_threads.cache_clear()
    yield monkeypatch
    monkeypatch.undo()
    decoder_threads.cache_clear()
