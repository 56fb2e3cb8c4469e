"""The primitives of the wire format: integers, byte strings, namespaces, locations, key-value pairs.

A `Reader` parses bytes that are complete, so that running out of them is a fault, or the beginning of more.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from kvabr.moqt.codes import SessionCode, SessionFault

MAX_NAMESPACE_FIELDS = 32
MAX_NAME_BYTES = 4096
"""Limit on the fields of a namespace, and on a namespace and track name together (draft 18, section 2.4.1)."""
MAX_REASON_BYTES = 1024
MAX_URI_BYTES = 8192
MAX_VALUE_BYTES = 0xFFFF
MAX_INTEGER = (1 << 64) - 1


class Location(NamedTuple):
    """A position in a track, ordered by group, then object."""

    group: int
    object: int


@dataclass(frozen=True, slots=True)
class Varint:
    """An encoding of integers: QUIC's (RFC 9000) in draft 16, MOQT's own in draft 18."""

    wide: bool
    """MOQT's own: leading one bits give the length, values have 64 bits. Otherwise QUIC's, with 62 bits."""

    @property
    def largest(self) -> int:
        """The largest integer that can be encoded."""
        return MAX_INTEGER if self.wide else (1 << 62) - 1

    def encode(self, value: int) -> bytes:
        """Encode an integer in as few bytes as possible."""
        if 0 <= value < 0x40:  # most are
            return bytes((value,))
        if not 0 <= value <= self.largest:
            raise ValueError(f"integer {value} is outside 0 to {self.largest}")
        if not self.wide:
            for size, prefix in ((1, 0), (2, 1), (4, 2), (8, 3)):
                if value < 1 << (8 * size - 2):
                    return (value | prefix << (8 * size - 2)).to_bytes(size, "big")
        for size in range(1, 9):
            if value < 1 << (7 * size):
                lead = (0xFF00 >> (size - 1)) & 0xFF
                return (value | lead << (8 * (size - 1))).to_bytes(size, "big")
        return b"\xff" + value.to_bytes(8, "big")

    def peek(self, data: bytes | bytearray | memoryview, at: int) -> tuple[int, int] | None:
        """Return the integer at offset `at` and the offset after it, or None if it is incomplete."""
        if at >= len(data):
            return None
        first = data[at]
        if first < (0x80 if self.wide else 0x40):
            return first, at + 1
        if self.wide:  # the leading one bits give the length
            size = 9 - (0xFF - first).bit_length()
            bits = 64 if size == 9 else 7 * size
        else:
            size = 1 << (first >> 6)
            bits = 8 * size - 2
        end = at + size
        if end > len(data):
            return None
        return int.from_bytes(data[at:end], "big") & ((1 << bits) - 1), end


WIDE = Varint(wide=True)
NARROW = Varint(wide=False)


@dataclass(frozen=True, slots=True)
class Draft:
    """One draft of moq-transport: what is different in it. `docs/reference/wire-format.md` has the table."""

    number: int
    varint: Varint
    streams: bool
    """Whether every request has its own bidirectional stream (draft 17 and later), or all share one."""
    filters: Literal["kind", "count", "form"] = "kind"
    """How a location filter begins: with one of four kinds, by the number of its fields, or with one of six forms."""
    fetch_by_filter: bool = False
    """Whether FETCH names its range by a location filter, whose end is inclusive as that of FETCH_OK (draft 20)."""
    goaway_names_request: bool = False
    """Whether GOAWAY says which request was the first not to be processed (drafts 17 and 18)."""
    fin_cancels: bool = True
    """Whether the end of its stream cancels a SUBSCRIBE_NAMESPACE or SUBSCRIBE_TRACKS (before draft 20)."""

    @property
    def alpn(self) -> str:
        """The ALPN protocol identifier."""
        return f"moqt-{self.number}"


DRAFT_22 = Draft(22, WIDE, streams=True, filters="form", fetch_by_filter=True, fin_cancels=False)
DRAFT_20 = Draft(20, WIDE, streams=True, filters="count", fetch_by_filter=True, fin_cancels=False)
DRAFT_18 = Draft(18, WIDE, streams=True, goaway_names_request=True)
DRAFT_16 = Draft(16, NARROW, streams=False)
DRAFTS = (DRAFT_22, DRAFT_20, DRAFT_18, DRAFT_16)
"""The supported drafts, in order of preference."""


def by_alpn(alpn: str) -> Draft | None:
    """Return the draft of an ALPN protocol identifier, or None if it is not supported."""
    return next((draft for draft in DRAFTS if draft.alpn == alpn), None)


class Incomplete(Exception):  # noqa: N818  # not an error: the rest is still on its way
    """A `Reader` of partial bytes has run out of them."""


class Reader:
    """Parse values from bytes; every method raises SessionFault if the bytes do not fit."""

    def __init__(
        self, data: bytes | bytearray | memoryview, varint: Varint, *, at: int = 0, partial: bool = False
    ) -> None:
        """Begin at offset `at`; `partial` says that more bytes may follow, so running out raises Incomplete."""
        self._data, self.varint_kind, self.at, self._partial = data, varint, at, partial

    @property
    def left(self) -> int:
        """Bytes that have not been read."""
        return len(self._data) - self.at

    def varint(self) -> int:
        """Read an integer."""
        found = self.varint_kind.peek(self._data, self.at)
        if found is None:
            raise self._short("message ends inside an integer")
        self.at = found[1]
        return found[0]

    def u8(self) -> int:
        """Read one byte."""
        return self.take(1)[0]

    def take(self, size: int) -> bytes:
        """Read `size` bytes into a copy."""
        if size > self.left:
            raise self._short(f"message has {self.left} bytes left but announces {size}")
        self.at += size
        return bytes(self._data[self.at - size : self.at])

    def _short(self, what: str) -> Exception:
        return Incomplete() if self._partial else SessionFault(what)

    def rest(self) -> bytes:
        """Read all bytes that are left."""
        return self.take(self.left)

    def text(self, limit: int, what: str) -> bytes:
        """Read a length and that many bytes, at most `limit`."""
        size = self.varint()
        if size > limit:
            raise SessionFault(f"{what} of {size} bytes; the limit is {limit}")
        return self.take(size)

    def reason(self) -> str:
        """Read a reason phrase, replacing invalid UTF-8: it only informs."""
        return self.text(MAX_REASON_BYTES, "reason phrase").decode("utf-8", "replace")

    def location(self) -> Location:
        """Read a location."""
        return Location(self.varint(), self.varint())

    def namespace(self, *, least: int = 0) -> tuple[bytes, ...]:
        """Read a track namespace of `least` to 32 fields, none of them empty."""
        count = self.varint()
        if not least <= count <= MAX_NAMESPACE_FIELDS:
            raise SessionFault(f"namespace of {count} fields; {least} to {MAX_NAMESPACE_FIELDS} are allowed")
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
        """Raise SessionFault if any bytes are left."""
        if self.left:
            raise SessionFault(f"message is {self.left} bytes longer than its fields")


def write_text(varint: Varint, value: bytes) -> bytes:
    """Encode a length and the bytes."""
    return varint.encode(len(value)) + value


def write_location(varint: Varint, value: Location) -> bytes:
    """Encode a location."""
    return varint.encode(value.group) + varint.encode(value.object)


def write_namespace(varint: Varint, fields: Sequence[bytes]) -> bytes:
    """Encode a namespace."""
    if len(fields) > MAX_NAMESPACE_FIELDS or not all(fields) or sum(map(len, fields)) > MAX_NAME_BYTES:
        most = f"{MAX_NAMESPACE_FIELDS} fields, none empty, of {MAX_NAME_BYTES} bytes together"
        raise ValueError(f"a namespace has at most {most}")
    return varint.encode(len(fields)) + b"".join(write_text(varint, field) for field in fields)


KeyValue = tuple[int, int | bytes]
"""A type and its value: an integer if the type is even, bytes if it is odd."""


def read_pairs(reader: Reader, count: int | None = None) -> tuple[KeyValue, ...]:
    """Read `count` key-value pairs, or all that are left (draft 18, section 1.4.3)."""
    pairs: list[KeyValue] = []
    kind = 0
    while reader.left if count is None else len(pairs) < count:
        kind += reader.varint()
        if kind > MAX_INTEGER:
            raise SessionFault("type of a key-value pair exceeds 64 bits")
        pairs.append((kind, reader.text(MAX_VALUE_BYTES, "value of a key-value pair") if kind % 2 else reader.varint()))
    return tuple(pairs)


def write_pairs(varint: Varint, pairs: Iterable[KeyValue]) -> bytes:
    """Encode key-value pairs in ascending order of type; pairs of one type keep their order."""
    out, before = bytearray(), 0
    for kind, value in sorted(pairs, key=lambda pair: pair[0]):
        out += varint.encode(kind - before)
        before = kind
        if isinstance(value, int):
            if kind % 2:
                raise ValueError(f"type 0x{kind:x} is odd, so its value must be bytes")
            out += varint.encode(value)
        else:
            if kind % 2 == 0 or len(value) > MAX_VALUE_BYTES:
                raise ValueError(f"type 0x{kind:x} cannot have a value of {len(value)} bytes")
            out += write_text(varint, value)
    return bytes(out)


def malformed(what: str) -> SessionFault:
    """Return the fault for a value that does not fit its type."""
    return SessionFault(what, SessionCode.KEY_VALUE_FORMATTING_ERROR)
