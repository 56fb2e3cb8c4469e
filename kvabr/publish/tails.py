"""Measures what is left of a track's loss behind a tail: see `kvabr.types.tails`.

Several continuations are scored, since a single one misleads by up to 13 times: what follows in the text, and answers
to questions about it, as the exact cache gives them. A question is a tail by itself, and so is the beginning of the
text's continuation. Longer tails are the last tokens of the prompt, computed on the coded cache of those before, and
measured on a few tracks. Every other track is taken to fall as the one of these whose loss questions lessen most alike.

What a question is about lies in other groups than those that the text's continuation attends to, and in nearly the same
for every question. So one is scored, too, where single groups are measured, which takes 3 % of the time of `encode`.

The catalog keeps the geometric mean over the continuations, which the loss behind one of them exceeds about as often as
not, and the standard deviation of their logarithms.
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
"""What readers ask about a text, in 10 to 60 tokens."""

ANSWER_TOKENS = 24
"""Tokens of an answer that are compared."""
_TRACKS = 3
"""Tracks that are measured behind tails of the prompt's own tokens."""
_SCORED = 48
"""Tokens of the text's continuation that are scored behind them."""
_LEAST = 1e-12
"""Losses below it are rounding."""


def questions(model: TextModel, prompt: int = 0) -> list[tuple[int, ...]]:
    """Return the token ids of those of `QUESTIONS` that the model sees, with an answer, behind so many tokens."""
    room = model.engine.context - prompt - ANSWER_TOKENS
    return [ids for ids in (tuple(model.encode(question)) for question in QUESTIONS) if len(ids) <= room]


def answered(
    engine: ScoringEngine,
    exact: Cache,
    asked: Sequence[Sequence[int]],
    before: torch.Tensor | None = None,
    progress: Callable[[int, int], None] = lambda _done, _all: None,
) -> list[Reference]:
    """Return what the exact cache answers to questions; arguments as those of `Reference`, and one after each."""
    references = []
    for number, question in enumerate(asked, 1):
        answer = answer_of(engine, placed(exact, before), question, ANSWER_TOKENS)
        references.append(Reference(engine, exact, [*question, *answer], before=before, asked=len(question)))
        progress(number, len(asked))
    return references


class TailMeter:
    """Collects the losses of tracks behind tails, in the course of `kvabr.publish.quality.measure_quality`."""

    def __init__(self, text: Reference, asked: Sequence[Reference], prompt: Sequence[int]) -> None:
        """Prepare to measure.

        Args:
            text: scores what follows the prompt.
            asked: answers to questions, see `answered`.
            prompt: its token ids.
        """
        self._text, self._asked, self._prompt = text, tuple(asked), tuple(prompt)
        self._near: dict[str, list[float]] = {}
        self._lessened: dict[str, float] = {}
        """What a question leaves of a track's loss."""
        self._far: dict[str, dict[int, list[float]]] = {}
        states = any(part.kind == "state" for part in text.engine.spec.classes)
        self.lengths = () if states else tuple(tail for tail in TAILS[1:] if tail < len(prompt))
        """Tails of the prompt's own tokens. A state has no snapshot where they would begin."""

    @property
    def tracks(self) -> int:
        """How many tracks `near` has measured."""
        return len(self._near)

    @property
    def caches(self) -> int:
        """How many caches `far` measures."""
        return min(_TRACKS, self.tracks) * len(self.lengths)

    def near(self, track: str, kv: Cache, scored: torch.Tensor) -> None:
        """Score the answers behind a track's whole cache; of the text's continuation, ``scored``, take the rest."""
        losses = [one.measure(kv).loss for one in self._asked]
        if len(scored) > TAILS[0] + 1:
            losses.append(self._text.compared(scored, TAILS[0]).loss)
        if losses:
            self._near[track] = losses
            self._lessened[track] = _middle(losses) / max(_LEAST, self._text.compared(scored).loss)

    def far(self, decoded: Callable[[str], tuple[torch.Tensor, ...]], progress: Callable[[], None]) -> None:
        """Compute longer tails on a few tracks' caches, which ``decoded`` returns, and score all continuations."""
        for track in self._picked():
            kv = decoded(track)
            for tail in self.lengths:
                begin = len(self._prompt) - tail
                shorter = tuple(part[:, :, :, :begin] for part in kv)
                made = prefill_classes(self._text.engine, self._prompt[begin:], placed(shorter, self._text.before))
                whole = tuple(torch.cat(both, dim=3) for both in zip(shorter, made, strict=True))
                losses = [one.measure(whole).loss for one in self._asked]
                losses.append(self._text.measure(whole, _SCORED).loss)
                self._far.setdefault(track, {})[tail] = losses
                progress()

    def single(self, kv: Cache) -> list[float]:
        """Return what an answer loses behind a cache of which one group is coded; empty if there are no questions.

        Which groups that are depends hardly on the question, so one is enough: the second, which asks for a summary.
        Of several layer classes, groups are parts of each, for which this was not tried: empty, too.
        """
        chosen = self._asked[:2][-1:] if len(self._text.engine.spec.classes) == 1 else ()
        return [one.measure(kv).loss for one in chosen]

    def _picked(self) -> list[str]:
        """Return the track that loses most behind questions, and of the others some that these lessen unlike."""
        worst = max(self._near, key=lambda track: _middle(self._near[track]), default=None)
        others = sorted(self._lessened.keys() - {worst}, key=self._lessened.__getitem__)
        return [] if worst is None else [worst, *evenly(others, _TRACKS - 1)]

    def tails(self, losses: Mapping[str, float]) -> dict[str, tuple[TailLoss, ...]]:
        """Return what every track has left behind tails, given its loss right behind the prompt."""
        made: dict[str, tuple[TailLoss, ...]] = {}
        for track, near in self._near.items():
            own = _middle(near) / max(_LEAST, losses[track])
            like = min(self._far, key=lambda other: abs(math.log(self._ratio(track, other))), default=None)
            further = {} if like is None else self._far[like]
            made[track] = (
                TailLoss(self._length(0), own, _spread(near)),
                *(
                    TailLoss(self._length(tail), own * _middle(far) / _middle(self._near[str(like)]), _spread(far))
                    for tail, far in further.items()
                ),
            )
        # Tracks that were not measured lose nearly nothing, and so as those that lose least.
        least = min(made, key=losses.__getitem__, default=None)
        return {} if least is None else {track: made.get(track, made[least]) for track in losses}

    def _ratio(self, one: str, other: str) -> float:
        return self._lessened[one] / self._lessened[other]

    def _length(self, tail: int) -> int:
        """Return the usual length of a tail with a question, or with the beginning of the text's continuation."""
        lengths = [*(tail + one.asked for one in self._asked), tail or TAILS[0]]
        return round(math.exp(fmean(map(math.log, lengths))))


def _middle(losses: Sequence[float]) -> float:
    return math.exp(fmean(math.log(max(_LEAST, loss)) for loss in losses))


def _spread(losses: Sequence[float]) -> float:
    return stdev(math.log(max(_LEAST, loss)) for loss in losses) if len(losses) > 1 else 0.0
