"""Arguments of public calls are of the types that their signatures say, or a `UsageError` names the one that is not.

`checked` is put on functions and methods, `check_fields` into `__post_init__` of dataclasses. The annotations are all
there is to write. What a type cannot say, such as the range of a number, the call checks itself.
"""

from __future__ import annotations

import inspect
import math
import os
import types
from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import fields
from functools import cache, partial, wraps
from operator import index
from typing import (
    Any,
    Literal,
    ParamSpec,
    SupportsFloat,
    SupportsIndex,
    TypeVar,
    Union,
    cast,
    get_args,
    get_origin,
    get_type_hints,
)

from kvabr.types.errors import UsageError

P = ParamSpec("P")
R = TypeVar("R")

_WORDS: dict[object, str] = {
    float: "a number",
    int: "a whole number",
    bool: "True or False",
    str: "text",
    bytes: "bytes",
    os.PathLike: "a path",
    type(None): "None",
}


def checked(call: Callable[P, R]) -> Callable[P, R]:
    """Return a function, coroutine function or method that checks the types of its arguments before anything else.

    Numbers that are none (NaN) and texts with a NUL character are refused as well, and True is no number. Of a sequence
    of whole numbers the elements are not looked at.
    """
    name = call.__qualname__.removesuffix(".__init__")
    signature = inspect.signature(call)
    variable = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    fixed = {each.name for each in signature.parameters.values() if each.kind not in variable}

    def check(args: tuple[object, ...], kwargs: dict[str, object]) -> None:
        hints = _hints(call)
        try:
            bound = signature.bind(*args, **kwargs)
        except TypeError:
            return  # the call itself says it best, with its name
        for argument, value in bound.arguments.items():
            if argument in fixed and argument in hints:
                check_type(f"{name}: {argument}", value, hints[argument])

    if inspect.iscoroutinefunction(call):

        @wraps(call)
        async def checking(*args: P.args, **kwargs: P.kwargs) -> object:
            check(args, kwargs)
            return await call(*args, **kwargs)

        return cast("Callable[P, R]", checking)

    @wraps(call)
    def checking_now(*args: P.args, **kwargs: P.kwargs) -> R:
        check(args, kwargs)
        return call(*args, **kwargs)

    return checking_now


def check_fields(value: object) -> None:
    """Raise `UsageError` unless the fields of a dataclass are of the types that it says."""
    kind: Any = type(value)
    for name, test, hint in _fields(kind):
        if not test(held := getattr(value, name)):
            check_type(f"{kind.__name__}: {name}", held, hint)


def check_type(what: str, value: object, hint: Any) -> None:
    """Raise `UsageError` unless ``value`` is of the type that an annotation says; ``what`` names it."""
    if not _test(hint)(value):
        kind = "" if value is None else f", of the type {type(value).__name__}"
        if isinstance(value, float) and math.isnan(value):
            raise UsageError(f"{what} is nan; it must be {_named(hint)}")
        if isinstance(value, str | os.PathLike) and "\0" in str(value):
            raise UsageError(f"{what} has a NUL character, which no name or path may have")
        shown = "a secret" if what.endswith(_SECRETS) else " ".join(repr(value).split())
        shown = shown if len(shown) <= _MOST_SHOWN else f"{shown[:_MOST_SHOWN]} ..."
        at = "; a prompt.json has them as `tokens`" if isinstance(value, Mapping) and "tokens" in value else ""
        raise UsageError(f"{what} is {shown}{kind}; it must be {_named(hint)}{at}")


_SECRETS = (" token", " salt")
"""Ends of the names of arguments that no message quotes."""
_MOST_SHOWN = 60
"""Most characters of a wrong argument that a message quotes."""
_Test = Callable[[Any], bool]


@cache
def _hints(call: Any) -> dict[str, Any]:
    return get_type_hints(call)


@cache
def _fields(kind: Any) -> tuple[tuple[str, _Test, Any], ...]:
    hints = _hints(kind)
    return tuple((field.name, _test(hints[field.name]), hints[field.name]) for field in fields(kind))


