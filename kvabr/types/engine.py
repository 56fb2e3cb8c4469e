"""Protocols of serving engines, which compute the KV of tokens after a given cache. Imports no engine."""

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
"""``hole``: the engine can compute any group once everything before it is in place; ``suffix``: only from the first
miss to the end.
"""


BUDGET_S = 2.0
SHORT, _LONG = 1024, (4096, 16384)
"""Tokens of prefills that are always timed, and of longer ones that reveal a GPU's rate."""

AttentionReduction = Literal["sum", "max"]


@runtime_checkable
class Engine(Protocol):
    """An engine that can recompute part of a cache."""

    @property
    def spec(self) -> KVSpec:
        """Shape and meaning of the computed cache."""

    @property
    def mode(self) -> EngineMode:
        """What the engine can compute, see `EngineMode`."""

    def prefill(self, tokens: Sequence[int], before: torch.Tensor | None = None) -> torch.Tensor:
        """Compute the KV of ``tokens``, at least one, that follow the tokens with KV ``before``.

        Args:
            tokens: ids of the new tokens.
            before: [layer, K/V, head, token, dim], any float dtype, read-only; None at the start of a prompt. Better
                groups may be written into it during the call; each number is then from the old or the new track.

        Returns:
            KV of the new tokens, [layer, K/V, head, token, dim], in the engine's dtype.

        Raises:
            ModelError: the tokens do not fit the model, or ``before`` is not a cache of this model.
        """


@runtime_checkable
class ClassEngine(Engine, Protocol):
    """An engine that may have several layer classes; `prefill` then requires a single class."""

    def prefill_classes(
        self, tokens: Sequence[int], before: tuple[torch.Tensor, ...] | None = None
    ) -> tuple[torch.Tensor, ...]:
        """Compute like `prefill`, with one tensor of all tokens per layer class, [layer, K/V, head, token, dim].

        The result for a state, [layer, 1, head, row, column], is the snapshot after the tokens. In ``before``, a
        state's snapshots are concatenated along the rows; the last one is used.
        """


class ResidentCache(Protocol):
    """Memory on an engine's device for one prompt's cache, freed with the last reference."""

    def place(self, first: int, kv: torch.Tensor) -> None:
        """Copy the KV of tokens from ``first`` on, [layer, K/V, head, token, dim], any float dtype."""

    def prefill(self, tokens: Sequence[int], first: int) -> torch.Tensor:
        """Compute and return the KV of ``tokens`` at positions from ``first`` on, and add it to the cache.

        The result is on the device, and may be unfinished; reading it synchronises.

        Raises:
            ModelError: as for `Engine.prefill`.
        """


@runtime_checkable
class ResidentEngine(Engine, Protocol):
    """An engine that keeps a play's cache on its device, without a second copy."""

    def reside(self, tokens: int) -> ResidentCache | None:
        """Return memory for ``tokens`` tokens; None if there is not enough, or the model is not supported."""


@runtime_checkable
class BlendEngine(Engine, Protocol):
    """An engine that can recompute any tokens of a cache, for example one joined from passages."""

    def recompute(
        self, tokens: Sequence[int], at: Sequence[int], kv: torch.Tensor, *, layers: int | None = None
    ) -> torch.Tensor:
        """Compute some tokens of a prompt over its cache.

        Each token attends to all earlier tokens: to computed keys and values for those in ``at``, to cached ones for
        others. With all positions in ``at``, this is the full prefill.

        Args:
            tokens: ids of the prompt, at least up to the last position.
            at: increasing positions to compute, at least one; they may extend beyond the cache, without a gap.
            kv: [layer, K/V, head, token, dim], any float dtype, read-only; the cache of the first tokens.
            layers: compute only the first ``layers`` layers; None: all.

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
        """Return the attention of a question to each token of the cache before it.

        Args:
            question: ids of the question, at least one.
            kv: [layer, K/V, head, token, dim], any float dtype, read-only; the cache before the question.
            layers: layers to evaluate; the pass ends after the last. None: all.
            reduce: sum over heads and question tokens, or maximum.

        Returns:
            [layer, token] float32 weights of cached tokens. For each head and question token, the weights of all
            visible tokens, including the question's, sum to 1.

        Raises:
            ModelError: as for `recompute`.
        """


def prefill_classes(
    engine: Engine, tokens: Sequence[int], before: tuple[torch.Tensor, ...] | None = None
) -> tuple[torch.Tensor, ...]:
    """Compute the KV of ``tokens`` with any engine; see `ClassEngine.prefill_classes`."""
    if isinstance(engine, ClassEngine):
        return engine.prefill_classes(tokens, before)
    _ = engine.spec.only
    return (engine.prefill(tokens, None if before is None else before[0]),)


def time_prefills(
    engine: Engine, tokens: Sequence[int], *, repeats: int = 2, budget_s: float = BUDGET_S
) -> list[tuple[int, int, float]]:
    """Time a few real prefills; return tokens before, new tokens and seconds, for `PrefillCost.fit`.

    ``tokens`` are at least 128 ids of any real text; more tokens allow longer prefills. The fastest of ``repeats`` runs
    counts; ``budget_s`` limits the time of prefills of more than 1,024 tokens. Raise `UsageError` for too few tokens,
    `ModelError` if the tokens of a short prefill do not fit the model.
    """
    if len(tokens) < 128:
        raise UsageError(f"timing a prefill needs at least 128 tokens of text, got {len(tokens)}")
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
            except ModelError:
                return timings
    return timings


def _timed(
    engine: Engine, tokens: Sequence[int], shapes: Sequence[tuple[int, int]], repeats: int
) -> list[tuple[int, int, float]]:
    # Use zeros as a cache; timing does not depend on values.
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
