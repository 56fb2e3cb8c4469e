"""Words for counts, as messages and errors say them."""

from __future__ import annotations


def counted(count: int, what: str, many: str = "") -> str:
    """Return a count with its noun: `1 play`, `2 plays`, or in the plural as ``many`` says."""
    return f"{count:,} {what if count == 1 else many or what + 's'}"
