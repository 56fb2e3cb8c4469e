"""What it takes to reach a publisher or a relay, whatever the transport."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

Names = Literal["draft", "split"]
"""How namespaces are written: as the draft has them, or split at the slashes, for peers that cannot carry one."""

DRAFTS = ("moqt-18", "moqt-16")
"""Protocols that the QUIC transports speak, the preferred one first: ALPN identifiers of moq-transport drafts."""


@dataclass(frozen=True, slots=True)
class DialOptions:
    """One peer, and how to talk to it."""

    host: str
    port: int
    path: str = "/"
    """Path and query of the URL."""
    token: str | None = None
    """What the peer's operator gave out; sent when the connection is set up, encrypted, and never logged."""
    ca: Path | None = None
    """Certificates to trust, PEM, instead of the system's."""
    fingerprint: str | None = None
    """SHA-256 of the only certificate to trust, hex; then neither its name nor its issuer matters, but its dates do."""
    insecure: bool = False
    """Trust any certificate. Whoever can redirect the packets can then read the token and serve lies."""
    drafts: tuple[str, ...] = DRAFTS
    timeout_s: float = 5.0
    """Seconds that reaching the peer may take, until its SETUP has come."""
    names: Names = "draft"
