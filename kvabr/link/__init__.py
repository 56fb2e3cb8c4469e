"""Transports, side by side: MoQT over QUIC and over QMux on TCP, and object stores.

Each carries the transfers of `kvabr.transfer`.
"""
