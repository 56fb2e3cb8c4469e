"""kvabr: a video player for KV caches.

A decode node embeds it to stream a prompt's KV cache from wherever it was computed, at the quality that the network
allows, so that the first token comes on time.
"""

__version__ = "0.1.0"
