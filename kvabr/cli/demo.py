"""`kvabr demo`: replay the shipped cache over the shipped traces, print the gain of adaptation, show the page."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median
from typing import TYPE_CHECKING, Annotated, Any

from kvabr.abr.policies import DEFAULT
from kvabr.cli.fields import command
from kvabr.types.fields import Shown
from kvabr.types.words import counted

if TYPE_CHECKING:
    from rich.table import Table

    from kvabr.replay.run import Matrix

_LOAD = 0.3
"""Fraction of the FP16 cache that the links carry within the deadline, on average."""
_STARTS = 2
_FIXED_POLICIES = ("fixed:Int8", "fixed:FP16")
_POLICIES = (DEFAULT, "mpc", "rate", *_FIXED_POLICIES)
_NOTICEABLE_LOSS = 0.001
"""Loss in nats per token above which greedy texts of a few dozen tokens begin to differ."""

Runs = list[dict[str, Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoCommand:
    """Replay a published KV cache (SmolLM2-135M, 8,064 tokens) over network traces.

    Compares the default policy, two rules of video players and two plain downloads, and writes a page with the timeline
    of every play. Needs neither a model nor a network, and takes a few seconds.
    """

    deadline: Annotated[float, Shown("-d --deadline S")] = 4.0
    """TTFT deadline, seconds."""
    html: Annotated[Path, Shown("--html F", written=True)] = Path("kvabr-demo.html")
    """The page."""
    no_open: Annotated[bool, Shown()] = False
    """Do not open the page in a browser."""


def run(args: DemoCommand) -> int:
    """Replay, write the page, and print the verdict."""
    from kvabr.cli.display import PlayBar, output, say
    from kvabr.replay.report import write_page
    from kvabr.replay.run import replay

    matrix = _matrix(args.deadline)
    plays = len(matrix.traces) * matrix.starts
    out = output()
    traces = counted(len(matrix.traces), "network trace")
    say(
        out,
        f"A KV cache of {matrix.catalog.tokens:,} tokens ({matrix.catalog.fp16_bytes / 1e6:.0f} MB at FP16) over "
        f"{traces}, {counted(plays, 'play')} for each of {len(_POLICIES)} policies.\nThe links carry "
        f"{_LOAD:.0%} of it within the deadline of {args.deadline:g} s, on average.",
    )
    with PlayBar("replaying", plays * len(_POLICIES)) as bar:
        report = replay(matrix, on_progress=bar.advance)
    write_page(args.html, report.result, report.timelines)
    by_policy = _fair(report.result["runs"])
    out.print()
    out.print(_table(by_policy))
    out.print()
    say(out, _verdict(by_policy, args.deadline))
    say(out, f"\nThe page with every decision and its reason: {args.html.resolve()}")
    say(out, "Next: `kvabr encode` publishes a real cache, `kvabr replay --help` shows what else can be played.")
    if not args.no_open and sys.stdout.isatty() and _has_screen():
        import webbrowser

        webbrowser.open(args.html.resolve().as_uri())
    return 0


add = command(DemoCommand, run)


def _matrix(deadline_s: float) -> Matrix:
    from kvabr.data import default_catalog, traces_folder
    from kvabr.replay.experiment import ReplayOptions
    from kvabr.replay.readers import find, read
    from kvabr.replay.run import Matrix

    traces = tuple(trace for path in find([traces_folder()]) for trace in read(path))
    options = ReplayOptions(deadline_s=deadline_s, scale_to_mean=_LOAD)
    return Matrix(default_catalog(), traces, _POLICIES, options, starts=_STARTS, timelines=24, detail=True)


def _fair(runs: Runs) -> dict[str, Runs]:
    """Return the runs by policy, except for plays that no schedule could have delivered in time."""
    found: dict[str, Runs] = {policy: [] for policy in _POLICIES}
    for line in runs:
        if line["feasible"]:
            found[line["policy"]].append(line)
    return found


def _ttft(runs: Runs) -> float:
    """Return the median TTFT in seconds; a play that gave up counts as infinite."""
    return median(line["ttft_s"] if line["gave_up"] is None else float("inf") for line in runs)


def _table(by_policy: dict[str, Runs]) -> Table:
    from kvabr.cli.display import table
    from kvabr.replay.report.queries import nats

    rows = []
    for policy, runs in by_policy.items():
        name = f"{policy} (default)" if policy == DEFAULT else policy
        met = f"{sum(line['met'] for line in runs)} of {len(runs)}"
        losses = [line["loss"] for line in runs] or [0.0]
        rows.append((name, f"{_ttft(runs):.1f} s" if runs else "-", met, nats(fmean(losses)), nats(max(losses))))
    titles = ("policy", "first token", "in time", "loss", "worst loss")
    return table("first token: median; loss: mean, nats per token", titles, rows, left=("policy",))


def _verdict(by_policy: dict[str, Runs], deadline_s: float) -> str:
    from kvabr.replay.report.queries import nats

    mine = by_policy[DEFAULT]
    if not mine:
        return f"No link could deliver the cache within {deadline_s:g} s, at any quality. Try a later --deadline."
    int8, fp16 = (by_policy[policy] for policy in _FIXED_POLICIES)
    met = sum(line["met"] for line in mine)
    loss = fmean(line["loss"] for line in mine)
    quality = (
        "That is too little to notice: at 0.0005 nats, 64 greedy tokens were the same as with the exact cache."
        if loss < _NOTICEABLE_LOSS
        else "From about 0.001 nats on, greedy texts begin to differ in places; 1 is about as bad as no cache."
    )
    return (
        f"With {DEFAULT} the first token came after {_ttft(mine):.1f} s (median), instead of {_ttft(int8):.1f} s with "
        f"a plain Int8 cache and {_ttft(fp16):.1f} s with the exact one.\n"
        f"It met the deadline in {met} of {len(mine)} plays; Int8 did in {sum(line['met'] for line in int8)}.\n"
        f"The price: an expected loss of {nats(loss)} nats per token on average, the divergence of the next-token "
        f"distribution from that of the exact cache (KL). {quality}"
    )


def _has_screen() -> bool:
    return sys.platform in {"darwin", "win32"} or bool(os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY"))
