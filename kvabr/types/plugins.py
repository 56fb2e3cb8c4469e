"""Finds plug-ins by name, by entry point, or in a file: ``NAME``, ``NAME:ARGUMENT``, ``FILE.py:CLASS``.

They are policies and estimators (`kvabr.abr.plugins`), and selectors of passages (`kvabr.blend`). A plug-in that
declares parameters (`kvabr.types.parameters`) accepts them as ``NAME:a=1,b=2`` or ``FILE.py:CLASS:a=1,b=2``.
"""

from __future__ import annotations

import importlib.util
import inspect
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from functools import cached_property
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, TypeVar

from kvabr.types.errors import PolicyError, UnknownPolicyError, did_you_mean
from kvabr.types.parameters import declared, parse

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

T = TypeVar("T")


class Registered(Mapping[str, type[T]]):
    """Classes by name: built-in ones, and those of installed packages, loaded on access."""

    def __init__(self, group: str, builtin: Mapping[str, type[T]]) -> None:
        """``group``: the entry-point group, which is read only for names that are not in ``builtin``."""
        self._group, self._builtin = group, builtin

    @cached_property
    def _added(self) -> Mapping[str, EntryPoint]:
        from importlib.metadata import entry_points  # noqa: PLC0415  # takes as long to load as all of this module

        return {entry.name: entry for entry in entry_points(group=self._group) if entry.name not in self._builtin}

    def __getitem__(self, name: str) -> type[T]:
        """Return the class with a name.

        Raises:
            PolicyError: the class of an installed package cannot be loaded.
        """
        if name in self._builtin:
            return self._builtin[name]
        entry = self._added[name]
        try:
            found: type[T] = entry.load()
        except Exception as error:  # another package's code may raise anything
            raise PolicyError(f"{name} of an installed package cannot be loaded: {error!r} ({entry.value})") from error
        return found

    def __contains__(self, name: object) -> bool:
        return name in self._builtin or name in self._added

    def __iter__(self) -> Iterator[str]:
        return iter([*self._builtin, *self._added])

    def __len__(self) -> int:
        return len(self._builtin) + len(self._added)


def load_plugin(text: str, base: type[T], named: Mapping[str, type[T]], kind: str, command: str) -> Callable[[], T]:
    """Return a factory of plug-ins.

    Args:
        text: see `load_policy`.
        base: required base class.
        named: classes by name, see `Registered`.
        kind: what to call the plug-in in errors.
        command: command that lists such plug-ins, for errors.

    Raises:
        PolicyError: as for `load_policy`.
    """
    cls, argument = find_plugin(text, base, named, kind, command)
    if not argument:
        return _construct(cls, text)
    known = declared(cls)
    if not known or "=" not in argument:
        return _construct(cls, text, argument)
    values = parse(argument)
    if unknown := sorted(set(values) - set(known)):
        raise PolicyError(f"{text}: unknown parameter {', '.join(unknown)}; choose from {', '.join(known)}")
    for name, value in values.items():
        low, high = known[name].low, known[name].high
        if not low <= value <= high:
            raise PolicyError(f"{text}: {name} must be from {low:g} to {high:g}, got {value:g}")
    return _construct(cls, text, **values)


def find_plugin(text: str, base: type[T], named: Mapping[str, type[T]], kind: str, command: str) -> tuple[type[T], str]:
    """Return the class that ``text`` names, and the argument after it."""
    head, _, argument = text.partition(":")
    if head.endswith(".py"):
        name, _, argument = argument.partition(":")
        return _class_in(Path(head), name, base, kind), argument
    if head not in named:
        more = "; the laboratory adds more" if command == "policies" else ""
        raise UnknownPolicyError(
            f"unknown {kind} {text!r}{did_you_mean(head, named)}; choose from {', '.join(sorted(named))}, "
            f"or give FILE.py:CLASS (`kvabr {command}` lists them{more})"
        )
    return named[head], argument


def _construct(cls: type[T], text: str, *arguments: str, **values: float) -> Callable[[], T]:
    build: Callable[..., T] = cls

    def make() -> T:
        try:
            return build(*arguments, **values)
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            raise PolicyError(f"{text}: cannot be created: {error!r} ({where(cls, error)})") from error

    return make


def _class_in(path: Path, name: str, base: type[T], kind: str) -> type[T]:
    if not path.is_file():
        raise UnknownPolicyError(f"{path}: no such file (given as {kind} {path}:{name})")
    module = _import(path)
    found = {
        value.__name__: value
        for value in vars(module).values()
        if inspect.isclass(value) and issubclass(value, base) and value.__module__ == module.__name__
    }
    if not name and len(found) == 1:
        return next(iter(found.values()))
    if name not in found:
        names = ", ".join(found) or "none"
        raise PolicyError(
            f"{path}: contains no {kind} class {name!r} (found: {names}); the class must derive from {_public(base)}"
        )
    if missing := ", ".join(sorted(getattr(found[name], "__abstractmethods__", ()))):
        raise PolicyError(f"{path}:{name} must define {missing}")
    return found[name]


def _public(base: type[Any]) -> str:
    return f"{base.__module__.rpartition('.')[0]}.{base.__name__}"


def _import(path: Path) -> ModuleType:
    name = f"_kvabr_plugin_{path.stem}_{abs(hash(str(path.resolve())))}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise PolicyError(f"{path}: not a Python file; name one that ends in .py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pickling in the plug-in need this
    try:
        spec.loader.exec_module(module)
    except BaseException as error:
        del sys.modules[name]
        if isinstance(error, KeyboardInterrupt):
            raise
        if isinstance(error, SyntaxError):
            line = f": {error.text.strip()}" if error.text else ""
            raise PolicyError(f"{error.filename or path}:{error.lineno}: {error.msg}{line}") from error
        raise PolicyError(f"{path}: cannot be loaded: {error!r} ({where(None, error)})") from error
    return module


def where(cls: type[Any] | None, error: BaseException | None = None) -> str:
    """Return file and line of an error's innermost frame, or else of the class's ``decide``."""
    if isinstance(error, SyntaxError) and error.filename:
        return f"{error.filename}, line {error.lineno}"
    if error is not None and (frames := traceback.extract_tb(error.__traceback__)) and frames[-1].filename != __file__:
        return f"{frames[-1].filename}, line {frames[-1].lineno}"
    if cls is None:
        return "unknown place"
    try:
        target = getattr(cls, "decide", cls)
        _, line = inspect.getsourcelines(target)
        return f"{inspect.getsourcefile(target)}, line {line}"
    except (OSError, TypeError):
        return f"class {cls.__name__}"
