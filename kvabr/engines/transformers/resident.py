"""A preallocated cache for a whole prompt on the model's device. Transformers' own cache is copied in every pass."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch

from kvabr.engines.adapters import require
from kvabr.engines.transformers.cache import is_plain
from kvabr.types.kv import KVSpec

IdsOf = Callable[[Sequence[int], int], torch.Tensor]
Extend = Callable[[Any, torch.Tensor, int], None]

_MAX_GPU_SHARE = 0.5
_MAX_CPU_BYTES = 8 << 30
"""Memory limit for one prompt on a CPU, in addition to the played cache."""


class RoomyCache:
    """The cache of one prompt; see `kvabr.types.engine.ResidentCache`."""

    def __init__(
        self, spec: KVSpec, tokens: int, dtype: torch.dtype, device: torch.device, ids_of: IdsOf, extend: Extend
    ) -> None:
        """Allocate ``tokens`` tokens, see `fits`; ``ids_of`` and ``extend`` are methods of the engine."""
        self._ids_of, self._extend = ids_of, extend
        shape = spec.shape(tokens)
        self._storage = torch.empty((*shape[:2], 1, *shape[2:]), dtype=dtype, device=device)
        """[layer, K/V, 1, head, token, dim]."""

    def place(self, first: int, kv: torch.Tensor) -> None:
        """Copy the KV of tokens from ``first`` on, [layer, K/V, head, token, dim]."""
        self._storage[:, :, 0, :, first : first + kv.shape[3]].copy_(kv)

    def prefill(self, tokens: Sequence[int], first: int) -> torch.Tensor:
        """Compute tokens that follow the ``first`` ones already in the cache, and add them to it."""
        computed = self.compute(self._ids_of(tokens, first), first)
        return computed.clone() if computed.data_ptr() == self._storage.data_ptr() else computed

    @torch.inference_mode()
    def compute(self, ids: torch.Tensor, first: int) -> torch.Tensor:
        """Like `prefill`, for checked ids, [1, token]. The result may be a view."""
        past = require("transformers").Cache(layers=[_layer_class()(*pair, first) for pair in self._storage])
        self._extend(past, ids, first)
        return self._storage[:, :, 0, :, first : first + ids.shape[1]].contiguous()


def fits(spec: KVSpec, tokens: int, dtype: torch.dtype, device: torch.device) -> bool:
    """Return True if a prompt fits on a device, and all layers have only keys and values of every token."""
    if (
        not is_plain(spec)
        or len(spec.parts) != 1
        or spec.only.halves != 2
        or tuple(spec.only.layers) != tuple(range(len(spec.only.layers)))
    ):
        return False
    nbytes, limit = tokens * spec.elements_per_token * dtype.itemsize, float(_MAX_CPU_BYTES)
    if device.type == "cuda":
        limit = _MAX_GPU_SHARE * torch.cuda.mem_get_info(device)[0]
    return nbytes <= limit


@cache
def _layer_class() -> Any:
    class RoomyLayer(require("transformers").cache_utils.DynamicLayer):  # type: ignore[misc]
        def __init__(self, keys: torch.Tensor, values: torch.Tensor, held: int) -> None:
            super().__init__()
            self._storage = keys, values
            self.dtype, self.device, self.is_initialized = keys.dtype, keys.device, True
            self.keys, self.values = keys[:, :, :held], values[:, :, :held]

        def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *_: Any, **__: Any) -> Any:
            held = self.keys.shape[2]
            end = held + key_states.shape[2]
            for storage, states in zip(self._storage, (key_states, value_states), strict=True):
                storage[:, :, held:end] = states
            self.keys, self.values = (storage[:, :, :end] for storage in self._storage)
            return self.keys, self.values

    return RoomyLayer
