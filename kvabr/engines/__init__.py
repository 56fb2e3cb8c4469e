"""Adapters of serving engines: transformers, vLLM, LMCache and SGLang.

Each is imported when its engine loads it. Nothing else in kvabr imports an engine, except commands and measurements
that load a transformers model. `kvabr.engines.contract` says what an adapter does, `kvabr.engines.adapters` lists them.
"""
