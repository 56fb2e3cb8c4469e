"""Repetitive texts, on which some codecs fail that are good on ordinary texts.

A codec's errors cancel over many tokens, but not over copies of one token. Such texts occur in practice: dumps, tables
of zeros, logs, binary data in base64.
"""

from __future__ import annotations

import base64
import random
from collections.abc import Iterator

_BYTES = 16
_PARAGRAPH = (
    "The tide tables for the harbour are printed in March, and every pilot keeps a copy next to the wheel. When the "
    "wind turns north before noon, the ferries leave by the eastern channel, because sand gathers at the mouth of the "
    "western one. Nobody remembers who first set the yellow buoys, though the harbour master has the bill.\n\n"
)


def repeated_texts() -> dict[str, str]:
    """Return the texts by name, each of several thousand tokens."""
    noise = random.Random(1)  # noqa: S311 - not a secret
    log = "2031-04-02 11:30:07 INFO worker-3 request served in 12 ms, status 200\n"
    return {
        "one-word": " the" * 8000,
        "line-breaks": "\n" * 32_000,
        "hexdump": "".join(_hexdump(noise.randbytes(_BYTES) for _ in range(400))),
        "hexdump-zeros": "".join(_hexdump(bytes(_BYTES) for _ in range(400))),
        "csv-zeros": "".join(f"{row},0,0,0,0,0,0,0,0\n" for row in range(400)),
        "c-zeros": "static const unsigned char table[] = {\n" + "    0, 0, 0, 0, 0, 0, 0, 0,\n" * 400 + "};\n",
        "log-line": log * 400,
        "paragraph": _PARAGRAPH * 100,
        "base64": base64.b64encode(b"A" * 12_000).decode(),
    }


def _hexdump(parts: Iterator[bytes]) -> Iterator[str]:
    for number, part in enumerate(parts):
        shown = "".join(chr(byte) if 32 <= byte < 127 else "." for byte in part)
        yield f"{number * _BYTES:08x}  {part.hex(' ')}  |{shown}|\n"