@cache
def _test(hint: Any) -> _Test:
    """Return a function that says whether a value is of the type of an annotation; of those unknown here, any is."""
    origin, parts = get_origin(hint), get_args(hint)
    kind = origin or hint
    if origin in (Union, types.UnionType):
        plain = tuple(part for part in parts if isinstance(part, type) and _test(part) is _is_of(part))
        tests = tuple(_test(part) for part in parts if part not in plain)
        return lambda value: isinstance(value, plain) or any(test(value) for test in tests)
    if origin is Literal:
        return lambda value: any(type(value) is type(part) and value == part for part in parts)
    if kind is tuple and parts:
        return partial(_is_tuple, tuple(_test(part) for part in parts if part is not ...), endless=parts[-1] is ...)
    if kind is Sequence:
        # Token ids are checked one by one where they are encoded; doing it here too would take long.
        return _is_sequence if parts in ((), (int,)) else partial(_is_sequence_of, _test(parts[0]))
    if getattr(kind, "_is_protocol", False):
        return partial(_has, _members(kind))
    own: dict[object, _Test] = {float: _is_number, int: _is_whole, str: _is_text, os.PathLike: _is_path}
    own[Callable] = callable
    return own.get(kind) or _is_of(kind)


@cache
def _is_of(kind: Any) -> _Test:
    return (lambda value: isinstance(value, kind)) if isinstance(kind, type) else lambda _: True


def _is_number(value: Any) -> bool:
    if type(value) is float:
        return value == value  # noqa: PLR0124  # NaN is not
    return isinstance(value, SupportsFloat) and not isinstance(value, bool) and _is_read_by(float, value)


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and "\0" not in value


def _is_path(value: Any) -> bool:
    return isinstance(value, os.PathLike) and "\0" not in str(value)


def _is_whole(value: Any) -> bool:
    return isinstance(value, SupportsIndex) and not isinstance(value, bool) and _is_read_by(index, value)


def _is_read_by(convert: Callable[[Any], float], value: Any) -> bool:
    try:
        return not math.isnan(convert(value))
    except (TypeError, ValueError, OverflowError, RuntimeError):
        return False


def _is_tuple(tests: tuple[_Test, ...], value: Any, *, endless: bool) -> bool:
    if not isinstance(value, tuple) or (len(value) != len(tests) and not endless):
        return False
    return all(test(one) for test, one in zip(tests * len(value) if endless else tests, value, strict=True))


def _is_sequence(value: Any) -> bool:
    """Return whether something is an ordered row of elements; arrays and tensors are, though no `Sequence`."""
    if isinstance(value, str | bytes | bytearray | Mapping | AbstractSet | type):
        return False
    return hasattr(value, "__len__") and hasattr(value, "__getitem__")


def _is_sequence_of(test: _Test, value: Any) -> bool:
    return _is_sequence(value) and all(map(test, value))


def _has(members: frozenset[str], value: Any) -> bool:
    return all(hasattr(value, member) for member in members)


def _members(protocol: type) -> frozenset[str]:
    """Return what a class must have to be of a protocol."""
    bases = [base for base in protocol.__mro__ if getattr(base, "_is_protocol", False) and base.__module__ != "typing"]
    names = {name for base in bases for name in (*vars(base), *vars(base).get("__annotations__", ()))}
    return frozenset(name for name in names if not name.startswith("_"))


def _named(hint: Any) -> str:
    origin, parts = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        return " or ".join(dict.fromkeys(_named(part) for part in parts))
    if origin is Literal:
        return " or ".join(map(repr, parts))
    kind: Any = origin or hint
    if kind is tuple and parts:
        return f"a tuple, each of them {_named(parts[0])}"
    if kind is Sequence:
        return "a sequence of token ids" if parts == (int,) else f"a sequence, each of them {_named(*parts)}"
    if getattr(kind, "__name__", "") == "Callable":
        return "a function"
    name = _WORDS.get(kind) or str(getattr(kind, "__name__", kind))
    return name if kind in _WORDS else f"{'an' if name[0] in 'AEIOU' else 'a'} {name}"
