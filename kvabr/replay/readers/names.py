"""Names of columns and units for the CSV reader.

`ColumnName.of` splits a column name into lower-case words and a unit. `find_time`, `find_end` and `find_rates` choose
columns. `table` renders the tables as Markdown. Unknown and ambiguous names become questions.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from kvabr.replay.trace import BYTES_PER_MBIT

TIME_UNITS = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "ns": 1e-9, "minutes": 60.0, "hours": 3600.0}
_TIME_SPELLINGS = {
    "s": ("s", "sec", "secs", "second", "seconds"),
    "ms": ("ms", "msec", "msecs", "millis", "millisecond", "milliseconds"),
    "us": ("us", "µs", "μs", "usec", "usecs", "micros", "microsecond", "microseconds"),
    "ns": ("ns", "nsec", "nsecs", "nanos", "nanosecond", "nanoseconds"),
    "minutes": ("mins", "minute", "minutes"),
    "hours": ("h", "hrs", "hour", "hours"),
}
"""Spellings of time units, case-insensitive. ``min`` may also mean minimum, so it is resolved by a question."""

BYTES_PER_SECOND = {
    "bit/s": 1 / 8,
    "kbit/s": BYTES_PER_MBIT / 1000,
    "Mbit/s": BYTES_PER_MBIT,
    "Gbit/s": BYTES_PER_MBIT * 1000,
    "Tbit/s": BYTES_PER_MBIT * 1e6,
    "Kibit/s": 1024 / 8,
    "Mibit/s": 1024**2 / 8,
    "Gibit/s": 1024**3 / 8,
    "byte/s": 1.0,
    "kbyte/s": 1e3,
    "Mbyte/s": 1e6,
    "Gbyte/s": 1e9,
    "KiB/s": 1024.0,
    "MiB/s": 1024.0**2,
    "GiB/s": 1024.0**3,
}
"""Bytes per second of each rate unit. Prefixes without ``i`` are powers of 1,000."""

_PREFIXES = {
    "": ("",),
    "k": ("k", "kilo"),
    "M": ("m", "mega"),
    "G": ("g", "giga"),
    "T": ("t", "tera"),
    "Ki": ("ki", "kibi"),
    "Mi": ("mi", "mebi"),
    "Gi": ("gi", "gibi"),
}
_BITS, _BYTES = ("bit", "bits"), ("byte", "bytes", "octet", "octets")
_PER_SECOND = ("ps", "/s", "/sec", "/secs", "/second")
"""How a unit per second ends. In a name, ``per``, ``p`` or a separator can replace the slash: ``mbit_s``,
``bits_per_sec``.
"""


class ColumnKind(NamedTuple):
    """A kind of column, and the words for it."""

    meaning: str
    names: tuple[str, ...]


def _kind(meaning: str, *names: str) -> ColumnKind:
    return ColumnKind(meaning, tuple(name for line in names for name in line.split(", ")))


START = _kind(
    "start of a row",
    "start, start time, time start, start timestamp, timestamp start, interval start, begin, begin time",
    "time begin, timestamp begin",
)
TIME = _kind(
    "time of a row, if there is no column with its start",
    "timestamp, timestamps, time stamp, time, times, datetime, date time, epoch, epoch time, unix time",
    "unix timestamp, unix epoch, time epoch, ts, t, elapsed, elapsed time, time elapsed, relative time",
    "time since start, time of day, clock time, date",
)
END = _kind(
    "end of a row",
    "end, end time, time end, end timestamp, timestamp end, interval end, stop, stop time, time stop",
    "timestamp stop",
)
RATE = _kind(
    "rate",
    "rate, bit rate, bitrate, data rate, datarate, bandwidth, bw, throughput, tput, thpt, capacity",
    "goodput",
)
DOWN = _kind(
    "marks a column of the downlink, which is preferred",
    "download, downlink, downstream, down, dl, rx, recv, received, recieved",
)
UP = _kind(
    "marks a column of the uplink, which is read only if named",
    "upload, uplink, upstream, up, ul, tx, sent, send",
)
AVERAGE = _kind(
    "marks a mean, read if no other column is a rate",
    "average, avg, mean",
)
OTHER = _kind(
    "marks a column that is never the link's rate",
    "min, max, minimum, maximum, peak, std, stddev, median, target, limit, cap, nominal, requested",
    "selected, chosen, video, audio, media, encoded, encoding",
)
COUNTER = _kind(
    "marks a column that counts, which is read only if `--counter` names it",
    "bytes, octets, bits, packets, datagrams, total, cumulative, cum, counter",
)
DIRECTIONS = frozenset((*DOWN.names, *UP.names))
DATE = "date"
ZONE = ("utc", "gmt", "local", "posix")
COUNTS = frozenset((*_BITS, *_BYTES, "kb", "mb", "gb", "kib", "mib", "gib", "b"))

_TIME_UNIT_OF = {spelling: unit for unit, spellings in _TIME_SPELLINGS.items() for spelling in spellings}
_LONE_TIMES = frozenset(word for word in _TIME_UNIT_OF if len(word) > 2)
"""Units that may be the whole name of a time column (``seconds``). Units of two letters (``ms``) could be a delay."""
_RATE_WORDS = frozenset(word for kind in (RATE, DOWN, UP) for name in kind.names for word in name.split())
_PARTS = re.compile(r"[^\W_]+|/")
_BRACKET = re.compile(r"[(\[{<]([^)\]}>]*)[)\]}>]\W*$")
_CAMEL = re.compile(r"(?<=[a-z]{2})(?=[A-Z])")


def _long_units() -> Iterator[tuple[str, str]]:
    for prefix, spellings in _PREFIXES.items():
        for bits, words in ((True, _BITS), (False, _BYTES)):
            unit = f"{prefix}bit/s" if bits else f"{prefix}B/s" if prefix.endswith("i") else f"{prefix}byte/s"
            if unit in BYTES_PER_SECOND:
                for spelling in spellings:
                    for word in words:
                        yield from ((f"{spelling}{word}{per}", unit) for per in _PER_SECOND)


def _short_units() -> Iterator[tuple[str, str]]:
    for prefix in _PREFIXES:
        bit, byte = f"{prefix}bit/s", f"{prefix}B/s" if prefix.endswith("i") else f"{prefix}byte/s"
        byte = byte if byte in BYTES_PER_SECOND else ""
        first = prefix[:1]
        cases = {first.lower() + prefix[1:], first.upper() + prefix[1:]}
        for per in _PER_SECOND:
            for case in cases:
                yield f"{case}b{per}", bit
                yield f"{case}B{per}", byte
            # Without mixed case, only `mbps` means bits by convention; in other spellings, b may be bits or bytes.
            customary = per == "ps" and not prefix.endswith("i")
            yield f"{prefix.lower()}b{per}", bit if customary else ""
            yield f"{prefix.upper()}B{per.upper()}", ""
    yield from (("Bps", ""), ("BPS", ""), ("b/s", ""))


RATE_SPELLINGS: dict[str, str] = {**dict(_long_units()), **dict(_short_units())}


def time_unit(text: str) -> str | None:
    """Return the time unit that ``text`` spells, a key of `TIME_UNITS`; None for other text."""
    return _TIME_UNIT_OF.get(text.strip().lower())


def rate_unit(text: str) -> str | None:
    """Return the rate unit that ``text`` spells, a key of `BYTES_PER_SECOND`.

    Return None for other text, and ``""`` if it could mean bits or bytes (``MBPS``, ``mb/s``).
    """
    if text in BYTES_PER_SECOND:
        return text
    spelt = _spelt([part.group() for part in _PARTS.finditer(text)])
    return RATE_SPELLINGS.get(spelt, RATE_SPELLINGS.get(spelt.lower()) if _is_long(spelt) else None)


def _is_long(spelt: str) -> bool:
    return re.search(r"bit|byte|octet", spelt, re.IGNORECASE) is not None


def _spelt(parts: Sequence[str]) -> str:
    words = [word for word in parts if word.lower() not in ("per", "p", "/")]
    return "/".join(words)


@dataclass(frozen=True, slots=True)
class ColumnName:
    """The parts of a column's name."""

    words: str
    """Lower case, without the unit, separated by spaces."""
    rate: str | None
    """Rate unit, or None; empty if it could mean bits or bytes."""
    time: str | None
    strange: str
    """Any other unit in brackets; also ``min`` after a name of a time."""

    @classmethod
    def of(cls, name: str) -> ColumnName:
        """Split a name such as ``Throughput (Mbit/s)``, ``time_ms`` or ``downloadMbps``."""
        bracket = _BRACKET.search(name)
        if bracket is not None:
            inside = bracket[1].strip()
            words = _split_words(name[: bracket.start()])
            kept = [word for word in inside.split() if word.lower() not in ZONE]
            rate, time = rate_unit(inside), time_unit(" ".join(kept))
            return cls(_plain(words), rate, time, inside if rate is None and time is None and kept else "")
        words = _split_words(name)
        for length in (4, 3, 2, 1):
            if length <= len(words) and (rate := rate_unit(" ".join(words[-length:]))) is not None:
                return cls(_plain(words[:-length]), rate, None, "")
        for length in (3, 2, 1):
            rest = _plain(words[length:]).split()
            if rest and set(rest) <= _RATE_WORDS and (rate := rate_unit(" ".join(words[:length]))) is not None:
                return cls(" ".join(rest), rate, None, "")
        words = [word for word in words if word.lower() not in ZONE]
        if _plain(words[-1:]) == "min" and _plain(words[:-1]) in (*START.names, *TIME.names, *END.names):
            return cls(_plain(words[:-1]), None, None, words[-1])
        time = time_unit(words[-1]) if words else None
        lone = len(words) == 1 and words[0].lower() not in _LONE_TIMES
        if time is not None and not lone:
            return cls(_plain(words[:-1]), None, time, "")
        return cls(_plain(words), None, None, "")

    @property
    def counts(self) -> bool:
        """True for counters of bytes or packets."""
        if self.rate is not None or self.has(RATE):
            return False
        counted = self.words.rpartition(" ")[2] in COUNTS
        return counted or self.has(COUNTER) or self.words.endswith(("bytes", "octets"))

    @property
    def counted(self) -> str | None:
        """Rate unit for the growth of a counter, see `rate_unit`."""
        found = (rate_unit(f"{word}/s") for word in reversed(self.words.split()))
        joined = next((word for word in ("bytes", "octets") if self.words.endswith(word)), "")
        return next((unit for unit in found if unit is not None), rate_unit(f"{joined}/s"))

    def has(self, kind: ColumnKind) -> bool:
        """Return True if a word of the name marks this kind."""
        return not set(kind.names).isdisjoint(self.words.split())


