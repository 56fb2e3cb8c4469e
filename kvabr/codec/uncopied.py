"""Buffers for torch without copying bytes."""

from __future__ import annotations

import ctypes

import numpy as np


def uncopied(piece: memoryview) -> memoryview | ctypes.Array[ctypes.c_ubyte]:
    """Return a buffer for `torch.frombuffer`, which warns of read-only buffers; most payloads are read-only."""
    if not piece.readonly:
        return piece
    kept = np.frombuffer(piece, dtype=np.uint8)
    shown = (ctypes.c_ubyte * len(piece)).from_address(kept.ctypes.data)
    shown.kept = kept  # type: ignore[attr-defined]  # the memory lives as long as what shows it
    return shown
