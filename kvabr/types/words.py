"""Counts and ordinals in messages."""

from __future__ import annotations


def counted(count: int, what: str, many: str = "") -> str:
    """Return a count with a noun: `1 play`, `2 plays`, or with ``many``, an irregular plural."""
    return f"{count:,} {what if count == 1 else many or what + 's'}"


def ordinal(number: int) -> str:
    """Return an ordinal: `1st`, `2nd`, `3rd`, `4th`, `11th`."""
    end = "th" if number % 100 in (11, 12, 13) else {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th")
    return f"{number:,}{end}"
