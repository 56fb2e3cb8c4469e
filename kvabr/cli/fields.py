"""Command line options from the fields of dataclasses (`kvabr.types.fields`)."""

from __future__ import annotations

import argparse
import dataclasses
import inspect
import os
from collections.abc import Callable
from typing import Any, TypeVar

from kvabr.cli.options import check_writable
from kvabr.types.errors import UsageError
from kvabr.types.fields import OptionError, OptionField, OptionGroup, check_fields, docstrings, option_fields

T = TypeVar("T")
_WHOLE = OptionGroup()


def command(
    kind: type[T], run: Callable[[T], int], more: Callable[[], str] = str
) -> Callable[[argparse.ArgumentParser], None]:
    """Return the function that declares a command.

    Args:
        kind: dataclass with the options as fields and the help as docstring.
        run: runs the command and returns the exit status.
        more: returns text for the end of the help.
    """

    def add(parser: argparse.ArgumentParser) -> None:
        parser.description, _, text = inspect.cleandoc(kind.__doc__ or "").partition("\n\n")
        parser.epilog = "\n\n".join(filter(None, (text, more())))
        parser.formatter_class = argparse.RawDescriptionHelpFormatter
        add_fields(parser, kind)
        parser.set_defaults(run=lambda args: run(read_fields(args, kind)))

    return add


def add_fields(parser: argparse._ActionsContainer, kind: type, group: OptionGroup = _WHOLE) -> None:
    """Declare options for the fields of a dataclass, or for one group of them; `read_fields` reads them."""
    made: dict[object, argparse._ActionsContainer] = {"": parser, None: parser}
    fields, docs, defaults = option_fields(kind), docstrings(kind), dict(group.defaults)
    for name in group.only or fields:
        field = fields[name]
        if field.heading is not None and field.heading not in made:
            made[field.heading] = parser.add_argument_group(field.heading.title, field.heading.text or None)
        into = made[field.heading]
        if field.group is not None:
            inner = parser.add_argument_group(field.group.title) if field.group.title else into
            add_fields(inner, field.kind, field.group)
        elif field.shown is not None:
            if field.shown.alone not in made:
                made[field.shown.alone] = into.add_mutually_exclusive_group()
            into = made[field.shown.alone] if field.shown.alone else into
            doc = field.shown.doc or first_sentence(docs[name])
            _add(into, field, doc, group.prefix, defaults.get(name, field.default))


def read_fields(args: argparse.Namespace, kind: type[T], group: OptionGroup = _WHOLE) -> T:
    """Return the dataclass with the values of the declared options.

    Raises:
        UsageError: a value is out of bounds or requires another option, or a file cannot be written, or is given for
            two options; the message names the options.
    """
    fields: dict[str, OptionField] = option_fields(kind)
    given: dict[str, Any] = {}
    for name in group.only or fields:
        field = fields[name]
        if field.group is not None:
            given[name] = read_fields(args, field.kind, field.group)
        elif field.shown is not None:
            value = getattr(args, _dest(field, group.prefix))
            given[name] = tuple(value) if isinstance(value, list) else value
    try:
        made = kind(**given)
        check_fields(made)
    except OptionError as error:
        raise UsageError(f"{_title(fields[error.name], group.prefix)} {error.value}: {error.why}") from None
    written: dict[str, str] = {}
    for name, value in given.items():
        shown = fields[name].shown
        if shown is not None and shown.written and value is not None:
            check_writable(value)
            title = _title(fields[name], group.prefix)
            other = written.setdefault(os.path.realpath(value), title)
            if other != title and (value.is_file() or not value.exists()):
                raise UsageError(f"{title} {value}: {other} writes the same file; give another path")
        if shown is not None and shown.needs and value != fields[name].default and not given[shown.needs]:
            title, needed = (_title(fields[each], group.prefix) for each in (name, shown.needs))
            raise UsageError(f"{title} needs {needed}: give both, or neither")
    return made


def _add(parser: argparse._ActionsContainer, field: OptionField, doc: str, prefix: str, default: Any) -> None:
    assert field.shown is not None  # noqa: S101  # other fields are no options
    flags, metavar = _flags(field, prefix)
    doc = doc.replace("%", "%%")
    if field.kind is bool:
        parser.add_argument(*flags, action="store_true", help=doc)
        return
    how: dict[str, Any] = {"type": field.shown.parse or field.kind, "metavar": metavar}
    if field.choices:
        how["choices"] = field.choices
    required = default is dataclasses.MISSING
    if not required:
        shown = default
        if field.count != 1 and default is not None:
            default, shown = list(default), " ".join(default)
        how["default"] = default
        if shown not in (None, "") and "default" not in doc:
            doc += f" (default: {shown:g})" if isinstance(shown, float) else f" (default: {shown})"
    if field.count is None and field.shown.repeated:
        how["action"] = "append"
    elif field.count != 1:
        how["nargs"] = field.count or ("+" if flags or required else "*")
    elif not flags and not required:
        how["nargs"] = "?"
    if flags:
        how["required"] = required
    parser.add_argument(*(flags or [field.name]), help=doc, **how)


def _flags(field: OptionField, prefix: str) -> tuple[list[str], Any]:
    """Return the flags of a field, the long one last, and its metavar (None: argparse's default)."""
    words = field.shown.words.split() if field.shown is not None else []
    flags = [word for word in words if word.startswith("-")]
    names = [word for word in words if not word.startswith("-")]
    if not flags and not names:
        flags = [f"--{field.name.replace('_', '-')}"]
    metavar = None if not names else names[0] if len(names) == 1 else tuple(names)
    return [flag.replace("--", f"--{prefix}") for flag in flags if not prefix or flag.startswith("--")], metavar


def _title(field: OptionField, prefix: str) -> str:
    flags, metavar = _flags(field, prefix)
    return flags[-1] if flags else str(metavar)


def _dest(field: OptionField, prefix: str) -> str:
    flags, _ = _flags(field, prefix)
    return flags[-1].removeprefix("--").replace("-", "_") if flags else field.name


def first_sentence(doc: str) -> str:
    """Return the first sentence of a docstring as help text: lower case, without a full stop."""
    first = doc.partition(". ")[0].rstrip(".").replace("``", "")
    return first[:1].lower() + first[1:] if first[1:2].islower() or first.startswith("A ") else first
