"""KV groups to bytes and back: one file per family, codecs by name, and one framed container.

Codecs handle tensors and bytes, never names, time or networks.
"""
