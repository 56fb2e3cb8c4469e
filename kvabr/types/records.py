"""Records: dataclasses that travel as JSON. Their annotations are all there is to know of their fields.

A field's type says what may be in it, and `msgspec.Meta` within which bounds: `check` holds a record that was made here
to that, `decode` and `read` one that came from a peer or a store. A field whose metadata are `IN_MEMORY` is no part of
the JSON. So a field that is added to a record is written, read and checked without a line anywhere else.

A decoder does not let go of the interpreter, so that a long call stops the event loop in whatever thread it runs.
`read` therefore first finds where the members of an object begin and end, which takes a nanosecond or two a byte, then
decodes one after the other, long lists of records element by element. JSON of many tiny values, which would take long
for its size, is refused before that (`_check_dense`), and so is much that this version does not know.

msgspec works out the types of a class at its first use, without a lock: a thread that meets a half-built one ends the
process with a segmentation fault. So all work on annotations happens here, under one lock (`once`), and no other
module of kvabr hands msgspec a type.
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
"""Metadata of a field that is no part of the JSON."""
MAX_SKIPPED_BYTES = 32 << 10
"""Most bytes of what this version does not know, and of white space and names, among the members of a record."""
_VALUE_BYTES = 8
"""Least bytes of a value on average: tokens, sizes, losses, digests and names of tracks have more."""
_SPARE_VALUES, MAX_OBJECTS = 4096, 4096
"""Values that may be smaller; and objects in one text."""
_SMALL_BYTES = 1 << 20
MAX_FLOAT = sys.float_info.max

Number = Annotated[float, Meta(ge=-MAX_FLOAT, le=MAX_FLOAT)]
"""A number that is finite."""
Positive = Annotated[float, Meta(ge=0, le=MAX_FLOAT)]
"""A finite number that is not negative."""
Sha256 = Annotated[str, Meta(pattern=r"^[0-9a-f]{64}\Z")]
"""SHA-256 in hex."""

_REFUSED = (msgspec.MsgspecError, RecursionError, ValueError, TypeError, OverflowError)


def decode(data: bytes | memoryview | Raw, kind: type[T], what: str, where: str = "") -> T:
    """Return JSON from an untrusted source as a type, within its bounds.

    Args:
        data: the JSON.
        kind: the type.
        what: begins the error's message.
        where: place of the data in a larger text, for the error's message: ``.tracks[0]``.

    Raises:
        FormatError: it is something else; the message says where.
    """
    try:
        found: T = _decoder(kind).decode(data)
    except _REFUSED as error:
        raise _wrong(error, what, where) from error
    return found


def convert(value: Any, kind: type[T], what: str, where: str = "") -> T:
    """Return a plain value as a type; as `decode`."""
    try:
        return msgspec.convert(value, built(kind))
    except _REFUSED as error:
        raise _wrong(error, what, where) from error


def check(record: object, what: str) -> None:
    """Raise a `FormatError` unless every field of a record is within its bounds; for its ``__post_init__``."""
    kinds, values, every = _bounded(type(record))
    try:
        msgspec.convert(values(record), every)
    except _REFUSED:
        for name, kind in kinds.items():  # which of them?
            convert(getattr(record, name), kind, what, f".{name}")
        raise


def read(data: bytes, kind: type[T], what: str, schema: str | None = None) -> T:
    """Return a record from the JSON of an untrusted source, without keeping other threads waiting.

    Args:
        data: the JSON.
        kind: the dataclass. Fields whose class has a method ``from_json`` are read by that.
        what: begins the error's message.
        schema: the one that this version reads, if the record has one; it becomes no field.

    Raises:
        FormatError: it is something else, see `decode`; a `VersionError` if another version of kvabr has written it.
    """
    _check_dense(data, what)
    parts = decode(data, _parts(kind), what)
    if schema is not None:
        said = None if parts.schema is None else decode(parts.schema, str, what, ".schema")
        check_schema(said, what, schema)
    given = {name: part for name in parts.__struct_fields__ if (part := getattr(parts, name)) is not None}
    if len(data) - sum(map(_bytes, given.values())) > MAX_SKIPPED_BYTES:
        raise FormatError(f"{what}: more than {MAX_SKIPPED_BYTES} bytes of what this version does not know")
    if lacks := [each.name for each in _fields(kind) if each.default is MISSING and each.name not in given]:
        raise FormatError(f"{what}: a field is missing, {lacks[0]}")
    kinds = _published(kind)
    own = {name: _read(part, kinds[name], what, f".{name}") for name, part in given.items() if name in kinds}
    return kind(**own)


class _Schema(msgspec.Struct):
    schema: str | None = None


def read_schema(data: bytes, what: str, known: str) -> None:
    """Check the schema that an object of JSON says it has; errors as `decode` and `check_schema`."""
    check_schema(decode(data, _Schema, what).schema, what, known)


def check_schema(found: object, what: str, known: str) -> None:
    """Raise unless this version reads a schema.

    Raises:
        VersionError: it is that of another version.
        FormatError: it is none of kvabr's.
    """
    if found == known:
        return
    told = repr(str(found)[:80])
    newer = str(found).partition("/")[0] == known.partition("/")[0]
    hint = "it was written by another version: upgrade kvabr" if newer else f"is this a {what}?"
    kind = VersionError if newer else FormatError
    raise kind(f"{what}: schema is {told}, this version reads {known!r}; {hint}")


def to_json(record: object, *always: str, last: tuple[str, ...] = ()) -> dict[str, Any]:
    """Return the fields of a record as plain JSON values; what is its default is left out.

    Args:
        record: the record.
        always: fields that are never left out.
        last: fields that come last, in this order.
    """
    value = {}
    for each in _fields(type(record)):
        own = getattr(record, each.name)
        if each.name in always or each.default is MISSING or own != each.default:
            value[each.name] = _to_plain(own)
    return value | {name: value.pop(name) for name in last if name in value}


def fields_of(record: object, kind: type) -> dict[str, Any]:
    """Return the fields that a record has as one of a type: its own, or one that it derives from."""
    return {each.name: getattr(record, each.name) for each in _fields(kind)}


def own_state(record: object) -> dict[str, Any]:
    """Return all fields of a dataclass, as it is to be pickled: without what it has worked out from them and keeps."""
    return {each.name: getattr(record, each.name) for each in fields(cast("Any", record))}


# ------------------------------------------------------- what annotations say


@once
def _decoder(kind: Any) -> msgspec.json.Decoder[Any]:
    return msgspec.json.Decoder(kind)


@once
def _message_decoder(kind: Any) -> msgspec.msgpack.Decoder[Any]:
    return msgspec.msgpack.Decoder(kind)


def message_decoder(kind: type[T]) -> msgspec.msgpack.Decoder[T]:
    """Return the decoder of MessagePack as a type."""
    return _message_decoder(kind)


def built(kind: type[T]) -> type[T]:
    """Return a type for `msgspec.convert`, once msgspec knows all classes in it."""
    _decoder(kind)
    return kind


@once
def _fields(kind: Any) -> tuple[Field[Any], ...]:
    return tuple(each for each in fields(kind) if each.metadata != IN_MEMORY)


@once
def _published(kind: Any) -> dict[str, Any]:
    """Return the types of a record's fields by name."""
    hints = get_type_hints(kind, include_extras=True)
    return {each.name: hints[each.name] for each in _fields(kind)}


