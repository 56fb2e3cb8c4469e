"""Options, defined once as fields of frozen dataclasses with type, bounds, default and docstring.

The command line, `kvabr.toml` and engine settings are generated from them (`kvabr.cli.fields`,
`kvabr.engines.settings`). Bounds are from the package annotated-types, as in pydantic:

    timeout_s: Annotated[float, Gt(0), Shown("--timeout S")] = 5.0
    '''Seconds that connecting may take.'''
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import inspect
import itertools
import linecache
import math
import operator
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from annotated_types import Ge, Gt, Le, Lt

from kvabr.types.errors import UsageError

Bound = Gt | Ge | Lt | Le
_BOUNDS = {
    Gt: ("gt", operator.gt, "more than"),
    Ge: ("ge", operator.ge, "at least"),
    Lt: ("lt", operator.lt, "less than"),
    Le: ("le", operator.le, "at most"),
}


@dataclass(frozen=True, slots=True)
class Shown:
    """Shows a field on the command line, as part of an `Annotated` type."""

    words: str = ""
    """Flags and metavar, such as ``-d --deadline S``; for a positional argument only the metavar. Default: ``--`` and
    the name.
    """
    doc: str = ""
    """Help text, for types that several classes use. Default: first sentence of the field's docstring."""
    alone: str = ""
    """Fields with the same word here exclude each other."""
    needs: str = ""
    engines: bool = False
    """True if engine settings have this key."""
    repeated: bool = False
    """True if each use of the option adds a value to a tuple."""
    parse: Callable[[str], Any] | None = None
    """Parses the value, or raises `UsageError`. Default: convert to the field's type."""
    written: bool = False
    """True if the command writes this file, which is then checked at the start."""
    choices: tuple[str, ...] = ()
    """Allowed values, for types other than `Literal`."""


@dataclass(frozen=True, slots=True)
class Heading:
    """Starts a group of options in help: the default of a `ClassVar` before its fields."""

    title: str
    text: str = ""


@dataclass(frozen=True, slots=True)
class OptionGroup:
    """Marks a field that is a dataclass of options, in an `Annotated` type."""

    title: str = ""
    """Title of the group in help. Default: the surrounding group."""
    prefix: str = ""
    """Prefix of the names of its options, such as ``upstream-``."""
    only: tuple[str, ...] = ()
    """Names of fields that are options here. Default: all."""
    defaults: tuple[tuple[str, Any], ...] = ()


@dataclass(frozen=True, slots=True)
class OptionField:
    """A field of a dataclass of options."""

    name: str
    kind: Any
    """Type of one value without None: float, int, str, bool, Path, or a dataclass for an `OptionGroup`."""
    count: int | None
    """Number of values of a tuple, None for any number; 1 for other types."""
    choices: tuple[str, ...]
    """Choices of a `Literal`; empty: any value."""
    default: Any
    """Default value; `dataclasses.MISSING` for required fields."""
    bounds: tuple[Bound, ...]
    shown: Shown | None
    """How the command line shows the field; None if it does not."""
    group: OptionGroup | None
    heading: Heading | None

    def check(self, value: Any) -> None:
        """Raise an `OptionError` if a value is out of bounds."""
        if isinstance(value, tuple):
            for one in value:
                self.check(one)
            return
        if self.choices and value not in self.choices:
            raise OptionError(self.name, value, f"choose from {', '.join(self.choices)}")
        limits = []
        holds = True
        for bound in self.bounds:
            name, compare, words = _BOUNDS[type(bound)]
            limit = getattr(bound, name)
            holds = holds and bool(compare(value, limit))
            limits.append("finite" if limit == math.inf else f"{words} {limit:,}")
        if not holds:
            raise OptionError(self.name, value, f"must be {' and '.join(limits)}")


class OptionError(UsageError):
    """An option has a wrong value."""

    def __init__(self, name: str, value: object, why: str) -> None:
        shown = f"{value:g}" if isinstance(value, float) else repr(value) if isinstance(value, str) else value
        super().__init__(f"{name} is {shown}: {why}")
        self.name, self.value, self.why = name, shown, why


def option_fields(kind: type) -> dict[str, OptionField]:
    """Return the fields of a dataclass of options, by name."""
    if kind not in _FIELDS:
        _FIELDS[kind] = _read_fields(kind)
    return _FIELDS[kind]


_FIELDS: dict[type, dict[str, OptionField]] = {}


def _read_fields(kind: type) -> dict[str, OptionField]:
    known = {field.name: field for field in dataclasses.fields(kind)}
    found, heading = {}, None
    for name, hint in get_type_hints(kind, include_extras=True).items():
        if name in known:
            found[name] = _described(known[name], hint, heading)
        elif isinstance(begun := getattr(kind, name, None), Heading):
            heading = begun
    return found


def check_fields(options: Any) -> None:
    """Raise `OptionError` if a field of a dataclass is out of bounds; convert text to paths."""
    for name, field in option_fields(type(options)).items():
        value = getattr(options, name)
        if field.kind is Path and isinstance(value, str):
            object.__setattr__(options, name, Path(value))
        elif value is not None:
            field.check(value)


def _described(field: dataclasses.Field[Any], hint: Any, heading: Heading | None) -> OptionField:
    bounds: list[Bound] = []
    shown = group = None
    choices: tuple[str, ...] = ()
    count: int | None = 1
    while True:
        if hasattr(hint, "__metadata__"):
            for one in hint.__metadata__:
                if isinstance(one, Shown):
                    shown, choices = one, one.choices
                elif isinstance(one, OptionGroup):
                    group = one
                elif type(one) in _BOUNDS:
                    bounds.append(one)
            hint = hint.__origin__
        elif get_origin(hint) in {Union, UnionType}:
            hint = next(one for one in get_args(hint) if one is not NoneType)
        elif get_origin(hint) is tuple:
            hint, *more = get_args(hint)
            count = None if more == [...] else 1 + len(more)
        elif get_origin(hint) is Literal:
            choices, hint = get_args(hint), str
        else:
            break
    default = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
    return OptionField(field.name, hint, count, choices, default, tuple(bounds), shown, group, heading)


@functools.cache
def docstrings(kind: type) -> dict[str, str]:
    """Return the docstrings of a class's attributes by name, from its source."""
    found = {name: text for base in kind.__bases__ if base is not object for name, text in docstrings(base).items()}
    # `inspect.getsource` parses the whole file, which is slow at a command's start.
    lines = linecache.getlines(inspect.getfile(kind))
    first = next((at for at, line in enumerate(lines) if re.match(rf"class {kind.__name__}\b", line)), len(lines))
    rest = itertools.takewhile(lambda line: line[:1].isspace(), lines[first + 1 :])
    body = ast.parse("".join([*lines[first : first + 1], *rest])).body
    members = body[0].body if body and isinstance(body[0], ast.ClassDef) else []
    for member, second in itertools.pairwise(members):
        if isinstance(member, ast.AnnAssign) and isinstance(member.target, ast.Name):
            match second:
                case ast.Expr(ast.Constant(str(text))):
                    found[member.target.id] = " ".join(text.split())
    return found
