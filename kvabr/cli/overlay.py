"""Shows a play on the terminal like a video player's statistics: track strip, rate, slack, bytes.

Without a terminal it prints a line every five seconds, and when a problem begins or ends.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable
from types import TracebackType
from typing import Self

from rich.console import Console, ConsoleOptions, Group, RenderResult
from rich.live import Live
from rich.text import Text

from kvabr.cli.display import human, printable, say
from kvabr.client.snapshot import Snapshot
from kvabr.types.catalog import RECOMPUTED

_COLOURS = ("red", "dark_orange", "yellow", "green", "cyan", "blue", "magenta", "white")
"""Colours of the tracks, smallest track first."""
_RECOMPUTED_COLOUR = "bright_white"
_MAX_ROWS = 6
"""Maximum rows of the track strip; with more groups, a cell stands for several."""
_UNPUBLISHED = "-"
"""Symbol of a group that is not published yet."""
_RATE_OVER_S = 0.5
_PLAIN_EVERY_S = 5.0


class Overlay:
    """A context manager that shows snapshots; pass `show` to a play as `PlayOptions.watch`."""

    def __init__(
        self, title: str, console: Console | None = None, trouble: Callable[[], str | None] = lambda: None
    ) -> None:
        """``console``: None: standard error; ``trouble`` returns a source's problem, if any."""
        self._title, self._trouble = title, trouble
        self._order: tuple[str, ...] = ()
        self._console = console or Console(stderr=True)
        self._shot: Snapshot | None = None
        self._received: deque[tuple[float, int]] = deque()
        self._next_line_s = 0.0
        self._troubled = False
        """True if the last line named a problem."""
        self._rate_text = "rate not known yet"
        self._live = Live(console=self._console, transient=True, auto_refresh=False, get_renderable=self._render)

    def __enter__(self) -> Self:
        if self._console.is_terminal:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._console.is_terminal:
            self._live.stop()

    def show(self, shot: Snapshot) -> None:
        """Show a snapshot."""
        troubled = self._trouble() is not None
        self._shot, self._order = shot, shot.offers
        self._received.append((shot.now, shot.bytes_fetched))
        while len(self._received) > 2 and shot.now - self._received[0][0] > _RATE_OVER_S:
            self._received.popleft()
        if self._console.is_terminal:
            self._live.refresh()
        elif shot.now >= self._next_line_s or troubled != self._troubled:
            self._next_line_s, self._troubled = shot.now + _PLAIN_EVERY_S, troubled
            say(self._console, self.line(shot), highlight=False)

    def line(self, shot: Snapshot) -> str:
        """Return a snapshot as one line of text."""
        in_place = sum(track is not None for track in shot.tracks)
        if shot.rate:  # it is 0 at the end of a play
            self._rate_text = f"{_mbits(shot.rate)} (at least {_mbits(shot.lower_bound)})"
        edge = "" if shot.edge is None else f", {shot.edge} published"
        undecoded = f"{shot.undecoded} to be decoded, " if shot.undecoded else ""
        trouble = self._trouble()
        return (
            f"{shot.now:.2f} s: {in_place} of {len(shot.tracks)} groups in place{edge}, {shot.requests} on their way, "
            f"{undecoded}{self._rate_text}, slack {_slack(shot.slack_s)}"
        ) + (f"; {printable(trouble)}" if trouble else "")

    def _render(self) -> Group:
        shot = self._shot
        if shot is None:
            return Group(Text(self._title, style="bold"), Text("looking up the cache ...", style="dim"))
        return Group(
            Text(self._title, style="bold"),
            _Strip(shot, self._cells(shot)),
            self._legend(shot),
            *self._figures(shot),
        )

    def _cells(self, shot: Snapshot) -> list[tuple[str, str]]:
        cells = []
        for group, track in enumerate(shot.tracks):
            transfer = shot.transfers.get(group)
            if track is not None:
                # An upgrade under way is marked on the track in place.
                cells.append(("▲" if transfer is not None else "█", self._colour(track)))
            elif transfer is not None:
                cells.append(("▁▂▃▄▅▆▇"[min(6, int(7 * transfer.share))], self._colour(transfer.track)))
            else:
                cells.append((_UNPUBLISHED if shot.edge is not None and group >= shot.edge else "·", "dim"))
        return cells

    def _legend(self, shot: Snapshot) -> Text:
        text = Text()
        counts = Counter(track for track in shot.tracks if track is not None)
        for track, count in sorted(counts.items(), key=lambda item: self._rank(item[0])):
            text.append("█ ", self._colour(track))
            text.append(f"{track} {count}   ")
        edge = len(shot.tracks) if shot.edge is None else shot.edge
        missing, unpublished = shot.tracks[:edge].count(None), shot.tracks[edge:].count(None)
        if missing:
            text.append(f"· missing {missing}   ", "dim")
        if unpublished:
            text.append(f"{_UNPUBLISHED} not prefilled yet {unpublished}", "dim")
        return text

    def _figures(self, shot: Snapshot) -> list[Text]:
        known = f"{_mbits(shot.rate)}, at least {_mbits(shot.lower_bound)}" if shot.rate else "not known yet"
        left = shot.deadline_s - shot.now
        when = f"deadline in {left:.2f} s" if left >= 0 else f"deadline {-left:.2f} s ago"
        rtt = "-" if shot.network.rtt_s is None else f"{1000 * shot.network.rtt_s:.1f} ms"
        slack_style = "red" if shot.slack_s is None or shot.slack_s < 0 else "green"
        wasted = f" ({human(shot.bytes_wasted)} wasted)" if shot.bytes_wasted else ""
        engine = ", the engine computes" if shot.computing else ""
        prefill = [Text(f"trouble   {printable(trouble)}", "red")] if (trouble := self._trouble()) else []
        undecoded = f", {shot.undecoded} to be decoded" if shot.undecoded else ""
        if shot.edge is not None:
            last = f"the last one is expected in {max(0.0, shot.ends_s - shot.now):.2f} s"
            prefill.append(Text(f"prefill   {shot.edge} of {len(shot.tracks)} groups published   {last}"))
        return [
            *prefill,
            Text.assemble("rate      ", (_mbits(self._rate()), "bold"), f"   estimate {known}"),
            Text.assemble("slack     ", (_slack(shot.slack_s), slack_style), f"   {when}{engine}{undecoded}"),
            Text(
                f"network   {human(shot.bytes_fetched)}{wasted}   {shot.requests} requests   RTT {rtt}   "
                f"to decode {1000 * shot.decode_backlog_s:.0f} ms"
            ),
        ]

    def _rate(self) -> float:
        (begin_s, before), (end_s, after) = self._received[0], self._received[-1]
        return (after - before) / (end_s - begin_s) if end_s > begin_s else 0.0

    def _rank(self, track: str) -> int:
        return self._order.index(track) if track in self._order else len(self._order)

    def _colour(self, track: str) -> str:
        return _RECOMPUTED_COLOUR if track == RECOMPUTED else _COLOURS[self._rank(track) % len(_COLOURS)]


class _Strip:
    def __init__(self, shot: Snapshot, cells: list[tuple[str, str]]) -> None:
        self._shot, self._cells = shot, cells

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        cells = max(10, options.max_width) * _MAX_ROWS
        together = -(-len(self._cells) // cells)
        text = Text()
        for first in range(0, len(self._cells), together):
            # A cell of several groups shows the one with the least progress.
            last = min(first + together, len(self._cells))
            text.append(*self._cells[min(range(first, last), key=self._progress)])
        yield text

    def _progress(self, group: int) -> float:
        if self._shot.tracks[group] is not None:
            return 2.0
        transfer = self._shot.transfers.get(group)
        return -1.0 if transfer is None else transfer.share


def _mbits(rate: float) -> str:
    bits = 8 * rate
    for unit, size in (("Gbit/s", 1e9), ("Mbit/s", 1e6)):
        if bits >= size:
            return f"{bits / size:.2f} {unit}"
    return f"{bits / 1e3:.0f} kbit/s"


def _slack(seconds: float | None) -> str:
    return "not known yet" if seconds is None else f"{seconds:+.2f} s"
