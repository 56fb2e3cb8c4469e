"""Measures the loss that remains after a tail, by track; see `kvabr.types.tails`.

The loss on a single continuation can be wrong by a factor of 13, so several are scored: that of the text, and answers
to questions, generated from the exact cache. A question is itself a tail, as is the beginning of the continuation.
Longer tails are the last tokens of the prompt, computed on the coded cache of a few tracks. For other tracks, the loss
is assumed to fall as for the track with the most similar reduction by questions. Answers depend on other groups than
the text's continuation, so one answer is also scored for single groups. The catalog stores the losses' geometric mean
over continuations, and the standard deviation of their logarithms.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from statistics import fmean, stdev

import torch

from kvabr.publish.model import ScoringEngine, TextModel, answer_of
from kvabr.publish.reference import Cache, Reference, evenly, placed
from kvabr.types.engine import prefill_classes
from kvabr.types.tails import TAILS, TailLoss

QUESTIONS = (
    "\n\nQuestion: What is the text above about?\nAnswer:",
    "\n\nSummarize the text above in a few sentences. Name what matters in it, and say why it does.\n\nSummary:",
    (
        "\n<|im_end|>\n<|im_start|>user\nWhat is the last thing that it says, and what does that refer to?<|im_end|>\n"
        "<|im_start|>assistant\n"
    ),
    (
        "\n\nThe text above ends here. Read it again from its beginning, and answer a question about it as briefly and "
        "exactly as you can, in words that it uses itself wherever possible.\n\nQuestion: Which details does it repeat?"
        "\n\nAnswer: The"
    ),
)

ANSWER_TOKENS = 24
_TRACKS = 3
_SCORED = 48
_ROUNDING = 1e-12


def questions(model: TextModel, prompt: int = 0) -> list[tuple[int, ...]]:
    """Return the token ids of those `QUESTIONS` that, with an answer, fit the model after ``prompt`` tokens."""
    limit = model.engine.context - prompt - ANSWER_TOKENS
    return [ids for ids in (tuple(model.encode(question)) for question in QUESTIONS) if len(ids) <= limit]


def answered(
    engine: ScoringEngine,
    exact: Cache,
    questions: Sequence[Sequence[int]],
    before: torch.Tensor | None = None,
    progress: Callable[[int, int], None] = lambda _done, _all: None,
) -> list[Reference]:
    """Return one reference per question; its continuation is an answer generated from the exact cache."""
    references = []
    for number, question in enumerate(questions, 1):
        answer = answer_of(engine, placed(exact, before), question, ANSWER_TOKENS)
        references.append(Reference(engine, exact, [*question, *answer], before=before, question_tokens=len(question)))
        progress(number, len(questions))
    return references


class TailMeter:
    """Collects losses after tails during `kvabr.publish.quality.measure_quality`."""

    def __init__(self, text: Reference, after_questions: Sequence[Reference], prompt: Sequence[int]) -> None:
        self._text, self._after_questions, self._prompt = text, tuple(after_questions), tuple(prompt)
        self._near: dict[str, list[float]] = {}
        self._reduction: dict[str, float] = {}
        """Fraction of a track's loss that remains after a question, by track."""
        self._far: dict[str, dict[int, list[float]]] = {}
        states = any(part.kind == "state" for part in text.engine.spec.classes)
        self.lengths = () if states else tuple(tail for tail in TAILS[1:] if tail < len(prompt))
        """Lengths of longer tails, in tokens; empty with states, which have no snapshots where such tails begin."""

    @property
    def tracks(self) -> int:
        """Number of tracks measured by `near`."""
        return len(self._near)

    @property
    def caches(self) -> int:
        """Number of caches measured by `far`."""
        return min(_TRACKS, self.tracks) * len(self.lengths)

    def near(self, track: str, kv: Cache, scored: torch.Tensor) -> None:
        """Score the answers after a track's whole cache; ``scored`` is the score of the text's continuation."""
        losses = [one.measure(kv).loss for one in self._after_questions]
        if len(scored) > TAILS[0] + 1:
            losses.append(self._text.compared(scored, TAILS[0]).loss)
        if losses:
            self._near[track] = losses
            self._reduction[track] = _geometric_mean(losses) / max(_ROUNDING, self._text.compared(scored).loss)

    def far(self, decoded: Callable[[str], tuple[torch.Tensor, ...]], progress: Callable[[], None]) -> None:
        """Compute longer tails on a few tracks' caches, and score all continuations."""
        for track in self._picked():
            kv = decoded(track)
            for tail in self.lengths:
                begin = len(self._prompt) - tail
                shorter = tuple(part[:, :, :, :begin] for part in kv)
                made = prefill_classes(self._text.engine, self._prompt[begin:], placed(shorter, self._text.before))
                whole = tuple(torch.cat(both, dim=3) for both in zip(shorter, made, strict=True))
                losses = [one.measure(whole).loss for one in self._after_questions]
                losses.append(self._text.measure(whole, _SCORED).loss)
                self._far.setdefault(track, {})[tail] = losses
                progress()

    def single(self, kv: Cache) -> list[float]:
        """Return the loss of one answer after a cache with one coded group.

        Which groups matter hardly depends on the question. Return an empty list without questions, and for several
        layer classes (untested).
        """
        chosen = self._after_questions[:2][-1:] if len(self._text.engine.spec.classes) == 1 else ()
        return [one.measure(kv).loss for one in chosen]

    def _picked(self) -> list[str]:
        worst = max(self._near, key=lambda track: _geometric_mean(self._near[track]), default=None)
        others = sorted(self._reduction.keys() - {worst}, key=self._reduction.__getitem__)
        return [] if worst is None else [worst, *evenly(others, _TRACKS - 1)]

    def tails(self, losses: Mapping[str, float]) -> dict[str, tuple[TailLoss, ...]]:
        """Return every track's loss after each tail, given the losses directly after the prompt."""
        made: dict[str, tuple[TailLoss, ...]] = {}
        for track, near in self._near.items():
            own = _geometric_mean(near) / max(_ROUNDING, losses[track])
            like = min(self._far, key=lambda other: abs(math.log(self._ratio(track, other))), default=None)
            further = {} if like is None else self._far[like]
            made[track] = (
                TailLoss(self._length(0), own, _spread(near)),
                *(
                    TailLoss(
                        self._length(tail),
                        own * _geometric_mean(far) / _geometric_mean(self._near[str(like)]),
                        _spread(far),
                    )
                    for tail, far in further.items()
                ),
            )
        # Unmeasured tracks get the loss of the least lossy measured track.
        least = min(made, key=losses.__getitem__, default=None)
        return {} if least is None else {track: made.get(track, made[least]) for track in losses}

    def _ratio(self, one: str, other: str) -> float:
        return self._reduction[one] / self._reduction[other]

    def _length(self, tail: int) -> int:
        lengths = [*(tail + one.question_tokens for one in self._after_questions), tail or TAILS[0]]
        return round(math.exp(fmean(map(math.log, lengths))))


def _geometric_mean(losses: Sequence[float]) -> float:
    return math.exp(fmean(math.log(max(_ROUNDING, loss)) for loss in losses))


def _spread(losses: Sequence[float]) -> float:
    return stdev(math.log(max(_ROUNDING, loss)) for loss in losses) if len(losses) > 1 else 0.0
