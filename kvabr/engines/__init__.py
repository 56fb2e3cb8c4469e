"""Adapters of serving engines: transformers, vLLM, LMCache and SGLang.

An adapter is imported when its engine loads it. It uses one of three play methods of `kvabr.AsyncClient`
(`kvabr.Client` for code with threads):

================  ===============================  ====================================================================
play              engine                           the adapter
================  ===============================  ====================================================================
``play``          has tokens, fills holes          implements `kvabr.types.engine.Engine` and gets a complete cache
``play_prefix``   has tokens, computes suffixes    gets the groups before the first miss, and puts them in place
``play_coded``    has keys instead of tokens       uses `kvabr.engines.chunk_store`, which names assets by key
================  ===============================  ====================================================================

========================  ================  ===============  ===============  ===============
part                      transformers      vLLM             LMCache          SGLang
========================  ================  ===============  ===============  ===============
play                      ``play``          ``play_prefix``  ``play_coded``   ``play_coded``
client                    both              ``Client``       ``AsyncClient``  ``AsyncClient``
decoded into              a tensor          `BlockSlots`     `TensorPlace`    `TensorPlace`
cost of a prefill         timed once        as it serves     unknown          unknown
upgrades of a used cache  `Steps`           no               no               no
========================  ================  ===============  ===============  ===============

All adapters publish through `kvabr.publish.publisher.Publisher`. An adapter is a package with an `Adapter` in
``ADAPTER``, listed in `kvabr.engines.adapters.BUILTIN` or an entry point. Its settings derive from
`kvabr.engines.settings.EngineSettings`.
"""
