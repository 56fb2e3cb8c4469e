"""Numbers in cells: decimal marks and missing values."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Literal

Mark = Literal["point", "comma"]
MISSING = frozenset(("", "-", "--", "na", "n/a", "nan", "null", "none"))

_COMMA = re.compile(
    r"[-+]?(?:\d*,(?:\d{0,2}|\d{4,})|0\d*,\d{3}|\d{4,},\d{3}|\d{1,3}(?:\.\d{3})+,\d*|\d{1,3}(?:\.\d{3}){2,})"
)
_POINT = re.compile(
    r"[-+]?(?:\d*\.(?:\d{0,2}|\d{4,})|0\d*\.\d{3}|\d{4,}\.\d{3}|\d{1,3}(?:,\d{3})+\.\d*|\d{1,3}(?:,\d{3}){2,})"
)
"""Numbers that are valid only with one decimal mark, by that mark."""


def number(text: str) -> float | None:
    """Return the number that ``text`` spells with a decimal point; None for other text, including ``1_000``."""
    try:
        return float(text) if "_" not in text else None
    except ValueError:
        return None


def decimal_mark(columns: Sequence[Sequence[str]], delimiter: str) -> tuple[Mark | None, bool]:
    """Return the decimal mark in ``columns`` (None if ambiguous), and True if it is proven.

    A mark before three digits may separate thousands. Other numbers prove a decimal mark: ``12,5``, ``0,125``,
    ``1.234,5``. Without proof, a mark that occurs in every number of a column is decimal, since some numbers would not
    have a thousands separator. A decimal comma requires another delimiter.
    """
    if not any("," in cell for column in columns for cell in column) and any(
        _POINT.fullmatch(cell) for column in columns for cell in column
    ):
        return "point", True
    proofs: set[Mark] = set()
    seen: set[str] = set()
    mixed = False
    for column in columns:
        marks: set[str] = set()
        for cell in column:
            text, _, _ = cell.strip().lower().partition("e")
            if text in MISSING:
                continue
            marks.add("," if "," in text else "." if "." in text else "")
            if _COMMA.fullmatch(text):
                proofs.add("comma")
            elif _POINT.fullmatch(text):
                proofs.add("point")
        seen |= marks
        mixed |= len(marks) > 1
    if proofs:
        return (proofs.pop(), True) if len(proofs) == 1 else (None, False)
    if mixed or {",", "."} <= seen or ("," in seen and delimiter == ","):
        return None, False
    return ("comma" if "," in seen else "point"), not {",", "."} & seen


def with_point(cells: Sequence[str], mark: Mark) -> list[str]:
    """Return numbers with a decimal point and without thousands separators."""
    if mark == "comma":
        return [cell.replace(".", "").replace(",", ".") for cell in cells]
    return [cell.replace(",", "") for cell in cells]
