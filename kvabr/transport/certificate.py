"""Whom a client trusts: the system's certificates, others, one pinned certificate, or, if the user says so, anyone."""

from __future__ import annotations

import datetime as dt
import hashlib
import hmac
import ssl
from typing import Any

from kvabr.errors import TransportError, UsageError
from kvabr.transport.options import DialOptions


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
    from cryptography import x509  # noqa: PLC0415  # slow to load

    try:
        parsed = x509.load_der_x509_certificate(der)
    except ValueError as error:
        raise TransportError(f"the peer's certificate cannot be read ({error})") from error
    now = dt.datetime.now(dt.UTC)
    if now > parsed.not_valid_after_utc:
        raise TransportError(f"the peer's certificate expired on {parsed.not_valid_after_utc:%Y-%m-%d}")
    if now < parsed.not_valid_before_utc:
        raise TransportError(f"the peer's certificate is not valid before {parsed.not_valid_before_utc:%Y-%m-%d}")
