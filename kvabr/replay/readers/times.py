"""Times in cells: numbers, or dates and times of day."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from datetime import UTC, datetime, timedelta

from kvabr.replay.readers.names import TIME_UNITS

FORMS = "2026-01-31 12:00:00, 2026.01.31_12.00.00, 31.01.2026 12:00:00, 23:59:30, 11:59:30 PM"
"""Examples for error messages. Seconds may have a fraction, and dates a zone (Z, +02:00, CET)."""
DAY_S = 86400.0

_YEAR_FIRST = re.compile(
    r"(?P<Y>\d{4})(?P<a>[-./_])(?P<m>\d\d?)(?P=a)(?P<d>\d\d?)[ T_,-]+"
    r"(?P<H>\d\d?)(?P<b>[:.])(?P<M>\d\d)(?:(?P=b)(?P<S>\d\d)(?:[.,](?P<f>\d{1,9}))?)?(?P<zone> ?\D.*)?"
)
_DAY_FIRST = re.compile(
    r"(?P<d>\d\d?)\.(?P<m>\d\d?)\.(?P<Y>\d{4})[ T_,]+"
    r"(?P<H>\d\d?):(?P<M>\d\d)(?::(?P<S>\d\d)(?:[.,](?P<f>\d{1,9}))?)?(?P<zone> ?\D.*)?"
)
_CLOCK = re.compile(r"(?P<H>\d{1,3}):(?P<M>[0-5]\d):(?P<S>[0-5]\d)(?:[.,](?P<f>\d{1,9}))?")
_HALF = re.compile(r"(?P<time>.*\d) ?(?P<half>[AP])\.?M\.?", re.IGNORECASE)
_OFFSET = re.compile(r"(?:UTC|GMT)?([+-])(\d\d):?(\d\d)?")
_NAMES = {
    -10: ("HST",),
    -9: ("AKST",),
    -8: ("PST", "AKDT"),
    -7: ("MST", "PDT"),
    -6: ("CST", "MDT"),
    -5: ("EST", "CDT"),
    -4: ("EDT",),
    0: ("Z", "UTC", "GMT", "WET"),
    1: ("WEST", "BST", "CET"),
    2: ("CEST", "EET"),
    3: ("EEST", "MSK"),
    9: ("JST", "KST"),
    10: ("AEST",),
    11: ("AEDT",),
}
_ZONES = {name: hours for hours, names in _NAMES.items() for name in names}
"""Hours ahead of UTC, by name. Only differences within a file matter, so an ambiguous ``CST`` is harmless."""

_DATES = (1e9, 4.2e9)
"""Range of numbers that are treated as seconds since 1970: the years 2001 to 2103."""
COARSE_S = 10.0
"""Minimum step, without a named unit, that could be in milliseconds."""
FINE_S = 1e-3
"""Steps below this, without a named unit, may be in hours or days."""


def calendar(text: str) -> float | None:
    """Convert a date and time to seconds since 1970 (UTC if it has no zone); None for other text."""
    return _halved(text.strip(), _calendar)


def clock(text: str) -> float | None:
    """Convert a time of day or an elapsed time to seconds (since midnight); None for other text.

    Hours and minutes alone are rejected, since they could be minutes and seconds.
    """
    return _halved(text.strip(), _clock)


def days(clocks: Sequence[float]) -> list[float]:
    """Make times of day ascend: a time half a day before the previous time is on the next day."""
    found: list[float] = []
    day = 0.0
    for time in clocks:
        if found and time + day < found[-1] - DAY_S / 2:
            day += DAY_S
        found.append(time + day)
    return found


def _halved(text: str, seconds: Callable[[str], float | None]) -> float | None:
    half = _HALF.fullmatch(text)
    if half is None:
        return seconds(text)
    time = seconds(half["time"])
    if time is None or not 1 <= (hour := int(time % DAY_S // 3600)) <= 12:
        return None
    return time + 3600 * (hour % 12 - hour + (12 if half["half"].upper() == "P" else 0))


def _clock(text: str) -> float | None:
    found = _CLOCK.fullmatch(text)
    if found is None:
        return None
    return int(found["H"]) * 3600 + int(found["M"]) * 60 + int(found["S"]) + float(f"0.{found['f'] or 0}")


def _calendar(text: str) -> float | None:
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        found = _YEAR_FIRST.fullmatch(text) or _DAY_FIRST.fullmatch(text)
        return None if found is None else _moment(found)
    return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()


def _moment(found: re.Match[str]) -> float | None:
    shift = _zone((found["zone"] or "").strip())
    if shift is None:
        return None
    try:
        day = datetime(*(int(found[part] or 0) for part in "YmdHMS"), tzinfo=UTC)  # type: ignore[arg-type, misc]
    except ValueError:
        return None
    return (day - shift).timestamp() + float(f"0.{found['f'] or 0}")


def _zone(text: str) -> timedelta | None:
    if not text:
        return timedelta()
    if text.upper() in _ZONES:
        return timedelta(hours=_ZONES[text.upper()])
    offset = _OFFSET.fullmatch(text.upper())
    if offset is None:
        return None
    length = timedelta(hours=int(offset[2]), minutes=int(offset[3] or 0))
    return length if offset[1] == "+" else -length


def unit_of_dates(times: Sequence[float]) -> str | None:
    """Return the unit in which numbers are dates from 2001 to 2103; None if there is none."""
    if not times:
        return None
    low, high = sorted((times[0], times[-1]))
    fits = (unit for unit, length in TIME_UNITS.items() if _DATES[0] <= low * length and high * length < _DATES[1])
    return next(fits, None)