@once
def _bounded(kind: Any) -> tuple[dict[str, Any], Callable[[object], object], Any]:
    """Return the types of a record's fields but those that are records, what gets their values, and its type."""
    kinds = {name: one for name, one in _published(kind).items() if not _is_record(one)}
    every = GenericAlias(tuple, tuple(kinds.values())) if len(kinds) > 1 else next(iter(kinds.values()))
    return kinds, attrgetter(*kinds), built(cast("type[Any]", every))


@once
def _parts(kind: Any) -> type[Any]:
    """Return the type of the members of a record, whose bytes are found but not decoded; None: not there."""
    kinds = {name: list[Raw] if _element(one) else Raw for name, one in _published(kind).items()}
    return msgspec.defstruct(kind.__name__, [(name, one, None) for name, one in {**kinds, "schema": Raw}.items()])


def _element(kind: Any) -> Any:
    """Return the record of which a field has a list; None: it has none."""
    inner = get_args(_only(kind))
    return inner[0] if get_origin(_only(kind)) is tuple and _is_record(inner[0]) else None


def _bytes(part: Raw | list[Raw]) -> int:
    return sum(map(len, part)) if isinstance(part, list) else len(part)


def _is_record(kind: Any) -> bool:
    return hasattr(_only(kind), "__dataclass_fields__")


def _only(kind: Any) -> Any:
    """Return the class of a field that has bounds, or may be None as well."""
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
    """Raise a `FormatError` for JSON that is made of values too small to be a record's, or of too many objects."""
    objects = at = 0
    while objects <= MAX_OBJECTS and (at := data.find(b"{", at) + 1):
        objects += 1
    if len(data) <= _SMALL_BYTES:
        values = data.count(b",")
    else:
        import numpy as np  # noqa: PLC0415  # counts five times as fast as bytes do, and loads slowly

        values = int(np.count_nonzero(np.frombuffer(data, np.uint8) == ord(",")))
    if values > _SPARE_VALUES + len(data) // _VALUE_BYTES or objects > MAX_OBJECTS:
        raise FormatError(f"{what}: {len(data)} bytes of nothing but small values; is this a {what}?")


def _wrong(error: Exception, what: str, where: str) -> FormatError:
    """Return an error that says what is wrong, and in which field."""
    if isinstance(error, FormatError):
        return error
    told = "values are nested too deeply" if isinstance(error, RecursionError) else str(error)
    if not isinstance(error, msgspec.ValidationError):
        told = f"not JSON ({told})"
    said, at, path = told.partition(" - at `$")
    place = f"{where}{path[:-1]}" if at else where
    return FormatError(f"{what}: {said}" + (f", at {place.removeprefix('.')}" if place else ""))
