"""Counters, gauges and histograms, and their text exposition for Prometheus (text format 0.0.4).

All of it is updated from any thread: every update takes a lock for a moment.
"""

from __future__ import annotations

import math
import threading
from abc import ABC, abstractmethod
from bisect import bisect_left
from collections.abc import Iterator, Sequence

MAX_SERIES = 256
"""Label values that one metric tells apart; what peers or assets bring beyond that is counted under ``other``."""


class Metric(ABC):
    """One metric, with a series of its own for each combination of label values."""

    kind: str
    """``counter``, ``gauge`` or ``histogram``."""

    def __init__(self, name: str, text: str, labels: Sequence[str] = ()) -> None:
        """Declare it.

        Args:
            name: as Prometheus wants it: letters, digits and underscores.
            text: what it counts, for whoever reads the exposition.
            labels: names of its labels.
        """
        self.name, self.text, self.labels = name, text, tuple(labels)
        self._lock = threading.Lock()

    def expose(self) -> Iterator[str]:
        """Its lines of the exposition."""
        yield f"# HELP {self.name} {_escape(self.text)}"
        yield f"# TYPE {self.name} {self.kind}"
        yield from self._samples()

    @abstractmethod
    def _samples(self) -> Iterator[str]: ...

    def _key(self, values: tuple[str, ...], known: object) -> tuple[str, ...]:
        if len(values) != len(self.labels):
            raise TypeError(f"{self.name} has the labels {self.labels}, not values {values}")
        if values and isinstance(known, dict) and values not in known and len(known) >= MAX_SERIES:
            return ("other",) * len(values)
        return values

    def _line(self, suffix: str, labels: Sequence[tuple[str, str]], value: float) -> str:
        inner = ",".join(f'{name}="{_escape(text, quote=True)}"' for name, text in labels)
        return f"{self.name}{suffix}{'{' + inner + '}' if inner else ''} {_number(value)}"


class _Scalar(Metric):
    def __init__(self, name: str, text: str, labels: Sequence[str] = ()) -> None:
        super().__init__(name, text, labels)
        self._values: dict[tuple[str, ...], float] = {} if self.labels else {(): 0.0}

    def value(self, *labels: str) -> float:
        """What it stands at; 0 for label values that never came."""
        with self._lock:
            return self._values.get(labels, 0.0)

    def _add(self, amount: float, labels: tuple[str, ...]) -> None:
        with self._lock:
            key = self._key(labels, self._values)
            self._values[key] = self._values.get(key, 0.0) + amount

    def _samples(self) -> Iterator[str]:
        with self._lock:
            values = sorted(self._values.items())
        for labels, value in values:
            yield self._line("", list(zip(self.labels, labels, strict=True)), value)


class Counter(_Scalar):
    """Only ever grows."""

    kind = "counter"

    def inc(self, *labels: str, by: float = 1.0) -> None:
        """Count ``by`` more, of the series with these label values."""
        if not by >= 0:
            raise ValueError(f"{self.name} is a counter, it cannot shrink by {-by}")
        self._add(by, labels)


class Gauge(_Scalar):
    """Goes up and down."""

    kind = "gauge"

    def inc(self, *labels: str, by: float = 1.0) -> None:
        """So much more."""
        self._add(by, labels)

    def dec(self, *labels: str, by: float = 1.0) -> None:
        """So much less."""
        self._add(-by, labels)

    def set(self, value: float, *labels: str) -> None:
        """Stand at ``value``."""
        with self._lock:
            self._values[self._key(labels, self._values)] = value


class Histogram(Metric):
    """How values are distributed; without labels."""

    kind = "histogram"

    def __init__(self, name: str, text: str, buckets: Sequence[float]) -> None:
        """Declare it with the upper ends of its buckets, ascending; one without end is added."""
        super().__init__(name, text)
        self._ends = (*buckets, math.inf)
        self._counts = [0] * len(self._ends)
        self._sum = 0.0

    @property
    def count(self) -> int:
        """How many values came."""
        with self._lock:
            return sum(self._counts)

    def observe(self, value: float) -> None:
        """Take one value."""
        with self._lock:
            self._counts[bisect_left(self._ends, value)] += 1
            self._sum += value

    def _samples(self) -> Iterator[str]:
        with self._lock:
            counts, total = list(self._counts), self._sum
        so_far = 0
        for end, count in zip(self._ends, counts, strict=True):
            so_far += count
            yield self._line("_bucket", [("le", _number(end))], so_far)
        yield self._line("_sum", [], total)
        yield self._line("_count", [], so_far)


class Exposition:
    """A set of metrics: those that are attributes of it."""

    def __iter__(self) -> Iterator[Metric]:
        return (value for value in vars(self).values() if isinstance(value, Metric))

    def expose(self) -> str:
        """All of it as Prometheus reads it."""
        return "".join(line + "\n" for metric in self for line in metric.expose())


def _number(value: float) -> str:
    if value == math.inf:
        return "+Inf"
    return str(int(value)) if float(value).is_integer() else repr(float(value))


def _escape(text: str, *, quote: bool = False) -> str:
    text = text.replace("\\", "\\\\").replace("\n", "\\n")
    return text.replace('"', '\\"') if quote else text
