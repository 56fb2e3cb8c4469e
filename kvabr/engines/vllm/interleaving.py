"""Context parallelism: the tokens of every block are divided among ranks.

With ``decode_context_parallel_size`` N, a block of vLLM's tables has N times the tokens of a rank's block. Tokens are
assigned to ranks in turn, ``cp_kv_cache_interleave_size`` at a time. Each rank plays the whole cache and keeps its own
tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvabr.types.errors import UsageError


@dataclass(frozen=True, slots=True)
class Interleaving:
    """The tokens of a block that one of several ranks holds."""

    ranks: int = 1
    rank: int = 0
    tokens: int = 1
    """Number of consecutive tokens assigned to a rank."""

    def own(self, offsets: NDArray[np.int64]) -> tuple[NDArray[np.bool_], NDArray[np.int64]]:
        """Return a mask of a block's tokens in this rank, and their offsets in the rank's own block."""
        turn, place = offsets // self.tokens, offsets % self.tokens
        return turn % self.ranks == self.rank, turn // self.ranks * self.tokens + place


WHOLE = Interleaving()
"""Every rank holds all tokens."""


def interleaving_of(parallel: Any) -> Interleaving:
    """Return this rank's interleaving from vLLM's ``ParallelConfig``; raise `UsageError` if it is not possible."""
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
