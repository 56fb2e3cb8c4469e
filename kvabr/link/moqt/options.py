"""Options for reaching a peer: address, token, trusted certificates."""

from __future__ import annotations

import contextlib
import datetime as dt
import hashlib
import hmac
import ssl
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from kvabr.moqt import wire
from kvabr.types.errors import TransportError
from kvabr.types.peer import PeerOptions, fingerprint_of

if TYPE_CHECKING:
    from cryptography.x509 import Certificate

Names = Literal["draft", "split"]
"""Notation of namespaces: as in the draft, or split at slashes for peers that do not allow slashes in a field."""

_TRUST_HINT = "trust its authority with ca= (--ca FILE), or this one certificate with fingerprint= (--fingerprint HEX)"

DRAFTS = tuple(draft.alpn for draft in wire.DRAFTS)
"""ALPN identifiers of the offered drafts, preferred first."""


@dataclass(frozen=True, slots=True)
class DialOptions:
    """One peer, and how to connect to it."""

    host: str
    port: int
    path: str = "/"
    """Path and query of the peer's URL."""
    token: str | None = field(default=None, repr=False)
    """Token, sent only over an encrypted connection and never logged."""
    how: PeerOptions = field(default_factory=PeerOptions)
    """Other options. With a certificate fingerprint, only the certificate's dates are checked otherwise."""
    drafts: tuple[str, ...] = DRAFTS
    names: Names = "draft"


def trust(configuration: Any, options: DialOptions) -> None:
    """Set the trusted certificates of a QUIC library's configuration or a TLS context; raise `TransportError`."""
    if options.how.insecure or options.how.fingerprint is not None:
        # `check_pinned` checks a pinned certificate before any data is sent.
        for checks in ("check_hostname", "verify_hostname"):  # names in Python and in qh3
            if hasattr(configuration, checks):
                setattr(configuration, checks, False)
        configuration.verify_mode = ssl.CERT_NONE
    elif options.how.ca is not None:
        _check_ca(options.how.ca)
        configuration.load_verify_locations(cafile=str(options.how.ca))


def _check_ca(path: Path) -> None:
    try:
        pem = path.read_bytes()
    except OSError as error:
        raise TransportError(f"{path}: cannot be read ({error.strerror})") from error
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(cadata=pem.decode("ascii", "ignore"))
    except (ssl.SSLError, ValueError) as error:
        raise TransportError(f"{path}: contains no readable PEM certificate") from error


def check_pinned(der: bytes | None, fingerprint: str) -> None:
    """Raise `TransportError` unless a certificate in DER has this SHA-256 fingerprint and is valid today."""
    if der is None:
        raise TransportError("the peer has no certificate")
    found = hashlib.sha256(der).hexdigest()
    if not hmac.compare_digest(found, fingerprint_of(fingerprint)):
        raise TransportError(
            f"the peer's certificate has the fingerprint {found}, not the expected one; if its "
            f"operator confirms the new one, give it with fingerprint= (--fingerprint)"
        )
    if (why := _outdated(_parsed(der))) is not None:
        raise TransportError(f"the peer's certificate {why}")


def untrusted(why: str, der: bytes | None = None) -> str:
    """Return the message for a certificate that TLS refused, with its names and dates, since qh3 gives no reason."""
    with contextlib.suppress(TransportError):
        found = _parsed(der or b"")
        names, dates = ", ".join(names_of(found)[:4]), (found.not_valid_before_utc, found.not_valid_after_utc)
        why += f"; it is for {names or 'no host'}, valid from {dates[0]:%Y-%m-%d} to {dates[1]:%Y-%m-%d}"
    return f"the peer's certificate was not accepted ({why}); {_TRUST_HINT}"


def _parsed(der: bytes) -> Certificate:
    from cryptography import x509  # noqa: PLC0415  # slow to load

    try:
        parsed = x509.load_der_x509_certificate(der)
        # Dates are parsed lazily, and may be invalid, such as the year 0.
        _ = parsed.not_valid_before_utc, parsed.not_valid_after_utc
    except (ValueError, x509.InvalidVersion) as error:
        raise TransportError(f"the peer's certificate cannot be read ({error})") from error
    return parsed


def _outdated(certificate: Certificate) -> str | None:
    now = dt.datetime.now(dt.UTC)
    if now > certificate.not_valid_after_utc:
        return f"expired on {certificate.not_valid_after_utc:%Y-%m-%d}"
    if now < certificate.not_valid_before_utc:
        return f"is not valid before {certificate.not_valid_before_utc:%Y-%m-%d}"
    return None


def names_of(certificate: Certificate) -> list[str]:
    """Return a certificate's host names and addresses."""
    from cryptography import x509  # noqa: PLC0415  # slow to load

    try:
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except (x509.ExtensionNotFound, x509.DuplicateExtension, x509.UnsupportedGeneralNameType, ValueError):
        return []
    return [*names.get_values_for_type(x509.DNSName), *map(str, names.get_values_for_type(x509.IPAddress))]
