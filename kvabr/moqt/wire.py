"""Primitives of the wire format: integers, byte strings, namespaces, locations, key-value pairs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from kvabr.moqt.codes import SessionCode, SessionFault

MAX_NAMESPACE_FIELDS = 32
MAX_NAME_BYTES = 4096
"""Maximum bytes of a namespace, and of namespace and track name together (draft 18, section 2.4.1)."""
MAX_REASON_BYTES = 1024
MAX_URI_BYTES = 8192
MAX_VALUE_BYTES = 0xFFFF
MAX_INTEGER = (1 << 64) - 1


class Location(NamedTuple):
    """A position in a track, ordered by group, then object."""

    group: int
    object: int


def write_varint(value: int) -> bytes:
    """Encode an integer in the fewest bytes; the leading one bits give the length (draft 18, section 1.4.1)."""
    if 0 <= value < 0x80:  # the most frequent case
        return bytes((value,))
    if not 0 <= value <= MAX_INTEGER:
        raise ValueError(f"integer {value} is outside 0 to {MAX_INTEGER}")
    for size in range(1, 9):
        if value < 1 << (7 * size):
            lead = (0xFF00 >> (size - 1)) & 0xFF
            return (value | lead << (8 * (size - 1))).to_bytes(size, "big")
    return b"\xff" + value.to_bytes(8, "big")


def peek_varint(data: bytes | bytearray | memoryview, at: int) -> tuple[int, int] | None:
    """Return the integer at offset `at`, and the next offset; None if it is incomplete."""
    if at >= len(data):
        return None
    first = data[at]
    if first < 0x80:
        return first, at + 1
    size = 9 - (0xFF - first).bit_length()
    end = at + size
    if end > len(data):
        return None
    bits = 64 if size == 9 else 7 * size
    return int.from_bytes(data[at:end], "big") & ((1 << bits) - 1), end


@dataclass(frozen=True, slots=True)
class Draft:
    """Properties of one draft of moq-transport, see `docs/reference/wire-format.md`."""

    number: int
    sized: bool
    """True if location filters and namespace prefixes begin with their length in bytes; False if filters begin with the
    number of a form.
    """

    @property
    def alpn(self) -> str:
        """The ALPN identifier."""
        return f"moqt-{self.number}"


DRAFT_22 = Draft(22, sized=False)
DRAFT_20 = Draft(20, sized=True)
DRAFTS = (DRAFT_22, DRAFT_20)


def by_alpn(alpn: str) -> Draft | None:
    """Return the draft of an ALPN identifier, or None."""
    return next((draft for draft in DRAFTS if draft.alpn == alpn), None)


class Incomplete(Exception):  # noqa: N818  # not an error: the rest is still on its way
    """Raised when a `Reader` reaches the end of partial data."""


class Reader:
    """Parses values. Every method raises SessionFault for malformed bytes."""

    def __init__(self, data: bytes | bytearray | memoryview, *, at: int = 0, partial: bool = False) -> None:
        """``partial``: raise Incomplete, instead of SessionFault, at the end of the data."""
        self._data, self.at, self._partial = data, at, partial

    @property
    def left(self) -> int:
        """Number of unread bytes."""
        return len(self._data) - self.at

    def varint(self) -> int:
        """Read an integer."""
        found = peek_varint(self._data, self.at)
        if found is None:
            raise self._short("message ends inside an integer")
        self.at = found[1]
        return found[0]

    def u8(self) -> int:
        """Read an integer of one byte."""
        return self.take(1)[0]

    def take(self, size: int) -> bytes:
        """Read `size` bytes; return a copy."""
        if size > self.left:
            raise self._short(f"message has {self.left} bytes left but announces {size}")
        self.at += size
        return bytes(self._data[self.at - size : self.at])

    def _short(self, what: str) -> Exception:
        return Incomplete() if self._partial else SessionFault(what)

    def rest(self) -> bytes:
        """Read all remaining bytes."""
        return self.take(self.left)

    def text(self, limit: int, what: str) -> bytes:
        """Read bytes with a length prefix of at most `limit`."""
        size = self.varint()
        if size > limit:
            raise SessionFault(f"{what} of {size} bytes; the limit is {limit}")
        return self.take(size)

    def reason(self) -> str:
        """Read a reason phrase; replace invalid UTF-8."""
        return self.text(MAX_REASON_BYTES, "reason phrase").decode("utf-8", "replace")

    def location(self) -> Location:
        """Read a location."""
        return Location(self.varint(), self.varint())

    def namespace(self) -> tuple[bytes, ...]:
        """Read a track namespace of up to 32 non-empty fields."""
        count = self.varint()
        if count > MAX_NAMESPACE_FIELDS:
            raise SessionFault(f"namespace of {count} fields; the limit is {MAX_NAMESPACE_FIELDS}")
        fields: list[bytes] = []
        for _ in range(count):
            field = self.text(MAX_NAME_BYTES, "namespace field")
            if not field:
                raise SessionFault("namespace with an empty field")
            fields.append(field)
        if sum(map(len, fields)) > MAX_NAME_BYTES:
            raise SessionFault(f"namespace of more than {MAX_NAME_BYTES} bytes")
        return tuple(fields)

    def end(self) -> None:
        """Raise SessionFault if there are unread bytes."""
        if self.left:
            raise SessionFault(f"message is {self.left} bytes longer than its fields")


def write_text(value: bytes) -> bytes:
    """Encode bytes with a length prefix."""
    return write_varint(len(value)) + value


def write_location(value: Location) -> bytes:
    """Encode a location."""
    return write_varint(value.group) + write_varint(value.object)


def write_namespace(fields: Sequence[bytes]) -> bytes:
    """Encode a namespace."""
    if len(fields) > MAX_NAMESPACE_FIELDS or not all(fields) or sum(map(len, fields)) > MAX_NAME_BYTES:
        most = f"{MAX_NAMESPACE_FIELDS} fields, none empty, of {MAX_NAME_BYTES} bytes together"
        raise ValueError(f"a namespace has at most {most}")
    return write_varint(len(fields)) + b"".join(write_text(field) for field in fields)


KeyValue = tuple[int, int | bytes]
"""A type and its value: an integer if the type is even, bytes if it is odd."""


def read_pairs(reader: Reader) -> tuple[KeyValue, ...]:
    """Read all remaining key-value pairs (draft 18, section 1.4.3)."""
    pairs: list[KeyValue] = []
    kind = 0
    while reader.left:
        kind += reader.varint()
        if kind > MAX_INTEGER:
            raise SessionFault("type of a key-value pair exceeds 64 bits")
        pairs.append((kind, reader.text(MAX_VALUE_BYTES, "value of a key-value pair") if kind % 2 else reader.varint()))
    return tuple(pairs)


def write_pairs(pairs: Iterable[KeyValue]) -> bytes:
    """Encode key-value pairs in ascending order of type; pairs of one type keep their order."""
    out, before = bytearray(), 0
    for kind, value in sorted(pairs, key=lambda pair: pair[0]):
        out += write_varint(kind - before)
        before = kind
        if isinstance(value, int):
            if kind % 2:
                raise ValueError(f"type 0x{kind:x} is odd, so its value must be bytes")
            out += write_varint(value)
        else:
            if kind % 2 == 0 or len(value) > MAX_VALUE_BYTES:
                raise ValueError(f"type 0x{kind:x} cannot have a value of {len(value)} bytes")
            out += write_text(value)
    return bytes(out)


def malformed(what: str) -> SessionFault:
    """Return the fault for a malformed value."""
    return SessionFault(what, SessionCode.KEY_VALUE_FORMATTING_ERROR)
