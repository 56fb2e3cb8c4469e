"""The primitives of the wire format: integers, byte strings, namespaces, locations, key-value pairs.

A `Reader` takes values off bytes that are complete (a control message, a property block): running out of them is a
fault. `peek_varint` reads from bytes that may not have come yet.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from kvabr.moqt.codes import SessionCode, SessionFault

MAX_NAMESPACE_FIELDS = 32
MAX_NAME_BYTES = 4096
"""Bytes of a namespace's fields, or of those and the track's name (draft 18, section 2.4.1)."""
MAX_REASON_BYTES = 1024
MAX_URI_BYTES = 8192
MAX_VALUE_BYTES = 0xFFFF
MAX_INTEGER = (1 << 64) - 1


class Location(NamedTuple):
    """A place in a track; ordered as the draft orders them."""

    group: int
    object: int


@dataclass(frozen=True, slots=True)
class Varint:
    """One of the two encodings of integers: QUIC's (RFC 9000) up to draft 16, MOQT's own after that."""

    wide: bool
    """MOQT's own: the count of leading one bits tells the length, and 64 bits fit. Otherwise QUIC's, with 62 bits."""

    @property
    def largest(self) -> int:
        """The largest integer that can be written."""
        return MAX_INTEGER if self.wide else (1 << 62) - 1

    def encode(self, value: int) -> bytes:
        """Write an integer in as few bytes as possible."""
        if not 0 <= value <= self.largest:
            raise ValueError(f"{value} is no integer that the wire format can carry")
        if not self.wide:
            for size, prefix in ((1, 0), (2, 1), (4, 2), (8, 3)):
                if value < 1 << (8 * size - 2):
                    return (value | prefix << (8 * size - 2)).to_bytes(size, "big")
        for size in range(1, 9):
            if value < 1 << (7 * size):
                lead = (0xFF00 >> (size - 1)) & 0xFF
                return (value | lead << (8 * (size - 1))).to_bytes(size, "big")
        return b"\xff" + value.to_bytes(8, "big")

    def size(self, first: int) -> int:
        """Length of an encoding by its first byte."""
        if not self.wide:
            return 1 << (first >> 6)
        return 9 - (0xFF - first).bit_length() if first != 0xFF else 9

    def peek(self, data: bytes | bytearray | memoryview, at: int) -> tuple[int, int] | None:
        """The integer at ``at`` and the place behind it, or None if not all of it has come."""
        if at >= len(data):
            return None
        first = data[at]
        if first < (0x80 if self.wide else 0x40):
            return first, at + 1
        size = self.size(first)
        end = at + size
        if end > len(data):
            return None
        value = int.from_bytes(data[at:end], "big")
        bits = (64 if size == 9 else 7 * size) if self.wide else 8 * size - 2
        return value & ((1 << bits) - 1), end


WIDE = Varint(wide=True)
NARROW = Varint(wide=False)


@dataclass(frozen=True, slots=True)
class Draft:
    """One draft."""

    number: int
    varint: Varint
    streams: bool
    """Whether every request has a bidirectional stream of its own (draft 17 and later), or all share one."""

    @property
    def alpn(self) -> str:
        """Its ALPN protocol identifier."""
        return f"moqt-{self.number}"


DRAFT_18 = Draft(18, WIDE, streams=True)
DRAFT_16 = Draft(16, NARROW, streams=False)
DRAFTS = (DRAFT_18, DRAFT_16)
"""All of them, the preferred one first."""


def by_alpn(alpn: str) -> Draft | None:
    """The draft of an ALPN protocol identifier, or None if it is not spoken here."""
    return next((draft for draft in DRAFTS if draft.alpn == alpn), None)


class Reader:
    """Takes values off a complete piece of bytes."""

    def __init__(self, data: bytes | memoryview, varint: Varint) -> None:
        self._data, self.varint_kind, self._at = memoryview(data), varint, 0

    @property
    def left(self) -> int:
        """Bytes that have not been taken."""
        return len(self._data) - self._at

    def varint(self) -> int:
        """An integer."""
        found = self.varint_kind.peek(self._data, self._at)
        if found is None:
            raise SessionFault("a message ends within an integer")
        self._at = found[1]
        return found[0]

    def u8(self) -> int:
        """One byte."""
        return self.take(1)[0]

    def take(self, size: int) -> bytes:
        """The next ``size`` bytes, copied."""
        if size > self.left:
            raise SessionFault(f"a message has {self.left} bytes left where {size} are announced")
        piece = bytes(self._data[self._at : self._at + size])
        self._at += size
        return piece

    def rest(self) -> bytes:
        """All that is left."""
        return self.take(self.left)

    def text(self, limit: int, what: str) -> bytes:
        """A length and so many bytes, at most ``limit``."""
        size = self.varint()
        if size > limit:
            raise SessionFault(f"{what} of {size} bytes, more than the {limit} allowed")
        return self.take(size)

    def reason(self) -> str:
        """A reason phrase. Text that is not UTF-8 is shown as well as it can be: it only informs."""
        return self.text(MAX_REASON_BYTES, "a reason").decode("utf-8", "replace")

    def location(self) -> Location:
        """A location."""
        return Location(self.varint(), self.varint())

    def namespace(self, *, least: int = 0) -> tuple[bytes, ...]:
        """A track namespace: ``least`` to 32 fields, none of them empty."""
        count = self.varint()
        if not least <= count <= MAX_NAMESPACE_FIELDS:
            raise SessionFault(f"a namespace of {count} fields; {least} to {MAX_NAMESPACE_FIELDS} are allowed")
        fields: list[bytes] = []
        for _ in range(count):
            field = self.text(MAX_NAME_BYTES, "a namespace field")
            if not field:
                raise SessionFault("a namespace with an empty field")
            fields.append(field)
        if sum(map(len, fields)) > MAX_NAME_BYTES:
            raise SessionFault(f"a namespace of more than {MAX_NAME_BYTES} bytes")
        return tuple(fields)

    def full_name(self, *, least: int = 0) -> tuple[tuple[bytes, ...], bytes]:
        """A namespace of at least so many fields, and a track's name."""
        namespace = self.namespace(least=least)
        track = self.text(MAX_NAME_BYTES, "a track name")
        if sum(map(len, namespace)) + len(track) > MAX_NAME_BYTES:
            raise SessionFault(f"a full track name of more than {MAX_NAME_BYTES} bytes")
        return namespace, track

    def end(self) -> None:
        """Nothing may be left."""
        if self.left:
            raise SessionFault(f"a message is {self.left} bytes longer than its fields")


