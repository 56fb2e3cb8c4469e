"""What kvabr needs from a serving engine: to compute the KV of tokens behind a given cache. Imports no engine."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal, Protocol, runtime_checkable

from kvabr.types.cost import PrefillCost
from kvabr.types.errors import ModelError, UsageError
from kvabr.types.kv import KVSpec
from kvabr.types.units import computed_shape

if TYPE_CHECKING:
    import torch

EngineMode = Literal["hole", "suffix"]
"""What an engine can compute: any group with everything before it in place, or only from the first miss to the end."""


BUDGET_S = 2.0
"""Seconds that timing long prefills may take."""
SHORT, _LONG = 1024, (4096, 16384)
"""Tokens of prefills that are timed in any case, and of those that tell the rate of a GPU."""

AttentionReduction = Literal["sum", "max"]
"""How the weights of heads and of a question's tokens become one number, see `BlendEngine.attention`."""


@runtime_checkable
class Engine(Protocol):
    """An engine that can recompute part of a cache."""

    @property
    def spec(self) -> KVSpec:
        """Shape and meaning of the cache that the engine computes."""

    @property
    def mode(self) -> EngineMode:
        """What the engine can compute, see `EngineMode`."""

    def prefill(self, tokens: Sequence[int], before: torch.Tensor | None = None) -> torch.Tensor:
        """Compute the KV of ``tokens``, at least one, which follow the tokens whose KV is ``before``.

        Args:
            tokens: ids of the new tokens.
            before: [layer, K/V, head, token, dim], any float dtype; read, never written. None before the first token.
                Better groups may be written into it during the call: each number is of the old track or the new one.

        Returns:
            KV of the new tokens alone, [layer, K/V, head, token, dim], in the engine's dtype.

        Raises:
            ModelError: the tokens do not fit the model, or ``before`` is not a cache of this model.
        """


@runtime_checkable
class ClassEngine(Engine, Protocol):
    """An engine whose cache may have several layer classes; its `prefill` is for those that have one."""

    def prefill_classes(
        self, tokens: Sequence[int], before: tuple[torch.Tensor, ...] | None = None
    ) -> tuple[torch.Tensor, ...]:
        """As `prefill`, with a tensor per layer class, [layer, K/V, head, token, dim], each of all tokens.

        That of a state, [layer, 1, head, row, column], is the snapshot behind the tokens. In ``before`` it may hold
        several, one behind the other in the axis of the rows, of which the last counts.
        """


class ResidentCache(Protocol):
    """Room on an engine's device for the cache of one prompt. It is freed with the last reference to it."""

    def place(self, first: int, kv: torch.Tensor) -> None:
        """Copy the KV of tokens from ``first`` on, [layer, K/V, head, token, dim], any float dtype, to their places."""

    def prefill(self, tokens: Sequence[int], first: int) -> torch.Tensor:
        """Compute the KV of ``tokens`` from ``first`` on, behind what is in place; keep it, and return it as well.

        It is on the device, and may still be in the making there: reading a number of it waits for that.

        Raises:
            ModelError: as `Engine.prefill`.
        """


@runtime_checkable
class ResidentEngine(Engine, Protocol):
    """An engine that keeps the cache of a play where it computes, so that nothing is copied there twice."""

    def reside(self, tokens: int) -> ResidentCache | None:
        """Return room for a prompt of ``tokens`` tokens; None: there is none, or not for such a model."""


