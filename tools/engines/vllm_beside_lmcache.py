"""LMCache's vLLM connector on a processor, for vllm_beside.py: LMCache itself copies chunks on accelerators only."""

from __future__ import annotations

from typing import Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.lmcache_connector import LMCacheConnectorV1


class LMCacheOnProcessor(LMCacheConnectorV1):
    """LMCache's connector with `ChunksOnProcessor`."""

    def __init__(self, *given: Any, **named: Any) -> None:
        """As LMCache's; its modules must not be imported before vLLM has prepared its kernels."""
        import lmcache.v1.gpu_connector as connectors

        connectors.CreateGPUConnector = ChunksOnProcessor
        super().__init__(*given, **named)


class ChunksOnProcessor:
    """LMCache's "GPU connector" for a processor: copies chunks to vLLM's blocks and back."""

    def __init__(self, _config: Any, metadata: Any, *_: Any, **__: Any) -> None:
        """Take LMCache's shapes: layers, K and V, tokens of a chunk, heads and head size."""
        self._layers, _, _, self._heads, self._dim = metadata.kv_shape

    def get_shape(self, tokens: int) -> Any:
        """Return the shape of a chunk: K and V, layers, tokens, heads x head size."""
        return torch.Size([2, self._layers, tokens, self._heads * self._dim])

    def batched_to_gpu(self, chunks: Any, starts: Any, ends: Any, **given: Any) -> None:
        """Copy chunks into vLLM's blocks."""
        self._copy(chunks, starts, ends, given, out=True)

    def batched_from_gpu(self, chunks: Any, starts: Any, ends: Any, **given: Any) -> None:
        """Copy chunks from vLLM's blocks."""
        self._copy(chunks, starts, ends, given, out=False)

    def _copy(self, chunks: Any, starts: Any, ends: Any, given: Any, *, out: bool) -> None:
        for chunk, start, end in zip(chunks, starts, ends, strict=True):
            slots = given["slot_mapping"][start:end]
            for layer, cache in enumerate(given["kvcaches"]):  # [block, head, token, K and then V]
                for half in (0, 1):
                    rows = chunk.tensor[half, layer].view(end - start, self._heads, self._dim)
                    blocks = cache[..., half * self._dim : (half + 1) * self._dim]
                    at = slots // blocks.shape[2], slice(None), slots % blocks.shape[2]
                    if out:
                        blocks[at] = rows
                    else:
                        rows.copy_(blocks[at])
