"""The cost of vLLM's prefills, from the times of its steps."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvabr.client.prefill_timings import guess
from kvabr.engines.vllm import step_times
from kvabr.engines.vllm.step_times import StepTimes, computed_before, prefill_of
from kvabr.types.cost import PrefillCost
from tests import kvdata

SPEC = kvdata.spec(32, 8, 128)
TRUE = PrefillCost(0.004, 30e-6, 4.8e-10, 1.7e-6, 0.02)


def step_times_of(folder: Path | None, device: str = "cpu", most: int = 1 << 20) -> StepTimes:
    times = StepTimes("float16 1", SPEC, most, folder, lambda work: work())
    times.use(torch.device(device))
    return times


class Card:
    """Stands for torch.cuda: events happen when the engine is done, and waiting for one is an error."""

    def __init__(self) -> None:
        self.now, self.done = 0.0, 0.0

    def current_stream(self) -> Card:
        return self

    def record_event(self, event: Any) -> Any:
        event.at = self.now
        return event

    def Event(self, *, enable_timing: bool) -> Any:  # noqa: N802  # torch's name
        assert enable_timing
        event = SimpleNamespace(at=0.0)
        event.query = lambda: event.at <= self.done
        event.elapsed_time = lambda end: 1000.0 * (end.at - event.at)
        return event

    def get_device_name(self, _: object) -> str:
        return "a card"


def test_a_gpus_steps_are_timed_by_events_and_nobody_waits(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    card = Card()
    monkeypatch.setattr(step_times.torch, "cuda", card)
    times = step_times_of(tmp_path, "cuda")
    for tokens in (1, 512, 8192, 65536):
        assert times.cost(None).seconds(0, tokens) == pytest.approx(guess(SPEC, "cuda").seconds(0, tokens), rel=0.02)
    for _ in range(3):
        for prefill in [(0, 2048), (2048, 2048), (4096, 512), (0, 100), (20000, 8000)]:
            times.begin(prefill)
            card.now += TRUE.seconds(*prefill)
            times.end(alone=False)  # others use the cores: that is nothing to a GPU
    assert times.news() is None
    card.done = card.now
    times.begin(None)
    times.end(alone=True)
    cost = times.news()
    assert cost is not None
    assert times.news() is None
    for shape in [(0, 128), (0, 2048), (0, 16384), (8192, 128), (32768, 2048)]:
        assert cost.seconds(*shape) == pytest.approx(TRUE.seconds(*shape), rel=0.25)
    times.close()
    again = step_times_of(tmp_path, "cuda")
    told = again.news()
    assert told is not None
    assert told.seconds(0, 8192) == pytest.approx(cost.seconds(0, 8192), rel=0.01)


def test_the_prefills_of_a_step_are_as_much_work_as_one() -> None:
    assert prefill_of({"a": 500}, {"a": 1000, "b": 5}) == (1000, 500)
    assert prefill_of({"a": 500, "b": 1}, {"a": 0, "b": 3000}) == (5, 501)
    assert prefill_of({"a": 500, "b": 500}, {"a": 0, "b": 0}) == (0, 1000)
    assert prefill_of({"a": 500, "b": 1}, {"a": 0}) is None
    assert prefill_of({}, {}) is None


def test_what_vllm_says_of_a_step() -> None:
    output = SimpleNamespace(
        scheduled_new_reqs=[SimpleNamespace(req_id="new", num_computed_tokens=16)],
        scheduled_cached_reqs=SimpleNamespace(req_ids=["old"], num_computed_tokens=[700]),
    )
    assert computed_before(output) == {"new": 16, "old": 700}
    assert computed_before(SimpleNamespace()) == {}
    output.scheduled_cached_reqs.num_computed_tokens = []
    assert computed_before(output) == {}
