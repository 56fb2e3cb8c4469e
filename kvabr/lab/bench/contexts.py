"""What codecs are measured on: contexts cut from texts, and codes planted in them for retrieval.

No context comes from a text that a profile was calibrated on. Mean loss over a text flatters a codec that blurs rare
content: a planted six-digit code occurs once and resembles nothing around it. The cache of the text is coded; the
question is not, because an engine computes it itself.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from kvabr.engines.transformers.model_loader import LoadedModel
from kvabr.publish.model import ScoringEngine
from kvabr.publish.texts import calibration_texts, measuring_texts, paragraphs
from kvabr.store.files import read_text
from kvabr.types.errors import UsageError

DOMAINS = ("python", "c", "licence", "prose")
"""What is measured by default, of what tools/fetch-texts fetches."""

_FETCH = "tools/fetch-texts fetches source code, licences, prose, two other languages and chat"


@dataclass(frozen=True, slots=True)
class Context:
    """A piece of text: a prompt whose cache is coded, and what really followed."""

    domain: str
    index: int
    """Which one of its domain."""
    tokens: tuple[int, ...]
    continuation: tuple[int, ...]

    @property
    def name(self) -> str:
        """As tables have it."""
        return f"{self.domain}-{self.index}"


def token_key(tokens: Sequence[int]) -> str:
    """A name for a sequence of token ids: 16 hex digits."""
    return hashlib.sha256(",".join(map(str, tokens)).encode()).hexdigest()[:16]


def read_texts(folder: Path | None, domains: Sequence[str] | None) -> dict[str, str]:
    """Texts by domain.

    Args:
        folder: holds one ``DOMAIN.txt`` each; None for what comes with Python.
        domains: which ones, in this order; None for those of `DOMAINS` that are there, or else all.

    Raises:
        UsageError: there is no such folder, or no text of a domain that was named.
    """
    if folder is None:
        texts = measuring_texts()
        where = "what comes with Python"
    else:
        if not folder.is_dir():
            raise UsageError(f"{folder}: no such folder of texts; {_FETCH}")
        texts = {path.stem: read_text(path) for path in sorted(folder.glob("*.txt"))}
        where = str(folder)
    if domains is None:
        usual = [name for name in DOMAINS if name in texts]
        domains = usual if folder is not None and usual else list(texts)
    missing = [name for name in domains if name not in texts]
    if missing or not domains:
        there = ", ".join(texts) or "none"
        raise UsageError(f"{where}: no text for {', '.join(missing) or 'any domain'}; there is {there}. {_FETCH}")
    return {name: texts[name] for name in domains}


def check_unseen(texts: Mapping[str, str]) -> None:
    """Refuse texts that share a paragraph with those of the default calibration.

    Raises:
        UsageError: one does; it would flatter the codec.
    """
    seen = {paragraph for text in calibration_texts().values() for paragraph in paragraphs(text)}
    for name, text in texts.items():
        shared = seen.intersection(paragraphs(text))
        if shared:
            raise UsageError(
                f"the text for {name} shares {len(shared)} paragraphs with the texts that profiles are calibrated on, "
                f"such as {min(shared)[:60]!r}: measure on another one"
            )


def cut(loaded: LoadedModel, texts: Mapping[str, str], each: int, tokens: int, continuation: int) -> list[Context]:
    """Cut contexts out of texts, evenly spaced, without overlap.

    Args:
        loaded: whose tokenizer and length of context count.
        texts: by domain.
        each: contexts of each domain.
        tokens: length of a prompt.
        continuation: tokens after it that losses are measured on.

    Raises:
        UsageError: a text is too short for so many, or the model cannot see so many tokens.
    """
    length = tokens + continuation
    if length > loaded.engine.context:
        raise UsageError(
            f"{tokens} tokens and {continuation} after them are more than {loaded.engine.spec.model} can see "
            f"({loaded.engine.context}): ask for fewer"
        )
    out = []
    for domain, text in texts.items():
        ids = loaded.encode(text)
        if len(ids) < each * length:
            raise UsageError(
                f"the text for {domain} has {len(ids)} tokens, too few for {each} contexts of {length}: "
                "ask for fewer or shorter ones, or give a longer text"
            )
        for index in range(each):
            # In the middle of equal shares: the ends of texts are titles and tables.
            start = (2 * index + 1) * (len(ids) - each * length) // (2 * each) + index * length
            part = ids[start : start + length]
            out.append(Context(domain, index, tuple(part[:tokens]), tuple(part[tokens:])))
    return out


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
