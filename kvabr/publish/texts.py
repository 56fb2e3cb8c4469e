"""Texts included with Python: one set to calibrate profiles, and another, with no text in common, to measure codecs."""

from __future__ import annotations

import importlib
import importlib.util
import random
from collections.abc import Callable, Sequence
from pathlib import Path

from kvabr.publish.model import TextModel, opened
from kvabr.store.prompt import Prompt
from kvabr.types.errors import AssetError, UsageError

_MEASURING_MODULES = ("calendar", "heapq", "textwrap", "zipfile")
SYLLABLES = ("ka", "lo", "mi", "ran", "to", "vel", "zu", "shi", "ber", "dan", "gor", "hul", "ith", "jo", "nex", "pra")
_RECORDS = 600
_FRONT = 4
"""Tokens to allow for those that a model prepends."""
_MIN_CONTINUATION = 2
_CHARACTERS_PER_TOKEN = 16
"""Characters per token, more than the average of any text."""


def calibration_texts() -> dict[str, str]:
    """Return texts for calibration by name: half the topics of Python's manual, and invented records.

    Source code, licences and stories are reserved for measuring.
    """
    return {"pydoc": _topics()[0], "records": _records()}


def _records() -> str:
    dice = random.Random(7)  # noqa: S311 - reproducible, not secret

    def name() -> str:
        return "".join(dice.choices(SYLLABLES, k=dice.randint(2, 4))).capitalize()

    kinds: list[Callable[[], str]] = [
        lambda: f"{name()} {name()}, tel. {dice.randint(10**9, 10**10 - 1)}",
        lambda: (
            f"invoice {dice.randint(10**4, 10**7)} of {dice.randint(1, 28)}.{dice.randint(1, 12)}.: "
            f"{dice.randint(1, 99999) / 100:.2f} EUR"
        ),
        lambda: "".join(dice.choices("0123456789abcdef", k=dice.choice((8, 16, 32)))),
        lambda: f"{name()}@{name().lower()}.{dice.choice(('com', 'org', 'net', 'de'))}",
        lambda: f"{name()} of {name()} keeps {dice.randint(2, 900)} {dice.choice(('goats', 'boats', 'clocks'))}.",
        lambda: f"{dice.randint(-99, 99):.1f}\t{dice.random():.6f}\t{dice.randint(0, 255)}",
    ]
    lines: list[str] = []
    while len(lines) < _RECORDS:
        some = dice.sample(kinds, dice.randint(2, 4))
        lines += [dice.choice(some)() for _ in range(100)]
    return "\n".join(lines)


def measuring_texts() -> dict[str, str]:
    """Return texts for measuring by name: other topics of the manual, source code, and Python's licence."""
    texts = {"manual": _topics()[1], "source": "\n\n".join(_source(module) for module in _MEASURING_MODULES)}
    licence = _licence()
    return texts if licence is None else texts | {"licence": licence}


def _topics() -> tuple[str, str]:
    topics: dict[str, str] = importlib.import_module("pydoc_data.topics").topics
    every = [topics[name] for name in sorted(topics)]
    first = every[::2]
    seen = {paragraph for text in first for paragraph in paragraphs(text)}
    second = [text for text in every[1::2] if seen.isdisjoint(paragraphs(text))]
    return "\n\n".join(first), "\n\n".join(second)


def paragraphs(text: str) -> list[str]:
    """Return the paragraphs, without layout, that are long enough not to occur in other texts by chance."""
    every = (" ".join(part.split()) for part in text.split("\n\n"))
    return [part for part in every if len(part) >= 160]


def _source(module: str) -> str:
    spec = importlib.util.find_spec(module)
    if spec is None or spec.origin is None or not Path(spec.origin).is_file():
        raise AssetError(f"this Python has no source of its module {module}; give your own texts with --text")
    return Path(spec.origin).read_text(encoding="utf-8")


def _licence() -> str | None:
    library = Path(importlib.import_module("os").__file__ or "").resolve().parent
    for path in (library / "LICENSE.txt", library.parent / "LICENSE.txt", library.parent / "LICENSE"):
        if path.is_file():
            return path.read_text(encoding="utf-8")
    return None


def check_length(encode: Callable[[str], Sequence[int]], text: str, tokens: int, continuation: int) -> None:
    """Raise `UsageError` if a text is clearly too short for `cut_prompt`."""
    wanted = tokens + continuation
    if len(text) <= wanted * _CHARACTERS_PER_TOKEN and (found := len(encode(text))) + _FRONT < wanted:
        raise too_short(found, tokens, continuation)


def too_short(found: int, tokens: int, continuation: int = 0) -> UsageError:
    """Return the error for a text of ``found`` tokens."""
    more = f" and {continuation} of continuation" if continuation else ""
    advice = _shorter(found, tokens, continuation)
    return UsageError(
        f"the text has {found} tokens, but {tokens}{more} are needed: give a longer text"
        + (f", or {advice}" if advice else "")
    )


def cut_prompt(model: TextModel, text: str, tokens: int, continuation: int, *, passage: bool = False) -> Prompt:
    """Return the first tokens of a text as a prompt, and the following ones as its continuation.

    Passages do not start with `TextModel.opening`. Raise `UsageError` if the text is too short, or exceeds the context.
    """
    if tokens < 1 or continuation < _MIN_CONTINUATION:
        raise UsageError(f"a prompt must have at least 1 token and its continuation 2, got {tokens} and {continuation}")
    wanted, context = tokens + continuation, model.engine.context
    if wanted > context:
        raise UsageError(
            f"{tokens} tokens and {continuation} of continuation exceed the context of {model.engine.spec.model} "
            f"({context}): give at most {_shorter(context, tokens, continuation)}"
        )
    head = text[: wanted * _CHARACTERS_PER_TOKEN]
    ids = _cut_ids(model, head, passage=passage)
    # The cut may fall within a word, so ignore tokens near it.
    if len(head) < len(text) and len(ids) < wanted + 16:
        ids = _cut_ids(model, text, passage=passage)
    if len(ids) < wanted:
        raise too_short(len(ids), tokens, continuation)
    return Prompt(tuple(ids[:tokens]), tuple(ids[tokens:wanted]))


def _cut_ids(model: TextModel, text: str, *, passage: bool) -> tuple[int, ...]:
    ids = model.encode(text)
    return tuple(ids) if passage else opened(model, ids)


def _shorter(total: int, tokens: int, continuation: int) -> str:
    if not continuation:
        return f"--tokens {total}" if total else ""
    if total >= 2 * continuation:
        return f"--tokens {total - continuation}"
    if total <= _MIN_CONTINUATION:
        return ""
    prompt = min(tokens, total - max(_MIN_CONTINUATION, total // 4))
    return f"--tokens {prompt} --continuation {min(continuation, total - prompt)}"
