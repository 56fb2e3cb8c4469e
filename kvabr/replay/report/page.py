"""The report page of a replay: one HTML file with data, styles and script.

It combines ``page.html``, ``page.css`` and `SCRIPTS` with a JSON digest of the result and its timelines. Its content
security policy forbids loading resources.
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

SCRIPTS = (
    *("dom.js", "overview.js", "strip.js", "loss.js", "timeline.js", "inspector.js", "log.js", "export.js", "page.js"),
)


@dataclass(frozen=True, slots=True)
class Frame:
    """Parts of the page around the plays, for pages that show more than a replay."""

    mark: str = "kvabr replay"
    title: str | None = None
    """Title of the window; None: the asset's name."""
    verdict: str | None = None
    """Sentence at the top; None: that of the replay."""
    sections: str = ""
    """HTML between the overview and the plays; not escaped."""
    style: str = ""
    facts: Mapping[str, Any] = field(default_factory=dict)
    """Facts in the header; they override those of the result's runs."""


def write_page(path: Path, result: Result, timelines: list[Timeline]) -> None:
    """Write the page with all ``timelines``; arguments and errors as for `kvabr.replay.report.exports.write_log`."""
    write_text(path, render(result, timelines))


def render(result: Result, timelines: list[Timeline], frame: Frame | None = None) -> str:
    """Return the page's HTML."""
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
    # Fill all placeholders in one pass, so that data is never mistaken for a placeholder.
    return re.sub(r"\{\{(\w+)\}\}", lambda match: fill[match[1]], _own("page.html"))


def _own(name: str) -> str:
    return files("kvabr.replay.report").joinpath(name).read_text(encoding="utf-8")


def _embed(data: dict[str, Any]) -> str:
    """Return JSON that is safe inside a script element, where ``<`` could close the element or open a comment."""
    text = json.dumps(data, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")


def _palette(tracks: int) -> str:
    """Return the tracks' colours as CSS variables: ``--t0`` (cheapest) and so on, ``--tr`` for recomputed groups."""

    def rule(colours: Iterable[str], recomputed: str) -> str:
        named = "".join(f"--t{index}:{colour};" for index, colour in enumerate(colours))
        return f":root{{{named}--tr:{recomputed}}}"

    light = rule(ramp(tracks, LIGHT), RECOMPUTED_LIGHT)
    dark = rule(ramp(tracks, DARK), RECOMPUTED_DARK)
    return f"{light}\n@media (prefers-color-scheme: dark) {{ {dark} }}"
