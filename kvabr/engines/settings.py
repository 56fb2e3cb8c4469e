"""Settings that a user gives an engine's adapter as a table of keys: read, checked, and wrong ones named."""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any, TypeVar

from kvabr.types.errors import UsageError

T = TypeVar("T")

Reader = Callable[[Any], Any]
"""Makes the value of a field of what a user gave, or raises ValueError with what is wanted instead."""


def read_settings(kind: type[T], given: Mapping[str, Any], readers: Mapping[str, Reader], where: str) -> T:
    """A dataclass from what a user gave.

    Args:
        kind: the dataclass.
        given: what the user gave, by key.
        readers: by field, what makes its value.
        where: what the user calls the table, for messages.

    Raises:
        UsageError: a key that there is not (the nearest is named), one that is missing, or a value that is none.
    """
    known = {field.name: field for field in fields(kind)}  # type: ignore[arg-type]
    values: dict[str, Any] = {}
    for key, value in given.items():
        if key not in known:
            raise UsageError(f"{where}: there is no key {key!r}; {nearest(key, known)}")
        try:
            values[key] = readers[key](value)
        except (ValueError, TypeError) as error:
            raise UsageError(f"{where}: {key} is {value!r}; it must be {error}") from error
    for name, field in known.items():
        if name not in values and field.default is MISSING and field.default_factory is MISSING:
            raise UsageError(f"{where}: {name} is missing")
    return kind(**values)


def nearest(key: str, known: Collection[str]) -> str:
    """What a user may have meant."""
    close = difflib.get_close_matches(str(key), list(known), n=1, cutoff=0.5)
    return f"did you mean {close[0]!r}?" if close else f"there are {', '.join(known)}"


def text(value: Any) -> str:
    """Text that is not empty."""
    if not isinstance(value, str) or not value:
        raise ValueError("text")
    return value


def path(value: Any) -> Path:
    """A path."""
    return Path(text(value)).expanduser()


def seconds(value: Any) -> float:
    """A positive number."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise ValueError("a positive number")
    return float(value)


def count(value: Any) -> int:
    """A positive whole number."""
    if type(value) is not int or value < 1:
        raise ValueError("a positive whole number")
    return value


def mib(given: int | None) -> int | None:
    """Bytes of a setting in MiB."""
    return None if given is None else given << 20


def flag(value: Any) -> bool:
    """True or false."""
    if not isinstance(value, bool):
        raise ValueError("true or false")  # noqa: TRY004  # told with the key, as every other
    return value


def names(value: Any) -> tuple[str, ...]:
    """A list of names."""
    if not isinstance(value, list | tuple) or not value or not all(isinstance(name, str) and name for name in value):
        raise ValueError("a list of names")
    return tuple(value)
