"""Settings, and the layouts of pages in HiCache's host pool. Pure functions over tensors; SGLang is not needed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from kvabr.engines.chunk_store import KeyedSettings
from kvabr.types.errors import FormatError, UsageError

LAYOUTS = ("layer_first", "page_first", "page_first_direct", "page_head")
"""Layouts of `MHATokenToKVPoolHost`, by SGLang's names."""


def read_settings(extra_config: Mapping[str, Any] | None) -> KeyedSettings:
    """Return the settings under ``kvabr`` in the backend's extra configuration; see `KeyedSettings.read`."""
    given = (extra_config or {}).get("kvabr")
    if not isinstance(given, Mapping):
        raise UsageError('hicache-storage-backend-extra-config: a table "kvabr" is missing, with "url" or "publish"')
    return KeyedSettings.read(given, 'hicache-storage-backend-extra-config, "kvabr"')


def page_view(pool: torch.Tensor, layout: str, first: int, page_size: int) -> torch.Tensor:
    """Return a view in kvabr's layout, [layer, K/V, head, token, dim], of the page at token ``first`` of a host pool.

    Raises:
        FormatError: the layout is unknown, or no page begins at ``first``.
    """
    if first % page_size:
        raise FormatError(f"no page of {page_size} tokens begins at token {first} of the host pool")
    page = first // page_size
    if layout == "layer_first":  # K/V, layer, token, head, dim
        return pool[:, :, first : first + page_size].permute(1, 0, 3, 2, 4)
    if layout == "page_first":  # K/V, token, layer, head, dim
        return pool[:, first : first + page_size].permute(2, 0, 3, 1, 4)
    if layout == "page_first_direct":  # K/V, page, layer, token, head, dim
        return pool[:, page].permute(1, 0, 3, 2, 4)
    if layout == "page_head":  # K/V, page, head, token, layer, dim
        return pool[:, page].permute(3, 0, 1, 2, 4)
    raise FormatError(f"a host pool with the layout {layout!r}; kvabr supports {', '.join(LAYOUTS)}")
