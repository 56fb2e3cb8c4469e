"""Context parallelism: ranks that share out the tokens of every block among them.

With ``decode_context_parallel_size`` N a block of vLLM's tables stands for N times as many tokens as one rank's block
holds: some tokens are in the block of the first rank, as many that follow in that of the second, and so on, over and
over (``cp_kv_cache_interleave_size``). Caches are published as one; each rank plays all of it and keeps its own tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvabr.types.errors import UsageError


@dataclass(frozen=True, slots=True)
class Interleaving:
    """Which tokens of a block one of several ranks holds."""

    ranks: int = 1
    rank: int = 0
    tokens: int = 1
    """Tokens in a row that one rank holds."""

    def own(self, offsets: NDArray[np.int64]) -> tuple[NDArray[np.bool_], NDArray[np.int64]]:
        """Return which of some tokens of a block this rank holds, and where in its own block, given their places."""
        turn, place = offsets // self.tokens, offsets % self.tokens
        return turn % self.ranks == self.rank, turn // self.ranks * self.tokens + place


WHOLE = Interleaving()
"""Every rank holds all tokens."""


def interleaving_of(parallel: Any) -> Interleaving:
    """Return what a rank holds, given vLLM's ``ParallelConfig``; `UsageError` if ranks and turns do not fit.

    Ranks of context parallelism are those of tensor parallelism, or those of prefill context parallelism of each of
    these in turn.
    """
    ranks = int(getattr(parallel, "decode_context_parallel_size", 1))
    if ranks == 1:
        return WHOLE
    tensor, prefill = int(parallel.tensor_parallel_size), int(getattr(parallel, "prefill_context_parallel_size", 1))
    rank = int(getattr(parallel, "rank", 0)) % (tensor * prefill)
    tokens = int(getattr(parallel, "cp_kv_cache_interleave_size", 1))
    if tensor * prefill % ranks or tokens < 1:
        raise UsageError(
            f"decode_context_parallel_size {ranks} does not divide {tensor * prefill} ranks, or "
            f"cp_kv_cache_interleave_size is {tokens}"
        )
    return Interleaving(ranks, (rank % tensor * prefill + rank // tensor) % ranks, tokens)
