"""How to reach a peer: its address, the token to send, and which certificates to trust."""

from __future__ import annotations

import datetime as dt
import hashlib
import hmac
import os
import ssl
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypedDict

from kvabr.link.quic.backend import Quic
from kvabr.moqt import wire
from kvabr.types.errors import TransportError, UsageError

if TYPE_CHECKING:
    from cryptography.x509 import Certificate

Names = Literal["draft", "split"]
"""How namespaces are written: as in the draft, or split at the slashes for peers that cannot carry one in a field."""

TransportChoice = Literal["auto", "quic", "tcp"]
"""How to reach a peer; see `DialArguments`."""

MAX_TOKEN_BYTES = 4096

DRAFTS = tuple(draft.alpn for draft in wire.DRAFTS)
"""ALPN identifiers of the moq-transport drafts to offer, preferred first."""


class DialArguments(TypedDict, total=False):
    """How to reach a peer: keyword arguments of `connect` and of all that dial through it. All have defaults."""

    token: str | None
    """Access token from the origin's operator; None: the environment's ``KVABR_TOKEN``, if it is set."""
    token_file: str | os.PathLike[str] | None
    """File with the token instead; read again for every dial, so that it may be replaced."""
    ca: str | os.PathLike[str] | None
    """PEM file of certificates to trust instead of the system's: authorities, or the peer's own certificate."""
    fingerprint: str | None
    """SHA-256 of the only certificate to trust, 64 hex digits, with or without colons."""
    insecure: bool
    """Do not verify the certificate. Anyone who can redirect packets can then read the token and the cache."""
    quic: Quic
    """QUIC library; ``auto`` takes qh3 if it is installed, and aioquic if qh3 cannot talk to the peer."""
    transport: TransportChoice
    """``quic``; ``tcp``, QMux over TLS; or ``auto``."""
    timeout_s: float
    """Seconds that connecting may take; 5 by default."""
    lanes: int
    """Most connections to the peer: further ones are opened where they bring more than those that there are. Object
    stores have their own."""


_DEFAULTS = DialArguments(
    token=None, token_file=None, ca=None, fingerprint=None, insecure=False, quic="auto", transport="auto",
    timeout_s=5.0, lanes=1,
)  # fmt: skip


def with_defaults(how: DialArguments) -> DialArguments:
    """Return all arguments, in one order; a `TypeError` names one that there is not."""
    if unknown := how.keys() - _DEFAULTS.keys():
        raise TypeError(f"got an unexpected keyword argument {min(unknown)!r}; there are {', '.join(_DEFAULTS)}")
    return _DEFAULTS | how


@dataclass(frozen=True, slots=True)
class DialOptions:
    """One peer, and how to connect to it; see `DialArguments`, and `kvabr.link.moqt.connect.connect`."""

    host: str
    port: int
    path: str = "/"
    """Path and query of the URL."""
    token: str | None = field(default=None, repr=False)
    """Sent once the connection is encrypted, and never logged."""
    token_file: Path | None = None
    """Read for every dial, and then sent instead."""
    ca: Path | None = None
    fingerprint: str | None = None
    """Name and issuer of the certificate are then ignored; its dates are checked."""
    insecure: bool = False
    drafts: tuple[str, ...] = DRAFTS
    timeout_s: float = 5.0
    """Seconds until the peer's SETUP must have arrived."""
    names: Names = "draft"
    lanes: int = 1
    """Most connections."""


