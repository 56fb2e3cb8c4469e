"""KV groups to bytes and back: one file a family, a registry, one framed container.

Codecs know tensors and bytes, never names, time or networks.
"""
