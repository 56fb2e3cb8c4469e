"""Reaching an origin or a relay: its URL, the choice of a backend, and a connection that lasts."""

from __future__ import annotations

import asyncio
import importlib.util
import os
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Literal, get_args
from urllib.parse import unquote, urlsplit

from kvabr.quic.interface import Connection
from kvabr.quic.options import DRAFTS, DialOptions, Names
from kvabr.quic.reconnect import RedialledConnection
from kvabr.quic.trust import fingerprint_of
from kvabr.types.errors import FormatError, TransportError, UsageError
from kvabr.types.naming import TrackNamespace

Quic = Literal["auto", "aioquic", "qh3", "moq"]

Backend = Literal["moq", "qh3", "aioquic"]
BACKENDS: tuple[Backend, ...] = ("moq", "qh3", "aioquic")
"""The fastest first."""
DEFAULT_PORT = 443
FRAGMENT_TYPE = "kvcache"
"""In a URL's fragment, before an asset's name (draft-ietf-moq-transport-18, Fragment Identifiers; not registered)."""

_EXTRA = {"moq": "moq", "qh3": "fast"}
_worked: dict[tuple[str, int], Backend] = {}
"""By host and port, the backend that ``auto`` found."""


def connect(
    url: str,
    *,
    token: str | None = None,
    ca: Path | None = None,
    fingerprint: str | None = None,
    insecure: bool = False,
    quic: Quic = "auto",
    drafts: tuple[str, ...] = DRAFTS,
    timeout_s: float = 5.0,
    names: Names = "draft",
) -> Connecting:
    """Connect to an origin or a relay: use it as ``async with kvabr.connect(url) as origin``.

    The connection dials again by itself when it is lost, and when the peer asks it to (GOAWAY).

    Args:
        url: ``moqt://host[:port][/path][?query]``; the port is 443 unless it says otherwise.
        token: what the origin's operator gave out; None: the environment's ``KVABR_TOKEN``, if there is one.
        ca: certificates to trust instead of the system's, PEM.
        fingerprint: SHA-256 of the only certificate to trust, 64 hex digits; colons may stand between.
        insecure: trust any certificate: whoever can redirect the packets can then read the token and serve lies.
        quic: the QUIC library; ``auto`` takes the fastest that is installed and that the peer speaks.
        drafts: protocols to offer, the preferred one first.
        timeout_s: seconds that reaching the peer may take.
        names: how namespaces are written: as the draft has them, or ``split`` at the slashes, for peers that cannot
            carry one.

    Raises:
        UsageError: the URL or an option makes no sense. From ``async with``:
        TransportError: the peer cannot be reached, does not speak our protocol, or does not let us in.
    """
    if not 0 < timeout_s < float("inf"):
        raise UsageError(f"a timeout of {timeout_s:g} s; it must be a positive number of seconds")
    if quic not in get_args(Quic):
        raise UsageError(f"no QUIC library {quic!r} here; there are {', '.join(get_args(Quic))}")
    host, port, path = parse_url(url)
    options = DialOptions(
        host=host,
        port=port,
        path=path,
        token=token or os.environ.get("KVABR_TOKEN") or None,
        ca=ca,
        fingerprint=None if fingerprint is None else fingerprint_of(fingerprint),
        insecure=insecure,
        drafts=drafts,
        timeout_s=timeout_s,
        names=names,
    )
    return Connecting(options, quic)


class Connecting:
    """What `connect` returns: an async context manager; inside it there is a `Connection`."""

    def __init__(self, options: DialOptions, quic: Quic) -> None:
        self._options, self._quic = options, quic
        self._connection: RedialledConnection | None = None

    async def __aenter__(self) -> Connection:
        self._connection = RedialledConnection(
            await self._dial(), self._dial, peer=f"{self._options.host}:{self._options.port}"
        )
        return self._connection

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._connection is not None:
            await self._connection.close()

    async def _dial(self) -> Connection:
        return await dial(self._options, self._quic)


