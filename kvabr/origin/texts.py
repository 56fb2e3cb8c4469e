"""Texts that every Python brings along: what profiles are calibrated on, and other ones to measure with.

The two sets share no text, so that no table shows a codec on what its profile was made from.
"""

from __future__ import annotations

import importlib
import importlib.util
from pathlib import Path

from kvabr.errors import AssetError

_CALIBRATION_MODULES = ("argparse", "asyncio.tasks", "http.client", "inspect", "json.decoder", "statistics", "tarfile")
_MEASURING_MODULES = ("calendar", "heapq", "textwrap", "zipfile")


def calibration_texts() -> dict[str, str]:
    """Texts to calibrate a profile on, by name: half the topics of Python's manual, and standard library sources."""
    return {"pydoc": _topics()[0]} | {module: _source(module) for module in _CALIBRATION_MODULES}


def measuring_texts() -> dict[str, str]:
    """Texts to measure codecs on, by name: other topics of the manual, other sources, and Python's licence."""
    texts = {"manual": _topics()[1], "source": "\n\n".join(_source(module) for module in _MEASURING_MODULES)}
    licence = _licence()
    return texts if licence is None else texts | {"licence": licence}


def _topics() -> tuple[str, str]:
    """The language reference that `pydoc` shows, topic by topic in alphabetical order, in two halves.

    Topics repeat each other, so one goes to the second half only if it shares no paragraph with the first.
    """
    topics: dict[str, str] = importlib.import_module("pydoc_data.topics").topics
    every = [topics[name] for name in sorted(topics)]
    first = every[::2]
    seen = {paragraph for text in first for paragraph in _paragraphs(text)}
    second = [text for text in every[1::2] if seen.isdisjoint(_paragraphs(text))]
    return "\n\n".join(first), "\n\n".join(second)


def _paragraphs(text: str) -> list[str]:
    """Paragraphs, without their layout, of a length that two texts do not share by chance."""
    every = (" ".join(part.split()) for part in text.split("\n\n"))
    return [part for part in every if len(part) >= 160]


def _source(module: str) -> str:
    """Source of a module of the standard library, found without running it."""
    spec = importlib.util.find_spec(module)
    if spec is None or spec.origin is None or not Path(spec.origin).is_file():
        raise AssetError(f"this Python has no source of its module {module}; give texts of your own with --text")
    return Path(spec.origin).read_text(encoding="utf-8")


def _licence() -> str | None:
    """The interpreter's licence, wherever it lies; None where a distribution leaves it out."""
    library = Path(importlib.import_module("os").__file__ or "").resolve().parent
    for path in (library / "LICENSE.txt", library.parent / "LICENSE.txt", library.parent / "LICENSE"):
        if path.is_file():
            return path.read_text(encoding="utf-8")
    return None
