"""Dialling over moq-rs, a QUIC stack in Rust."""

from __future__ import annotations

import asyncio
import time
from typing import Any
from urllib.parse import quote

from kvabr.quic import moq_lib as moqlib
from kvabr.quic.interface import Connection
from kvabr.quic.moq_connection import CACHE_BYTES, MOQ_LITE, MOQT, MoqConnection
from kvabr.quic.options import DialOptions
from kvabr.quic.trust import fingerprint_of
from kvabr.types.errors import TransportError

_WHY = (
    ("fingerprint mismatch", "the peer's certificate does not have the fingerprint that is expected"),
    ("UnknownIssuer", "the peer's certificate is signed by nobody that is trusted; trust its CA, or its fingerprint"),
    ("certificate expired", "the peer's certificate has expired"),
    ("not valid yet", "the peer's certificate is not valid yet; is the clock right?"),
    ("not valid for name", "the peer's certificate is for another name"),
    ("error 120", "no common protocol: the peer speaks none of those that moq-rs offers"),
    ("failed DNS lookup", "no such host"),
    *moqlib.TURNED_AWAY.items(),
)


async def dial(options: DialOptions) -> Connection:
    """Reach a peer.

    Raises:
        TransportError: it does not answer in time, its certificate is not trusted, it speaks nothing that moq-rs
            speaks, or it does not let us in; the message says which. Or moq-rs is not installed.
    """
    moq = moqlib.load()
    host = f"[{options.host}]" if ":" in options.host else options.host
    where = f"{host}:{options.port}"
    client = moq.Client(
        f"moqt://{where}{_target(options)}",
        tls_verify=not options.insecure,
        tls_roots=None if options.ca is None or options.insecure else [str(options.ca)],
        tls_fingerprints=(
            None if options.fingerprint is None or options.insecure else [fingerprint_of(options.fingerprint)]
        ),
        websocket_enabled=False,
        reconnect=False,
        publish=moq.OriginProducer(cache_capacity_bytes=0),
        subscribe=moq.OriginProducer(cache_capacity_bytes=CACHE_BYTES),
    )
    end_s = time.monotonic() + options.timeout_s
    try:
        async with asyncio.timeout(options.timeout_s):
            await client.__aenter__()
        protocol = await _admitted(moq, client, end_s - time.monotonic())
    except TimeoutError as error:
        await client.__aexit__(None, None, None)
        raise TransportError(
            f"{where}: no answer within {options.timeout_s:.3g} s; is it running there, and may UDP pass?"
        ) from error
    except moq.Error as error:
        await client.__aexit__(None, None, None)
        raise TransportError(f"{where}: {_why(moq, error)}") from error
    except BaseException:
        await client.__aexit__(None, None, None)
        raise
    return MoqConnection(moq, client, options, protocol)


def _target(options: DialOptions) -> str:
    if options.token is None:
        return options.path
    return f"{options.path}{'&' if '?' in options.path else '?'}token={quote(options.token, safe='')}"


async def _admitted(moq: Any, client: Any, left_s: float) -> str:
    """Wait until the peer has announced something: only then may anything be asked of it, and only then are we in.

    A peer that announces nothing may still do so later, so time running out is no error.

    Returns:
        The family of protocols that is spoken.
    """
    announced = client.announced(hidden=True)
    first = asyncio.ensure_future(anext(announced))
    closed = asyncio.ensure_future(client.session.closed())
    try:
        await asyncio.wait({first, closed}, timeout=max(0.0, left_s), return_when=asyncio.FIRST_COMPLETED)
        if closed.done():
            closed.result()
            raise moq.Error.Closed
        # Announcements by MoQT carry no identity of the peer's; those by moq-lite do.
        return MOQT if first.done() and first.result().route.anonymous else MOQ_LITE
    finally:
        first.cancel()
        closed.cancel()
        await asyncio.wait({first, closed})
        for task in (first, closed):
            if not task.cancelled():
                task.exception()  # seen
        announced.cancel()


def _why(moq: Any, error: Exception) -> str:
    if moq.is_auth(error):
        return "it does not let us in: the token is missing or wrong"
    said = moqlib.explain(moq, error)
    return next((f"{why} ({said})" for mark, why in _WHY if mark in said), said)