def _split_words(name: str) -> list[str]:
    return [part.group() for part in _PARTS.finditer(_CAMEL.sub(" ", name))]


def _plain(words: Sequence[str]) -> str:
    return " ".join(word.lower() for word in words if word != "/" and word.lower() not in ZONE)


def find_time(header: Sequence[str]) -> int | None:
    """Return the index of the column with the start of a row; None if no column is a time."""
    names = [ColumnName.of(name) for name in header]
    for known in (*START.names, *TIME.names):
        for index, name in enumerate(names):
            if name.words == known and name.rate is None:
                return index
    return next((index for index, name in enumerate(names) if not name.words and name.time), None)


def find_end(header: Sequence[str]) -> int | None:
    """Return the index of the column with the end of a row, or None."""
    names = [ColumnName.of(name) for name in header]
    return next((index for index, name in enumerate(names) if name.rate is None and name.words in END.names), None)


def find_rates(header: Sequence[str]) -> list[int]:
    """Return the indices of possible rate columns: one if the header is unambiguous.

    A column qualifies by a rate unit or a rate name. Columns without a unit are skipped if a column with a unit has the
    same direction. Uplink columns are skipped if there are other columns.
    """
    names = [ColumnName.of(name) for name in header]
    rates = [index for index, name in enumerate(names) if _is_rate(name) and not name.has(OTHER)]
    plain = [index for index in rates if not names[index].has(AVERAGE)] or rates
    with_unit = [index for index in plain if names[index].rate is not None]
    directions = {_direction(names[index]) for index in with_unit}
    likely = with_unit + [
        index for index in plain if names[index].rate is None and _direction(names[index]) not in directions
    ]
    return sorted(index for index in likely if _direction(names[index]) != "up")