async def dial(options: DialOptions, quic: Quic = "auto") -> Connection:
    """Dial once.

    Raises:
        UsageError: the QUIC library that is asked for is not installed.
        TransportError: no library reached the peer; the message has what each said.
    """
    if quic != "auto":
        return await _backend(quic)(options)
    where = (options.host, options.port)
    order = [name for name in BACKENDS if importlib.util.find_spec(name) is not None]
    if (known := _worked.get(where)) in order and known is not None:
        order.remove(known)
        order.insert(0, known)
    loop = asyncio.get_running_loop()
    end_s = loop.time() + options.timeout_s
    failures: dict[str, str] = {}
    for index, name in enumerate(order):
        # A peer that does not speak what a library offers may well say nothing: leave the others their share.
        share_s = max(0.1, (end_s - loop.time()) / (len(order) - index))
        try:
            connection = await _backend(name)(replace(options, timeout_s=share_s))
        except TransportError as error:
            failures[name] = str(error)
            continue
        _worked[where] = name
        return connection
    raise TransportError(_summary(options, failures))


def parse_url(url: str) -> tuple[str, int, str]:
    """Host, port, and path with query of a ``moqt`` URL; a fragment is ignored, see `asset_of`.

    Raises:
        UsageError: it is none.
    """
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as error:
        raise UsageError(f"{url}: not a URL ({error})") from error
    if parts.scheme != "moqt":
        raise UsageError(f"{url}: an origin's URL begins with moqt://, as in moqt://origin.example:4443/")
    if parts.username is not None or parts.password is not None:
        raise UsageError(f"{parts.scheme}://{parts.hostname}: no user or password belongs in the URL; use a token")
    if not parts.hostname or any(letter <= " " or letter == "\x7f" for letter in url):
        raise UsageError(f"{url}: has no host, or a blank in it")
    if port == 0:
        raise UsageError(f"{url}: 0 is no port to dial")
    path = parts.path or "/"
    return parts.hostname, port or DEFAULT_PORT, f"{path}?{parts.query}" if parts.query else path


def asset_of(url: str) -> TrackNamespace | None:
    """The asset that a URL's fragment names: ``#kvcache:<model>/<prompt digest>``; None without a fragment.

    Raises:
        UsageError: there is a fragment, but it names no asset.
    """
    fragment = urlsplit(url).fragment
    if not fragment:
        return None
    kind, colon, name = fragment.partition(":")
    if kind != FRAGMENT_TYPE or not colon:
        raise UsageError(f"#{fragment}: name an asset as in #{FRAGMENT_TYPE}:<model>/<prompt digest>")
    return parse_namespace(unquote(name))


def parse_namespace(name: str) -> TrackNamespace:
    """Read ``<model>/<prompt digest>``.

    Raises:
        UsageError: it is no asset's name.
    """
    model, _, prompt = name.strip().rpartition("/")
    try:
        return TrackNamespace(model, prompt.lower())
    except FormatError as error:
        raise UsageError(f"{name[:200]!r} is no asset's name: use <model>/<prompt digest of 64 hex digits>") from error


def _backend(name: Backend) -> Callable[[DialOptions], Awaitable[Connection]]:
    """How to dial with a library.

    Raises:
        UsageError: it is not installed.
    """
    if importlib.util.find_spec(name) is None:
        raise UsageError(f'the QUIC library {name} is not installed: pip install "kvabr[{_EXTRA.get(name, "")}]"')
    if name == "moq":
        from kvabr.quic import moq_dial as moqrs  # noqa: PLC0415  # a Rust library of many megabytes

        return moqrs.dial
    from kvabr.quic import dial as quic  # noqa: PLC0415  # loads the library

    return lambda options: quic.dial(options, name)


def _summary(options: DialOptions, failures: dict[str, str]) -> str:
    where = f"{options.host}:{options.port}"
    said = {name: text.removeprefix(f"{where}: ") for name, text in failures.items()}
    if not said:
        return f"{where}: no QUIC library is installed: pip install kvabr"
    if len(set(said.values())) == 1:
        return f"{where}: {said.popitem()[1]}"
    return f"{where} cannot be reached: " + "; ".join(f"by {name}: {text}" for name, text in said.items())
