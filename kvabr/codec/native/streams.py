"""The layout of a coded part: the indices of a group in one or several streams, and their directory.

    words 4 | escapes 4 | 64 states 4 | words 2 ... | escapes 2 ...          (little-endian)

or n streams, decoded independently,

    n + 0xFFFF0000 4 | per stream: words 4 | escapes 4 | per stream: 64 states 4 | words 2 ... | escapes 2 ...

Rows in coding order are cut into runs of 64; the last run may be shorter. Stream s has the runs s, s + n, s + 2n ...,
at least one of them whole. So all streams have about the same length, and neighbouring rows of a stream share tables.

The words are those of 64 interleaved rANS coders, called lanes (Duda, 2013; Giesen, 2014), with 32-bit states, 12-bit
probabilities and 16-bit words. A step decodes up to 64 symbols, one per lane from the first lane on. Then each lane
with a state below 2^16 takes one word, in order. A tile of 128 tokens starts with the flags of all rows in coding
order, 64 per step. The indices of the flagged rows follow, row by row, 64 tokens per step. With references
(`kvabr.codec.native.references`) the tokens of a tile are in another order, and tokens of the second step use other
tables, selected by the referenced tokens (`NearTables`). Escaped indices follow at the end. States start (for the
decoder: end) at 2^16.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from kvabr.codec.native.references import LANES

STREAMED = 0xFFFF0000
"""Added to the number of streams in the first field of a directory."""
_NUMBER = struct.Struct("<I")
_ALIGN = 16


def has_streams(data: bytes | memoryview) -> bool:
    """Return True if a payload has several streams."""
    return memoryview(data).nbytes >= _NUMBER.size and bool(_NUMBER.unpack_from(data)[0] >= STREAMED)


def payload_heads(counts: NDArray[np.int64]) -> NDArray[np.uint8]:
    """Return the headers before the streams, [group, byte]; ``counts`` are words and escapes, [group, stream, 2]."""
    groups, streams = counts.shape[:2]
    numbers = counts.reshape(groups, -1)
    if streams > 1:
        numbers = np.column_stack((np.full(groups, STREAMED + streams), numbers))
    return np.ascontiguousarray(numbers).astype("<u4").view(np.uint8)


def rows_of_streams(rows: int, streams: int) -> NDArray[np.int64]:
    """Return the number of rows of each stream; see `cut`."""
    runs, rest = divmod(rows, LANES)
    out = np.full(streams, LANES * (runs // streams))
    out[: runs % streams] += LANES
    out[runs % streams] += rest
    return out


def gathered_places(payloads: Sequence[bytes | memoryview]) -> list[int]:
    """Return each payload's offset in the buffer of `coder.gather`, then the total size, in bytes."""
    sizes = (-(-memoryview(payload).nbytes // _ALIGN) * _ALIGN for payload in payloads)
    return list(accumulate(sizes, initial=0))
