"""Records: dataclasses that are transferred as JSON and defined entirely by their annotations.

`msgspec.Meta` gives the bounds of a field. `check` validates a record created here; `decode` and `read` validate
untrusted input. Fields with metadata `IN_MEMORY` are not part of the JSON.

A msgspec decoder holds the GIL, so a long call would block the event loop. `read` therefore first finds the members of
an object (1 to 2 ns per byte), then decodes each member separately, and long lists of records element by element. JSON
with too many tiny values is rejected first (`_check_dense`), and so is too much unknown data.

msgspec resolves the types of a class at first use, without a lock; a second thread that uses a half-built class crashes
the process. So all work on annotations happens here under one lock (`once`), and no other module passes a type to
msgspec.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import MISSING, Field, fields
from operator import attrgetter
from types import GenericAlias, NoneType, UnionType
from typing import Annotated, Any, TypeVar, Union, cast, get_args, get_origin, get_type_hints

import msgspec
from msgspec import Meta, Raw

from kvabr.types.errors import FormatError, VersionError
from kvabr.types.once import once

T = TypeVar("T")

IN_MEMORY = {"in memory": True}
"""Metadata of a field that is not part of the JSON."""
MAX_SKIPPED_BYTES = 32 << 10
"""Maximum bytes of unknown members, white space and names in a record."""
_VALUE_BYTES = 8
"""Minimum average bytes per value; tokens, sizes, losses, digests and track names are longer."""
_BASE_VALUES, MAX_OBJECTS = 4096, 4096
"""Number of values that may be smaller; maximum number of objects per text."""
_SMALL_BYTES = 1 << 20
MAX_FLOAT = sys.float_info.max

Number = Annotated[float, Meta(ge=-MAX_FLOAT, le=MAX_FLOAT)]
Positive = Annotated[float, Meta(ge=0, le=MAX_FLOAT)]
Sha256 = Annotated[str, Meta(pattern=r"^[0-9a-f]{64}\Z")]

_REFUSED = (msgspec.MsgspecError, RecursionError, ValueError, TypeError, OverflowError)


def decode(data: bytes | memoryview | Raw, kind: type[T], what: str, where: str = "") -> T:
    """Decode untrusted JSON as a type, and check its bounds.

    ``what`` starts the error message; ``where`` is the place in a larger text, such as ``.tracks[0]``. Raise
    `FormatError`, which names the place, if the data does not match.
    """
    try:
        found: T = _decoder(kind).decode(data)
    except _REFUSED as error:
        raise _wrong(error, what, where) from error
    return found


def convert(value: Any, kind: type[T], what: str, where: str = "") -> T:
    """Convert a plain value to a type; errors as for `decode`."""
    try:
        return msgspec.convert(value, built(kind))
    except _REFUSED as error:
        raise _wrong(error, what, where) from error


def check(record: object, what: str) -> None:
    """Raise `FormatError` if a field of a record is out of bounds; for ``__post_init__``."""
    kinds, values, every = _bounded(type(record))
    try:
        msgspec.convert(values(record), every)
    except _REFUSED:
        for name, kind in kinds.items():
            convert(getattr(record, name), kind, what, f".{name}")
        raise


def read(data: bytes, kind: type[T], what: str, schema: str | None = None) -> T:
    """Parse a record (a dataclass) from untrusted JSON without blocking other threads for long.

    If a field's type has a ``from_json`` method, it is used. ``what`` starts the error message; ``schema`` is the
    required value of the member ``schema``, which is not a field. Raise `FormatError` like `decode`, `VersionError` if
    another version of kvabr wrote the JSON.
    """
    _check_dense(data, what)
    parts = decode(data, _parts(kind), what)
    if schema is not None:
        written = None if parts.schema is None else decode(parts.schema, str, what, ".schema")
        check_schema(written, what, schema)
    given = {name: part for name in parts.__struct_fields__ if (part := getattr(parts, name)) is not None}
    if len(data) - sum(map(_bytes, given.values())) > MAX_SKIPPED_BYTES:
        raise FormatError(f"{what}: more than {MAX_SKIPPED_BYTES} bytes of fields that this version does not know")
    if lacks := [each.name for each in _fields(kind) if each.default is MISSING and each.name not in given]:
        raise FormatError(f"{what}: a field is missing, {lacks[0]}")
    kinds = _published(kind)
    own = {name: _read(part, kinds[name], what, f".{name}") for name, part in given.items() if name in kinds}
    return kind(**own)


class _Schema(msgspec.Struct):
    schema: str | None = None


def read_schema(data: bytes, what: str, known: str) -> None:
    """Check the schema of a JSON object; errors as for `decode` and `check_schema`."""
    check_schema(decode(data, _Schema, what).schema, what, known)


def check_schema(found: object, what: str, known: str) -> None:
    """Raise `VersionError` for a schema of another version, `FormatError` for one that is not kvabr's."""
    if found == known:
        return
    shown = repr(str(found)[:80])
    newer = str(found).partition("/")[0] == known.partition("/")[0]
    hint = "it was written by another version: upgrade kvabr" if newer else f"is this a {what}?"
    kind = VersionError if newer else FormatError
    raise kind(f"{what}: schema is {shown}, this version reads {known!r}; {hint}")


