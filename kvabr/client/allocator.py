"""Memory for a cache in the making.

It is not cleared: that takes long, and all of it is written in any case. But the system clears every page of fresh
memory when it is first written, and with pages of 4 KiB that takes longer than decoding does; so large pages are asked
for, where there are such.
"""

from __future__ import annotations

import contextlib
import math
import mmap

import torch

_LEAST_BYTES = 4 << 20
"""Less than this does not fill large pages."""


def empty(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """A new contiguous tensor whose numbers may be anything.

    Args:
        shape: its shape.
        dtype: its element type.

    Raises:
        RuntimeError: there is not so much memory.
    """
    size = math.prod(shape) * dtype.itemsize
    if size < _LEAST_BYTES or not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.empty(shape, dtype=dtype)
    try:
        memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, ValueError, OverflowError) as error:
        raise RuntimeError(f"{size:,} bytes cannot be had ({error})") from error
    with contextlib.suppress(OSError):  # the kernel was built without them
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=dtype).view(shape)
