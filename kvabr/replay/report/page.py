"""One page that shows a replay: a single HTML file with its data, styles and script inside, readable offline.

The page is made of ``page.html`` (the frame), ``page.css`` and the scripts of `SCRIPTS`, which lie beside this file,
and of a digest of the result and its timelines as JSON. It loads nothing: its content security policy forbids it.
"""

from __future__ import annotations

import html
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path
from typing import Any

from kvabr.replay.report.digest import digest
from kvabr.replay.report.queries import (
    DARK,
    LIGHT,
    RECOMPUTED_DARK,
    RECOMPUTED_LIGHT,
    Result,
    Timeline,
    ramp,
    track_order,
)
from kvabr.replay.report.verdict import verdict
from kvabr.store.files import write_text

SCRIPTS = ("dom.js", "overview.js", "strip.js", "timeline.js", "inspector.js", "log.js", "page.js")
"""The page's scripts in the order in which they are put together."""


@dataclass(frozen=True, slots=True)
class Frame:
    """What a page that shows more than a replay puts around the plays."""

    mark: str = "kvabr replay"
    """What made the page."""
    title: str | None = None
    """The window's title; None for the asset's name."""
    verdict: str | None = None
    """The sentence at the top; None for the replay's own."""
    sections: str = ""
    """HTML that stands between the overview and the plays. It is not escaped."""
    style: str = ""
    """CSS of these sections."""
    facts: Mapping[str, Any] = field(default_factory=dict)
    """Facts of the header that the result's runs do not tell rightly."""


def write_page(path: Path, result: Result, timelines: list[Timeline]) -> None:
    """Write the page.

    Args:
        path: where to; replaced whole.
        result: what `kvabr replay --json` writes; its ``asset`` names what was played.
        timelines: ``{"run": index, "log": [event, ...], "link": [[seconds, bytes per second], ...]}``; every one of
            them can be looked at in the page.

    Raises:
        AssetError: the file cannot be written.
    """
    write_text(path, render(result, timelines))


def render(result: Result, timelines: list[Timeline], frame: Frame | None = None) -> str:
    """The page's text."""
    frame = frame or Frame()
    sentence = verdict(result) if frame.verdict is None else frame.verdict
    tracks = track_order(result, timelines)
    data = digest(result, timelines, tracks)
    data["facts"] |= frame.facts
    fill = {
        "mark": html.escape(frame.mark),
        "title": html.escape(data["title"] if frame.title is None else frame.title),
        "verdict": html.escape(sentence),
        "sections": frame.sections,
        "style": _own("page.css").replace("/*tracks*/", _palette(len(tracks))) + frame.style,
        "data": _embed(data),
        "script": "\n".join(map(_own, SCRIPTS)),
    }
    # One pass, so that nothing in the data can be taken for a place to fill.
    return re.sub(r"\{\{(\w+)\}\}", lambda match: fill[match[1]], _own("page.html"))


def _own(name: str) -> str:
    return files("kvabr.replay.report").joinpath(name).read_text(encoding="utf-8")


def _embed(data: dict[str, Any]) -> str:
    """JSON that can stand inside a script element whatever it holds: no ``<`` is left to close it or open a comment."""
    text = json.dumps(data, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")


def _palette(tracks: int) -> str:
    """The tracks' colours as CSS variables ``--t0`` (cheapest) and so on, ``--tr`` for recomputed groups."""

    def rule(colours: Iterable[str], recomputed: str) -> str:
        named = "".join(f"--t{index}:{colour};" for index, colour in enumerate(colours))
        return f":root{{{named}--tr:{recomputed}}}"

    light = rule(ramp(tracks, LIGHT), RECOMPUTED_LIGHT)
    dark = rule(ramp(tracks, DARK), RECOMPUTED_DARK)
    return f"{light}\n@media (prefers-color-scheme: dark) {{ {dark} }}"
