"""Codecs: KV groups to bytes and back, one file per codec family, and the frame around every group.

Codecs handle tensors and bytes only: no names, clocks or networks.
"""
