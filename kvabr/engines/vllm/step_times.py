"""Measures the cost of the engine's prefills from the times of its steps. Does not import vLLM.

On a GPU, two events on the stream measure a step; they are read when the next step begins.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

from kvabr.client.memory import COSTS_FILE, cost_key, costs_at
from kvabr.client.prefill_timings import PrefillTimings, guess
from kvabr.types.cost import PrefillCost
from kvabr.types.kv import KVSpec

MIN_TOKENS = 64
"""Minimum tokens of a timed step."""
_EVERY_S = 60.0
_PENDING = 64


class StepTimes:
    """Times steps, and stores the costs in the client's folder. Call its methods on the engine's thread."""

    def __init__(
        self, model: str, spec: KVSpec, limit: int, folder: Path | None, submit: Callable[[Callable[[], None]], None]
    ) -> None:
        """Prepare to time steps of up to ``limit`` tokens of ``model``; ``submit`` runs work in a thread."""
        self._model, self._spec, self._limit, self._submit = model, spec, limit, submit
        self._costs = costs_at(None if folder is None else folder / COSTS_FILE)
        self._timings, self._key, self._on_gpu = PrefillTimings(guess(spec)), "", False
        self._begun: tuple[tuple[int, int], float, Any] | None = None
        self._ended: deque[tuple[tuple[int, int], Any, Any]] = deque(maxlen=_PENDING)
        self._unfitted, self._fitted, self._saved_s = 0, 0, 0.0
        self._known: PrefillCost | None = None
        """Cached cost, since fitting takes too long to repeat for every play."""
        self._news: PrefillCost | None = None

    def use(self, device: torch.device) -> None:
        """Set the engine's device, and load costs of earlier runs."""
        self._on_gpu = device.type == "cuda"
        self._timings = PrefillTimings(guess(self._spec, device.type))
        self._key = cost_key(self._spec.digest().hex(), f"vllm {self._model}", device)
        if not self._costs.restored(self._timings, self._key).empty:
            self._news = self._known = self.cost(None)

    def cost(self, prior: PrefillCost | None) -> PrefillCost:
        """Return the cost of a prefill; before any measurement, the publisher's ``prior``, or a guess."""
        return self._known or _in_steps(self._timings.cost(prior), self._limit)

    def begin(self, prefill: tuple[int, int] | None) -> None:
        """Begin a step that takes as long as this prefill: tokens before it, and new tokens."""
        while self._ended and self._ended[0][2].query():
            done, start, end = self._ended.popleft()
            self._note(done, start.elapsed_time(end) / 1000.0)
        self._begun = None
        if prefill is not None and prefill[1] >= MIN_TOKENS:
            self._begun = prefill, time.perf_counter(), self._event()

    def end(self, *, alone: bool) -> None:
        """End the step; ``alone`` is True if no other thread has used the cores."""
        begun, self._begun = self._begun, None
        if begun is None:
            return
        prefill, start_s, start = begun
        if start is not None:
            self._ended.append((prefill, start, self._event()))
        elif alone:
            self._note(prefill, time.perf_counter() - start_s)

    def news(self) -> PrefillCost | None:
        """Return a new cost of a prefill, once; None if there is none."""
        news, self._news = self._news, None
        return news

    def close(self) -> None:
        """Write the costs."""
        self._costs.save(self._timings, self._key)

    def _event(self) -> Any:
        if not self._on_gpu:
            return None
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        return torch.cuda.current_stream().record_event(event)

    def _note(self, prefill: tuple[int, int], seconds: float) -> None:
        self._timings.note(*prefill, seconds)
        self._unfitted += 1
        if self._unfitted > self._fitted // 4:
            self._fitted, self._unfitted = min(96, self._fitted + self._unfitted), 0
            self._submit(self._fit)

    def _fit(self) -> None:
        self._news = self._known = _in_steps(self._timings.cost(), self._limit)
        if (now := time.monotonic()) >= self._saved_s:
            self._saved_s = now + _EVERY_S
            self._costs.save(self._timings, self._key)


@lru_cache(maxsize=32)
def _in_steps(cost: PrefillCost, limit: int) -> PrefillCost:
    return cost.in_steps(limit)


def prefill_of(scheduled: Mapping[str, int], before: Mapping[str, int]) -> tuple[int, int] | None:
    """Return a prefill of one prompt that takes as long as a step of several: tokens before it, and new tokens.

    ``scheduled`` has the new tokens by request, ``before`` the computed ones. Return None if some are unknown.
    """
    tokens = sum(scheduled.values())
    if not tokens or not scheduled.keys() <= before.keys():
        return None
    pairs = sum((2 * before[name] + new) * new for name, new in scheduled.items())
    return max(0, round((pairs - tokens * tokens) / (2 * tokens))), tokens


def computed_before(output: Any) -> dict[str, int]:
    """Return the number of each request's tokens before a step of vLLM; empty if unavailable."""
    try:
        found = {one.req_id: int(one.num_computed_tokens) for one in output.scheduled_new_reqs}
        running = output.scheduled_cached_reqs
        return found | dict(zip(running.req_ids, map(int, running.num_computed_tokens), strict=True))
    except (AttributeError, TypeError, ValueError):
        return {}
