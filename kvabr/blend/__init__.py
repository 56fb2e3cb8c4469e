"""Prompts with cached passages at any position: selects the tokens to recompute.

A passage's cache was computed without the text that precedes it in this prompt. Recomputing a few well-chosen tokens
over the joined cache repairs most of the difference: a `Selector` scores the tokens, and `choose` takes the best.
Selectors are plug-ins: by name, by entry point (``kvabr.selectors``), or from a file.
"""

from kvabr.blend.selection import Need, Selection, Selector, choose

__all__ = ["Need", "Selection", "Selector", "choose"]
