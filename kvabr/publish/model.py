"""Protocols of the models that can be published with; `kvabr.engines` loads such models."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from kvabr.types.engine import ClassEngine, Engine

if TYPE_CHECKING:
    import torch


class ScoringEngine(Engine, Protocol):
    """An engine that can also score a continuation: enough to measure losses."""

    def score(self, kv: torch.Tensor | None, tokens: Sequence[int]) -> torch.Tensor:
        """Return log-probabilities of the next token after each of ``tokens`` behind the cache ``kv``.

        Args:
            kv: [layer, K/V, head, token, dim]; read, never written. None for no cache at all.
            tokens: ids of the continuation.

        Returns:
            [len(tokens), vocabulary] float64.
        """


@runtime_checkable
class ScoringClassEngine(ScoringEngine, ClassEngine, Protocol):
    """A scoring engine whose cache may have several layer classes."""

    def score_classes(self, kv: tuple[torch.Tensor, ...] | None, tokens: Sequence[int]) -> torch.Tensor:
        """As `score`, with a tensor per layer class, see `kvabr.types.engine.ClassEngine.prefill_classes`."""


def score_classes(engine: ScoringEngine, kv: tuple[torch.Tensor, ...] | None, tokens: Sequence[int]) -> torch.Tensor:
    """Score a continuation with any engine, see `ScoringClassEngine.score_classes`."""
    if isinstance(engine, ScoringClassEngine):
        return engine.score_classes(kv, tokens)
    return engine.score(None if kv is None else kv[0], tokens)


@runtime_checkable
class AnsweringEngine(ScoringEngine, Protocol):
    """A scoring engine that generates faster than `answer_of` would with its scores."""

    def answer(self, kv: tuple[torch.Tensor, ...] | None, question: Sequence[int], tokens: int) -> list[int]:
        """Return the most likely ``tokens`` ids behind a cache, a tensor per layer class, and a question."""


def answer_of(
    engine: ScoringEngine, kv: tuple[torch.Tensor, ...] | None, question: Sequence[int], tokens: int
) -> list[int]:
    """Return what any engine answers to a question, see `AnsweringEngine.answer`."""
    if isinstance(engine, AnsweringEngine):
        return engine.answer(kv, question, tokens)
    said: list[int] = []
    while len(said) < tokens:
        said.append(int(score_classes(engine, kv, [*question, *said])[-1].argmax()))
    return said


class CalibrationEngine(ScoringEngine, Protocol):
    """An engine that can also say how sensitive a continuation is to each number of a cache."""

    @property
    def context(self) -> int:
        """Tokens that the model can see."""

    def check_weights(self) -> None:
        """Raise a `ModelError` that names the weights that are NaN or infinite, if any in memory are."""

    def gradient_classes(
        self, kv: tuple[torch.Tensor, ...], tokens: Sequence[int], seed: int = 0
    ) -> tuple[torch.Tensor, ...]:
        """Return how the log-probability of sampled next tokens changes with a cache.

        The expectation of its square is the Fisher information: how fast the KL divergence grows with an error.

        Args:
            kv: a tensor per layer class, [layer, K/V, head, token, dim] of all tokens; read, never written.
            tokens: ids of the continuation; a next token is sampled behind each.
            seed: of the sampling.

        Returns:
            Of the shapes of ``kv``, float32: the gradient of the summed log-probability of the sampled tokens.
        """

    def continue_classes(
        self, kv: tuple[torch.Tensor, ...], tokens: Sequence[int], seed: int = 0
    ) -> tuple[tuple[torch.Tensor, ...], tuple[torch.Tensor, ...]]:
        """Return the KV of ``tokens`` behind ``kv``, and what `gradient_classes` returns."""

    @property
    def concurrent(self) -> bool:
        """Whether two threads may compute at once, and are the faster for it."""


class LayerSink(Protocol):
    """Where an engine that runs layer by layer leaves caches and gradients, and finds the caches again."""

    def put_cache(self, context: int, layer: int, kv: torch.Tensor) -> None:
        """Take one layer of a context's cache, [K/V, head, token, dim]."""

    def kept(self, context: int, layer: int) -> torch.Tensor:
        """Return one layer of the cache of a context without its scored tokens, [K/V, head, token, dim]."""

    def put_gradient(self, context: int, layer: int, gradient: torch.Tensor) -> None:
        """Take the gradient with respect to what `kept` returned, float32."""


@runtime_checkable
class LayerEngine(CalibrationEngine, Protocol):
    """An engine that holds one layer of its model at a time, and therefore does all contexts layer by layer."""

    @property
    def layer_bytes(self) -> int:
        """Bytes of a temporary file that each scored token takes in `by_layer`."""

    def places(self) -> list[tuple[int, int]]:
        """Return of every layer the number of its class, and its place in the class's tensor."""

    def by_layer(
        self,
        contexts: Sequence[Sequence[int]],
        scored: Sequence[int],
        sink: LayerSink,
        progress: Callable[[str, int, int], None] = lambda _stage, _done, _all: None,
    ) -> None:
        """Compute the caches of contexts, and gradients as `gradient_classes` does, with the context's number as seed.

        Args:
            contexts: token ids of each.
            scored: how many of a context's last tokens are the continuation; 0: no gradient is needed.
            sink: takes the caches of all tokens, then gradients.
            progress: called with the stages "forward" and "backward", and their steps: contexts times layers.

        Raises:
            ModelError: the tokens do not fit the model, or weights or outputs are not finite.
            OSError: the disk has no room for what enters the layers.
        """


class TextModel(Protocol):
    """An engine with its tokenizer."""

    @property
    def engine(self) -> CalibrationEngine:
        """The model."""

    @property
    def opening(self) -> tuple[int, ...]:
        """Special tokens that every prompt of this model begins with; empty for many models."""

    def encode(self, text: str) -> list[int]:
        """Return the token ids of ``text``, without any added around it."""


def opened(model: TextModel, tokens: Sequence[int]) -> tuple[int, ...]:
    """Return a prompt that begins as prompts of this model do: with `TextModel.opening`, once.

    A model that learned to find it at position 0 says other, less likely things without it, and has other sinks.
    """
    opening = model.opening
    return tuple(tokens) if tuple(tokens[: len(opening)]) == opening else (*opening, *tokens)
