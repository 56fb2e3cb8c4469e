"""Prompts of several passages. There are three kinds, since a good choice of tokens depends on the task.

``text`` continues a text. ``facts`` asks for one entry of one invented manual page, among pages with some common
options of different values. ``codes`` asks for one of several six-digit codes, one per passage, in sentences that
differ only in place names.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from kvabr.publish.model import TextModel, opened
from kvabr.types.errors import UsageError
from kvabr_lab.bench.contexts import token_key
from kvabr_lab.bench.manual_pages import ManualPage

Kind = Literal["text", "facts", "codes"]
KINDS: tuple[Kind, ...] = ("text", "facts", "codes")

BEGINNING = "You are a careful assistant. Use the passages below where they help.\n\n"
"""Start of every prompt. Its cache is exact, as for a prefix that is played or computed."""
_PIECES = 4
_PASSAGES = 5
_FOLLOWING, _ASKED = 96, 32
"""Number of scored tokens of a text, and of the tokens before them that represent the question."""
_PLACES = (
    *("the north gate", "the boiler room", "the harbour crane", "the reading hall", "the seed vault"),
    *("the radio mast", "the east lift", "the pump house", "the wine cellar", "the signal box"),
)
_PLANTED = "\n\nThe access code of {place} is {code}.\n\n"
_QUESTION = "\n\nQuestion: What is the access code of {place}?\nAnswer: The access code of {place} is"


@dataclass(frozen=True, slots=True)
class FusedPrompt:
    """A prompt joined from passages, with its question."""

    kind: Kind
    index: int
    beginning: tuple[int, ...]
    """Tokens before the passages, computed exactly."""
    passages: tuple[tuple[int, ...], ...]
    question: tuple[int, ...]
    tail: tuple[int, ...]
    """Tokens to score; for ``codes``, those of the code."""
    others: tuple[tuple[int, ...], ...] = ()
    """For ``codes``: the other codes, which are wrong."""

    @property
    def name(self) -> str:
        """Return the name used in results."""
        return f"{self.kind}-{self.index}"

    @property
    def tokens(self) -> tuple[int, ...]:
        """Tokens before the question."""
        return self.beginning + tuple(token for passage in self.passages for token in passage)

    @property
    def spans(self) -> tuple[tuple[int, int], ...]:
        """First and end position of each passage."""
        out, first = [], len(self.beginning)
        for passage in self.passages:
            out.append((first, first + len(passage)))
            first += len(passage)
        return tuple(out)

    @property
    def key(self) -> str:
        """Key of all tokens."""
        return token_key([*self.tokens, -1, *self.question, -1, *self.tail])


def make_prompts(
    model: TextModel, texts: Mapping[str, str], kind: Kind, count: int, *, size: int = 256, seed: int = 0
) -> list[FusedPrompt]:
    """Return ``count`` prompts of a kind with passages of ``size`` tokens; a larger count only adds prompts.

    Raises:
        UsageError: The texts are too short, or a passage is too small for its planted content.
    """
    out = []
    beginning = opened(model, model.encode(BEGINNING))
    encoded: dict[str, list[int]] = {}
    for index in range(count):
        dice = random.Random(f"{seed} {kind} {index}")  # noqa: S311 - test data, not secrets
        if kind == "facts":
            passages, question, tail, others = _facts(model, dice, size)
        else:
            encoded = encoded or {name: model.encode(text) for name, text in texts.items()}
            passages, question, tail, others = (_text if kind == "text" else _codes)(model, dice, size, encoded)
        parts = tuple(map(tuple, passages))
        wrong = tuple(map(tuple, others))
        out.append(FusedPrompt(kind, index, beginning, parts, tuple(question), tuple(tail), wrong))
    return out


_Parts = tuple[list[list[int]], Sequence[int], Sequence[int], list[Sequence[int]]]
"""Passages, question, answer, and similar wrong answers."""


def _text(_model: TextModel, dice: random.Random, size: int, texts: Mapping[str, list[int]]) -> _Parts:
    ids = _piece(dice, texts, _PIECES * size + _ASKED + _FOLLOWING)
    end = _PIECES * size
    return (
        [ids[first : first + size] for first in range(0, end, size)],
        ids[end : end + _ASKED],
        ids[end + _ASKED :],
        [],
    )


def _facts(model: TextModel, dice: random.Random, size: int) -> _Parts:
    pages = [ManualPage(dice) for _ in range(_PASSAGES)]
    page = dice.choice(pages)
    question, answer = dice.choice(page.answers)
    # Entries are in random order, so that a page cut to any length has some of them.
    passages = [model.encode(page.text)[:size] for page in pages]
    return passages, *_split(model, f"\n\nQuestion: {question}\nAnswer:", f" {answer}\n"), []


def _codes(model: TextModel, dice: random.Random, size: int, texts: Mapping[str, list[int]]) -> _Parts:
    places = dice.sample(_PLACES, _PASSAGES)
    codes = [str(dice.randrange(10**5, 10**6)) for _ in places]
    passages = []
    for place, code in zip(places, codes, strict=True):
        planted = model.encode(_PLANTED.format(place=place, code=code))
        room = size - len(planted)
        if room < 1:
            raise UsageError(
                f"a code of {len(planted)} tokens does not fit a passage of {size} tokens: give longer passages"
            )
        ids, at = _piece(dice, texts, room), dice.randrange(room // 8, room - room // 8)
        passages.append([*ids[:at], *planted, *ids[at:]])
    asked = dice.randrange(_PASSAGES)
    question = _QUESTION.format(place=places[asked])
    others = [_split(model, question, f" {code}")[1] for code in codes if code != codes[asked]]
    return passages, *_split(model, question, f" {codes[asked]}"), others


def _piece(dice: random.Random, texts: Mapping[str, list[int]], tokens: int) -> list[int]:
    long = sorted(name for name, ids in texts.items() if len(ids) >= tokens)
    if not long:
        raise UsageError(f"no text has {tokens} tokens: give longer texts, or shorter passages")
    ids = texts[dice.choice(long)]
    first = dice.randrange(len(ids) - tokens + 1)
    return ids[first : first + tokens]


def _split(model: TextModel, question: str, answer: str) -> tuple[Sequence[int], Sequence[int]]:
    """Return the tokens of the question and of the answer, which may start with a separate space token."""
    asked, whole = model.encode(question), model.encode(question + answer)
    same = next((n for n, (a, b) in enumerate(zip(asked, whole, strict=False)) if a != b), len(asked))
    # Some tokenizers separate the space before a number. This token carries no information.
    while same + 1 < len(whole) and model.encode(" ")[:1] == whole[same : same + 1]:
        same += 1
    return whole[:same], whole[same:]
