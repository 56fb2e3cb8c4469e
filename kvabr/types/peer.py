"""How to reach a peer and which certificates to trust: the options of every connection."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

from annotated_types import Ge, Gt, Le, Lt

from kvabr.types.errors import UsageError
from kvabr.types.fields import OptionError, Shown, check_fields

Quic = Literal["auto", "aioquic", "qh3"]
"""A QUIC library; ``auto`` uses the fastest that is installed and works with the peer."""
TransportChoice = Literal["auto", "quic", "tcp"]

MAX_TOKEN_BYTES = 4096
MAX_CONNECTIONS = 16
TOKEN_VARIABLE = "KVABR_TOKEN"  # noqa: S105  # its name
"""Environment variable with a token for peers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerOptions:
    """How to reach an origin or a relay, and which certificates to trust.

    Raises:
        UsageError: an option is wrong, or two exclude each other.
    """

    token: Annotated[str | None, Shown("--token T", alone="token")] = field(default=None, repr=False)
    """Token for the peer; on a command line every user of the machine can see it, so prefer a file (default: the
    environment variable KVABR_TOKEN).
    """
    token_file: Annotated[Path | None, Shown("--token-file F", alone="token", engines=True)] = None
    """File with the token; read again for each connection, so that it may be replaced."""
    ca: Annotated[Path | None, Shown("--ca F.pem", alone="trust", engines=True)] = None
    """PEM file of certificates to trust instead of the system's: CA certificates, or the peer's own certificate."""
    fingerprint: Annotated[str | None, Shown("--fingerprint HEX", alone="trust", engines=True)] = None
    """SHA-256 of the only certificate to trust, 64 hex digits, with or without colons."""
    insecure: Annotated[bool, Shown(alone="trust")] = False
    """Do not verify the certificate: anyone who can redirect packets can then read the token and the cache."""
    quic: Annotated[Quic, Shown()] = "auto"
    """QUIC library; ``auto`` takes qh3 if it is installed, and aioquic if qh3 cannot talk to the peer."""
    transport: Annotated[TransportChoice, Shown(engines=True)] = "auto"
    """How to connect: ``quic``; ``tcp``, which is QMux over TLS; or ``auto``, TCP where the peer offers it."""
    timeout_s: Annotated[float, Gt(0), Lt(math.inf), Shown("--timeout S")] = 5.0
    """Seconds that connecting may take."""
    connections: Annotated[int, Ge(1), Le(MAX_CONNECTIONS), Shown("--connections N")] = 1
    """Maximum number of connections to a peer; further ones are opened if they raise the rate. Object stores have their
    own.
    """

    def __post_init__(self) -> None:
        check_fields(self)
        if self.token is not None and self.token_file is not None:
            raise UsageError("give a token or a token file, not both")
        if self.fingerprint is not None:
            try:
                object.__setattr__(self, "fingerprint", fingerprint_of(self.fingerprint))
            except UsageError as error:
                raise OptionError("fingerprint", self.fingerprint[:80], str(error).partition(": ")[2]) from None

    def secret(self) -> str | None:
        """Return the current token to send; None if there is none.

        Raises:
            UsageError: the file cannot be read, or has no token; or the token is invalid.
        """
        if self.token_file is not None:
            return read_token(self.token_file)
        token = self.token or os.environ.get(TOKEN_VARIABLE)
        return check_token(token, "the token") if token else None

    @property
    def for_stores(self) -> bool:
        """True if all options apply to object stores, which use neither kvabr's tokens nor its certificates."""
        trust = self.token_file, self.ca, self.fingerprint
        return (
            trust == (None, None, None) and not self.insecure and self.token in {None, os.environ.get(TOKEN_VARIABLE)}
        )


def read_token(path: Path) -> str:
    """Return the token in a file.

    Raises:
        UsageError: the file cannot be read, or has no token.
    """
    try:
        with path.open("rb") as file:
            token = file.read(MAX_TOKEN_BYTES + 1).decode().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{path}: cannot be read as text ({error})") from error
    if not token:
        raise UsageError(f"{path}: is empty")
    return check_token(token, f"{path}: the token")


def check_token(token: str, where: str) -> str:
    """Return a token; raise `UsageError` if it is invalid."""
    if len(token) > MAX_TOKEN_BYTES or not token.isprintable():
        raise UsageError(f"{where} must have at most {MAX_TOKEN_BYTES} characters, all printable")
    return token


def fingerprint_of(text: str) -> str:
    """Return a SHA-256 fingerprint as 64 lower-case hex digits; raise UsageError for other text."""
    plain = text.replace(":", "").strip().lower()
    if len(plain) != 64 or not all(digit in "0123456789abcdef" for digit in plain):
        raise UsageError(f"{text[:80]!r} is not a SHA-256 fingerprint: give 64 hex digits, with or without colons")
    return plain
