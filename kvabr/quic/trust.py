"""Whom a client trusts: the system's certificates, others, one pinned certificate, or, if the user says so, anyone."""

from __future__ import annotations

import datetime as dt
import hashlib
import hmac
import ssl
from typing import TYPE_CHECKING, Any

from kvabr.quic.options import DialOptions
from kvabr.types.errors import TransportError, UsageError

if TYPE_CHECKING:
    from cryptography.x509 import Certificate


def fingerprint_of(text: str) -> str:
    """A SHA-256 fingerprint in one spelling: 64 lower-case hex digits.

    Raises:
        UsageError: it is none.
    """
    plain = text.replace(":", "").strip().lower()
    if len(plain) != 64 or not all(digit in "0123456789abcdef" for digit in plain):
        raise UsageError(f"{text[:80]!r} is no SHA-256 fingerprint: 64 hex digits, with or without colons")
    return plain


def trust(configuration: Any, options: DialOptions, library: str) -> None:
    """Tell a QUIC library's configuration whom to trust.

    Raises:
        TransportError: the file of trusted certificates cannot be read.
    """
    if options.insecure or options.fingerprint is not None:
        # A pinned certificate is checked by `check_pinned`, before anything is said.
        configuration.verify_mode = ssl.CERT_NONE
        if library == "qh3":
            configuration.verify_hostname = False
    elif options.ca is not None:
        try:
            pem = options.ca.read_bytes()
        except OSError as error:
            raise TransportError(f"{options.ca}: cannot be read ({error.strerror})") from error
        if b"-----BEGIN CERTIFICATE-----" not in pem:
            raise TransportError(f"{options.ca}: holds no certificate in PEM")
        configuration.load_verify_locations(cafile=str(options.ca))


def check_pinned(der: bytes | None, fingerprint: str) -> None:
    """Check that a peer's certificate is the one expected, and valid today.

    Args:
        der: the certificate.
        fingerprint: its SHA-256, hex.

    Raises:
        TransportError: it is not.
    """
    if der is None:
        raise TransportError("the peer has no certificate")
    found = hashlib.sha256(der).hexdigest()
    if not hmac.compare_digest(found, fingerprint_of(fingerprint)):
        raise TransportError(f"the peer's certificate has the fingerprint {found}, not the one expected")
    if (why := _outdated(_parsed(der))) is not None:
        raise TransportError(f"the peer's certificate {why}")


def why_refused(der: bytes | None, host: str) -> str:
    """Why TLS did not accept a peer's certificate, in words; the libraries' own say little.

    Args:
        der: the certificate; None: TLS failed before it came.
        host: the name or address that was dialled.
    """
    if der is None:
        return "the peer's certificate was not accepted"
    try:
        parsed = _parsed(der)
    except TransportError as error:
        return str(error)
    if (why := _outdated(parsed)) is not None:
        return f"the peer's certificate {why}; is the clock right?"
    names = _names(parsed)
    if not any(_matches(host.rstrip(".").lower(), name.lower()) for name in names):
        known = ", ".join(names[:4]) or "no host at all"
        return f"the peer's certificate is for another name: {known}, not {host}"
    return "the peer's certificate is signed by nobody that is trusted; trust its CA, or its fingerprint"


def _parsed(der: bytes) -> Certificate:
    from cryptography import x509  # noqa: PLC0415  # slow to load

    try:
        return x509.load_der_x509_certificate(der)
    except ValueError as error:
        raise TransportError(f"the peer's certificate cannot be read ({error})") from error


def _outdated(certificate: Certificate) -> str | None:
    now = dt.datetime.now(dt.UTC)
    if now > certificate.not_valid_after_utc:
        return f"expired on {certificate.not_valid_after_utc:%Y-%m-%d}"
    if now < certificate.not_valid_before_utc:
        return f"is not valid before {certificate.not_valid_before_utc:%Y-%m-%d}"
    return None


def _names(certificate: Certificate) -> list[str]:
    """Host names and addresses that a certificate is good for."""
    from cryptography import x509  # noqa: PLC0415  # slow to load

    try:
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except (x509.ExtensionNotFound, ValueError):
        return []
    return [*names.get_values_for_type(x509.DNSName), *map(str, names.get_values_for_type(x509.IPAddress))]


def _matches(host: str, name: str) -> bool:
    """Whether a name of a certificate is that of a host; a leading ``*`` stands for one label (RFC 6125)."""
    return host == name or (name.startswith("*.") and host.partition(".")[2] == name[2:])
