"""Contexts for measuring codecs: pieces of texts, and texts with planted codes to retrieve.

No context is from a calibration text. The mean loss over a text does not show if a codec blurs rare content. So a
six-digit code is planted, which occurs once and differs from its surroundings. Only the text's cache is coded; the
engine computes the question.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from kvabr.codec.profile import Profile
from kvabr.engines.transformers.model_loader import LoadedModel
from kvabr.publish.model import ScoringEngine, opened
from kvabr.publish.texts import calibration_texts, measuring_texts, paragraphs
from kvabr.store.files import read_text
from kvabr.types.errors import UsageError

DOMAINS = ("python", "c", "licence", "prose")

_FETCH = "tools/fetch-texts fetches source code, licences, prose, two other languages and chat"


@dataclass(frozen=True, slots=True)
class Context:
    """A prompt with a coded cache, and its real continuation."""

    domain: str
    index: int
    tokens: tuple[int, ...]
    continuation: tuple[int, ...]

    @property
    def name(self) -> str:
        """Name in tables."""
        return f"{self.domain}-{self.index}"


def token_key(tokens: Sequence[int]) -> str:
    """Return a key for token ids: 16 hex digits."""
    return hashlib.sha256(",".join(map(str, tokens)).encode()).hexdigest()[:16]


def read_texts(folder: Path | None, domains: Sequence[str] | None) -> dict[str, str]:
    """Return texts by domain, in the order of ``domains`` (None: those of `DOMAINS` that exist, or else all).

    Texts are ``DOMAIN.txt`` files in the folder; None: texts included in Python.

    Raises:
        UsageError: The folder or the text of a named domain does not exist.
    """
    if folder is None:
        texts = measuring_texts()
        where = "the texts of Python"
    else:
        if not folder.is_dir():
            raise UsageError(f"{folder}: no such folder of texts; {_FETCH}")
        texts = {path.stem: read_text(path) for path in sorted(folder.glob("*.txt"))}
        where = str(folder)
    if domains is None:
        usual = [name for name in DOMAINS if name in texts]
        domains = usual if folder is not None and usual else None
    return chosen(texts, domains, f"{where}: ", f". {_FETCH}")


def chosen(
    texts: Mapping[str, str], domains: Sequence[str] | None, where: str = "", where_else: str = ""
) -> dict[str, str]:
    """Return the texts of ``domains``, or all; raise a `UsageError` that lists missing and available domains."""
    wanted = list(texts) if domains is None else domains
    missing = [name for name in wanted if name not in texts]
    if missing or not wanted:
        there = ", ".join(texts) or "none"
        named = ", ".join(missing) or "any domain"
        raise UsageError(f"{where}no text for {named}; available: {there}{where_else}")
    return {name: texts[name] for name in wanted}


def check_unseen(texts: Mapping[str, str]) -> None:
    """Raise a `UsageError` if a text shares a paragraph with the default calibration, which would favour the codec."""
    seen = {paragraph for text in calibration_texts().values() for paragraph in paragraphs(text)}
    for name, text in texts.items():
        shared = seen.intersection(paragraphs(text))
        if shared:
            raise UsageError(
                f"the text for {name} shares {len(shared)} paragraphs with the texts that profiles are calibrated on, "
                f"such as {min(shared)[:60]!r}: measure on another text"
            )


def seen_shares(contexts: Sequence[Context], profiles: Iterable[Profile]) -> dict[str, float | None]:
    """Return each context's largest fraction seen in calibration; None if a profile does not record its texts."""
    seen = [profile.seen for profile in profiles]
    known = [each for each in seen if each is not None]
    if len(known) < len(seen):
        return dict.fromkeys((context.name for context in contexts), None)
    return {
        context.name: max((each.share((*context.tokens, *context.continuation)) for each in known), default=0.0)
        for context in contexts
    }


def seen_sentence(shares: Mapping[str, float | None]) -> str:
    """Return a sentence on whether the contexts were unseen in calibration."""
    if None in shares.values():
        return "it is not known whether calibration used these contexts: a profile does not record its texts"
    found = {name: share for name, share in shares.items() if share}
    if not found:
        return "no context is in the texts that the profiles were calibrated on"
    listed = ", ".join(f"{name} {share:.0%}" for name, share in found.items())
    return f"used by the calibration, so their results do not count: {listed}"