def to_json(record: object, *always: str, last: tuple[str, ...] = ()) -> dict[str, Any]:
    """Return the fields of a record as plain JSON values, without defaults.

    Fields in ``always`` are included even if they have their default value; those in ``last`` are put last, in this
    order.
    """
    value = {}
    for each in _fields(type(record)):
        own = getattr(record, each.name)
        if each.name in always or each.default is MISSING or own != each.default:
            value[each.name] = _to_plain(own)
    return value | {name: value.pop(name) for name in last if name in value}


def fields_of(record: object, kind: type) -> dict[str, Any]:
    """Return the fields of a record that ``kind``, its class or a base class, defines."""
    return {each.name: getattr(record, each.name) for each in _fields(kind)}


def own_state(record: object) -> dict[str, Any]:
    """Return all fields for pickling, without values of cached properties."""
    return {each.name: getattr(record, each.name) for each in fields(cast("Any", record))}


# ------------------------------------------------------- what annotations say


@once
def _decoder(kind: Any) -> msgspec.json.Decoder[Any]:
    return msgspec.json.Decoder(kind)


@once
def _message_decoder(kind: Any) -> msgspec.msgpack.Decoder[Any]:
    return msgspec.msgpack.Decoder(kind)


def message_decoder(kind: type[T]) -> msgspec.msgpack.Decoder[T]:
    """Return a MessagePack decoder for a type."""
    return _message_decoder(kind)


def built(kind: type[T]) -> type[T]:
    """Return ``kind`` with all its classes resolved, ready for `msgspec.convert`."""
    _decoder(kind)
    return kind


@once
def _fields(kind: Any) -> tuple[Field[Any], ...]:
    return tuple(each for each in fields(kind) if each.metadata != IN_MEMORY)


@once
def _published(kind: Any) -> dict[str, Any]:
    hints = get_type_hints(kind, include_extras=True)
    return {each.name: hints[each.name] for each in _fields(kind)}


@once
def _bounded(kind: Any) -> tuple[dict[str, Any], Callable[[object], object], Any]:
    kinds = {name: one for name, one in _published(kind).items() if not _is_record(one)}
    every = GenericAlias(tuple, tuple(kinds.values())) if len(kinds) > 1 else next(iter(kinds.values()))
    return kinds, attrgetter(*kinds), built(cast("type[Any]", every))


@once
def _parts(kind: Any) -> type[Any]:
    kinds = {name: list[Raw] if _element(one) else Raw for name, one in _published(kind).items()}
    return msgspec.defstruct(kind.__name__, [(name, one, None) for name, one in {**kinds, "schema": Raw}.items()])


def _element(kind: Any) -> Any:
    inner = get_args(_only(kind))
    return inner[0] if get_origin(_only(kind)) is tuple and _is_record(inner[0]) else None


def _bytes(part: Raw | list[Raw]) -> int:
    return sum(map(len, part)) if isinstance(part, list) else len(part)


def _is_record(kind: Any) -> bool:
    return hasattr(_only(kind), "__dataclass_fields__")


def _only(kind: Any) -> Any:
    if get_origin(kind) is Annotated:
        return get_args(kind)[0]
    either = get_origin(kind) in (Union, UnionType)
    return next(each for each in get_args(kind) if each is not NoneType) if either else kind


def _read(part: Raw | list[Raw], kind: Any, what: str, where: str) -> Any:
    if isinstance(part, list):
        return tuple(decode(each, _element(kind), what, f"{where}[{number}]") for number, each in enumerate(part))
    one = _only(kind)
    if not hasattr(one, "from_json"):
        return decode(part, kind, what, where)
    plain = decode(part, object, what, where)
    return None if plain is None and one is not kind else one.from_json(plain)


def _to_plain(value: Any) -> Any:
    if hasattr(value, "to_json"):
        return value.to_json()
    if isinstance(value, tuple | list):
        plain = not value or isinstance(value[0], str | int | float)
        return list(value) if plain else [_to_plain(each) for each in value]
    return to_json(value) if hasattr(value, "__dataclass_fields__") else value


def _check_dense(data: bytes, what: str) -> None:
    """Raise `FormatError` for JSON with values too small for a record, or with too many objects."""
    objects = at = 0
    while objects <= MAX_OBJECTS and (at := data.find(b"{", at) + 1):
        objects += 1
    if len(data) <= _SMALL_BYTES:
        values = data.count(b",")
    else:
        import numpy as np  # noqa: PLC0415  # counts five times as fast as bytes, but loads slowly

        values = int(np.count_nonzero(np.frombuffer(data, np.uint8) == ord(",")))
    if values > _BASE_VALUES + len(data) // _VALUE_BYTES or objects > MAX_OBJECTS:
        raise FormatError(f"{what}: {len(data)} bytes with too many small values or objects; is this a {what}?")


def _wrong(error: Exception, what: str, where: str) -> FormatError:
    if isinstance(error, FormatError):
        return error
    problem = "values are nested too deeply" if isinstance(error, RecursionError) else str(error)
    if not isinstance(error, msgspec.ValidationError):
        problem = f"not JSON ({problem})"
    message, at, path = problem.partition(" - at `$")
    place = f"{where}{path[:-1]}" if at else where
    return FormatError(f"{what}: {message}" + (f", at {place.removeprefix('.')}" if place else ""))
