"""What the engine's prefills cost, by the time that its steps take. Needs no vLLM.

On a CPU a step's time is the clock's. On a GPU a step ends long after vLLM has begun it, so that two events on its
stream tell, which are looked at when the next step begins: nothing waits for them. The cost is fitted in a thread.
What is told is the cost of prompts, of which long ones take several steps.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

from kvabr.client.engine_costs import COSTS_FILE, cost_key, costs_at
from kvabr.client.prefill_timings import PrefillTimings, guess
from kvabr.types.cost import PrefillCost
from kvabr.types.kv import KVSpec

MIN_TOKENS = 64
"""Tokens that a step must compute for its time to count as that of a prefill."""
_EVERY_S = 60.0
"""Seconds between two writes of the file."""
_PENDING = 64


class StepTimes:
    """Times steps, and keeps what they tell in the client's folder. Called on the engine's thread."""

    def __init__(
        self, model: str, spec: KVSpec, most: int, folder: Path | None, submit: Callable[[Callable[[], None]], None]
    ) -> None:
        """Start.

        Args:
            model: what the engine computes, for the file.
            spec: of its cache.
            most: tokens that a step computes at most; longer prompts take several.
            folder: where costs are kept; None: nowhere.
            submit: has work done in a thread.
        """
        self._model, self._spec, self._most, self._submit = model, spec, most, submit
        self._costs = costs_at(None if folder is None else folder / COSTS_FILE)
        self._timings, self._key, self._on_gpu = PrefillTimings(guess(spec)), "", False
        self._begun: tuple[tuple[int, int], float, Any] | None = None
        self._ended: deque[tuple[tuple[int, int], Any, Any]] = deque(maxlen=_PENDING)
        """On a GPU, the steps whose time is not known yet."""
        self._unfitted, self._fitted, self._saved_s = 0, 0, 0.0
        self._known: PrefillCost | None = None
        """The cost that was fitted last: fitting takes too long for every play. None: nothing was timed."""
        self._news: PrefillCost | None = None

    def use(self, device: torch.device) -> None:
        """Note where the engine computes, and what earlier processes knew of it."""
        self._on_gpu = device.type == "cuda"
        self._timings = PrefillTimings(guess(self._spec, device.type))
        self._key = cost_key(self._spec.digest().hex(), f"vllm {self._model}", device)
        if not self._costs.restored(self._timings, self._key).empty:
            self._news = self._known = self.cost(None)

    def cost(self, said: PrefillCost | None) -> PrefillCost:
        """Return the cost of a prefill; until one was timed, what a publisher ``said``, or a guess."""
        return self._known or _in_steps(self._timings.cost(said), self._most)

    def begin(self, prefill: tuple[int, int] | None) -> None:
        """Begin a step that computes as much as this prefill: tokens before it, and new ones."""
        while self._ended and self._ended[0][2].query():
            done, start, end = self._ended.popleft()
            self._note(done, start.elapsed_time(end) / 1000.0)
        self._begun = None
        if prefill is not None and prefill[1] >= MIN_TOKENS:
            self._begun = prefill, time.perf_counter(), self._event()

    def end(self, *, alone: bool) -> None:
        """End the step; ``alone``: nobody else has used the cores, if it is computed on them."""
        begun, self._begun = self._begun, None
        if begun is None:
            return
        prefill, start_s, start = begun
        if start is not None:
            self._ended.append((prefill, start, self._event()))
        elif alone:
            self._note(prefill, time.perf_counter() - start_s)

    def told(self) -> PrefillCost | None:
        """Return, once, the cost that is now known better; None: there is no news."""
        news, self._news = self._news, None
        return news

    def close(self) -> None:
        """Write what is known."""
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
        self._news = self._known = _in_steps(self._timings.cost(), self._most)
        if (now := time.monotonic()) >= self._saved_s:
            self._saved_s = now + _EVERY_S
            self._costs.save(self._timings, self._key)


@lru_cache(maxsize=32)
def _in_steps(cost: PrefillCost, most: int) -> PrefillCost:
    return cost.in_steps(most)


def prefill_of(scheduled: Mapping[str, int], before: Mapping[str, int]) -> tuple[int, int] | None:
    """Return the prefill of one prompt, as tokens before it and new ones, that is as much work as a step of several.

    Args:
        scheduled: by request, the tokens that the step computes.
        before: by request, those that were computed before; without some of them nothing is known (None).
    """
    tokens = sum(scheduled.values())
    if not tokens or not scheduled.keys() <= before.keys():
        return None
    pairs = sum((2 * before[name] + new) * new for name, new in scheduled.items())
    return max(0, round((pairs - tokens * tokens) / (2 * tokens))), tokens


def computed_before(output: Any) -> dict[str, int]:
    """Return the tokens that each request of a step of vLLM's scheduler had before it; nothing if it does not tell."""
    try:
        found = {one.req_id: int(one.num_computed_tokens) for one in output.scheduled_new_reqs}
        running = output.scheduled_cached_reqs
        return found | dict(zip(running.req_ids, map(int, running.num_computed_tokens), strict=True))
    except (AttributeError, TypeError, ValueError):
        return {}