def cut(loaded: LoadedModel, texts: Mapping[str, str], each: int, tokens: int, continuation: int) -> list[Context]:
    """Cut evenly spaced contexts from texts without overlap; each starts with the model's opening tokens.

    There are ``each`` contexts per domain. Losses are measured on ``continuation`` tokens after the prompt.

    Raises:
        UsageError: A text is too short, or a context is longer than the model's.
    """
    length = tokens + continuation
    if length > loaded.engine.context:
        raise UsageError(
            f"{tokens} tokens and {continuation} after them exceed the context of {loaded.engine.spec.model} "
            f"({loaded.engine.context}): give fewer"
        )
    out = []
    for domain, text in texts.items():
        ids = loaded.encode(text)
        if len(ids) < each * length:
            raise UsageError(
                f"the text for {domain} has {len(ids)} tokens, too few for {each} contexts of {length}: give fewer or "
                "shorter contexts, or a longer text"
            )
        for index in range(each):
            # Take the middle of equal parts: texts begin and end with titles and tables.
            start = (2 * index + 1) * (len(ids) - each * length) // (2 * each) + index * length
            part = opened(loaded, ids[start : start + length])
            out.append(Context(domain, index, part[:tokens], part[tokens : tokens + continuation]))
    return out


DEPTHS = 10
"""Number of evenly spaced places in a text for a code."""

_PLANTED = "\n\nThe secret code is {code}. Remember it.\n\n"
_QUESTION = "\n\nQuestion: What is the secret code?\nAnswer: The secret code is"
_DIGITS = 6


@dataclass(frozen=True, slots=True)
class Needle:
    """A retrieval case."""

    context: Context
    depth: int
    """Place of the code: 0 is at the start, `DEPTHS` - 1 at the end."""
    at: int
    tokens: tuple[int, ...]
    question: tuple[int, ...]
    answer: tuple[int, ...]

    @property
    def name(self) -> str:
        """Name in results."""
        return f"{self.context.name}@{self.depth}"


@dataclass(frozen=True, slots=True)
class Recall:
    """Retrieval by the model."""

    digits: float
    """Fraction of the answer's tokens that are the first choice after the correct preceding tokens."""
    whole: bool
    """True if greedy generation returns the code."""
    logprob: float
    """Mean log-probability of the answer's tokens, nats."""


def plant(loaded: LoadedModel, contexts: Sequence[Context], depths: int = DEPTHS, seed: int = 1) -> Iterator[Needle]:
    """Yield every context with a code planted at each of ``depths`` places; the length does not change.

    Raises:
        UsageError: A context is too short for a code.
    """
    dice = random.Random(seed)  # noqa: S311 - test data, not secrets
    for context in contexts:
        for depth in range(depths):
            code = str(dice.randrange(10 ** (_DIGITS - 1), 10**_DIGITS))
            planted = loaded.encode(_PLANTED.format(code=code))
            question, answer = _ask(loaded, code)
            room = len(context.tokens) - len(planted)
            if room < depths:
                raise UsageError(f"a code of {len(planted)} tokens does not fit a text of {len(context.tokens)} tokens")
            at = room * (2 * depth + 1) // (2 * depths)
            tokens = (*context.tokens[:at], *planted, *context.tokens[at:room])
            yield Needle(context, depth, at, tokens, question, answer)


def recall(engine: ScoringEngine, kv: torch.Tensor, needle: Needle) -> Recall:
    """Ask for the code, given a cache of `Needle.tokens`, [layer, K/V, head, token, dim], which is not modified."""
    asked = [*needle.question, *needle.answer[:-1]]
    rows = engine.score(kv, asked)[len(needle.question) - 1 :]
    wanted = torch.tensor(needle.answer)
    right = rows.argmax(dim=-1) == wanted
    said = rows.gather(1, wanted[:, None])
    return Recall(float(right.double().mean()), bool(right.all()), float(said.mean()))


def _ask(loaded: LoadedModel, code: str) -> tuple[tuple[int, ...], tuple[int, ...]]:
    asked, whole = loaded.encode(_QUESTION), loaded.encode(f"{_QUESTION} {code}")
    same = next((n for n, (a, b) in enumerate(zip(asked, whole, strict=False)) if a != b), len(asked))
    # A separate space token before the digits carries no information, so it belongs to the question.
    while same + 1 < len(whole) and not loaded.decode(whole[same : same + 1]).strip():
        same += 1
    return tuple(whole[:same]), tuple(whole[same:])
