"""The contract between kvabr and a serving engine: what an adapter implements, and what it calls.

There is one entry, `kvabr.AsyncClient` (`kvabr.Client` for code with threads). Engines differ in how they name a cache
and in what they can compute by themselves, so an adapter uses one of three plays:

================  ===============================  ====================================================================
play              engine                           the adapter
================  ===============================  ====================================================================
``play``          knows tokens, fills holes        implements `kvabr.types.engine.Engine` and gets a complete cache
``play_prefix``   knows tokens, computes suffixes  gets the groups before the first miss, and puts them in place
``play_asset``    knows keys instead of tokens     uses `kvabr.engines.chunk_store`, which names assets by key
================  ===============================  ====================================================================

========================  ================  ===============  ===============  ===============
part                      transformers      vLLM             LMCache          SGLang
========================  ================  ===============  ===============  ===============
play                      ``play``          ``play_prefix``  ``play_asset``   ``play_asset``
client                    both              ``Client``       ``AsyncClient``  ``AsyncClient``
its cache is              a `DynamicCache`  `PagedBlocks`    `KVView`         `KVView`
cost of a prefill         timed once        as it serves     unknown          unknown
upgrades of a used cache  `Steps`           no               no               no
publishes by              `Publisher`       `Publisher`      `Publisher`      `Publisher`
========================  ================  ===============  ===============  ===============

An adapter is a package with an `kvabr.engines.adapters.Adapter` in its attribute ``ADAPTER``, and the class or function
that the engine loads. One line in `kvabr.engines.adapters.BUILTIN`, or an entry point of another distribution, lists
it. Settings that users write into the engine's configuration derive from `kvabr.engines.settings.EngineSettings`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch


class KVPlace(Protocol):
    """Memory in which an engine keeps the KV of some tokens: plays write it, publications read it.

    `kvabr.engines.layouts` has two implementations: `PagedBlocks` for blocks of a paged cache, and `KVView` for memory
    that a strided view can describe.
    """

    def write(self, kv: torch.Tensor) -> None:
        """Copy KV into the engine's memory.

        Args:
            kv: [layer, K/V, head, token, dim], any float dtype, any device.

        Raises:
            FormatError: it has another shape than the engine's memory.
        """
        ...

    def read(self, out: torch.Tensor) -> None:
        """Copy KV out of the engine's memory.

        Args:
            out: [layer, K/V, head, token, dim], any float dtype, any device; written.

        Raises:
            FormatError: it has another shape than the engine's memory.
        """
        ...
