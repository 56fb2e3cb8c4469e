"""The contract between kvabr and a serving engine: what an engine gives, what it gets, and what an adapter says of it.

No class has to be derived from, since engines call very differently; what all adapters share are these parts:

==============================  =====================================================================================
what the engine gives           how
==============================  =====================================================================================
shape and meaning of its cache  a `kvabr.types.kv.KVSpec`
KV layout, and where to write   `kvabr.engines.layouts` converts between kvabr's layout and the engine's; a play
                                writes into a tensor of the engine's own with ``out=``
compute rate                    a `kvabr.types.cost.PrefillCost`: timed (`kvabr.prefill_cost`), or as the engine
                                sees itself serve
whether holes can be computed   mode ``hole``: an object of the protocol `kvabr.types.engine.Engine`; mode
                                ``suffix``: the engine computes behind what it was given, by itself
upgrades of a cache in use      a hook `kvabr.client.upgrades.Rewrite`, if it has a moment at which nothing reads
==============================  =====================================================================================

============================  =======================================================================================
what the engine gets          how
============================  =======================================================================================
a play, mode ``hole``         `kvabr.play` (async), `kvabr.sync` (blocking), `kvabr.node` (for many at once): `Played`
a play, mode ``suffix``       `kvabr.client.prefix.play_prefix`: what is in place before the first miss: `Prefix`
a play of what has a key      `kvabr.engines.chunk_store`, for engines that tell no tokens
coverage, loss, times         fields of both
statistics                    `kvabr.telemetry`, `kvabr.node.NodeMetrics`, or what the engine itself has
a way to publish              `kvabr.publish.publisher.Publisher`, in the background
============================  =======================================================================================

Nothing here imports an engine.
"""
