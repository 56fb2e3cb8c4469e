"""Addresses as a user writes them: ``HOST:PORT``, an IPv6 host in brackets."""

from __future__ import annotations

import ipaddress
import re
import socket

from kvabr.types.errors import UsageError

_ADDRESS = re.compile(r"(?:\[(?P<six>[0-9A-Fa-f:.%\w]+)\]|(?P<host>[^:\[\]\s/]*)):(?P<port>\d{1,5})")


def parse_address(text: str, option: str) -> tuple[str, int]:
    """Host and port; an empty host means every address of this machine.

    Raises:
        UsageError: it is no such address.
    """
    found = _ADDRESS.fullmatch(text)
    if found is None or int(found["port"]) > 65535:
        raise UsageError(f"{option} {text}: must be HOST:PORT, such as 127.0.0.1:4443 or [::1]:4443")
    return found["six"] or found["host"] or "0.0.0.0", int(found["port"])  # noqa: S104 - what the user asked for


def is_wildcard(host: str) -> bool:
    """Whether binding to it means every address."""
    return host in {"0.0.0.0", "::"}  # noqa: S104 - compared, not bound


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach it."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def moqt_url(host: str, port: int) -> str:
    """The URL of a server bound there, as a client of another machine would give it."""
    if is_wildcard(host):
        host = socket.gethostname()
    return f"moqt://[{host}]:{port}/" if ":" in host else f"moqt://{host}:{port}/"
