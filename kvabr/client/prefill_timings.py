"""What an engine's prefills took, and the cost that explains them. Loads no torch.

Every computation of a play is timed. The latest ones of each size count, so that the cost follows an engine that has
changed for good, and a call that took much longer than others of its size, or a clock that jumped, changes little
(`PrefillCost.fit`). Until there are timings, the cost is what a publisher measured, or a guess by the device.
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
"""Timings that are kept."""
_MOST_ALIKE = 5
_MAX_S, _MAX_TOKENS = 1e5, 1 << 24
_FEW, _FEW_TIMES = 4, 4.0
"""Of fewer timings than the first none counts as more times as slow as expected than the second: the first call of an
engine also loads and compiles, and nothing tells yet that a machine was busy."""
_CREDIBLE = 30.0
"""A publisher's cost that differs from the guess by a larger factor is not believed."""
_TYPICAL = 2048
_CPU_WEIGHT_S, _GPU_WEIGHT_S = 1e-11, 6e-15
"""Seconds per token and weight of a prefill: on a few cores, and on an accelerator at 330 TFLOPS."""
_GPU_FLOOR_S = 0.02
_LEAST_WEIGHTS = 10_000
_PER_ELEMENT = 2.0
"""What a pair of tokens costs per element of a token's cache, in what a token costs per weight."""
_LIKE = (8e9, 65536.0, 2.35)
"""Weights of a model, elements of its cache per token, and the exponent by which the former grow with the latter."""


def guess(spec: KVSpec, device: str = "cpu", weights: int | None = None) -> PrefillCost:
    """Return what a prefill may cost before anything is known of the engine.

    Args:
        spec: of its cache.
        device: ``cuda``, ``cpu`` or another type of torch's devices.
        weights: how many the model has; None: as many as models with such caches have.
    """
    each = sum(part.elements_per_token for part in spec.parts if part.only.kind != "state")
    if weights is None:
        usual, elements, power = _LIKE
        weights = int(usual * (each / elements) ** power)
    on_cpu = device == "cpu"
    weight_s = _CPU_WEIGHT_S if on_cpu else _GPU_WEIGHT_S
    linear = max(_LEAST_WEIGHTS, weights) * weight_s
    return PrefillCost(
        5 * linear if on_cpu else 0.0, linear, _PER_ELEMENT * each * weight_s, floor_s=0.0 if on_cpu else _GPU_FLOOR_S
    )


def guess_of(engine: Engine) -> PrefillCost:
    """Return `guess` for an engine, by its attributes ``device`` and ``weights`` if it has them."""
    device = getattr(getattr(engine, "device", None), "type", "cpu")
    weights = getattr(engine, "weights", None)
    return guess(engine.spec, device, weights if isinstance(weights, int) else None)


class PrefillTimings:
    """The timings of one engine. May be used from several threads."""

    def __init__(self, guessed: PrefillCost) -> None:
        self._lock = threading.Lock()
        self._guess, self._prior = guessed, guessed
        self._alike: OrderedDict[tuple[int, int], deque[Timing]] = OrderedDict()
        """By size, those used last at the end."""
        self._cost: PrefillCost | None = None
        """What was fitted to them; None: it must be fitted again."""
        self.news = False
        """Whether there are timings that `rows` has not told."""

    @property
    def empty(self) -> bool:
        """Whether there is no timing."""
        return not self._alike

    def note(self, before: int, tokens: int, seconds: float) -> None:
        """Note what a computation took; what cannot be is ignored."""
        if not sound((before, tokens, seconds)):
            return
        with self._lock:
            self._add((before, tokens, seconds))
            self.news = True

    def timed(self, timings: Iterable[Timing]) -> PrefillCost:
        """Note what was timed on an idle engine, and return the cost, which is now known without a guess."""
        rows = list(timings)
        with self._lock:
            self._prior = PrefillCost.fit(rows)
            for row in rows:
                self._add(row)
            self.news = True
        return self.cost()

    def restore(self, rows: Iterable[Timing]) -> None:
        """Note timings of an earlier process, unless there are newer ones."""
        with self._lock:
            if not self._alike:
                for row in rows:
                    self._add(row)

    def rows(self) -> list[Timing]:
        """Return the timings, for `restore`."""
        with self._lock:
            self.news = False
            return [row for alike in self._alike.values() for row in alike]

    def cost(self, said: PrefillCost | None = None) -> PrefillCost:
        """Return the cost of a prefill; until something was timed it is what a publisher ``said``, if that may be."""
        with self._lock:
            if said is not None and self._prior is self._guess and self._credible(said):
                self._prior, self._cost = said, None
            if self._cost is None:
                rows = [row for alike in self._alike.values() for row in alike]
                if len(rows) < _FEW:
                    rows = [(b, n, min(s, _FEW_TIMES * self._prior.seconds(b, n))) for b, n, s in rows]
                self._cost = PrefillCost.fit(rows, self._prior) if rows else self._prior
            return self._cost

    def _credible(self, said: PrefillCost) -> bool:
        times = said.seconds(0, _TYPICAL) / self._guess.seconds(0, _TYPICAL)
        return 1 / _CREDIBLE <= times <= _CREDIBLE

    def _add(self, row: Timing) -> None:
        before, tokens, _ = row
        size = (before.bit_length() + 1) // 2, round(2 * math.log2(tokens))
        self._alike.setdefault(size, deque(maxlen=_MOST_ALIKE)).append(row)
        self._alike.move_to_end(size)
        while sum(map(len, self._alike.values())) > MOST:
            self._alike.popitem(last=False)
        self._cost = None


def sound(row: Any) -> bool:
    """Return whether a timing can be one."""
    before, tokens, seconds = row
    counts = type(before) is int and type(tokens) is int and 0 <= before <= _MAX_TOKENS and 0 < tokens <= _MAX_TOKENS
    return counts and type(seconds) is float and 0 < seconds <= _MAX_S  # NaN compares false


def read_rows(found: Any) -> list[Timing] | None:
    """Return timings from a file; None if they cannot be any."""
    rows = [tuple(row) for row in found]
    return rows if 0 < len(rows) <= MOST and all(map(sound, rows)) else None
