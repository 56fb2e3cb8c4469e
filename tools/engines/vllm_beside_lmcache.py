"""LMCache's vLLM connector on a processor, for vllm_beside.py: LMCache itself copies chunks on accelerators only."""

from __future__ import annotations

from typing import Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.lmcache_connector import LMCacheConnectorV1


class LMCacheOnProcessor(LMCacheConnectorV1):
    """LMCache's connector with `ChunksOnProcessor`."""

    def __init__(self, *given: Any, **named: Any) -> None:
        """Import LMCache's modules only now, after vLLM has prepared its kernels."""
        import lmcache.v1.gpu_connector as connectors

        connectors.CreateGPUConnector = ChunksOnProcessor
        super().__init__(*given, **named)


class ChunksOnProcessor:
    """LMCache's "GPU connector" for a processor: copies chunks to vLLM's blocks and back."""

    def __init__(self, _config: Any, metadata: Any, *_: Any, **__: Any) -> None:
        """Read LMCache's shapes: layers, K and V, tokens per chunk, heads and head size."""
        self._layers, _, _, self._heads, self._dim = metadata.kv_shape

    def get_shape(self, tokens: int) -> Any:
        """Return a chunk's shape: K and V, layers, tokens, heads x head size."""
        return torch.Size([2, self._layers, tokens, self._heads * self._dim])

    def batched_to_gpu(self, chunks: Any, starts: Any, ends: Any, **given: Any) -> None:
        """Copy chunks into vLLM's blocks."""
        self._copy(chunks, starts, ends, given, out=True)

    def batched_from_gpu(self, chunks: Any, starts: Any, ends: Any, **given: Any) -> None:
        """Copy chunks from vLLM's blocks."""
        self._copy(chunks, starts, ends, given, out=False)

    def _copy(self, chunks: Any, starts: Any, ends: Any, given: Any, *, out: bool) -> None:
        caches = given["kvcaches"]  # per layer [block, head, token, K and then V]
        size = caches[0].shape[2]
        for chunk, start, end in zip(chunks, starts, ends, strict=True):
            blocks = given["slot_mapping"][start:end:size] // size  # chunks are whole blocks
            rows = chunk.tensor.view(2, self._layers, len(blocks), size, self._heads, self._dim)
            rows = rows.permute(1, 2, 4, 3, 0, 5)  # [layer, block, head, token, K/V, dim]
            for layer, cache in enumerate(caches):
                if out:
                    cache[blocks] = rows[layer].flatten(3)
                else:
                    rows[layer].copy_(cache[blocks].unflatten(3, (2, self._dim)))
