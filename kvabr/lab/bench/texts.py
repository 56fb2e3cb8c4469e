"""The texts that codecs are measured on: by domain, cut into contexts, none of which a profile was calibrated on."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from kvabr.engines.transformers.model_loader import LoadedModel
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
