"""TLS 1.3 for QMux: contexts of both ends, and the certificate of a server that is not trusted."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from kvabr.link.moqt.options import DialOptions, check_ca
from kvabr.types.errors import TransportError

PREFIX = "qmux-01."
"""Before a MoQT draft in ALPN: QMux needs identifiers of its own (section 8.1). The bare ones of QUIC are accepted and
offered as well, for peers that take them (moq-transport #1626)."""


def client_context(options: DialOptions, drafts: Iterable[str]) -> ssl.SSLContext:
    """Return what a client trusts, and offers; `TransportError` if certificates cannot be read."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    if options.how.insecure or options.how.fingerprint is not None:
        # `check_pinned` checks a pinned certificate before anything is said.
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    elif options.how.ca is not None:
        check_ca(options.how.ca)
        context.load_verify_locations(cafile=str(options.how.ca))
    else:
        context.load_default_certs()
    return _with_protocols(context, drafts)


def server_context(certfile: Path, keyfile: Path, drafts: Iterable[str]) -> ssl.SSLContext:
    """Return what a server shows and accepts; `TransportError` if the certificate cannot be used."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        context.load_cert_chain(certfile, keyfile)
    except (OSError, ValueError) as error:
        raise TransportError(f"{certfile}, {keyfile}: not a certificate and its key ({error})") from error
    return _with_protocols(context, drafts)


async def certificate_at(address: tuple[Any, ...], host: str, timeout_s: float) -> bytes | None:
    """Return the certificate, DER, that a server shows, trusted or not; None if none can be had."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    with contextlib.suppress(OSError, TimeoutError):
        async with asyncio.timeout(timeout_s):
            _, writer = await asyncio.open_connection(*address[:2], ssl=context, server_hostname=host)
            found: ssl.SSLObject = writer.get_extra_info("ssl_object")
            writer.transport.abort()
            return found.getpeercert(binary_form=True)
    return None


def _with_protocols(context: ssl.SSLContext, drafts: Iterable[str]) -> ssl.SSLContext:
    names = list(drafts)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.set_alpn_protocols([*(PREFIX + name for name in names), *names])
    return context
