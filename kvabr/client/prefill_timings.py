"""Timings of an engine's prefills, and a cost fitted to them. Does not load torch.

Plays time every computation. Only the latest timings of each size are kept, so the cost follows lasting changes;
outliers matter little (`PrefillCost.fit`). Without timings, the cost is the publisher's, or a guess for the device.
"""

from __future__ import annotations

import math
import threading
from collections import OrderedDict, deque
from collections.abc import Iterable
from typing import Any

from kvabr.types.cost import PrefillCost
from kvabr.types.engine import Engine
from kvabr.types.kv import KVSpec

Timing = tuple[int, int, float]
"""Tokens before, new tokens, seconds."""

MOST = 96
_MAX_PER_SIZE = 5
_MAX_S, _MAX_TOKENS = 1e5, 1 << 24
_MIN_TIMINGS, _MAX_FIRST_FACTOR = 4, 4.0
"""With fewer timings than the first number, each is capped at the second number times the expectation: a first call
also loads and compiles."""
_MAX_COST_FACTOR = 30.0
"""Reject a publisher's cost that differs from the guess by more than this factor."""
_TYPICAL_TOKENS = 2048
_CPU_WEIGHT_S, _GPU_WEIGHT_S = 1e-11, 6e-15
"""Seconds per token and weight: on a few cores, and at 330 TFLOPS."""
_GPU_FLOOR_S = 0.02
_MIN_WEIGHTS = 10_000
_PER_ELEMENT = 2.0
"""Cost of a token pair per element of a token's cache, in units of a token's cost per weight."""
_REFERENCE_MODEL = (8e9, 65536.0, 2.35)
"""Weights and cache elements per token of a typical model, and the power of elements with which weights grow."""


def guess(spec: KVSpec, device: str = "cpu", weights: int | None = None) -> PrefillCost:
    """Return the estimated prefill cost of an engine without timings.

    ``device``: a device type of torch; ``weights``: the model's number of weights (None: typical for the cache's size).
    """
    each = sum(part.elements_per_token for part in spec.parts if part.only.kind != "state")
    if weights is None:
        usual, elements, power = _REFERENCE_MODEL
        weights = int(usual * (each / elements) ** power)
    on_cpu = device == "cpu"
    weight_s = _CPU_WEIGHT_S if on_cpu else _GPU_WEIGHT_S
    linear = max(_MIN_WEIGHTS, weights) * weight_s
    return PrefillCost(
        5 * linear if on_cpu else 0.0, linear, _PER_ELEMENT * each * weight_s, floor_s=0.0 if on_cpu else _GPU_FLOOR_S
    )


def guess_of(engine: Engine) -> PrefillCost:
    """Return `guess` for an engine, from its ``device`` and ``weights`` if it has them."""
    device = getattr(getattr(engine, "device", None), "type", "cpu")
    weights = getattr(engine, "weights", None)
    return guess(engine.spec, device, weights if isinstance(weights, int) else None)


class PrefillTimings:
    """The timings of one engine. Thread-safe."""

    def __init__(self, guessed: PrefillCost) -> None:
        self._lock = threading.Lock()
        self._guess, self._prior = guessed, guessed
        self._by_size: OrderedDict[tuple[int, int], deque[Timing]] = OrderedDict()
        self._cost: PrefillCost | None = None
        self.news = False

    @property
    def empty(self) -> bool:
        return not self._by_size

    def note(self, before: int, tokens: int, seconds: float) -> None:
        """Record the seconds of a computation, unless implausible."""
        if not sound((before, tokens, seconds)):
            return
        with self._lock:
            self._add((before, tokens, seconds))
            self.news = True

    def timed(self, timings: Iterable[Timing]) -> PrefillCost:
        """Record timings of an idle engine, replace the guess by them, and return the fitted cost."""
        rows = list(timings)
        with self._lock:
            self._prior = PrefillCost.fit(rows)
            for row in rows:
                self._add(row)
            self.news = True
        return self.cost()

    def restore(self, rows: Iterable[Timing]) -> None:
        """Add the timings of an earlier process, unless there are newer ones."""
        with self._lock:
            if not self._by_size:
                for row in rows:
                    self._add(row)

    def rows(self) -> list[Timing]:
        """Return all timings, for `restore`."""
        with self._lock:
            self.news = False
            return [row for rows in self._by_size.values() for row in rows]

    def cost(self, published: PrefillCost | None = None) -> PrefillCost:
        """Return the prefill cost; without timings, the cost ``published`` with the asset if plausible, or a guess."""
        with self._lock:
            if published is not None and self._prior is self._guess and self._credible(published):
                self._prior, self._cost = published, None
            if self._cost is None:
                rows = [row for rows in self._by_size.values() for row in rows]
                if len(rows) < _MIN_TIMINGS:
                    rows = [(b, n, min(s, _MAX_FIRST_FACTOR * self._prior.seconds(b, n))) for b, n, s in rows]
                self._cost = PrefillCost.fit(rows, self._prior) if rows else self._prior
            return self._cost

    def _credible(self, published: PrefillCost) -> bool:
        times = published.seconds(0, _TYPICAL_TOKENS) / self._guess.seconds(0, _TYPICAL_TOKENS)
        return 1 / _MAX_COST_FACTOR <= times <= _MAX_COST_FACTOR

    def _add(self, row: Timing) -> None:
        before, tokens, _ = row
        size = (before.bit_length() + 1) // 2, round(2 * math.log2(tokens))
        self._by_size.setdefault(size, deque(maxlen=_MAX_PER_SIZE)).append(row)
        self._by_size.move_to_end(size)
        while sum(map(len, self._by_size.values())) > MOST:
            self._by_size.popitem(last=False)
        self._cost = None


def sound(row: Any) -> bool:
    """Return True if a timing is plausible."""
    before, tokens, seconds = row
    counts = type(before) is int and type(tokens) is int and 0 <= before <= _MAX_TOKENS and 0 < tokens <= _MAX_TOKENS
    return counts and type(seconds) is float and 0 < seconds <= _MAX_S  # rejects NaN


def read_rows(found: Any) -> list[Timing] | None:
    """Return timings from a file, or None if implausible."""
    rows = [tuple(row) for row in found]
    return rows if 0 < len(rows) <= MOST and all(map(sound, rows)) else None
