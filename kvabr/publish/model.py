"""Protocols of models to publish with, loaded by `kvabr.engines`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from kvabr.types.engine import ClassEngine, Engine

if TYPE_CHECKING:
    import torch


class ScoringEngine(Engine, Protocol):
    """An engine that can score a continuation."""

    def score(self, kv: torch.Tensor | None, tokens: Sequence[int]) -> torch.Tensor:
        """Return log-probabilities of the next token after each of ``tokens``, given the cache ``kv`` (None: no cache).

        ``kv`` is [layer, K/V, head, token, dim], not modified; the result is [len(tokens), vocabulary] float64.
        """


@runtime_checkable
class ScoringClassEngine(ScoringEngine, ClassEngine, Protocol):
    """A scoring engine for several layer classes."""

    def score_classes(self, kv: tuple[torch.Tensor, ...] | None, tokens: Sequence[int]) -> torch.Tensor:
        """As `score`, with one tensor per layer class."""


def score_classes(engine: ScoringEngine, kv: tuple[torch.Tensor, ...] | None, tokens: Sequence[int]) -> torch.Tensor:
    """Score a continuation with any engine; see `ScoringClassEngine.score_classes`."""
    if isinstance(engine, ScoringClassEngine):
        return engine.score_classes(kv, tokens)
    return engine.score(None if kv is None else kv[0], tokens)


@runtime_checkable
class AnsweringEngine(ScoringEngine, Protocol):
    """A scoring engine with a faster generation of its own."""

    def answer(self, kv: tuple[torch.Tensor, ...] | None, question: Sequence[int], tokens: int) -> list[int]:
        """Return the ``tokens`` most likely ids, one after the other, following a cache and a question."""


def answer_of(
    engine: ScoringEngine, kv: tuple[torch.Tensor, ...] | None, question: Sequence[int], tokens: int
) -> list[int]:
    """Return an answer of ``tokens`` ids from any engine, see `AnsweringEngine.answer`."""
    if isinstance(engine, AnsweringEngine):
        return engine.answer(kv, question, tokens)
    said: list[int] = []
    while len(said) < tokens:
        said.append(int(score_classes(engine, kv, [*question, *said])[-1].argmax()))
    return said


class CalibrationEngine(ScoringEngine, Protocol):
    """An engine that can differentiate the scores of a continuation with respect to its cache."""

    @property
    def context(self) -> int:
        """Context length in tokens."""

    def check_weights(self) -> None:
        """Raise `ModelError` with the names of weights in memory that are NaN or infinite, if any."""

    def gradient_classes(
        self, kv: tuple[torch.Tensor, ...], tokens: Sequence[int], seed: int = 0
    ) -> tuple[torch.Tensor, ...]:
        """Return the gradient, with respect to a cache, of sampled tokens' log-probability sum: float32, same shapes.

        Its expected square is the Fisher information, which determines how the KL divergence grows with errors. ``kv``
        has one tensor per layer class, [layer, K/V, head, token, dim], not modified; one token is sampled after each of
        ``tokens``.
        """

    def continue_classes(
        self, kv: tuple[torch.Tensor, ...], tokens: Sequence[int], seed: int = 0
    ) -> tuple[tuple[torch.Tensor, ...], tuple[torch.Tensor, ...]]:
        """Return the cache of ``tokens`` after ``kv``, and the result of `gradient_classes`."""

    @property
    def concurrent(self) -> bool:
        """True if two threads may compute at once, and this is faster."""


class LayerSink(Protocol):
    """Storage of a `LayerEngine` for caches and gradients."""

    def put_cache(self, context: int, layer: int, kv: torch.Tensor) -> None:
        """Store one layer of a context's cache, [K/V, head, token, dim]."""

    def kept(self, context: int, layer: int) -> torch.Tensor:
        """Return one layer of a context's cache without its scored tokens."""

    def put_gradient(self, context: int, layer: int, gradient: torch.Tensor) -> None:
        """Store the gradient with respect to the result of `kept`, float32."""


@runtime_checkable
class LayerEngine(CalibrationEngine, Protocol):
    """An engine that loads one layer at a time, and runs all contexts through it."""

    @property
    def layer_bytes(self) -> int:
        """Bytes per scored token in the temporary file of `by_layer`."""

    def places(self) -> list[tuple[int, int]]:
        """Return each layer's class and its index in the class's tensor."""

    def by_layer(
        self,
        contexts: Sequence[Sequence[int]],
        scored: Sequence[int],
        sink: LayerSink,
        progress: Callable[[str, int, int], None] = lambda _stage, _done, _all: None,
    ) -> None:
        """Compute the caches of contexts, and gradients as in `gradient_classes`; the seed is the context's number.

        ``scored`` has the number of last tokens of each context that are its continuation (0: no gradient). ``sink``
        receives the caches of all tokens, then gradients. ``progress`` receives the stages "forward" and "backward".

        Raises:
            ModelError: the tokens do not fit the model, or weights or outputs are not finite.
            OSError: no disk space.
        """


class TextModel(Protocol):
    """An engine with its tokenizer."""

    @property
    def engine(self) -> CalibrationEngine:
        """The model."""

    @property
    def opening(self) -> tuple[int, ...]:
        """Special tokens at the start of every prompt of this model; often empty."""

    def encode(self, text: str) -> list[int]:
        """Return the token ids of ``text``, without special tokens."""


def opened(model: TextModel, tokens: Sequence[int]) -> tuple[int, ...]:
    """Prepend `TextModel.opening` if it is missing."""
    opening = model.opening
    return tuple(tokens) if tuple(tokens[: len(opening)]) == opening else (*opening, *tokens)
