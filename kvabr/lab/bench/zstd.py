"""zstd on the bytes of a track that has no entropy coder: what a general compressor finds in a cache."""

from __future__ import annotations

import numpy as np
import torch
from safetensors.numpy import save_file

from kvabr.codec.base import GroupContext, codec
from kvabr.lab.bench.peers import Peer
from kvabr.lab.bench.schemes import Coded, Scheme, groups
from kvabr.lab.bench.store import Store
from kvabr.types.kv import GROUP_TOKENS, KVSpec

_LEVEL = 3


class Zstd(Scheme):
    """A track's payloads through zstd; the cache is the track's own."""

    def __init__(self, track: str, width: int, spec: KVSpec, peer: Peer, store: Store) -> None:
        """Prepare.

        Args:
            track: FP16 or Int8.
            width: bytes of a number; the bytes of each significance are put together before they are compressed.
            spec: of the caches.
            peer: zstd.
            store: whose work folder the payloads are handed over in.
        """
        self.name, self.family, self.group_tokens = f"{track}+zstd", "zstd", GROUP_TOKENS
        self._track, self._width, self._spec, self._peer, self._store = track, width, spec, peer, store

    @property
    def key(self) -> str:
        """Track and level."""
        return f"zstd-0.25.0|{_LEVEL}|{self._track}|{self._width}"

    def code(self, cache: torch.Tensor, *, decode: bool = True) -> Coded:
        """Compress every group by itself.

        Raises:
            PeerError: zstd failed.
        """
        level = codec(self._track)
        out = torch.empty_like(cache) if decode else None
        payloads = {}
        for index, (first, end) in enumerate(groups(cache.shape[3], self.group_tokens)):
            context = GroupContext(self._spec, first, end - first)
            payload = level.encode(cache[:, :, :, first:end], context)
            payloads[str(index)] = np.frombuffer(payload, dtype=np.uint8)
            if out is not None:
                level.decode(memoryview(payload), context, out[:, :, :, first:end])
        given = self._store.scratch("to-zstd.safetensors")
        try:
            save_file(payloads, given)
            answer = self._peer.ask({"in": str(given), "options": {"level": _LEVEL, "width": self._width}})
        finally:
            given.unlink(missing_ok=True)
        return Coded(sum(answer["bytes"]), out)
