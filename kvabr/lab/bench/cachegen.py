"""CacheGen as LMCache ships it: the real codec as a peer, and its quantiser alone for where only quality counts.

CacheGen (Liu et al., SIGCOMM 2024) as LMCache 0.5.6 has it: every token's keys of a layer are divided by their largest
magnitude and rounded to so many levels, values likewise; the indices of each channel are coded with probabilities that
are counted in the group itself and travel with it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from safetensors.torch import load_file, save_file

from kvabr.lab.bench.peers import Peer
from kvabr.lab.bench.schemes import Coded, Scheme, groups
from kvabr.lab.bench.store import Store
from kvabr.types.errors import AssetError
from kvabr.types.kv import GROUP_TOKENS

Runs = Sequence[tuple[int, int]]
"""Levels of runs of layers: (layer after the last, levels)."""

_ALL = 1 << 30

LEVELS: dict[str, tuple[Runs, Runs]] = {
    "CacheGen": (((10, 32), (_ALL, 16)), ((2, 32), (_ALL, 16))),
    "CacheGen-low": (((10, 16), (_ALL, 12)), ((2, 16), (_ALL, 12))),
    "CacheGen-32": (((_ALL, 32),), ((_ALL, 32),)),
}
"""Levels of keys and of values by name: LMCache's only setting first, and a coarser and a finer one for its curve."""

_SHALLOW = 10
"""LMCache gives models of fewer layers the finest levels throughout."""


class Quantised(Scheme):
    """CacheGen's quantiser without its coder: the same cache, and no size."""

    def __init__(self, name: str = "CacheGen") -> None:
        self.name, self.family, self.group_tokens = name, "CacheGen", GROUP_TOKENS
        self._levels = LEVELS[name]

    @property
    def key(self) -> str:
        """The levels."""
        return f"cachegen-quantiser-1|{self._levels}"

    def levels(self, layers: int) -> tuple[Runs, Runs]:
        """Of keys and of values, for a model of so many layers."""
        return self._levels if layers >= _SHALLOW else LEVELS["CacheGen-32"]

    def code(self, cache: torch.Tensor, *, decode: bool = True) -> Coded:
        """Round; groups do not matter, since every token has a scale of its own."""
        if not decode:
            return Coded(0, None)
        layers = cache.shape[0]
        out = torch.empty_like(cache)
        for which, runs in enumerate(self.levels(layers)):
            top = _per_layer(runs, layers)[:, None, None, None] // 2 - 1
            values = cache[:, which]
            # One scale for a token's heads together, in the cache's own precision.
            peak = values.abs().amax(dim=(1, 3), keepdim=True)
            index = (values * (top / peak) + top).round().to(torch.int8)
            out[:, which] = (index.float() - top) / top * peak
        return Coded(0, out)


class CacheGen(Quantised):
    """The real codec of LMCache on a CPU."""

    def __init__(self, peer: Peer, store: Store, name: str = "CacheGen", *, group_tokens: int = GROUP_TOKENS) -> None:
        """Prepare.

        Args:
            peer: LMCache.
            store: whose work folder the caches are handed over in.
            name: one of `LEVELS`.
            group_tokens: tokens of what LMCache calls a chunk.
        """
        super().__init__(name)
        self.group_tokens = group_tokens
        self._peer, self._store = peer, store

    @property
    def key(self) -> str:
        """The levels, and the version whose bytes these are."""
        return f"lmcache-0.5.6|{self._levels}|{self.group_tokens}"

    def code(self, cache: torch.Tensor, *, decode: bool = True) -> Coded:
        """Encode and decode, in its own process.

        Raises:
            PeerError: LMCache failed.
            AssetError: it decodes to another cache than its quantiser makes.
        """
        given, back = self._store.scratch("to-peer.safetensors"), self._store.scratch("from-peer.safetensors")
        keys, values = self.levels(cache.shape[0])
        try:
            save_file({"kv": cache.contiguous()}, given)
            answer = self._peer.ask(
                {
                    "in": str(given),
                    "out": str(back) if decode else None,
                    "groups": list(groups(cache.shape[3], self.group_tokens)),
                    "options": {"keys": keys, "values": values},
                    "dtype": str(cache.dtype).removeprefix("torch."),
                }
            )
            made = load_file(back)["kv"] if decode else None
        finally:
            given.unlink(missing_ok=True)
            back.unlink(missing_ok=True)
        if made is not None:
            alone = super().code(cache).cache
            if alone is None or not torch.equal(made, alone):
                raise AssetError(f"{self.name}: LMCache decodes to another cache than its quantiser makes")
        return Coded(sum(answer["bytes"]), made)


def _per_layer(runs: Runs, layers: int) -> torch.Tensor:
    out, first = torch.zeros(layers), 0
    for end, count in runs:
        out[first : min(end, layers)] = count
        first = min(end, layers)
    return out
