"""Passages from anywhere in one prompt: which of their tokens are recomputed.

A passage's cache was computed without what comes before it in this prompt. Recomputing a few of its tokens over the
joined cache repairs most of that, if they are the right ones: a `Selector` scores them, and `choose` takes the best.
Selectors are plug-ins: by name, by entry point (``kvabr.selectors``), or from a file. They know scores and spans, never
models, codecs or networks.
"""

from kvabr.blend.selection import Need, Selection, Selector, choose

__all__ = ["Need", "Selection", "Selector", "choose"]
