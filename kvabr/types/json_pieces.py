"""JSON from an untrusted peer, decoded in pieces, so that other threads can run meanwhile.

`json.loads` is one call that does not let go of the interpreter's lock: ten megabytes of brackets stop every other
thread of the process for seconds, and with them its event loop. `JsonPieces` hands the decoder at most `PIECE_BYTES` at
a time, and its callers say what they expect: what else comes is refused before it is decoded.
"""

from __future__ import annotations

import codecs
import json
from collections.abc import Iterator
from typing import Any

from kvabr.types.errors import FormatError

PIECE_BYTES = 32 << 10
"""Most bytes that are decoded at once: about half a millisecond of brackets."""
_SMALL_BYTES = 64
"""Most values are smaller, and end within the first look at them."""
_MAX_NAME = 256
_SPACE = b" \t\r\n"
_BLANKS = frozenset((b" ", b"\t", b"\r", b"\n"))
_DECODER = json.JSONDecoder()


class JsonPieces:
    """Reads one JSON text from its beginning to its end. Methods raise `FormatError` for what is not as expected."""

    def __init__(self, data: bytes, what: str) -> None:
        """Start at the beginning of ``data``, UTF-8; ``what`` it should be begins each error."""
        self._data, self._what = data, what
        self._at = self._member_at = self._skipped = 0

    def __len__(self) -> int:
        """Return the bytes of the whole text."""
        return len(self._data)

    def members(self) -> Iterator[str]:
        """Yield the names in an object. Read the value of each before the next name."""
        if self._next() != b"{":
            raise self._wrong("not JSON, or no object")
        self._at += 1
        seen: set[str] = set()
        if self._next() == b"}":
            self._at += 1
            return
        while True:
            self._member_at = self._at
            name = self.value()
            if not isinstance(name, str) or len(name) > _MAX_NAME:
                raise self._wrong(f"a member of an object needs a name of at most {_MAX_NAME} characters")
            if name in seen:
                raise self._wrong(f"{name!r} is there twice")
            seen.add(name)
            if self._next() != b":":
                raise self._wrong("not JSON")
            self._at += 1
            yield name
            if self._ends(b"}"):
                return

    def elements(self, most: int) -> Iterator[int]:
        """Yield the indices of a list of at most ``most`` values. Read each value before the next index."""
        if self._next() != b"[":
            raise self._wrong("not JSON, or no list")
        self._at += 1
        if self._next() == b"]":
            self._at += 1
            return
        for index in range(most):
            yield index
            if self._ends(b"]"):
                return
        raise self._wrong(f"a list of more than {most}")

    def value(self) -> Any:
        """Return the next value, whatever it is, if it has at most `PIECE_BYTES`."""
        self._next()
        for size in (_SMALL_BYTES, PIECE_BYTES):
            window = self._data[self._at : self._at + size]
            cut = self._at + len(window) < len(self._data)
            try:
                text, _ = codecs.utf_8_decode(window, "strict", not cut)
                value, end = _DECODER.raw_decode(text)
            except RecursionError as error:
                raise self._wrong("values are nested too deeply") from error
            except ValueError as error:
                if cut and size < PIECE_BYTES:
                    continue
                raise self._wrong(_why(error)) from error
            if end == len(text) and cut:  # a number may go on behind the window
                continue
            self._at += len(text[:end].encode())
            return value
        raise self._wrong(f"a value of more than {PIECE_BYTES} bytes")

    def skip(self) -> None:
        """Read over a member that is not known, as of a newer version: all of them together have at most a piece."""
        start = self._member_at
        self.value()
        self._skipped += self._at - start
        if self._skipped > PIECE_BYTES:
            raise self._wrong(f"more than {PIECE_BYTES} bytes of what this version does not know")

    def scalars(self, kinds: set[type], most: int) -> list[Any]:
        """Return a list of at most ``most`` values of these types, which are decoded many at a time.

        Whole numbers become floats where those are allowed. No string in the list may have a comma or a bracket.
        """
        if self._next() != b"[":
            raise self._wrong("not JSON, or no list")
        self._at += 1
        data, found = self._data, list[Any]()
        while True:
            stop = self._at + PIECE_BYTES
            end = data.find(b"]", self._at, stop)
            cut = data.rfind(b",", self._at, stop) if end < 0 else end
            if cut < 0:
                raise self._wrong(f"a list whose values do not end within {PIECE_BYTES} bytes")
            part = data[self._at : cut]
            self._at = cut + 1
            if not part.strip(_SPACE):
                if found or end < 0:
                    raise self._wrong("not JSON (a value is missing)")
                return found
            try:
                values = _DECODER.decode(f"[{part.decode()}]")
            except (ValueError, RecursionError) as error:
                raise self._wrong(_why(error)) from error
            if len(found) + len(values) > most:
                raise self._wrong(f"a list of more than {most}")
            if not kinds.issuperset(map(type, values)):
                names = " or ".join(sorted(kind.__name__ for kind in kinds))
                raise self._wrong(f"a list should have nothing but {names}")
            found += map(float, values) if float in kinds else values
            if end >= 0:
                return found

    def finish(self) -> None:
        """Raise unless nothing but white space is left."""
        if self._next():
            raise self._wrong("not JSON (something follows it)")

    def _next(self) -> bytes:
        """Return the next byte that is not white space, which stays unread; empty at the end."""
        data = self._data
        if data[self._at : self._at + 1] in _BLANKS:
            window = data[self._at : self._at + PIECE_BYTES]
            self._at += len(window) - len(window.lstrip(_SPACE))
            if self._at < len(data) and data[self._at : self._at + 1] in _BLANKS:
                raise self._wrong(f"more than {PIECE_BYTES} bytes of white space")
        return data[self._at : self._at + 1]

    def _ends(self, last: bytes) -> bool:
        """Read a comma or the ``last`` byte of an object or list, and return whether it was that."""
        found = self._next()
        if found not in {b",", last}:
            raise self._wrong("not JSON")
        self._at += 1
        return found == last

    def _wrong(self, why: str) -> FormatError:
        return FormatError(f"{self._what}: {why}, at byte {self._at}")


def _why(error: Exception) -> str:
    """Return why the decoder refused a piece, without the place in the piece."""
    return f"not JSON ({error.msg if isinstance(error, json.JSONDecodeError) else error})"
