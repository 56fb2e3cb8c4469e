"""Fields of JSON and binary objects from an untrusted store, each checked; `FormatError` says what is wrong."""

from __future__ import annotations

import json
import re
from typing import Any

from kvabr.types.errors import FormatError, VersionError

HEX16, HEX64 = re.compile(r"[0-9a-f]{16}"), re.compile(r"[0-9a-f]{64}")


def check_magic(magic: bytes, version: int, ours: bytes, newest: int, what: str) -> None:
    """Check the magic and the version of a binary object."""
    if magic != ours:
        raise FormatError(f"{what}: begins with {magic!r}, so it is none")
    if version != newest:
        raise VersionError(
            f"{what}: version {version}, this one reads {newest}; it was written by another kvabr, upgrade"
        )


def check_schema(value: dict[str, Any], schema: str, what: str) -> None:
    """Check the schema of a JSON object."""
    found = str(value.get("schema"))[:80]
    if found != schema:
        kind = VersionError if found.partition("/")[0] == schema.partition("/")[0] else FormatError
        raise kind(f"{what}: schema is {found!r}, this version reads {schema!r}; upgrade kvabr if it is newer")


def json_object(data: bytes | memoryview, limit: int, what: str) -> dict[str, Any]:
    """Return an object of JSON of at most ``limit`` bytes."""
    if len(data) > limit:
        raise FormatError(f"{what}: {len(data)} bytes, more than the {limit} allowed")
    try:
        value = json.loads(bytes(data))
    except (ValueError, RecursionError) as error:
        raise FormatError(f"{what}: not JSON") from error
    if not isinstance(value, dict):
        raise FormatError(f"{what}: not an object of JSON")
    return value


def list_of(value: Any, most: int, what: str) -> list[Any]:
    """Return a list of at most ``most`` values."""
    if not isinstance(value, list) or len(value) > most:
        raise FormatError(f"{what}: a list of at most {most} is missing")
    return value


def digests_of(value: Any, most: int) -> tuple[str, ...]:
    """Return a list of at most ``most`` digests of 64 hex digits."""
    listed = list_of(value, most, "span")
    if not all(isinstance(each, str) and HEX64.fullmatch(each) for each in listed):
        raise FormatError("span: a digest is not 64 hex digits")
    return tuple(listed)


def whole(value: Any, least: int, most: int) -> int:
    """Return a whole number within bounds."""
    if type(value) is not int or not least <= value <= most:
        raise FormatError(f"a number of {str(value)[:40]} that is not from {least} to {most}")
    return value
