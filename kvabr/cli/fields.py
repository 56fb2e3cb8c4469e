"""Command line options made from the fields of dataclasses of options (`kvabr.types.fields`)."""

from __future__ import annotations

import argparse
from collections.abc import Collection
from typing import Any, TypeVar

from kvabr.types.errors import UsageError
from kvabr.types.fields import OptionError, OptionField, docstrings, option_fields

T = TypeVar("T")


def add_fields(
    parser: argparse._ActionsContainer, kind: type, only: Collection[str] = (), prefix: str = "", **defaults: Any
) -> None:
    """Declare options for the fields of a dataclass; `read_fields` reads them.

    Args:
        parser: takes the options.
        kind: the dataclass.
        only: names of the fields; empty: all.
        prefix: before the names, such as ``upstream-``.
        defaults: of this command, by field.
    """
    groups: dict[str, argparse._ActionsContainer] = {}
    fields, docs = option_fields(kind), docstrings(kind)
    for name in only or fields:
        shown = fields[name].shown
        if shown is None:
            continue
        if shown.alone and shown.alone not in groups:
            groups[shown.alone] = parser.add_mutually_exclusive_group()
        into = groups.get(shown.alone, parser)
        _add(into, fields[name], first_sentence(docs[name]), prefix, defaults.get(name, fields[name].default))


def read_fields(args: argparse.Namespace, kind: type[T], prefix: str = "", **more: Any) -> T:
    """Return the dataclass with the values of the options that were declared, and ``more`` fields.

    Raises:
        UsageError: a value is out of bounds; the message names the option.
    """
    given, flags = {}, {}
    for name, field in option_fields(kind).items():
        flags[name] = flag = _flags(field, prefix)[0][-1]
        dest = flag.removeprefix("--").replace("-", "_")
        if field.shown is not None and hasattr(args, dest):
            given[name] = getattr(args, dest)
    try:
        return kind(**given | more)
    except OptionError as error:
        raise UsageError(f"{flags[error.name]} {error.value}: {error.why}") from None


def _add(parser: argparse._ActionsContainer, field: OptionField, said: str, prefix: str, default: Any) -> None:
    flags, metavar = _flags(field, prefix)
    if field.kind is bool:
        parser.add_argument(*flags, action="store_true", help=said)
        return
    if default is not None and "default" not in said:
        said += f" (default: {default:g})" if isinstance(default, float) else f" (default: {default})"
    how: dict[str, Any] = {"choices": field.choices} if field.choices else {"metavar": metavar, "type": field.kind}
    parser.add_argument(*flags, default=default, help=said.replace("%", "%%"), **how)


def _flags(field: OptionField, prefix: str) -> tuple[list[str], str]:
    """Return the flags of a field, the long one last, and its metavar."""
    words = field.shown.words.split() if field.shown is not None else []
    flags = [word for word in words if word.startswith("-")] or [f"--{field.name.replace('_', '-')}"]
    metavar = next((word for word in words if not word.startswith("-")), field.name.upper())
    return [flag.replace("--", f"--{prefix}") for flag in flags if not prefix or flag.startswith("--")], metavar


def first_sentence(doc: str) -> str:
    """Return the first sentence of a docstring as help has it, without a capital and a full stop."""
    first = doc.partition(". ")[0].rstrip(".").replace("``", "")
    return first[:1].lower() + first[1:] if first[1:2].islower() else first