def read_token(path: Path) -> str:
    """Return the token in a file.

    Raises:
        UsageError: the file cannot be read, or holds no token.
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
    """Return a token; `UsageError` if it cannot be one."""
    if len(token) > MAX_TOKEN_BYTES or not token.isprintable():
        raise UsageError(f"{where} has more than {MAX_TOKEN_BYTES} characters, or some that cannot be printed")
    return token


def fingerprint_of(text: str) -> str:
    """Return a SHA-256 fingerprint as 64 lower-case hex digits, or raise UsageError."""
    plain = text.replace(":", "").strip().lower()
    if len(plain) != 64 or not all(digit in "0123456789abcdef" for digit in plain):
        raise UsageError(f"{text[:80]!r} is not a SHA-256 fingerprint: give 64 hex digits, with or without colons")
    return plain


def trust(configuration: Any, options: DialOptions, library: str) -> None:
    """Configure a QUIC library with the certificates to trust, or raise TransportError if they cannot be read."""
    if options.insecure or options.fingerprint is not None:
        # `check_pinned` checks a pinned certificate before anything is sent.
        configuration.verify_mode = ssl.CERT_NONE
        if library == "qh3":
            configuration.verify_hostname = False
    elif options.ca is not None:
        check_ca(options.ca)
        configuration.load_verify_locations(cafile=str(options.ca))


def check_ca(path: Path) -> None:
    """Raise TransportError unless a file has certificates that can be trusted."""
    try:
        pem = path.read_bytes()
    except OSError as error:
        raise TransportError(f"{path}: cannot be read ({error.strerror})") from error
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(cadata=pem.decode("ascii", "ignore"))
    except (ssl.SSLError, ValueError) as error:
        raise TransportError(f"{path}: contains no PEM certificate that can be read") from error


def trusted_itself(der: bytes | None, options: DialOptions) -> str | None:
    """Return the fingerprint of a certificate that TLS refused if we trust that very one, for this host and today.

    A file of authorities may have it, self-signed as ``openssl req -x509`` makes it. That is an authority to itself,
    which qh3 does not accept of a server.
    """
    if der is None or options.ca is None or options.fingerprint is not None:
        return None
    from cryptography import x509  # noqa: PLC0415  # slow to load
    from cryptography.hazmat.primitives.serialization import Encoding  # noqa: PLC0415

    try:
        known = x509.load_pem_x509_certificates(options.ca.read_bytes())
        parsed = _parsed(der)
    except (OSError, ValueError, TransportError):
        return None
    given = any(each.public_bytes(Encoding.DER) == der for each in known)
    fits = _outdated(parsed) is None and _fits(options.host, parsed)
    return hashlib.sha256(der).hexdigest() if given and fits else None


def check_pinned(der: bytes | None, fingerprint: str) -> None:
    """Raise TransportError unless a peer's certificate, DER, has a SHA-256 fingerprint and is valid today."""
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


def why_refused(der: bytes | None, host: str) -> str:
    """Return why TLS refused the certificate of ``host``, None if it never came; the libraries say little."""
    if der is None:
        return "the peer's certificate was not accepted"
    try:
        parsed = _parsed(der)
    except TransportError as error:
        return str(error)
    if (why := _outdated(parsed)) is not None:
        return f"the peer's certificate {why}; check this machine's clock"
    names = _names(parsed)
    if not _fits(host, parsed):
        known = ", ".join(names[:4]) or "no host at all"
        return f"the peer's certificate is for another name: {known}, not {host}"
    return (
        "the peer's certificate is not signed by a trusted authority; trust the authority with ca= (--ca FILE), or "
        "this one certificate with fingerprint= (--fingerprint HEX)"
    )


def _parsed(der: bytes) -> Certificate:
    from cryptography import x509  # noqa: PLC0415  # slow to load

    try:
        parsed = x509.load_der_x509_certificate(der)
        # The dates are parsed when they are looked at, and may be none: the year 0, for example.
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


def _names(certificate: Certificate) -> list[str]:
    """Return the host names and addresses that a certificate is valid for."""
    from cryptography import x509  # noqa: PLC0415  # slow to load

    try:
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except (x509.ExtensionNotFound, x509.DuplicateExtension, x509.UnsupportedGeneralNameType, ValueError):
        return []
    return [*names.get_values_for_type(x509.DNSName), *map(str, names.get_values_for_type(x509.IPAddress))]


def _fits(host: str, certificate: Certificate) -> bool:
    return any(_matches(host.rstrip(".").lower(), name.lower()) for name in _names(certificate))


def _matches(host: str, name: str) -> bool:
    """Return whether a certificate's name matches a host; a leading ``*`` stands for one label (RFC 6125)."""
    return host == name or (name.startswith("*.") and host.partition(".")[2] == name[2:])
