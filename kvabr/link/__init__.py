"""Transports for `kvabr.transfer`: MoQT over QUIC and over QMux on TCP, and object stores."""
