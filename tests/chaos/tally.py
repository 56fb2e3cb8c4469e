"""Counts the outcomes of all plays, and shows them as a table."""

import re
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from tests.chaos.facts import Order, Report
from tests.chaos.judge import Failure
from tests.chaos.nodes import Sample
from tests.chaos.published import G

WARM_UP = 10
"""Rounds of a process's life that its memory is not compared with."""
_OUTCOMES = ("complete", "incomplete", "prefix", "nothing", "refused", "error", "cancelled")
BAD = ("hole", "wrong", "hang", "crash", "stuck")
"""What must not be; ``stuck``: nothing can be played although all faults are over."""
_GROWTH, _SLACK = 1.05, 8 << 20
"""Memory is flat if it has not grown by more than this factor and these bytes."""
_SLACK_FILES, _SLACK_THREADS = 16, 4


@dataclass(slots=True)
class Tally:
    plays: int = 0
    rounds: int = 0
    lost: int = 0
    """Plays whose player was killed."""
    outcomes: Counter[str] = field(default_factory=Counter)
    failures: Counter[str] = field(default_factory=Counter)
    errors: Counter[str] = field(default_factory=Counter)
    seen: list[tuple[int, str, str]] = field(default_factory=list)
    """Seed, kind and text of every failure."""
    recovered_s: list[float] = field(default_factory=list)
    """Seconds until a play was complete after all faults of a round were over."""
    lives: dict[str, list[list[Sample]]] = field(default_factory=lambda: defaultdict(list))
    """Samples of each process, one list for each of its lives."""
    partial: int = 0
    """Half-written files and folders that were left."""

    def play(self, seed: int, report: Report, order: Order, failures: Iterable[Failure]) -> None:
        self.plays += 1
        self.outcomes[report.outcome] += 1
        if report.outcome == "nothing" and order.tokens >= G:
            self.outcomes["unfound"] += 1
        if report.outcome == "error":
            self.errors[re.sub(r"(?<=prefix\.)\S+(?=,)|[0-9a-f]{16,}|[0-9.]+", "#", report.error)[:300]] += 1
        for failure in failures:
            self.note(seed, failure.kind, failure.text)

    def note(self, seed: int, kind: str, text: str) -> None:
        self.failures[kind] += 1
        self.seen.append((seed, kind, text))

    def sample(self, name: str, pid: int, sample: Sample | None, pids: dict[str, int]) -> None:
        """Keep a sample of a process; another process ID begins another life."""
        if sample is None:
            return
        if pids.get(name) != pid:
            pids[name] = pid
            self.lives[name].append([])
        self.lives[name][-1].append(sample)

    @property
    def bad(self) -> int:
        """How many failures there are that must not be; late plays do not count."""
        return sum(self.failures[kind] for kind in BAD)

    def growing(self) -> list[str]:
        """Processes with growing memory, files or threads, over their longest life."""
        out = []
        for name, lives in self.lives.items():
            if (pair := _ends(max(lives, key=len))) is None:
                continue
            first, last = pair
            if last.rss > _GROWTH * first.rss and last.rss > first.rss + _SLACK:
                out.append(f"{name}: memory")
            if last.files > first.files + _SLACK_FILES:
                out.append(f"{name}: files")
            if last.threads > first.threads + _SLACK_THREADS:
                out.append(f"{name}: threads")
        return out

    def to_json(self) -> dict[str, Any]:
        return {
            "plays": self.plays, "rounds": self.rounds, "lost": self.lost, "outcomes": self.outcomes,
            "failures": self.failures, "errors": self.errors,
            "seen": self.seen, "recovered_s": self.recovered_s,
            "partial": self.partial, "growing": self.growing(),
            "memory": {name: [[one.rss for one in life] for life in lives] for name, lives in self.lives.items()},
        }  # fmt: skip

    def table(self) -> str:
        lines = [
            f"{self.plays:,} plays in {self.rounds:,} rounds; {self.lost:,} more were lost with a killed player",
            "",
        ]
        counts = self.outcomes + self.failures
        lines.append(", ".join(f"{counts[name]:,} {name}" for name in (*_OUTCOMES, "unfound", "late", *BAD)))
        lines += ["", "process    lives rounds        RSS MiB          files        threads"]
        for name, lives in sorted(self.lives.items()):
            longest = max(lives, key=len)
            pair = _ends(longest)
            if pair is None:
                lines.append(f"{name:10} {len(lives):5} {len(longest):6}   too short a life to compare")
                continue
            first, last = pair
            lines.append(
                f"{name:10} {len(lives):5} {len(longest):6} {first.rss / 2**20:6.1f} ->{last.rss / 2**20:6.1f}"
                f" {first.files:6} ->{last.files:4} {first.threads:6} ->{last.threads:4}"
            )
        recovered = sorted(self.recovered_s)
        if recovered:
            half, last = statistics.median(recovered), recovered[-1]
            lines += ["", f"after the faults a play was complete within {half:.2f} s (median), {last:.2f} s (longest)"]
        if self.errors:
            lines += ["errors of kvabr:", *(f"{count:6,} {text}" for text, count in self.errors.most_common(12))]
        lines.append(f"half-written files left: {self.partial}; growing: {', '.join(self.growing()) or 'nothing'}")
        return "\n".join(lines)


def _ends(samples: list[Sample]) -> tuple[Sample, Sample] | None:
    """Return the medians of the first and the last few samples of the later half; None if there are too few.

    A player's memory grows for some minutes: buffers and decoders are used again, but each thread needs its own.
    """
    few = 5
    rest = samples[max(WARM_UP, len(samples) // 2) :]
    if len(rest) < 2 * few:
        return None
    return _median(rest[:few]), _median(rest[-few:])


def _median(samples: list[Sample]) -> Sample:
    return Sample(*(int(statistics.median(getattr(one, name) for one in samples)) for name in Sample.__slots__))