def write_text(varint: Varint, value: bytes) -> bytes:
    """A length and the bytes."""
    return varint.encode(len(value)) + value


def write_location(varint: Varint, value: Location) -> bytes:
    """A location."""
    return varint.encode(value.group) + varint.encode(value.object)


def write_namespace(varint: Varint, fields: Sequence[bytes]) -> bytes:
    """A namespace.

    Raises:
        ValueError: more fields or bytes than the draft allows, or an empty field.
    """
    if len(fields) > MAX_NAMESPACE_FIELDS or not all(fields) or sum(map(len, fields)) > MAX_NAME_BYTES:
        raise ValueError("a namespace has up to 32 fields, none empty, of 4,096 bytes together")
    return varint.encode(len(fields)) + b"".join(write_text(varint, field) for field in fields)


KeyValue = tuple[int, int | bytes]
"""A type and its value: an integer if the type is even, bytes if it is odd."""


def read_pairs(reader: Reader, count: int | None = None) -> tuple[KeyValue, ...]:
    """Key-value pairs: ``count`` of them, or all that there are (draft 18, section 1.4.3)."""
    pairs: list[KeyValue] = []
    kind = 0
    while reader.left if count is None else len(pairs) < count:
        kind += reader.varint()
        if kind > MAX_INTEGER:
            raise SessionFault("a key-value pair whose type is beyond 64 bits")
        if kind % 2:
            size = reader.varint()
            if size > MAX_VALUE_BYTES:
                raise SessionFault(f"a key-value pair with a value of {size} bytes, more than {MAX_VALUE_BYTES}")
            pairs.append((kind, reader.take(size)))
        else:
            pairs.append((kind, reader.varint()))
    return tuple(pairs)


def write_pairs(varint: Varint, pairs: Iterable[KeyValue]) -> bytes:
    """Key-value pairs, sorted by type; those of one type stay in their order."""
    out, before = bytearray(), 0
    for kind, value in sorted(pairs, key=lambda pair: pair[0]):
        out += varint.encode(kind - before)
        before = kind
        if isinstance(value, int):
            if kind % 2:
                raise ValueError(f"type 0x{kind:x} is odd: its value is bytes, not a number")
            out += varint.encode(value)
        else:
            if kind % 2 == 0 or len(value) > MAX_VALUE_BYTES:
                raise ValueError(f"type 0x{kind:x} cannot have {len(value)} bytes as its value")
            out += write_text(varint, value)
    return bytes(out)


def malformed(what: str) -> SessionFault:
    """A value that does not fit its type."""
    return SessionFault(what, SessionCode.KEY_VALUE_FORMATTING_ERROR)
