"""Transports: one narrow interface, and behind it memory, QUIC in Python (aioquic, qh3) and moq-rs.

What a player needs of a network, and nothing more: fetch one group of one track at a priority, read its bytes as they
come, change the priority, cancel, and know who held the transfer up. Nothing here knows policies, codecs or catalogs.
"""
