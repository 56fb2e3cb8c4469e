"""Transports, side by side: MoQT over QUIC, and object stores. Each carries the transfers of `kvabr.transfer`."""