@runtime_checkable
class BlendEngine(Engine, Protocol):
    """An engine that can recompute any tokens of a cache, such as one that was joined from passages."""

    def recompute(
        self, tokens: Sequence[int], at: Sequence[int], kv: torch.Tensor, *, layers: int | None = None
    ) -> torch.Tensor:
        """Compute some tokens of a prompt over a cache of it.

        Every computed token sees all tokens before it: those in ``at`` with their computed keys and values, the others
        with those of the cache. With all positions this is the full prefill.

        Args:
            tokens: ids of the whole prompt, as far as ``at`` reaches at least.
            at: positions to compute, increasing, at least one. They may run on behind the cache, without a gap.
            kv: [layer, K/V, head, token, dim], any float dtype; the cache of the first tokens. Read, never written.
            layers: compute only this many layers, the first ones; None: all.

        Returns:
            KV of the computed tokens, [layer, K/V, head, len(at), dim], in the engine's dtype.

        Raises:
            ModelError: the tokens or positions do not fit, or ``kv`` is not a cache of this model.
        """

    def attention(
        self,
        question: Sequence[int],
        kv: torch.Tensor,
        *,
        layers: Sequence[int] | None = None,
        reduce: AttentionReduction = "sum",
    ) -> torch.Tensor:
        """Return how much a question attends to each token of a cache that it follows.

        Args:
            question: ids of the question, at least one.
            kv: [layer, K/V, head, token, dim], any float dtype; the cache before it. Read, never written.
            layers: the layers to look at; the pass ends with the last of them. None: all.
            reduce: whether heads and the question's tokens are summed, or the largest weight among them is returned.

        Returns:
            [layer, token] float32: the weights of every cached token. Each head of each of the question's tokens
            distributes 1 over all that it sees, the question's own tokens included.

        Raises:
            ModelError: as for `recompute`.
        """


def prefill_classes(
    engine: Engine, tokens: Sequence[int], before: tuple[torch.Tensor, ...] | None = None
) -> tuple[torch.Tensor, ...]:
    """Compute the KV of ``tokens`` with any engine: a tensor per layer class, see `ClassEngine.prefill_classes`."""
    if isinstance(engine, ClassEngine):
        return engine.prefill_classes(tokens, before)
    _ = engine.spec.only  # an engine that does not know classes has one
    return (engine.prefill(tokens, None if before is None else before[0]),)


def time_prefills(
    engine: Engine, tokens: Sequence[int], *, repeats: int = 2, budget_s: float = BUDGET_S
) -> list[tuple[int, int, float]]:
    """Time a few real prefills; return their tokens before, new tokens and seconds, for `PrefillCost.fit`.

    Args:
        engine: the engine to time.
        tokens: ids of any real text, at least 128; the more, the longer are those that are timed.
        repeats: runs of each, of which the fastest counts: other work on the machine only adds time.
        budget_s: seconds that long ones may take; short ones, of up to 1,024 tokens, are timed in any case.

    Raises:
        UsageError: there are too few tokens.
        ModelError: the tokens of a short one do not fit the model.
    """
    if len(tokens) < 128:
        raise UsageError(f"timing a prefill needs at least 128 tokens of text, not {len(tokens)}")
    size = min(SHORT, len(tokens))
    step = size // 4
    shapes = [(0, 8), (0, step), (0, 3 * step), (size - step, step), (size - 8, 8)]
    timings = _timed(engine, tokens, shapes, repeats)
    for longer in sorted({length for length in (*_LONG, len(tokens)) if size < length <= len(tokens)}):
        for shape in ((longer - step, step), (0, longer), (longer - longer // 4, longer // 4)):
            budget_s -= (expected_s := repeats * PrefillCost.fit(timings).seconds(*shape))
            if budget_s < 0:
                budget_s += expected_s
                continue
            try:
                timings += _timed(engine, tokens, [shape], repeats)
            except ModelError:  # it does not take as many
                return timings
    return timings


def _timed(
    engine: Engine, tokens: Sequence[int], shapes: Sequence[tuple[int, int]], repeats: int
) -> list[tuple[int, int, float]]:
    # The cache's values do not affect the timing, so zeros save the prefill that a real cache would need.
    probes, most = prefill_classes(engine, tokens[:1]), max(before for before, _ in shapes)
    parts = engine.spec.parts
    longest = [probe.new_zeros(computed_shape(part, most)) for probe, part in zip(probes, parts, strict=True)]
    timings = []
    for before, new in shapes:
        best = float("inf")
        for _ in range(repeats):
            start = time.perf_counter()
            behind = (
                each[..., : computed_shape(part, before)[3], :] for each, part in zip(longest, parts, strict=True)
            )
            prefill_classes(engine, tokens[before : before + new], tuple(behind) if before else None)
            best = min(best, time.perf_counter() - start)
        timings.append((before, new, best))
    return timings
