"""TLS 1.3 contexts for QMux, of client and server."""

from __future__ import annotations

import ssl
from collections.abc import Iterable
from pathlib import Path

from kvabr.link.moqt.options import DialOptions, trust
from kvabr.types.errors import TransportError

PREFIX = "qmux-01."
"""Prefix of a MoQT draft in ALPN, since QMux needs its own identifiers (section 8.1). QUIC's identifiers are also
offered and accepted, for peers that use them (moq-transport #1626)."""


def client_context(options: DialOptions) -> ssl.SSLContext:
    """Return a client's TLS context; raise `TransportError` if certificates cannot be read."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    trust(context, options)
    if context.verify_mode != ssl.CERT_NONE and options.how.ca is None:
        context.load_default_certs()
    return _with_protocols(context, options.drafts)


def server_context(certfile: Path, keyfile: Path, drafts: Iterable[str]) -> ssl.SSLContext:
    """Return a server's TLS context; raise `TransportError` if the certificate cannot be used."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        context.load_cert_chain(certfile, keyfile)
    except (OSError, ValueError) as error:
        raise TransportError(f"{certfile}, {keyfile}: not a certificate and its key ({error})") from error
    return _with_protocols(context, drafts)


def _with_protocols(context: ssl.SSLContext, drafts: Iterable[str]) -> ssl.SSLContext:
    names = list(drafts)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.set_alpn_protocols([*(PREFIX + name for name in names), *names])
    return context