def find_related(header: Sequence[str]) -> list[int]:
    """Return columns that are related to a rate but are not a rate: counters, uplinks, vehicle speeds."""
    names = [ColumnName.of(name) for name in header]
    return [
        index
        for index, name in enumerate(names)
        if name.rate is not None or name.counts or name.has(UP) or "speed" in name.words.split() or _is_rate(name)
    ]


def _is_rate(name: ColumnName) -> bool:
    if name.rate is not None:
        return True
    if name.counts or name.time is not None:
        return False
    words = name.words.split()
    left = " ".join(word for word in words if word not in DOWN.names and word not in UP.names)
    left = " ".join(word for word in left.split() if word not in AVERAGE.names)
    return left in RATE.names or (_direction(name) != "" and left in ("", "speed"))


def _direction(name: ColumnName) -> str:
    return "up" if name.has(UP) else "down" if name.has(DOWN) else ""


def table() -> str:
    """Return the accepted names and units as Markdown tables."""
    kinds = (START, TIME, END, RATE, DOWN, UP, AVERAGE, COUNTER, OTHER)
    rows = [f"| {kind.meaning} | {', '.join(f'`{name}`' for name in kind.names)} |" for kind in kinds]
    times = [f"| {unit} | {', '.join(f'`{word}`' for word in words)} |" for unit, words in _TIME_SPELLINGS.items()]
    rates = [f"| {unit} | {', '.join(_examples(unit))} |" for unit in BYTES_PER_SECOND]
    unclear = ", ".join(f"`{word}`" for word in ("MBPS", "mb/s", "kb/s", "Bps"))
    return "\n".join(
        (
            "| column | names |",
            "|---|---|",
            *rows,
            "",
            "| unit of time | spellings |",
            "|---|---|",
            *times,
            "",
            "| unit of rate | spellings, among others |",
            "|---|---|",
            *rates,
            f"| a question | {unclear}: bits or bytes? |",
        )
    )


def _examples(unit: str) -> Iterator[str]:
    prefix, bits = unit.removesuffix("bit/s").removesuffix("byte/s").removesuffix("B/s"), unit.endswith("bit/s")
    letter, word = ("b", "bits") if bits else ("B", "bytes")
    capital = prefix[:1].upper() + prefix[1:]
    long = _PREFIXES[prefix][-1]
    common = (f"{prefix}{letter}ps", f"{capital}{letter}/s", f"{prefix}{word}/sec", f"{prefix}{word}_s")
    yield from (f"`{text}`" for text in (*common, f"{long}{word} per second") if rate_unit(text) == unit)
