"""Retrieval: a random six-digit code planted in a text and asked for at its end.

Mean loss over a text flatters a codec that blurs what is rare: a planted code is said once and is like nothing around
it. The cache of the text is coded; the question is not, since an engine computes it itself.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from kvabr.engines.transformers.model_loader import LoadedModel
from kvabr.lab.bench.texts import Context
from kvabr.publish.score import ScoringEngine
from kvabr.types.errors import UsageError

DEPTHS = 10
"""Places in a text where a code is planted, evenly spaced."""

_PLANTED = "\n\nThe secret code is {code}. Remember it.\n\n"
_QUESTION = "\n\nQuestion: What is the secret code?\nAnswer: The secret code is"
_DIGITS = 6


@dataclass(frozen=True, slots=True)
class Needle:
    """One case."""

    context: Context
    """The text that it is planted in."""
    depth: int
    """0 is at the start, `DEPTHS` - 1 at the end."""
    at: int
    """Tokens of the text before it."""
    tokens: tuple[int, ...]
    """The text with the planted code."""
    question: tuple[int, ...]
    answer: tuple[int, ...]

    @property
    def name(self) -> str:
        """As results have it."""
        return f"{self.context.name}@{self.depth}"


@dataclass(frozen=True, slots=True)
class Recall:
    """What the model remembers."""

    digits: float
    """Share of the answer's tokens that the model finds most likely, each behind the right ones before it."""
    whole: bool
    """All of them: greedy generation would say the code."""
    logprob: float
    """Mean log-probability of the answer's tokens, nats."""


def plant(loaded: LoadedModel, contexts: Sequence[Context], depths: int = DEPTHS, seed: int = 1) -> Iterator[Needle]:
    """Cases: every context with a code at every depth, as long as the context was.

    Args:
        loaded: whose tokenizer counts.
        contexts: the texts.
        depths: places in each.
        seed: of the codes.

    Raises:
        UsageError: a context is too short to plant something in it.
    """
    dice = random.Random(seed)  # noqa: S311 - codes to remember, none to keep
    for context in contexts:
        for depth in range(depths):
            code = str(dice.randrange(10 ** (_DIGITS - 1), 10**_DIGITS))
            planted = loaded.encode(_PLANTED.format(code=code))
            question, answer = _ask(loaded, code)
            room = len(context.tokens) - len(planted)
            if room < depths:
                raise UsageError(f"a code of {len(planted)} tokens does not fit a text of {len(context.tokens)}")
            at = room * (2 * depth + 1) // (2 * depths)
            tokens = (*context.tokens[:at], *planted, *context.tokens[at:room])
            yield Needle(context, depth, at, tokens, question, answer)


def recall(engine: ScoringEngine, kv: torch.Tensor, needle: Needle) -> Recall:
    """Ask for the code behind a cache of the text.

    Args:
        engine: the model.
        kv: cache of `Needle.tokens`, [layer, K/V, head, token, dim]; read, never written.
        needle: the case.
    """
    asked = [*needle.question, *needle.answer[:-1]]
    rows = engine.score(kv, asked)[len(needle.question) - 1 :]
    wanted = torch.tensor(needle.answer)
    right = rows.argmax(dim=-1) == wanted
    said = rows.gather(1, wanted[:, None])
    return Recall(float(right.double().mean()), bool(right.all()), float(said.mean()))


def _ask(loaded: LoadedModel, code: str) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Tokens of the question, up to the code, and those of the code."""
    asked, whole = loaded.encode(_QUESTION), loaded.encode(f"{_QUESTION} {code}")
    same = next((n for n, (a, b) in enumerate(zip(asked, whole, strict=False)) if a != b), len(asked))
    # A space of its own before the digits is the question's: it carries nothing.
    while same + 1 < len(whole) and not loaded.decode(whole[same : same + 1]).strip():
        same += 1
    return tuple(whole[:same]), tuple(whole[same:])
