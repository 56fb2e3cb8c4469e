"""Certificates of a server: check them before binding, or create one for development."""

from __future__ import annotations

import fcntl
import hashlib
import ipaddress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.types import PrivateKeyTypes
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID
from platformdirs import user_state_path

from kvabr.link.moqt.options import names_of
from kvabr.store.files import PRIVATE, PRIVATE_FOLDER, read_bytes, write_file
from kvabr.types.errors import AssetError, TransportError

DEV_DAYS = 13
"""Days of validity of a development certificate; browsers accept pinned fingerprints for at most 14."""

_MAX_PEM_BYTES = 1 << 20
_DEV_HINT = "for a first try, --dev makes a certificate"


@dataclass(frozen=True, slots=True)
class ServerTls:
    """Files of a server's certificate and key."""

    certfile: Path
    """PEM file with the certificate chain, the server's own first."""
    keyfile: Path
    """PEM file with the private key, without a password."""


@dataclass(frozen=True, slots=True)
class CertificateFacts:
    """The contents of a certificate that a user needs."""

    fingerprint: str
    """SHA-256 of its DER form, in hex."""
    names: tuple[str, ...]
    """Its host names and addresses."""
    not_after: datetime


class CertificateError(TransportError):
    """A certificate or key is unusable."""


def check(tls: ServerTls, now: datetime | None = None) -> CertificateFacts:
    """Check that a certificate and its key can be used at a time (None: now), and return its contents.

    Raises `CertificateError` if a file is missing, unreadable or not PEM, if the key does not match, or if the
    certificate is not valid at that time.
    """
    now = datetime.now(UTC) if now is None else now
    try:
        chain = x509.load_pem_x509_certificates(_read(tls.certfile, "certificate"))
        _ = chain[0].not_valid_before_utc, chain[0].not_valid_after_utc  # raise for impossible dates, such as year 0
    except ValueError as error:
        raise CertificateError(
            f"{tls.certfile}: not a certificate in PEM form (-----BEGIN CERTIFICATE-----); {_DEV_HINT}"
        ) from error
    key = _load_key(tls.keyfile)
    certificate = chain[0]
    if certificate.public_key() != key.public_key():
        raise CertificateError(
            f"{tls.keyfile}: not the key of {tls.certfile}; the server's own certificate must come first in that file"
        )
    fingerprint = hashlib.sha256(certificate.public_bytes(serialization.Encoding.DER)).hexdigest()
    facts = CertificateFacts(fingerprint, tuple(names_of(certificate)), certificate.not_valid_after_utc)
    if facts.not_after < now:
        raise CertificateError(f"{tls.certfile}: expired on {facts.not_after:%Y-%m-%d %H:%M} UTC; renew it")
    if certificate.not_valid_before_utc > now:
        raise CertificateError(
            f"{tls.certfile}: not valid before {certificate.not_valid_before_utc:%Y-%m-%d %H:%M} UTC; is the clock "
            "of this machine right?"
        )
    if not facts.names:
        raise CertificateError(
            f"{tls.certfile}: has no host name (no subjectAltName), so no client would accept it; make one with the "
            "server's name"
        )
    return facts


def make(hosts: tuple[str, ...] = (), now: datetime | None = None) -> tuple[bytes, bytes]:
    """Return a new development certificate and its key (ECDSA on P-256), both as PEM.

    It is valid for ``hosts``, ``localhost``, ``127.0.0.1`` and ``::1``, and from an hour before ``now``, since clocks
    may differ. It is not signed by an authority: clients need its fingerprint.
    """
    now = datetime.now(UTC) if now is None else now
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "kvabr development")])
    names = [_general_name(host) for host in dict.fromkeys(("localhost", "127.0.0.1", "::1", *hosts))]
    begin = now - timedelta(hours=1)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(begin)
        .not_valid_after(begin + timedelta(days=DEV_DAYS))
        .add_extension(x509.SubjectAlternativeName(names), critical=False)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .sign(key, hashes.SHA256())
    )
    return (
        certificate.public_bytes(serialization.Encoding.PEM),
        key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()),
    )


def development(*hosts: str) -> ServerTls:
    """Return the files of a development certificate, shared by the servers of one user.

    It stays in the user's state folder until its last day, so that pinned fingerprints survive a restart. Raises
    `CertificateError` if the folder is not writable.
    """
    of_hosts = hashlib.sha256(" ".join(hosts).encode()).hexdigest()[:16]
    folder = user_state_path("kvabr", appauthor=False) / "dev" / of_hosts
    tls = ServerTls(folder / "cert.pem", folder / "key.pem")
    try:
        folder.mkdir(mode=PRIVATE_FOLDER, parents=True, exist_ok=True)
        with (folder / "lock").open("a") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # if two servers start at once, only one creates it
            if not _lasts(tls, datetime.now(UTC) + timedelta(days=1)):
                certificate, key = make(hosts)
                write_file(tls.keyfile, key, mode=PRIVATE)
                write_file(tls.certfile, certificate, mode=PRIVATE)
    except (OSError, AssetError) as error:
        raise CertificateError(
            f"a development certificate cannot be kept in {folder} ({error}): set XDG_STATE_HOME to a writable folder, "
            "or give a certificate of your own"
        ) from error
    return tls


def _lasts(tls: ServerTls, until: datetime) -> bool:
    try:
        return check(tls).not_after > until
    except CertificateError:
        return False


def _general_name(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        pass
    try:
        return x509.DNSName(host.encode("idna").decode())
    except UnicodeError as error:
        raise CertificateError(f"{host!r} is not a host name that a certificate can contain") from error


def _load_key(path: Path) -> PrivateKeyTypes:
    data = _read(path, "key")
    try:
        return serialization.load_pem_private_key(data, password=None)
    except TypeError as error:
        raise CertificateError(
            f"{path}: has a password, which a server cannot ask for; write it without, for instance with: "
            f"openssl pkey -in {path} -out key.pem"
        ) from error
    except ValueError as error:
        raise CertificateError(f"{path}: not a private key in PEM form (-----BEGIN PRIVATE KEY-----)") from error


def _read(path: Path, what: str) -> bytes:
    if not path.exists():
        raise CertificateError(f"{path}: no such {what}; {_DEV_HINT}")
    return read_bytes(path, _MAX_PEM_BYTES, unreadable=CertificateError, unfit=CertificateError)
