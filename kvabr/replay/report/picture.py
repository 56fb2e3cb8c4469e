"""One play as an SVG picture: the link at the top, and below it every group over time, coloured by its track.

It needs no scripts, fonts or other files and follows the reader's light or dark theme.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from html import escape
from pathlib import Path

from kvabr.replay.report.queries import (
    DARK,
    LIGHT,
    RECOMPUTED,
    RECOMPUTED_DARK,
    RECOMPUTED_LIGHT,
    Result,
    Run,
    Timeline,
    number,
    ramp,
    track_order,
)
from kvabr.replay.report.timeline import capacity, computations, requests, start_of
from kvabr.store.files import write_text
from kvabr.types.events import DecisionMade, PlayEvent, PlayStarted, ProgressMade

_LEFT, _WIDTH, _RIGHT = 84.0, 720.0, 24.0
_LINK_TOP, _LINK, _ROWS_TOP = 26.0, 70.0, 136.0
_ROWS = 264.0
"""Height of all groups together, pixels; each row is at most `_MAX_ROW` high."""
_MAX_ROW = 12.0
_CHARACTER = 6.6
_MBIT = 8e-6

_LIGHT_STYLE = (
    "text{font:12px system-ui,sans-serif;fill:#1c2027}.muted{fill:#646c79}.ground{fill:#fbfbf9}.empty{fill:#ecece6}"
    ".link{fill:#8b94a3;fill-opacity:.35}.lower{stroke:#1f5fbf;fill:none;stroke-width:1.6}"
    ".deadline{stroke:#b3261e;stroke-dasharray:4 3}.ended{stroke:#1c7a4d}"
)
_DARK_STYLE = (
    "text{fill:#e7e9ed}.muted{fill:#98a1af}.ground{fill:#14171c}.empty{fill:#262b33}.lower{stroke:#79aef5}"
    ".deadline{stroke:#ff8a80}.ended{stroke:#5cc492}"
)


def write_picture(path: Path, result: Result, timelines: list[Timeline]) -> None:
    """Draw the first play that has a timeline; there must be at least one.

    Raise `AssetError` if the file cannot be written.
    """
    first = timelines[0]
    write_text(path, picture(result["runs"][first["run"]], first, track_order(result, timelines)))


def picture(run: Run, timeline: Timeline, tracks: list[str]) -> str:
    """Return one play as SVG; ``tracks`` has all tracks, cheapest first, and determines their colours."""
    log: list[PlayEvent] = timeline["log"]
    start = start_of(log)
    if start is None:
        raise ValueError("a log without its first event")
    end_s = max(start.deadline_s, number(run.get("ttft_s")) or 0.0)
    row = min(_MAX_ROW, _ROWS / start.groups)
    scale = _Scale(end_s)
    bottom = _ROWS_TOP + row * start.groups
    ended_s = number(run.get("ttft_s"))
    spans = list(_spans(log, end_s if ended_s is None else ended_s))
    body = [
        '<rect class="ground" width="100%" height="100%" rx="6"/>',
        *_link(timeline, log, scale, end_s),
        *_rows(spans, start, scale, row, tracks),
        *_axis(start, scale, bottom, end_s),
        *(() if ended_s is None else _ended(scale(ended_s), bottom)),
        *_legend([track for _, _, _, track in spans], tracks, bottom + 32),
        _text(_LEFT, bottom + 68, _sentence(run, start), "muted"),
    ]
    title = f"{start.groups} groups of a KV cache over {run['trace']}, policy {run['policy']}"
    size = f"0 0 {_LEFT + _WIDTH + _RIGHT:.0f} {bottom + 84:.0f}"
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="{size}" role="img"><title>{escape(title)}</title>'
    return "\n".join([head, _style(len(tracks)), *body, "</svg>", ""])


class _Scale:
    def __init__(self, end_s: float) -> None:
        self._end_s = end_s

    def __call__(self, t: float) -> float:
        return round(_LEFT + _WIDTH * min(max(t, 0.0), self._end_s) / self._end_s, 1)


def _style(tracks: int) -> str:
    def colours(anchors: tuple[str, ...], recomputed: str) -> str:
        named = (f".t{index}{{fill:{colour}}}" for index, colour in enumerate(ramp(tracks, anchors)))
        return f"{''.join(named)}.tr{{fill:{recomputed}}}"

    light, dark = colours(LIGHT, RECOMPUTED_LIGHT), colours(DARK, RECOMPUTED_DARK)
    return f"<style>{_LIGHT_STYLE}{light}@media (prefers-color-scheme:dark){{{_DARK_STYLE}{dark}}}</style>"


def _spans(log: list[PlayEvent], end_s: float) -> Iterator[tuple[int, float, float, str]]:
    states: dict[int, list[tuple[float, str]]] = {}
    for request in requests(log):
        if request.decoded_s is not None:
            states.setdefault(request.group, []).append((request.decoded_s, request.track))
    for run in computations(log):
        for group in range(run.first, run.last) if run.finished else ():
            states.setdefault(group, []).append((run.end_s, RECOMPUTED))
    for group, changes in sorted(states.items()):
        changes.sort()
        ends = [t for t, _ in changes[1:]] + [end_s]
        for (t, track), until in zip(changes, ends, strict=True):
            yield group, t, until, track


def _rows(
    spans: Iterable[tuple[int, float, float, str]], start: PlayStarted, scale: _Scale, row: float, tracks: list[str]
) -> Iterator[str]:
    yield _text(_LEFT, _ROWS_TOP - 10, f"the cache: a row for each group, {start.groups} in all")
    yield _text(_LEFT - 8, _ROWS_TOP + 10, "group 0", "muted", anchor="end")
    yield _text(_LEFT - 8, _ROWS_TOP + row * start.groups, str(start.groups - 1), "muted", anchor="end")
    yield _box("empty", _LEFT, _ROWS_TOP, _WIDTH, row * start.groups)
    for group, t, until, track in spans:
        left = scale(t)
        yield _box(_class(track, tracks), left, _ROWS_TOP + row * group, scale(until) - left, row * 0.86)


def _link(timeline: Timeline, log: list[PlayEvent], scale: _Scale, end_s: float) -> Iterator[str]:
    link = capacity(timeline.get("link") or (), end_s)
    area = [(t or 0.0, rate or 0.0) for t, rate in zip(link["t"], link["mean"], strict=True)]
    bounds = [(event.t, event.lower) for event in log if isinstance(event, DecisionMade | ProgressMade) and event.lower]
    most = max((rate for _, rate in area + bounds), default=1.0) or 1.0
    floor = _LINK_TOP + _LINK

    def y(rate: float) -> float:
        return round(floor - _LINK * rate / most, 1)

    yield _text(_LEFT, _LINK_TOP - 10, "the link, and the rate that the player counts on")
    yield _text(_LEFT - 8, _LINK_TOP + 10, f"{most * _MBIT:.0f} Mbit/s", "muted", anchor="end")
    if area:
        steps = [
            f"{scale(t)},{y(rate)} {scale(until)},{y(rate)}"
            for (t, rate), until in zip(area, [t for t, _ in area[1:]] + [end_s], strict=True)
        ]
        yield f'<polygon class="link" points="{_LEFT},{floor} {" ".join(steps)} {_LEFT + _WIDTH},{floor}"/>'
    if bounds:
        path = " ".join(f"{'L' if index else 'M'}{scale(t)} {y(rate)}" for index, (t, rate) in enumerate(bounds))
        yield f'<path class="lower" d="{path}"/>'


def _axis(start: PlayStarted, scale: _Scale, bottom: float, end_s: float) -> Iterator[str]:
    step = next((s for s in (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 60) if end_s / s <= 8), end_s)
    for count in range(int(end_s / step + 1e-6) + 1):
        yield _text(scale(count * step), bottom + 16, f"{count * step:g} s", "muted", anchor="middle")
    x = scale(start.deadline_s)
    yield f'<line class="deadline" x1="{x}" x2="{x}" y1="{_LINK_TOP}" y2="{bottom:.1f}"/>'
    yield _text(x - 4, _LINK_TOP - 10, "deadline", anchor="end")


def _ended(x: float, bottom: float) -> Iterator[str]:
    yield f'<line class="ended" x1="{x}" x2="{x}" y1="{_LINK_TOP}" y2="{bottom:.1f}"/>'
    if x < _LEFT + _WIDTH - 150:
        yield _text(x + 6, bottom - 8, "the cache is complete", "muted")


def _legend(used: list[str], tracks: list[str], y: float) -> Iterator[str]:
    x = _LEFT
    for track in [name for name in (*tracks, RECOMPUTED) if name in used]:
        yield _box(_class(track, tracks), x, y, 12, 12)
        yield _text(x + 17, y + 10, track)
        x += 34 + _CHARACTER * len(track)


def _sentence(run: Run, start: PlayStarted) -> str:
    ttft, loss = number(run.get("ttft_s")), number(run.get("loss"))
    if ttft is None:
        return f"The play did not end; the deadline was {start.deadline_s:g} s."
    share = (number(run.get("bytes_fetched")) or 0.0) / start.fp16_bytes
    met = "in time" if run.get("met") else "late"
    quality = "" if loss is None else f", expected loss {loss:.2g} nats per token"
    return f"The cache was complete after {ttft:.2f} s ({met}), with {share:.1%} of the bytes of FP16{quality}."


def _class(track: str, tracks: list[str]) -> str:
    return "tr" if track == RECOMPUTED else f"t{tracks.index(track)}"


def _box(name: str, x: float, y: float, width: float, height: float) -> str:
    return f'<rect class="{name}" x="{x:g}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}"/>'


def _text(x: float, y: float, text: str, name: str = "", *, anchor: str = "start") -> str:
    kind = f' class="{name}"' if name else ""
    return f'<text{kind} x="{x:g}" y="{y:.0f}" text-anchor="{anchor}">{escape(text)}</text>'
